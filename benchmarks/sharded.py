"""Collectives of plain JAX, by shard_map, beside those of `jaxmpi.jit`.

    jaxmpi run -n 2 benchmarks/sharded.py
    JAXMPI_XLA=gloo jaxmpi run -n 2 benchmarks/sharded.py
    tests/network.sh 2 1 1 1000 0 benchmarks/sharded.py --mbit 1000

The contenders take turns in one job: `jaxmpi.jit`, and JAX's own collectives, which the native
transport carries in the first job and gloo in the second. So the ratios to `jaxmpi.jit` can be
compared between the two. The third job is between two hosts, which are made of this one with 1 ms
and 1000 Mbit/s between them: the mean of 20 MB beside the cable's limit. With p hosts and B bytes,
no algorithm is faster than 2 (p-1)/p · B / rate. Exits with 1 where a bound of the first or the
third job is missed.
"""

import sys

import jax
import numpy as np
from common import Report, parser
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import resnet50

import jaxmpi

LARGE_LIMIT = 1.5  # JAX / jaxmpi
CABLE_LIMIT = 1.3  # the cable's own time is 1
arguments = parser(__doc__)
arguments.add_argument(
    "--mbit", type=float, help="rate of the cables between hosts, of one rank each"
)
args = arguments.parse_args()
world = jaxmpi.init("mpi", jax_processes=True)
carrier = jax.config.jax_cpu_collectives_implementation
report = Report("sharded" if carrier == "mpi" else f"sharded-{carrier}", args)
JAX = f"JAX over {carrier}"
n = world.size
RING = [(i, (i + 1) % n) for i in range(n)]
COLLECTIVES = {
    "pmean": lambda x, axis: lax.pmean(x, axis),
    # along the first dimension: for others, XLA copies an array before and after its collective
    "all_gather": lambda x, axis: lax.all_gather(x, axis, tiled=True),
    "psum_scatter": lambda x, axis: lax.psum_scatter(x, axis, tiled=True),
    "all_to_all": lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True),
    "ppermute": lambda x, axis: lax.ppermute(x, axis, RING),
}
SIZES = {"1 KB": 2**8, "100 KB": 25_600, "10 MB": 2_500_000, "100 MB": 25_000_000}

mesh = jax.make_mesh((n,), ("d",))
sharding = NamedSharding(mesh, P("d"))


class Calls:
    """Calls of a program; of a donated argument, each on what the last one returned."""

    def __init__(self, program, x, donated=False):
        self.program, self.x, self.donated = program, x, donated

    def __call__(self):
        y = self.program(self.x)
        if self.donated:
            self.x = y
        return y


def plain(f, arrays, donated=False):
    """Return calls of a collective of plain JAX, by shard_map."""
    program = jax.shard_map(
        lambda tree: jax.tree.map(lambda x: f(x, "d"), tree),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
        check_vma=False,
    )
    tree = [jax.make_array_from_process_local_data(sharding, x) for x in arrays]
    return Calls(jax.jit(program, donate_argnums=(0,) if donated else ()), tree, donated)


def ours(f, arrays, donated=False):
    """Return calls of the same collective of `jaxmpi.jit`."""
    program = jaxmpi.jit(
        lambda tree: jax.tree.map(lambda x: f(x, jaxmpi.AXIS), tree),
        donate_argnums=(0,) if donated else (),
    )
    return Calls(program, [jax.numpy.array(x) for x in arrays], donated)


def measure(case, f, arrays, donated=False, **bound):
    """Measure a collective of both kinds, and return the times of each in µs [rounds, calls]."""
    contenders = {"jaxmpi.jit": ours(f, arrays, donated), JAX: plain(f, arrays, donated)}
    times = report.measure(case, contenders)
    bound = bound if carrier == "mpi" else {}
    report.ratio(case, f"{JAX} / jaxmpi.jit", times[JAX], times["jaxmpi.jit"], **bound)
    return times


def measure_between_hosts():
    """Measure the mean of 20 MB, as one array and as 16, beside the cable's limit."""
    megabytes = 20
    limit_us = 2 * (n - 1) / n * megabytes * 8e6 / args.mbit
    for count in (1, 16):
        # XLA begins a collective when the one before has ended, so that several wait for each other
        bound = {"at_most": CABLE_LIMIT} if count == 1 and carrier == "mpi" else {}
        items = megabytes * 250_000 // count
        arrays = [np.full(items, world.rank + 1, np.float32)] * count
        case = f"pmean {megabytes} MB, {count} arrays" if count > 1 else f"pmean {megabytes} MB"
        for name, times in measure(case, COLLECTIVES["pmean"], arrays).items():
            report.ratio(case, f"{name} / the cable", times, np.full_like(times, limit_us), **bound)
    report.finish()


if args.mbit:
    measure_between_hosts()
    sys.exit(0)
tree = [np.full((1, int(np.prod(shape))), world.rank + 1, np.float32) for shape in resnet50()]
for donated in (False, True):
    case = "ResNet-50" + ", donated" * donated
    measure(case, COLLECTIVES["pmean"], tree, donated, at_most=LARGE_LIMIT)
    # without the division, which is a pass of XLA's over all arrays, into memory of its own
    measure("sums of " + case, lambda x, axis: lax.psum(x, axis), tree, donated)
for name, f in report.progress(COLLECTIVES.items()):
    for size, items in SIZES.items():
        if args.quick and items > 10**7:
            continue
        x = np.full(items, world.rank + 1, np.float32)
        measure(f"{name} {size}", f, [x], at_most=1.0 if size == "1 KB" else LARGE_LIMIT)
report.finish()
