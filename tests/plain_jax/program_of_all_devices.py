"""A plain JAX program that sums over all devices, however many each process has."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
n = len(jax.devices())
mesh = jax.make_mesh((n,), ("d",))
x = jax.make_array_from_callback(
    (n, 3), NamedSharding(mesh, P("d")), lambda index: np.ones((n, 3), np.float32)[index]
)
program = jax.jit(
    jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
)
print(program(x).addressable_data(0), flush=True)
