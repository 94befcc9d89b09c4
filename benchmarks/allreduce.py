"""The mean of arrays over the ranks, beside memcpy and what else the field has.

    jaxmpi run -n 2 benchmarks/allreduce.py

One array of 256 B to 256 MB, and the parameters of known models. All contenders run in this job, in
turns, each on arrays of its own. Exits with 1 when a bound is missed. torch is a contender where it
is installed.
"""

import ml_dtypes
import numpy as np
import peers
from common import Report, parser
from models import gpt2, mlp, resnet50

arguments = parser(__doc__)
arguments.add_argument("--cases", default="", help="only cases whose name has this in it")
args = arguments.parse_args()
peers.start_jax()
report = Report("allreduce", args)
torch = peers.start_torch()
if torch is None:
    report.show("torch is not installed: that contender is left out")

CONTENDERS = {
    "memcpy": peers.memcpy,
    "jaxmpi": peers.jaxmpi_mean,
    "mpi4py in place": peers.mpi4py_in_place,
    "mpi4jax per leaf": peers.mpi4jax_per_leaf,
    "mpi4jax concatenated": peers.mpi4jax_concatenated,
    "JAX gloo": peers.jax_gloo,
} | ({"torch gloo, one array": peers.torch_gloo(torch)} if torch else {})
BF16 = ml_dtypes.bfloat16
SIZES = {
    "one array 256 B": [(64,)],
    "one array 4 KB": [(1024,)],
    "one array 64 KB": [(2**14,)],
    "one array 1 MB": [(2**18,)],
    "one array 16 MB": [(2**22,)],
    "one array 256 MB": [(2**26,)],
}
MODELS = {"ResNet-50": resnet50(), "MLP 10M": mlp(), "GPT-2 small": gpt2()}
CASES = [(name, shapes, np.float32) for name, shapes in (SIZES | MODELS).items()]
CASES += [("ResNet-50 bf16", MODELS["ResNet-50"], BF16), ("one array 16 MB bf16", [(2**23,)], BF16)]

for case, shapes, dtype in report.progress([c for c in CASES if args.cases in c[0]]):
    big = sum(int(np.prod(shape)) for shape in shapes) > 2**25
    if args.quick and big:
        continue
    left_out = {"mpi4jax concatenated"} if len(shapes) == 1 else set()
    calls = {name: peer(shapes, dtype) for name, peer in CONTENDERS.items() if name not in left_out}
    # next to each other: within a minute, or seconds, the cores get other places
    if case == "ResNet-50 bf16":
        calls = {"jaxmpi, float32": CONTENDERS["jaxmpi"](shapes, np.float32)} | calls
    times = report.measure(case, calls, seconds=3.0 if big else 1.5)
    bounds = {"memcpy": {}, "mpi4jax per leaf": {}, "JAX gloo": {}, "torch gloo, one array": {}}
    if case == "ResNet-50" and report.world.size == 2:
        bounds = {
            "memcpy": {"at_most": 1.3},
            "mpi4jax per leaf": {"at_least": 3.0},
            "JAX gloo": {"at_least": 10.0},
            "torch gloo, one array": {"at_least": 4.0},
        }
    for peer, bound in bounds.items():
        if peer == "memcpy":
            report.ratio(case, "jaxmpi / memcpy", times["jaxmpi"], times["memcpy"], **bound)
        elif peer in times:
            report.ratio(case, f"{peer} / jaxmpi", times[peer], times["jaxmpi"], **bound)
    if "jaxmpi, float32" in times:
        report.ratio(
            "ResNet-50",
            "jaxmpi bf16 / jaxmpi f32",
            times["jaxmpi"],
            times["jaxmpi, float32"],
            at_most=0.6,
        )


def plot(axes, rows):
    for name in CONTENDERS:
        points = []
        for r in rows:
            if r["contender"] == name and r["case"] in SIZES:
                points.append((4 * np.prod(SIZES[r["case"]][0]), r))
        if points:
            sizes, values = zip(*points, strict=True)
            axes.plot(sizes, [v["median_us"] for v in values], marker="o", markersize=3, label=name)
            axes.fill_between(
                sizes, [v["low_us"] for v in values], [v["high_us"] for v in values], alpha=0.15
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes of one float32 array",
        ylabel="µs for its mean over the ranks",
    )


report.finish(plot)
