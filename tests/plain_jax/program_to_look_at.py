"""A plain JAX program to look at: rank 1 waits, in the middle, until a file is there.

    program_to_look_at.py FILE [jaxmpi | jaxmpi late | fails | raises]

With "jaxmpi", jaxmpi.init starts MPI, or, late, finds it started. With "fails" or "raises", rank 1
ends with code 3 there, unless the job was restarted. The ranks are a mesh of one axis or, four of
them, of two.
"""

import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

go, how = Path(sys.argv[1]), sys.argv[2:]
if how == ["jaxmpi"]:
    import jaxmpi

    jaxmpi.init(jax_processes=True)
else:
    jax.distributed.initialize()
if how == ["jaxmpi late"]:
    import jaxmpi

    jax.block_until_ready(jax.numpy.ones(3))
    jaxmpi.init()
n, rank = jax.process_count(), jax.process_index()
shape = {4: (2, 2)}.get(n, (1, n))
mesh = jax.make_mesh(shape, ("a", "b"))
RING = [(i, (i + 1) % shape[1]) for i in range(shape[1])]


def local_step(x):
    rows = jax.lax.psum(x, "b")
    if shape[0] > 1:
        rows = jax.lax.psum(rows, "a")
    return rows + jax.lax.ppermute(x, "b", RING)


spec = P(("a", "b"))
step = jax.jit(jax.shard_map(local_step, mesh=mesh, in_specs=spec, out_specs=spec))
local = np.full((1, 1000), rank + 1, np.float32)
x = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
for i in range(30):
    if i == 20 and rank == 1:
        if how == ["raises"]:
            raise SystemExit(3)
        if how == ["fails"] and os.environ["JAXMPI_RESTART"] == "0":
            sys.exit(3)
        while not go.exists():
            time.sleep(0.05)
    y = np.asarray(step(x).addressable_data(0))
print("done", flush=True)
