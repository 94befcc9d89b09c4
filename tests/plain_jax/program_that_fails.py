"""A plain JAX program whose rank 1 fails, or comes late, in the way that its argument names."""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
how = sys.argv[1]
if how == "start" and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(3)
n, rank = jax.process_count(), jax.process_index()
mesh = jax.make_mesh((n,), ("d",))
program = jax.jit(
    jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
)
for i in range(10):
    items = 4
    if i == 5 and rank == 1:
        if how == "raise":
            raise ValueError("of rank 1")
        if how == "exit":
            sys.exit(3)
        if how == "text":
            sys.exit("rank 1 gives up")
        if how == "leave":
            sys.exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "late":
            time.sleep(4)
        if how == "other":
            items = 5
    local = np.full((1, items), rank + 1, np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), local)
    y = np.asarray(program(x).addressable_data(0))
    assert (y == n * (n + 1) / 2).all()
print("done", flush=True)
