"""Measuring and reporting for the benchmarks: rounds of contenders, medians, bounds, plots."""

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

import jaxmpi

UNTIMED = 2  # calls at the start of a turn, which find the caches of another contender
LONG = 1.0  # seconds of a call for which once a turn is enough, as caches do not show in it
PACKAGES = ("jax", "jaxlib", "mpi4py", "mpi4jax", "torch")


def parser(doc):
    """Make an argument parser with the options of every benchmark."""
    made = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    made.add_argument(
        "--quick",
        action="store_true",
        help="2 rounds of few calls, no bounds: to see that it works",
    )
    made.add_argument("--out", type=Path, help="folder for NAME.json and NAME.png")
    return made


def machine(world):
    """Describe the machine, the ranks and the versions in one line."""
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].strip("\0 \n")
    versions = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    transport = jaxmpi._world.session.current("benchmark").transport.name
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, "
        f"{world.size} ranks on {len(os.sched_getaffinity(0))} cores each, "
        f"{world.device.device_kind}, backend {world.backend} ({transport}), "
        f"Python {platform.python_version()}, {', '.join(versions)}, {library}"
    )


def bars(axes, rows):
    """Draw a group of bars for each case, with one bar for each contender."""
    cases = list(dict.fromkeys(r["case"] for r in rows))
    names = list(dict.fromkeys(r["contender"] for r in rows))
    for i, name in enumerate(names):
        mine = {r["case"]: r for r in rows if r["contender"] == name}
        shift = (i - len(names) / 2) * 0.8 / len(names)
        places = [k + shift for k, case in enumerate(cases) if case in mine]
        axes.bar(
            places,
            [mine[case]["median_us"] / 1e3 for case in cases if case in mine],
            0.8 / len(names),
            label=name,
        )
    axes.set(yscale="log", ylabel="ms", xticks=range(len(cases)), xticklabels=cases)


def save(folder, name, found, title, draw):
    """Write NAME.json, and NAME.png with the plot of `draw(axes)`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install '.[bench]')", flush=True)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    draw(axes)
    axes.set_title(f"{title}, {time.strftime('%Y-%m-%d')}", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(folder / f"{name}.png", dpi=120)


class Report:
    """Times and ratios of a benchmark, printed by rank 0 as they are found."""

    def __init__(self, name, args):
        self.name, self.args, self.world = name, args, jaxmpi.init()
        self.rows, self.ratios = [], []
        self.machine = machine(self.world)
        self.show(f"{name}: {self.machine}, {time.strftime('%Y-%m-%d')}")

    def show(self, *columns):
        if self.world.rank == 0:
            tqdm.write(" ".join(map(str, columns)), file=sys.stdout)
            sys.stdout.flush()

    def progress(self, cases):
        return tqdm(cases, desc=self.name, disable=self.world.rank != 0 or not sys.stderr.isatty())

    def measure(self, case, contenders, seconds=1.0, turn=contextlib.nullcontext):
        """Measure contenders in rounds, each for about `seconds` in all.

        Returns {name: µs [rounds, ranks · calls]}.

        All ranks start each turn together, inside of `turn(contender)`, and the times of all ranks
        count.
        """
        rounds = 2 if self.args.quick else self.args.rounds
        calls = {}
        for name, call in contenders.items():
            with turn(call):
                calls[name] = self._calls(call, seconds / rounds)
        times = {name: np.empty((rounds, calls[name])) for name in contenders}
        for k in range(rounds):
            for name in list(contenders)[:: -1 if k % 2 else 1]:
                with turn(contenders[name]):
                    jaxmpi.barrier()
                    for i in range(-UNTIMED if calls[name] > 1 else 0, calls[name]):
                        start = time.perf_counter()
                        jax.block_until_ready(contenders[name]())
                        if i >= 0:
                            times[name][k, i] = 1e6 * (time.perf_counter() - start)
        everyone = jaxmpi.allgather_object(times)
        times = {
            name: np.concatenate([one[name] for one in everyone], axis=1) for name in contenders
        }
        for name, values in times.items():
            low, median, high = np.percentile(values, [25, 50, 75])
            self.rows.append(
                {
                    "case": case,
                    "contender": name,
                    "median_us": median,
                    "low_us": low,
                    "high_us": high,
                }
            )
            self.show(
                f"{case:22} {name:34} median {median:12.1f} µs, "
                f"quartiles {low:12.1f} to {high:12.1f}"
            )
        return times

    def _calls(self, call, seconds):
        """Return how many calls take `seconds` on the slowest rank.

        At least 3, but 1 if the calls are long.
        """
        # compiles for the state as it begins, and for what a call makes of it
        for _ in range(UNTIMED):
            jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        took = max(jaxmpi.allgather_object(time.perf_counter() - start))
        if took > LONG:
            return 1
        return 3 if self.args.quick else int(np.clip(seconds / took, 3, 1000))

    def ratio(self, case, name, above, below, *, at_most=None, at_least=None):
        """Note the ratio of two medians, and its range over the rounds."""
        ratio = np.median(above) / np.median(below)
        by_round = np.median(above, axis=1) / np.median(below, axis=1)
        bounds = []
        if at_least is not None:
            bounds.append(f"at least {at_least:g}")
        if at_most is not None:
            bounds.append(f"at most {at_most:g}")
        bound = " and ".join(bounds) or "no bound"
        holds = (at_most is None or ratio <= at_most) and (at_least is None or ratio >= at_least)
        verdict = "" if not bounds else ": holds" if holds else ": MISSED"
        self.ratios.append(
            {
                "case": case,
                "ratio": name,
                "value": float(ratio),
                "bound": bound,
                "holds": bool(holds),
            }
        )
        digits = 2 if ratio >= 0.1 else 4
        spread = f"rounds {by_round.min():.{digits}f} to {by_round.max():.{digits}f}"
        self.show(f"{case:22} {name:50} {ratio:7.{digits}f}, {spread}, {bound}{verdict}")

    def finish(self, plot=bars):
        """Write results and the plot of `plot(axes, rows)`; exit with 1 if a bound was missed."""
        missed = [r for r in self.ratios if not r["holds"]]
        if self.args.out and self.world.rank == 0:
            found = {
                "machine": self.machine,
                "date": time.strftime("%Y-%m-%d"),
                "rows": self.rows,
                "ratios": self.ratios,
            }
            title = f"{self.name}, {self.world.size} ranks"
            save(self.args.out, self.name, found, title, lambda axes: plot(axes, self.rows))
        self.show(f"\n{self.name}: {len(self.ratios)} ratios, {len(missed)} missed their bound")
        jaxmpi.barrier()
        sys.exit(int(bool(missed) and not self.args.quick))
