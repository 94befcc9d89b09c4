"""FSDP-like training of plain JAX: sharded parameters, a sharded batch, and no import of jaxmpi.

python examples/sharded.py                    # one device
XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/sharded.py
jaxmpi run -n 4 examples/sharded.py           # four ranks
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

if "OMPI_COMM_WORLD_SIZE" in os.environ:  # a rank
    jax.distributed.initialize()

WIDTH, BATCH, STEPS = 128, 64, 300
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, P("data"))
rng = np.random.default_rng(0)


def sharded(x):
    """Make a global array of which each device has some rows; every rank calls it with the same."""
    return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["in"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@jax.jit
def step(params, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return jax.lax.with_sharding_constraint(params, rows), loss


scale = 1 / np.sqrt(WIDTH)
params = {
    "in": sharded(rng.normal(size=(8, WIDTH)).astype(np.float32)),
    "out": sharded(scale * rng.normal(size=(WIDTH, 1)).astype(np.float32)),
}
for i in range(STEPS):
    x = rng.uniform(-1, 1, (BATCH, 8)).astype(np.float32)
    y = np.sin(3 * x.sum(axis=1, keepdims=True))
    params, loss = step(params, sharded(x), sharded(y))
    if (i + 1) % 100 == 0 and jax.process_index() == 0:
        print(f"step {i + 1}: loss {float(loss):.4f} on {jax.device_count()} devices", flush=True)
