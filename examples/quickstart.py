"""Fit y = x² with a small tanh network: one rank or many, the same script."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmpi

jaxmpi.init()

x = np.linspace(-2.0, 2.0, 120, dtype=np.float32)[:, None]
data = {"x": x, "y": x**2}

rngs = nnx.Rngs(0)
layers = [nnx.Linear(1, 256, rngs=rngs), jnp.tanh]
layers += [nnx.Linear(256, 512, rngs=rngs), jnp.tanh]
layers += [nnx.Linear(512, 256, rngs=rngs), jnp.tanh]
model = nnx.Sequential(*layers, nnx.Linear(256, 1, rngs=rngs))
nnx.update(model, jaxmpi.synchronize(nnx.state(model)))  # rank 0's values
tx = jaxmpi.distributed(optax.adam(1e-3))  # averages the gradients
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)


@jaxmpi.nn.jit
def step(model, optimizer, batch):
    def loss_of(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return jaxmpi.tree_allreduce(loss)


for epoch in jaxmpi.progress(range(100)):
    for batch in jaxmpi.batches(data, 60, seed=0, epoch=epoch):
        loss = step(model, optimizer, batch)  # batch: this rank's rows

if jaxmpi.rank() == 0:
    print(f"loss after 100 epochs: {loss:.6e} (ranks: {jaxmpi.size()})")
