"""Reduce-scatters of 16 MB by ranks that come at different times, which JAX's gloo got wrong."""

import sys
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
n, rank = jax.process_count(), jax.process_index()
mesh = jax.make_mesh((n,), ("d",))
items = (16 << 20) // 4 // n
program = jax.jit(
    jax.shard_map(
        lambda x: lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
    )
)
wrong = 0
for i in range(int(sys.argv[1])):
    whole = np.random.default_rng(i).integers(-100, 100, (n, n * items), np.int8)
    local = whole[rank : rank + 1].astype(np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), local)
    time.sleep(0.02 * ((i + rank) % n))
    got = np.asarray(program(x).addressable_data(0))[0]
    want = whole[:, rank * items : (rank + 1) * items].sum(0, dtype=np.int32)
    wrong += not np.array_equal(got, want)
print(f"wrong: {wrong}", flush=True)
