"""How long `explain` says that a mean takes, beside how much longer it makes a step.

    jaxmpi run -n 2 benchmarks/prediction.py
    python benchmarks/prediction.py --mbit 1000 --delay-ms 1

The second form makes two hosts of this one by tests/network.sh: it needs root. Exits with 1 when a prediction is off by more
than a quarter.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import Report, parser

import jaxmpi

OFF = 0.25  # of what is measured, at most
CASES = {
    "1 KB": [(256,)],
    "1 MB": [(262_144,)],
    "25 MB": [(6_553_600,)],
    "100 MB": [(26_214_400,)],
    "300 arrays of 1 KB": [(256,)] * 300,
}

arguments = parser(__doc__)
arguments.add_argument("--mbit", type=float, help="between two hosts with a cable of so many Mbit/s")
arguments.add_argument("--delay-ms", type=float, default=1, help="one way")
arguments.add_argument("--launches", type=int, default=3, help="of the whole, between hosts")
args = arguments.parse_args()


class Calls:
    """Of a step, each in the place of the last one."""

    def __init__(self, step, shapes):
        self.step, self.arrays = jaxmpi.jit(step, donate_argnums=0), [jnp.ones(shape) for shape in shapes]

    def __call__(self):
        self.arrays = self.step(self.arrays)
        return self.arrays


def work():
    report = Report("prediction", args)
    for case, shapes in report.progress(CASES.items()):
        mean, nothing = Calls(jaxmpi.tree_allreduce, shapes), Calls(lambda arrays: arrays, shapes)
        plan = jaxmpi.explain(mean.step, jax.eval_shape(lambda arrays: arrays, mean.arrays))
        times = report.measure(case, {"mean": mean, "no mean": nothing}, seconds=4.0)
        measured = times["mean"] - np.median(times["no mean"])
        predicted = np.full_like(measured, 1e6 * plan.seconds)
        report.ratio(case, "predicted / measured", predicted, measured, at_least=1 - OFF, at_most=1 + OFF)
    report.finish()


def main():
    words = [2, 1, args.delay_ms, args.mbit, 0, __file__, "--rounds", args.rounds, *["--quick"] * args.quick]
    command = [str(Path(__file__).resolve().parents[1] / "tests" / "network.sh"), *map(str, words)]
    environ = {**os.environ, "PYTHON": sys.executable, "MPLBACKEND": "Agg"}
    codes = [subprocess.run(command, env=environ).returncode for _ in range(1 if args.quick else args.launches)]
    print(f"prediction: {sum(map(bool, codes))} of {len(codes)} launches missed a bound or failed")
    sys.exit(max(codes))


if args.mbit is None:
    work()
else:
    main()
