"""Compare a commit with the working tree: bits of the examples, tables of `explain`, and speed.

    make parity BASE=COMMIT
    python benchmarks/parity.py COMMIT [--only bits|speed] [--cases NAME]

- The examples of the commit run on both, on 2 ranks and some on 1 and 3, on both transports and on
  xla. What each of their jitted steps returns must have the same bits, call by call, and `explain`
  must print the same table.
- dispatch.py and allreduce.py of the commit and of the working tree run in turns. The ratios that
  they print are relative to peers in the same launch, so that the machine's drift is no part of
  them; the medians over the launches are compared.

The commit is installed into build/parity/COMMIT, with the packages of this environment. Exits with
1 where bits or tables differ, or where a ratio is worse than BOUND times the commit's.
"""

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import venv
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "parity"
BOUND = 1.1  # working tree by commit, of a median over the launches

SMALL_GPT = (
    "gpt.py --steps 12 --batch-size 12 --length 32 --layers 2 --width 32 --megabytes 0.3 --sample 0"
)
SMALL_IMAGENET = (
    "imagenet.py {photos} --out {out} --model resnet18 --width 4 --pixels 32 --batch-size 8 "
    "--epochs 2 --warmup 1"
)

EXAMPLES = [  # (example and its arguments, ranks, environment)
    ("quickstart.py", 1, {}),
    ("quickstart.py", 2, {}),
    ("quickstart.py", 3, {}),
    ("quickstart.py", 2, {"JAXMPI_BACKEND": "xla"}),
    ("quickstart.py", 2, {"JAXMPI_TRANSPORT": "mpi4jax"}),
    ("many_devices.py", 2, {}),
    ("digits.py --epochs 3", 2, {}),
    ("digits.py --epochs 3 --sharded", 3, {}),
    ("digits.py --epochs 3 --codec int8 --accumulate 2", 2, {}),
    ("digits.py --epochs 3 --local-every 4 --codec powersgd", 2, {}),
    ("digits.py --epochs 3", 2, {"JAXMPI_BACKEND": "xla"}),
    ("digits_linen.py --epochs 3", 2, {}),
    ("deq.py --epochs 2", 2, {}),
    (SMALL_GPT, 2, {}),
    (f"{SMALL_GPT} --fully-sharded", 2, {}),
    (f"{SMALL_GPT} --fully-sharded", 2, {"JAXMPI_BACKEND": "xla"}),
    (f"{SMALL_GPT} --local-every 3 --diloco --fragments 2 --delay 1", 2, {}),
    (f"{SMALL_GPT} --local-every 3 --diloco --islands 2 --sharded", 4, {}),
    (SMALL_IMAGENET, 2, {}),
]


class Installed(NamedTuple):
    """An installed jaxmpi, and the tree with the benchmarks that belong to it."""

    name: str
    python: Path
    tree: Path


def install(commit):
    """Install a commit beside this environment's packages, unless build/parity/COMMIT exists."""
    sha = subprocess.check_output(
        ["git", "rev-parse", "--short=12", f"{commit}^{{commit}}"], cwd=ROOT, text=True
    ).strip()
    folder = BUILD / sha
    installed = Installed(sha, folder / "venv" / "bin" / "python", folder / "tree")
    if (folder / "complete").exists():
        return installed
    shutil.rmtree(folder, ignore_errors=True)
    archive = subprocess.check_output(["git", "archive", sha], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(installed.tree, filter="data")
    # An environment that holds nothing but this jaxmpi. All else is found in the one that runs this
    # file: a path in a .pth file comes after the environment's own, and .pth files behind it, such
    # as that of an editable install, are not read.
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    packages = sysconfig.get_path("purelib")
    own = Path(packages).relative_to(sys.prefix)
    (folder / "venv" / own / "packages.pth").write_text(packages + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "--python",
        str(installed.python),
    ]
    subprocess.run(
        [
            *pip,
            "install",
            "--no-deps",
            "--no-build-isolation",
            "--no-cache-dir",
            str(installed.tree),
        ],
        check=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    (folder / "complete").touch()
    return installed


@cache
def mpi_library():
    """Return the path of the MPI library of this environment; the commit's would look elsewhere."""
    program = (
        "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI;"
        "from jaxmpi._job.process import loaded_mpi; print(loaded_mpi.loaded()[0])"
    )
    return subprocess.check_output([sys.executable, "-c", program], text=True).strip()


def launch(installed, ranks, command, environment, log):
    """Run a command on `ranks` ranks of an installed jaxmpi, with its output in `log`.

    Returns the exit code.
    """
    launcher = ["-m", "jaxmpi", "run", "-n", str(ranks)] if ranks > 1 else []
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        return subprocess.run(
            [str(installed.python), *launcher, *command],
            cwd=BUILD,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "MPI4PY_LIBMPI": mpi_library(),
                **environment,
            },
        ).returncode


def make_photos(folder):
    """Write DIR/train and DIR/val for imagenet.py: two classes cut from scikit-learn's photos."""
    import numpy as np
    import sklearn.datasets
    from PIL import Image

    rng = np.random.default_rng(0)
    for name, image in zip(
        ("china", "flower"), sklearn.datasets.load_sample_images().images, strict=True
    ):
        for part, count in (("train", 24), ("val", 8)):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                y, x = rng.integers(0, np.array(image.shape[:2]) - 100)
                Image.fromarray(image[y : y + 100, x : x + 100]).save(
                    folder / part / name / f"{i:03}.png"
                )


def record(installed, number, example, ranks, environment, script_tree, photos):
    """Run an example under recorded.py; return its ranks' records, or its last output."""
    folder = BUILD / "bits" / f"{number:02}-{installed.name}"
    shutil.rmtree(folder, ignore_errors=True)
    script, *arguments = example.format(photos=photos, out=folder / "out").split()
    recorder = ROOT / "benchmarks" / "recorded.py"
    command = [str(recorder), str(folder), str(script_tree / "examples" / script), *arguments]
    code = launch(installed, ranks, command, environment, folder / "log")
    if code:
        return None, f"exit code {code}, see {folder / 'log'}"
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(ranks)], None


def difference(base, head):
    """Describe the first difference of two recordings; None where there is none."""
    for rank, (theirs, ours) in enumerate(zip(base, head, strict=True)):
        if [step["name"] for step in theirs] != [step["name"] for step in ours]:
            return f"rank {rank} calls other steps"
        for a, b in zip(theirs, ours, strict=True):
            if a["table"] != b["table"]:
                return f"explain of {a['name']} on rank {rank}:\n{a['table']}---\n{b['table']}"
            if len(a["calls"]) != len(b["calls"]):
                return f"{a['name']} on rank {rank}: {len(a['calls'])} and {len(b['calls'])} calls"
            for call, (x, y) in enumerate(zip(a["calls"], b["calls"], strict=True), 1):
                if x != y:
                    which = f"from call {call} of {len(a['calls'])} on"
                    return f"{a['name']} on rank {rank}: other bits {which}"
    return None


def compare_bits(base, head, cases):
    """Run all examples on both; return how many differ."""
    photos = BUILD / "photos"
    make_photos(photos)
    differ = 0
    for number, (example, ranks, environment) in enumerate(EXAMPLES):
        name = example.split(" --out")[0].replace("{photos}", "")
        name = " ".join([*(f"{k}={v}" for k, v in environment.items()), name, f"on {ranks}"])
        if cases not in name:
            continue
        theirs, failed = record(base, number, example, ranks, environment, base.tree, photos)
        if failed:
            print(f"{name}: of the commit: {failed}", flush=True)
            differ += 1
            continue
        ours, failed = record(head, number, example, ranks, environment, base.tree, photos)
        failed = failed or difference(theirs, ours)
        differ += 1 if failed else 0
        calls = sum(len(step["calls"]) for step in theirs[0])
        print(f"{name}: {failed or f'{calls} calls, equal bits and tables'}", flush=True)
    return differ


def compare_speed(base, head, launches, cases):
    """Run the benchmarks of both in turns; return how many ratios grew by more than BOUND."""
    found = {}  # {(benchmark, case, ratio): {name: [values]}}
    for turn in range(launches):
        for installed in (base, head) if turn % 2 == 0 else (head, base):
            for benchmark in ("dispatch", "allreduce"):
                out = BUILD / "speed" / f"{installed.name}-{turn}"
                script = installed.tree / "benchmarks" / f"{benchmark}.py"
                options = [
                    "--out",
                    str(out),
                    *(["--cases", cases] if cases and benchmark == "allreduce" else []),
                ]
                results = out / f"{benchmark}.json"
                results.unlink(missing_ok=True)
                # its exit code is 1 where one of its own bounds is missed, which is not asked here
                launch(installed, 2, [str(script), *options], {}, out / f"{benchmark}.log")
                if not results.exists():
                    sys.exit(
                        f"{benchmark}.py of {installed.name} failed, see {out / benchmark}.log"
                    )
                for ratio in json.loads(results.read_text())["ratios"]:
                    values = found.setdefault((benchmark, ratio["case"], ratio["ratio"]), {})
                    values.setdefault(installed.name, []).append(ratio["value"])
    worse = 0
    for (benchmark, case, ratio), values in found.items():
        if len(values) < 2:
            print(f"{benchmark} {case}, {ratio}: only of {', '.join(values)}")
            continue
        before, after = (statistics.median(values[side.name]) for side in (base, head))
        # "jaxmpi / peer" is better when it is smaller, "peer / jaxmpi" when it is larger
        quotient = after / before if ratio.startswith("jaxmpi") else before / after
        concerns_us = "jaxmpi" in ratio
        worse += 1 if concerns_us and quotient > BOUND else 0
        verdict = "" if not concerns_us else ": WORSE" if quotient > BOUND else ": holds"
        spreads = []
        for side in (base, head):
            low, high = min(values[side.name]), max(values[side.name])
            spreads.append(f"{side.name} {low:.2f} to {high:.2f}")
        print(
            f"{benchmark} {case:22} {ratio:50} {before:6.2f} -> {after:6.2f}, by {quotient:.2f} "
            f"({', '.join(spreads)}){verdict}"
        )
    return worse


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("base", help="the commit to compare with")
    options.add_argument("--only", choices=("bits", "speed"), help="one of the two parts")
    options.add_argument(
        "--cases",
        default="",
        help="only examples, and sizes of allreduce.py, whose name has this in it",
    )
    options.add_argument("--launches", type=int, default=3, help="of each benchmark, on each side")
    args = options.parse_args()
    base, head = install(args.base), Installed("tree", Path(sys.executable), ROOT)
    differ = compare_bits(base, head, args.cases) if args.only != "speed" else 0
    worse = compare_speed(base, head, args.launches, args.cases) if args.only != "bits" else 0
    print(
        f"parity with {base.name}: {differ} examples differ, "
        f"{worse} ratios are worse by more than {BOUND:g}"
    )
    return int(bool(differ or worse))


if __name__ == "__main__":
    sys.exit(main())
