"""Time of an eager collective beside the jitted one and raw MPI, for a small message.

    jaxmpi run -n 2 benchmarks/eager.py

Exits with 1 when an eager call of one leaf costs over 0.1 ms more than the jitted call.
"""

import os
import platform
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi

REPEATS = 500
LIMIT_MICROSECONDS = 100.0

world = jaxmpi.init()
x = jnp.arange(256.0)
tree = {f"leaf{i}": jnp.arange(10.0) + i for i in range(20)}
buffer = np.ones(256, np.float32)
comm = MPI.COMM_WORLD.Dup()
allreduce = jax.jit(lambda t: jaxmpi.tree_allreduce(t))
add = jax.jit(lambda x: x + 1)

cases = {
    "mpi4py Allreduce in place, 1 KB": lambda: comm.Allreduce(MPI.IN_PLACE, buffer),
    "jit(x + 1), no communication": lambda: add(x),
    "jitted tree_allreduce, 1 KB": lambda: allreduce(x),
    "eager tree_allreduce, 1 KB": lambda: jaxmpi.tree_allreduce(x),
    "jitted tree_allreduce, 20 leaves": lambda: allreduce(tree),
    "eager tree_allreduce, 20 leaves": lambda: jaxmpi.tree_allreduce(tree),
}
times = {name: [] for name in cases}
for repeat in range(REPEATS + 20):  # interleaved, so that all see the same machine
    for name, call in cases.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        if repeat >= 20:
            times[name].append(1e6 * (time.perf_counter() - start))

medians = {name: statistics.median(values) for name, values in times.items()}
overhead = medians["eager tree_allreduce, 1 KB"] - medians["jitted tree_allreduce, 1 KB"]
if world.rank == 0:
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, {world.size} ranks, "
        f"{REPEATS} repeats"
    )
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        print(f"{name:36} median {medians[name]:8.1f} µs, quartiles {low:8.1f} to {high:8.1f}")
    print(f"eager - jitted, 1 KB: {overhead:.1f} µs (limit {LIMIT_MICROSECONDS:.0f})")
sys.exit(int(jaxmpi.broadcast_object(overhead) > LIMIT_MICROSECONDS))
