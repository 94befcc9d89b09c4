"""One rank of a plain JAX job with a fault: program_with_fault.py PROGRAM FAULT.

The last rank has the fault, in its sixth call.
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

which, fault = sys.argv[1:]
jax.distributed.initialize()
n, rank = jax.process_count(), jax.process_index()
two_axes = jax.make_mesh((n // 2, 2) if n == 4 else (1, n), ("rows", "columns"))
mesh = jax.make_mesh((n,), ("d",), axis_types=(AxisType.Auto,))
rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())


def mapped(function, mesh, spec):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped), NamedSharding(mesh, spec)


def loop(x):
    return lax.fori_loop(0, 10, lambda _, x: lax.pmean(x, "d"), x)


def both_axes(x):
    return lax.all_gather(lax.psum(x, "columns"), "rows").sum(0)


PROGRAMS = {
    "shard_map": mapped(lambda x: lax.psum(x, "d"), mesh, P("d")),
    "loop": mapped(loop, mesh, P("d")),
    "two axes": mapped(both_axes, two_axes, P(("rows", "columns"))),
    "permute": mapped(
        lambda x: lax.ppermute(x, "d", [(i, (i + 1) % n) for i in range(n)]), mesh, P("d")
    ),
    "sharding": (
        jax.jit(lambda x: jnp.tanh(x @ x.T), in_shardings=rows, out_shardings=everywhere),
        rows,
    ),
}
program, sharding = PROGRAMS[which]
x = jax.make_array_from_process_local_data(sharding, np.full((1, 8), rank, np.float32))
jax.block_until_ready(program(x))
for i in range(10):
    if i == 5 and rank == n - 1:
        print(f"now {time.time()}", flush=True)
        if fault == "raise":
            raise RuntimeError("a fault on purpose")
        if fault == "exit 3":
            sys.exit(3)
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    jax.block_until_ready(program(x))
print("done", flush=True)
