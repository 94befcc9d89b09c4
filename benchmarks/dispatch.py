"""What a call of a jitted function costs, with one allreduce of 1 KB in it and without: jaxmpi.jit, plain jax.jit and mpi4jax.

    jaxmpi run -n 2 benchmarks/dispatch.py
    JAXMPI_BACKEND=xla jaxmpi run -n 2 benchmarks/dispatch.py

A call is dispatched and its result is waited for. "one wait" is the step without communication after an MPI Allreduce of
4 bytes: what it costs to meet the other ranks once a call, whatever is sent. The contenders take turns, in rounds; all ranks
start each turn together, and the times of all ranks count. Exits with 1 when a bound is missed, unless the collectives are
XLA's or it is a --quick run.
"""

import argparse
import os
import platform
import sys
import time
from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import jaxmpi

STEP_LIMIT = 1.1  # jaxmpi.jit / the same step without communication, at most
STEP_GAIN = 5.0  # mpi4jax / jaxmpi.jit, at least
SMALL_LIMIT = 1.5  # jaxmpi.jit / (raw MPI + an empty jitted call), at most
SMALL_GAIN = 20.0
BOUNDED = (300, 1500)  # numbers of state arrays with bounds; few arrays show what the collective itself takes
CALLS = {10: 200, 300: 50, 1500: 15}  # by number of state arrays: timed calls of a turn
SMALL_CALLS = 200
UNTIMED = 2  # calls at the start of a turn, which find the caches of another contender

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--rounds", type=int, default=12, help="turns of each contender")
parser.add_argument("--quick", action="store_true", help="2 rounds of 3 calls: to see that it works")
args = parser.parse_args()
rounds = 2 if args.quick else args.rounds

world = jaxmpi.init()
if world.size < 2:
    sys.exit("dispatch.py: one rank has nothing to send. Start it with `jaxmpi run -n 2`.")
raw = MPI.COMM_WORLD.Dup()
four_bytes, answer = np.ones(1, np.int32), np.zeros(1, np.int32)
on_mpi = world.backend == "mpi"
if on_mpi:
    import mpi4jax

    theirs = MPI.COMM_WORLD.Clone()  # mpi4py and mpi4jax must not share one


def ours(x):
    return lax.psum(x, jaxmpi.AXIS)


def mpi4jax_allreduce(x):
    return mpi4jax.allreduce(x, op=MPI.SUM, comm=theirs)


def meet():
    raw.Allreduce(four_bytes, answer)


def make_step(allreduce):
    """A step of k arrays, all of which depend on the allreduce."""

    def step(state, x):
        shift = 0.1 * jnp.mean(allreduce(x))
        return {name: v - shift for name, v in state.items()}

    return step


class Steps:
    """Calls of a jitted step, each on the state that the last one left."""

    def __init__(self, step, k, before=None):
        self.step, self.k, self.before = step, k, before

    def start(self):
        """A new state for each round: where 1500 arrays lie in memory makes more difference than what is measured."""
        self.state = {f"array{i}": jnp.full(16, float(i)) for i in range(self.k)}

    def __call__(self):
        if self.before is not None:
            self.before()
        self.state = self.step(self.state, x)
        return self.state

    def end(self):
        """Leave the caches to the next contender."""
        del self.state


class Calls:
    """Calls of a function without a state."""

    def __init__(self, function):
        self.function = function

    def start(self):
        pass

    def __call__(self):
        return self.function()

    def end(self):
        pass


def measure(contenders, calls):
    """Microseconds of each call: {name: [rounds, ranks · calls]}."""
    calls = 3 if args.quick else calls
    times = {name: np.empty((rounds, calls)) for name in contenders}
    for turn in range(rounds):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            call = contenders[name]
            call.start()
            jaxmpi.barrier()
            for i in range(-UNTIMED, calls):
                start = time.perf_counter()
                jax.block_until_ready(call())
                if i >= 0:
                    times[name][turn, i] = 1e6 * (time.perf_counter() - start)
            call.end()
    everyone = jaxmpi.allgather_object(times)
    return {name: np.concatenate([one[name] for one in everyone], axis=1) for name in contenders}


def show(*columns):
    if world.rank == 0:
        print(*columns, flush=True)


def show_times(label, times):
    for name, values in times.items():
        low, median, high = np.percentile(values, [25, 50, 75])
        show(f"{label:12} {name:28} median {median:9.1f} µs, quartiles {low:9.1f} to {high:9.1f}")


def show_ratio(label, name, above, below, *, at_most=None, at_least=None):
    """Print the ratio of two medians, and its range over the rounds; return whether it keeps its bound."""
    ratio = np.median(above) / np.median(below)
    by_round = np.median(above, axis=1) / np.median(below, axis=1)
    if at_most is not None:
        holds, bound = ratio <= at_most, f"bound <= {at_most:g}"
    elif at_least is not None:
        holds, bound = ratio >= at_least, f"bound >= {at_least:g}"
    else:
        holds, bound = True, "no bound"
    verdict = "" if bound == "no bound" else ": holds" if holds else ": MISSED"
    show(f"{label:12} {name:48} {ratio:7.2f}, rounds {by_round.min():7.2f} to {by_round.max():7.2f}, {bound}{verdict}")
    return bool(holds)


versions = ", ".join(f"{name} {version(name)}" for name in ["jax", "jaxlib", "mpi4py"] + ["mpi4jax"] * on_mpi)
library = MPI.Get_library_version().split(",")[0].strip("\0 \n")
show(
    f"{platform.machine()}, {os.cpu_count()} cores, {world.size} ranks on {len(os.sched_getaffinity(0))} cores each, "
    f"{world.device.device_kind}, backend {world.backend}, Python {platform.python_version()}, {versions}, {library}, "
    f"{rounds} rounds"
)
holds = []
x = (world.rank + 1) * jnp.arange(256.0) / 256
total = world.size * (world.size + 1) / 2 * np.mean(np.arange(256.0) / 256)  # the mean of the allreduced x

show("\nA step with k state arrays f32[16], donated, and one allreduce of 1 KB")
for k, calls in CALLS.items():
    jit = partial(jax.jit, donate_argnums=0)
    local = jit(make_step(lambda x: x))
    steps = {
        "jax.jit, no communication": Steps(local, k),
        "jaxmpi.jit": Steps(jaxmpi.jit(make_step(ours), donate_argnums=0), k),
        "no communication, one wait": Steps(local, k, before=meet),
    }
    if on_mpi:
        steps["mpi4jax under jax.jit"] = Steps(jit(make_step(mpi4jax_allreduce)), k)
    for name, call in steps.items():
        call.start()
        last = np.asarray(call()[f"array{k - 1}"])  # compiles
        call.end()
        if "no communication" not in name:
            np.testing.assert_allclose(last, k - 1 - 0.1 * total, rtol=1e-5, err_msg=name)
    times = measure(steps, calls)
    label, (alone, distributed, waited, *others) = f"k = {k}", times.values()
    show_times(label, times)
    bounds = [{"at_most": STEP_LIMIT}, {"at_least": STEP_GAIN}] if k in BOUNDED else [{}, {}]
    holds.append(show_ratio(label, "jaxmpi.jit / no communication", distributed, alone, **bounds[0]))
    show_ratio(label, "no communication, one wait / no communication", waited, alone)
    show_ratio(label, "jaxmpi.jit / no communication, one wait", distributed, waited)
    for other in others:
        holds.append(show_ratio(label, "mpi4jax / jaxmpi.jit", other, distributed, **bounds[1]))

show("\nAn allreduce of 1 KB in a jitted function of one array")
sent, received = np.asarray(x), np.empty(256, np.float32)
add, allreduce = jax.jit(lambda x: x + 1), jaxmpi.jit(ours)
small = {
    "mpi4py Allreduce": Calls(lambda: raw.Allreduce(sent, received)),
    "jit(x + 1)": Calls(lambda: add(x)),
    "jaxmpi.jit": Calls(lambda: allreduce(x)),
}
if on_mpi:
    allreduce_mpi4jax = jax.jit(mpi4jax_allreduce)
    small["mpi4jax under jax.jit"] = Calls(lambda: allreduce_mpi4jax(x))
for name, call in small.items():
    out = call()
    out = received if out is None else out
    if name != "jit(x + 1)":
        np.testing.assert_allclose(np.mean(np.asarray(out)), total, rtol=1e-5, err_msg=name)
times = measure(small, SMALL_CALLS)
show_times("1 KB", times)
raw_times, add_times, distributed, *others = times.values()
floor = np.median(raw_times, axis=1, keepdims=True) + np.median(add_times, axis=1, keepdims=True)  # a row for each round
holds.append(show_ratio("1 KB", "jaxmpi.jit / (mpi4py Allreduce + jit(x + 1))", distributed, floor, at_most=SMALL_LIMIT))
for other in others:
    holds.append(show_ratio("1 KB", "mpi4jax / jaxmpi.jit", other, distributed, at_least=SMALL_GAIN))

show("\nall bounds hold" if all(holds) else "\nsome bounds are missed")
sys.exit(int(on_mpi and not args.quick and not all(holds)))
