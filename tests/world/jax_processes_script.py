"""Libraries that ask JAX for this process's number, on mpi with `jax_processes=True`."""

import warnings

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import jaxmpi

world = jaxmpi.init("mpi", jax_processes=True)
rank, size = world.rank, world.size
assert (jax.process_index(), jax.process_count(), jax.device_count()) == (rank, size, size)
assert jax.local_device_count() == 1 and world.device == jax.local_devices()[0]

# JAX's own tools
np.testing.assert_array_equal(
    multihost_utils.process_allgather(np.float32(rank + 1)), np.arange(1, size + 1)
)
assert multihost_utils.broadcast_one_to_all(np.float32(rank + 3)) == 3
multihost_utils.sync_global_devices("here")

# Grain: each record on one rank
shard = grain.ShardByJaxProcess()
mine = [
    int(x) for x in grain.MapDataset.source(np.arange(10))[shard.shard_index :: shard.shard_count]
]
assert sorted(np.concatenate(jaxmpi.allgather_object(mine))) == list(range(10))

# jaxmpi beside them: a step, eager collectives, a second call that compiles nothing
tx = jaxmpi.distributed(optax.sgd(1.0))
params = jnp.zeros(3)
state = tx.init(params)


@jaxmpi.jit
def step(params, state, x):
    updates, state = tx.update(params + x, state, params)
    return optax.apply_updates(params, updates), state


for _ in range(3):
    params, state = step(params, state, jnp.float32(rank))
np.testing.assert_allclose(params, -np.mean(np.arange(size)))
np.testing.assert_array_equal(jaxmpi.tree_allgather(jnp.float32(rank)), np.arange(size))
assert jaxmpi.init(jax_processes=True) is world

# a pmap of JAX's own is over the ranks, of which nothing is said, and so is that of jaxmpi
mine = jnp.asarray([rank + 1.0])
with warnings.catch_warnings():
    warnings.simplefilter("error")
    np.testing.assert_allclose(
        jax.pmap(lambda x: jax.lax.psum(x, "i"), "i")(mine), size * (size + 1) / 2
    )
np.testing.assert_allclose(
    jaxmpi.pmap(lambda x: jax.lax.psum(x, "i"), "i")(mine), size * (size + 1) / 2
)
jaxmpi.print("right")
