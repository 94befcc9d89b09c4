"""Train plain JAX with parameters sharded as in FSDP; it does not import jaxmpi.

    python examples/sharded.py                    # one device
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/sharded.py
    jaxmpi run -n 4 examples/sharded.py           # four ranks

The number of devices must divide 120: the hidden units, and the samples of a batch.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

# The number of ranks: of `jaxmpi run` and Open MPI, and of `srun`
counts = [os.environ.get(name) for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")]
if any(int(count or 1) > 1 for count in counts):
    jax.distributed.initialize()

FEATURES, WIDTH, BATCH, STEPS = 8, 120, 120, 300
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, P("data"))
rng = np.random.default_rng(0)


def sharded(x):
    """Make a global array of which each device has some rows; every rank calls it with the same."""
    return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["in"].T)
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@jax.jit
def step(params, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return jax.lax.with_sharding_constraint(params, rows), loss


scale = 1 / np.sqrt(WIDTH)
params = {
    "in": sharded(rng.normal(size=(WIDTH, FEATURES)).astype(np.float32)),
    "out": sharded(scale * rng.normal(size=(WIDTH, 1)).astype(np.float32)),
}
for i in range(STEPS):
    x = rng.uniform(-1, 1, (BATCH, FEATURES)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    params, loss = step(params, sharded(x), sharded(y))
    # A collective of virtual devices occupies one thread of XLA's pool for each device until all
    # have come. Steps that are queued without a wait can occupy all threads, so that the last
    # device of a collective finds none, and nothing goes on.
    loss.block_until_ready()
    if (i + 1) % 100 == 0 and jax.process_index() == 0:
        print(f"step {i + 1}: loss {float(loss):.4f} on {jax.device_count()} devices", flush=True)
