"""Time of a mean as `explain` predicts it, beside the time that each further mean adds to a step.

    jaxmpi run -n 2 benchmarks/prediction.py
    python benchmarks/prediction.py --mbit 1000 --delay-ms 1

The second form makes two hosts of this one by tests/network.sh: it needs root. Exits with 1 when a
prediction is off by more than a quarter.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from common import Report, parser

import jaxmpi
from jaxmpi._world import session

OFF = 0.25  # of what is measured, at most
# The arrays of a mean, and how many further means a step has. There are so many that their time
# exceeds the difference between two calls of one step.
CASES = {
    "1 KB": ([(256,)], 20),
    "1 MB": ([(262_144,)], 5),
    "25 MB": ([(6_553_600,)], 1),
    "100 MB": ([(26_214_400,)], 1),
    "300 arrays of 1 KB": ([(256,)] * 300, 10),
}

arguments = parser(__doc__)
arguments.add_argument(
    "--mbit", type=float, help="between two hosts with a cable of so many Mbit/s"
)
arguments.add_argument("--delay-ms", type=float, default=1, help="one way")
arguments.add_argument("--launches", type=int, default=3, help="of the whole, between hosts")
args = arguments.parse_args()


def repeated(means, arrays):
    """Apply the mean several times in a row."""
    return repeated(means - 1, jaxmpi.tree_allreduce(arrays)) if means else arrays


class Calls:
    """Calls of a step with a given number of means, each in place of the last result."""

    def __init__(self, means, shapes):
        self.step = jaxmpi.jit(lambda arrays: repeated(means, arrays), donate_argnums=0)
        self.arrays = [jnp.ones(shape) for shape in shapes]

    def __call__(self):
        self.arrays = self.step(self.arrays)
        return self.arrays


def work():
    # the second mean is of equal arrays
    warnings.filterwarnings("ignore", "jaxmpi.jit: what is summed or averaged")
    report = Report("prediction", args)
    for case, (shapes, further) in report.progress(CASES.items()):
        one, several = Calls(1, shapes), Calls(1 + further, shapes)
        session.set_speed(None)  # measure anew: machines drift from one case to the next
        plan = jaxmpi.explain(one.step, one.arrays)
        times = report.measure(
            case, {"one mean": one, f"{1 + further} means": several}, seconds=4.0
        )
        alone, together = times.values()
        measured = (together - np.median(alone)) / further
        predicted = np.full_like(measured, 1e6 * plan.seconds)
        report.ratio(
            case, "predicted / measured", predicted, measured, at_least=1 - OFF, at_most=1 + OFF
        )
    report.finish()


def main():
    words = [
        2,
        1,
        args.delay_ms,
        args.mbit,
        0,
        __file__,
        "--rounds",
        args.rounds,
        *["--quick"] * args.quick,
    ]
    command = [str(Path(__file__).resolve().parents[1] / "tests" / "network.sh"), *map(str, words)]
    environ = {**os.environ, "PYTHON": sys.executable, "MPLBACKEND": "Agg"}
    launches = 1 if args.quick else args.launches
    codes = [subprocess.run(command, env=environ).returncode for _ in range(launches)]
    print(f"prediction: {sum(map(bool, codes))} of {len(codes)} launches missed a bound or failed")
    sys.exit(max(codes))


if args.mbit is None:
    work()
else:
    main()
