"""Time of a call of a jitted function, with one allreduce of 1 KB and without.

The contenders are jaxmpi.jit, plain jax.jit and mpi4jax.

    jaxmpi run -n 2 benchmarks/dispatch.py
    JAXMPI_BACKEND=xla jaxmpi run -n 2 benchmarks/dispatch.py

A call is dispatched and its result is waited for. "one wait" is the step without communication
after an MPI Allreduce of 4 bytes: what it costs to meet the other ranks once a call, whatever is
sent. Exits with 1 when a bound is missed; where the collectives are XLA's, there are none.
"""

import contextlib
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from common import Report, parser
from jax import lax
from mpi4py import MPI

import jaxmpi

STATES = (10, 300, 1500)  # numbers of arrays
BOUNDED = (300, 1500)  # few arrays show what the collective itself takes
STEP_LIMIT = 1.1  # jaxmpi.jit / the same step without communication, at most
STEP_GAIN = 5.0  # mpi4jax / jaxmpi.jit, at least
SMALL_LIMIT = 1.5  # jaxmpi.jit / (raw MPI + an empty jitted call), at most
SMALL_GAIN = 20.0
SECONDS = 2.0  # of each contender

options = parser(__doc__)
options.set_defaults(rounds=12)
report = Report("dispatch", options.parse_args())
world = report.world
if world.size < 2:
    sys.exit("dispatch.py: one rank has nothing to send. Start it with `jaxmpi run -n 2`.")
raw = MPI.COMM_WORLD.Dup()
four_bytes, answer = np.ones(1, np.int32), np.zeros(1, np.int32)
on_mpi = world.backend == "mpi"
if on_mpi:
    import mpi4jax

    theirs = MPI.COMM_WORLD.Clone()  # mpi4py and mpi4jax must not share one
x = (world.rank + 1) * jnp.arange(256.0) / 256
# the mean of the allreduced x
total = world.size * (world.size + 1) / 2 * np.mean(np.arange(256.0) / 256)


def ours(x):
    return lax.psum(x, jaxmpi.AXIS)


def mpi4jax_allreduce(x):
    return mpi4jax.allreduce(x, op=MPI.SUM, comm=theirs)


def meet():
    raw.Allreduce(four_bytes, answer)


def make_step(allreduce):
    """Make a step of k arrays, all of which depend on the allreduce."""

    def step(state, x):
        shift = 0.1 * jnp.mean(allreduce(x))
        return {name: v - shift for name, v in state.items()}

    return step


class Steps:
    """Calls of a jitted step, each on the state that the last one left."""

    def __init__(self, step, k, before=None):
        self.step, self.k, self.before = step, k, before

    @contextlib.contextmanager
    def turn(self):
        """Start on a new state, whose 1500 arrays may lie elsewhere in memory.

        Where they lie changes the time more than the contenders do.
        """
        self.state = {f"array{i}": jnp.full(16, float(i)) for i in range(self.k)}
        yield
        del self.state  # leaves the caches to the next contender

    def __call__(self):
        if self.before is not None:
            self.before()
        self.state = self.step(self.state, x)
        return self.state


def check(name, value, want):
    """Check that a contender's result is right before it is timed."""
    if name in ("jaxmpi.jit", "mpi4jax under jax.jit", "mpi4py Allreduce"):
        np.testing.assert_allclose(value, want, rtol=1e-5, err_msg=name)


def show_ratios(case, times, ours_beside, below, limit, gain):
    """Report jaxmpi's times over those in `below`, and mpi4jax's over jaxmpi's."""
    report.ratio(
        case,
        f"jaxmpi.jit / {ours_beside}",
        times["jaxmpi.jit"],
        below,
        at_most=limit if on_mpi else None,
    )
    if on_mpi:
        report.ratio(
            case,
            "mpi4jax / jaxmpi.jit",
            times["mpi4jax under jax.jit"],
            times["jaxmpi.jit"],
            at_least=gain,
        )


report.show("A step with k state arrays f32[16], donated, and one allreduce of 1 KB")
for k in report.progress(STATES):
    case, jit = f"k = {k}", partial(jax.jit, donate_argnums=0)
    local = jit(make_step(lambda x: x))
    steps = {
        "jax.jit, no communication": Steps(local, k),
        "jaxmpi.jit": Steps(jaxmpi.jit(make_step(ours), donate_argnums=0), k),
        "no communication, one wait": Steps(local, k, before=meet),
    }
    if on_mpi:
        steps["mpi4jax under jax.jit"] = Steps(jit(make_step(mpi4jax_allreduce)), k)
    for name, call in steps.items():
        with call.turn():
            check(name, np.asarray(call()[f"array{k - 1}"]), k - 1 - 0.1 * total)
    times = report.measure(case, steps, SECONDS, turn=Steps.turn)
    alone, waited = times["jax.jit, no communication"], times["no communication, one wait"]
    bounds = (STEP_LIMIT, STEP_GAIN) if k in BOUNDED else (None, None)
    show_ratios(case, times, "no communication", alone, *bounds)
    report.ratio(case, "no communication, one wait / no communication", waited, alone)
    report.ratio(case, "jaxmpi.jit / no communication, one wait", times["jaxmpi.jit"], waited)

report.show("An allreduce of 1 KB in a jitted function of one array")
sent, received = np.asarray(x), np.empty(256, np.float32)


def mpi4py_allreduce():
    raw.Allreduce(sent, received)
    return received


small = {
    "mpi4py Allreduce": mpi4py_allreduce,
    "jit(x + 1)": partial(jax.jit(lambda x: x + 1), x),
    "jaxmpi.jit": partial(jaxmpi.jit(ours), x),
}
if on_mpi:
    small["mpi4jax under jax.jit"] = partial(jax.jit(mpi4jax_allreduce), x)
for name, call in small.items():
    check(name, np.mean(np.asarray(call())), total)
times = report.measure("1 KB", small, SECONDS)
medians = {name: np.median(times[name], axis=1, keepdims=True) for name in times}  # of each round
floor = medians["mpi4py Allreduce"] + medians["jit(x + 1)"]
show_ratios("1 KB", times, "(mpi4py Allreduce + jit(x + 1))", floor, SMALL_LIMIT, SMALL_GAIN)
report.finish()
