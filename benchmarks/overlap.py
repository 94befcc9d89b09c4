"""Train steps between hosts that communicate while they compute, beside the same steps that wait.

    python benchmarks/overlap.py [--mbit 1000] [--delay-ms 1] [--heat-delay-ms 10] [--launches 3]

tests/network.sh makes two hosts of this one, with a rank each: it needs root, and the machine
alone. Each batch, and the plate of the halo exchange, is so large that computation and
communication take about as long. A step without communication beside a mean that does not depend on
it shows how much could be hidden on these cores. With the times of the step without communication,
of its backward pass and of the mean alone, the hidden share is what the step saves by overlap, of
the smaller of backward pass and mean. Exits with 1 when a bound is missed.
"""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
from common import Report, parser
from step_models import MODELS, torch_models

import jaxmpi

HERE = Path(__file__).resolve().parent
COORDINATOR = "10.77.0.1"  # the first host of tests/network.sh
NAMES = ("MLP 10M", "CNN", "GPT 10M")
# a step by the longer of computation and communication at most; hidden at least
SLOWER, HIDDEN = 1.2, 0.7
OTHER_THREAD = ThreadPoolExecutor(1)
FASTER = 1.5  # a halo exchange at once by one that is hidden, at least

arguments = parser(__doc__)
arguments.add_argument(
    "--models", nargs="*", default=list(NAMES), choices=MODELS, help="which to train"
)
arguments.add_argument("--mbit", type=float, default=1000, help="rate of each cable, in Mbit/s")
arguments.add_argument("--delay-ms", type=float, default=1, help="one way, of the train steps")
arguments.add_argument(
    "--heat-delay-ms",
    type=float,
    default=10,
    help="one way, of the halo exchange, which is all delay",
)
arguments.add_argument("--launches", type=int, default=3, help="of the whole")
arguments.add_argument(
    "--with-gloo", action="store_true", help="beside JAX's gloo, too, which takes long"
)
arguments.add_argument("--worker", choices=("heat", "models"), help="be one of the ranks")
args = arguments.parse_args()


def jaxmpi_step(overlap, loss_of, params, batch):
    os.environ["JAXMPI_OVERLAP"] = overlap
    trained = Trained(
        jaxmpi.jit(step_of(loss_of, jaxmpi.tree_allreduce), donate_argnums=0), params, batch
    )
    jax.block_until_ready(trained())  # it is built here
    return trained


def peers_of(case, factor, loss_of, params, batch):
    """Make the steps of other libraries, where they are installed."""
    calls = {}
    if importlib.util.find_spec("mpi4jax"):
        calls["mpi4jax per leaf"] = mpi4jax_step(loss_of, params, batch)
    if args.with_gloo:
        calls["JAX gloo"] = gloo_step(loss_of, params, batch)
    if torch:
        model, batch, loss_of = torch_models(torch)[case]
        calls |= torch_steps(torch, model, times(batch, factor), loss_of)
    return calls


def contenders(loss_of, params, batch):
    """Make the contenders: a step's parts, and whole steps."""
    jitted = partial(jax.jit, donate_argnums=0)
    forward, backward = jax.jit(loss_of), jax.jit(jax.value_and_grad(loss_of))
    mean, grads = jaxmpi.jit(jaxmpi.tree_allreduce), jax.tree.map(jax.numpy.array, params)
    local = Trained(jitted(step_of(loss_of, lambda grads: grads)), params, batch)
    return {
        "local": local,
        "forward": lambda: forward(params, batch),
        "forward and backward": lambda: backward(params, batch),
        "mean alone": lambda: mean(grads),
        "local beside a mean": lambda: beside(local, lambda: mean(grads)),
        "jaxmpi, at once": jaxmpi_step("0", loss_of, params, batch),
        "jaxmpi, overlap": jaxmpi_step("1", loss_of, params, batch),
    }


def beside(local, mean):
    """Run a step without communication beside an independent mean.

    It shows how much of a mean these cores can hide.
    """
    arriving = OTHER_THREAD.submit(lambda: jax.block_until_ready(mean()))
    jax.block_until_ready(local())
    return arriving.result()


def balanced(report, case):
    """Grow a model's batch until computation takes about as long as communication."""
    loss_of, params, batch = MODELS[case]()
    calls = contenders(loss_of, params, batch)
    took = report.measure(
        f"{case}, first", {name: calls[name] for name in ("local", "mean alone")}, seconds=2.0
    )
    factor = max(1, round(float(np.median(took["mean alone"]) / np.median(took["local"]))))
    factor = jaxmpi.broadcast_object(factor)
    return factor, (loss_of, params, times(batch, factor))


def times(batch, factor):
    return jax.tree.map(lambda x: np.concatenate([x] * factor), batch)


class Heat:
    """Iterations of the heat equation on a plate whose rows are shared out over the ranks.

    Each call starts from the result of the last one.
    """

    def __init__(self, size, overlap=None):
        if overlap is not None:
            os.environ["JAXMPI_OVERLAP"] = overlap
        self.u = jax.numpy.asarray(
            np.random.default_rng(jaxmpi.rank()).normal(size=(size, size)), np.float32
        )
        if overlap is None:
            self.turn = jax.jit(partial(self.heat, lambda row, way: row))
        else:
            self.turn = jaxmpi.jit(partial(self.heat, self.moved))
        jax.block_until_ready(self())

    def __call__(self):
        self.u = self.turn(self.u)
        return self.u

    @staticmethod
    def moved(row, way):
        n = jaxmpi.size()
        return jax.lax.ppermute(row, jaxmpi.AXIS, [(r, (r + way) % n) for r in range(n)])

    @staticmethod
    def heat(moved, u):
        above, below = moved(u[-1], 1), moved(u[0], -1)
        rows = jax.numpy.pad(u, ((1, 1), (0, 0)))
        around = rows[:-2] + rows[2:] + jax.numpy.roll(u, 1, 1) + jax.numpy.roll(u, -1, 1) - 4 * u
        return (u + 0.1 * around).at[0].add(0.1 * above).at[-1].add(0.1 * below)


def measure_heat(report):
    """Measure the heat equation on a plate that takes as long to compute as to exchange."""
    size, case = 1024, "heat"
    times = report.measure(
        f"{case}, first", {"at once": Heat(size, "0"), "local": Heat(size)}, seconds=1.0
    )
    local = float(np.median(times["local"]))
    size = jaxmpi.broadcast_object(
        int(size * (max(local, float(np.median(times["at once"])) - local) / local) ** 0.5)
        // 64
        * 64
    )
    once, overlap, local = Heat(size, "0"), Heat(size, "1"), Heat(size)
    exchange, u = jaxmpi.jit(lambda u: (Heat.moved(u[-1], 1), Heat.moved(u[0], -1))), local.u
    calls = {"local": local, "exchange": lambda: exchange(u), "at once": once, "overlap": overlap}
    calls["local beside an exchange"] = lambda: beside(local, calls["exchange"])
    times = report.measure(f"{case} {size}", calls, seconds=8.0)
    start = jax.numpy.ones((size, size)) * jaxmpi.rank()
    turns = [jax.device_get(plate.turn(start)) for plate in (once, overlap)]
    np.testing.assert_array_equal(*turns)
    report.ratio(
        f"{case} {size}", "at once / overlap", times["at once"], times["overlap"], at_least=FASTER
    )
    report.ratio(
        f"{case} {size}",
        "at once / local beside an exchange",
        times["at once"],
        times["local beside an exchange"],
    )
    report.finish()


def added(middle, name, local):
    return middle[name] - middle[local]


def measure_models(report):
    for case in report.progress(args.models):
        factor, made = balanced(report, case)
        took = report.measure(
            case, {**contenders(*made), **peers_of(case, factor, *made)}, seconds=8.0
        )
        middle = {name: np.median(values, axis=1, keepdims=True) for name, values in took.items()}
        longer = np.maximum(middle["local"], middle["mean alone"])
        backward = middle["forward and backward"] - middle["forward"]
        saved = middle["jaxmpi, at once"] - middle["jaxmpi, overlap"]
        report.ratio(
            case,
            "step / longer of computation and mean",
            middle["jaxmpi, overlap"],
            longer,
            at_most=SLOWER,
        )
        report.ratio(
            case, "step at once / longer of computation and mean", middle["jaxmpi, at once"], longer
        )
        report.ratio(
            case,
            "step beside an independent mean / longer of both",
            middle["local beside a mean"],
            longer,
        )
        report.ratio(
            case,
            "step / step beside an independent mean",
            middle["jaxmpi, overlap"],
            middle["local beside a mean"],
        )
        report.ratio(
            case,
            "hidden / smaller of backward and mean",
            saved,
            np.minimum(backward, middle["mean alone"]),
            at_least=HIDDEN,
        )
        ours = added(middle, "jaxmpi, overlap", "local")
        for name, local in (
            ("mpi4jax per leaf", "local"),
            ("JAX gloo", "local"),
            ("torch DDP", "torch local"),
        ):
            if name in middle:
                report.ratio(
                    case,
                    f"added by jaxmpi / by {name}",
                    ours,
                    added(middle, name, local),
                    at_most=1.0,
                )
    report.finish()


def launched(worker, delay_ms):
    """Run two ranks on hosts with a cable of this delay; return the exit status."""
    words = [
        2,
        1,
        delay_ms,
        args.mbit,
        0,
        __file__,
        "--worker",
        worker,
        "--rounds",
        args.rounds,
        "--models",
        *args.models,
    ]
    words += ["--with-gloo"] if args.with_gloo else []
    words += [*["--quick"] * args.quick, *(["--out", args.out] if args.out else [])]
    command = [str(HERE.parent / "tests" / "network.sh"), *map(str, words)]
    return subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable, "MPLBACKEND": "Agg"}
    ).returncode


def main():
    codes = []
    for _ in range(1 if args.quick else args.launches):
        codes.append(launched("heat", args.heat_delay_ms))
        if args.models:
            codes.append(launched("models", args.delay_ms))
    print(f"overlap: {sum(map(bool, codes))} of {len(codes)} launches missed a bound or failed")
    sys.exit(max(codes))


if args.worker:
    import peers  # which start MPI
    from trained import Trained, gloo_step, mpi4jax_step, step_of, torch_steps

    if args.with_gloo:
        peers.start_jax(COORDINATOR)
    torch = peers.start_torch(COORDINATOR)
    report = Report("overlap" if args.worker == "models" else "halo", args)
    measure_heat(report) if args.worker == "heat" else measure_models(report)
else:
    main()
