"""Fit y = x² with a small tanh network: one rank or many, the same script."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmpi

jaxmpi.init()

x = np.linspace(-2.0, 2.0, 120, dtype=np.float32)[:, None]
data = {"x": x, "y": x**2}

rngs = nnx.Rngs(0)
hidden = [nnx.Linear(1, 256, rngs=rngs), jnp.tanh, nnx.Linear(256, 512, rngs=rngs), jnp.tanh]
network = nnx.Sequential(*hidden, nnx.Linear(512, 256, rngs=rngs), jnp.tanh, nnx.Linear(256, 1, rngs=rngs))
graph, params = nnx.split(network, nnx.Param)
params = jaxmpi.synchronize(params)  # copy rank 0's parameters to every rank

optimizer = jaxmpi.distributed(optax.adam(1e-3))  # Adam on the mean of all ranks' gradients
state = optimizer.init(params)


@jaxmpi.jit
def step(params, state, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((nnx.merge(graph, p)(batch["x"]) - batch["y"]) ** 2))(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jaxmpi.tree_allreduce(loss)


for epoch in jaxmpi.progress(range(100)):
    for batch in jaxmpi.batches(data, 60, seed=0, epoch=epoch):  # this rank's rows of each global batch
        params, state, loss = step(params, state, batch)

if jaxmpi.rank() == 0:
    print(f"loss after 100 epochs: {loss:.6e} (ranks: {jaxmpi.size()})")
