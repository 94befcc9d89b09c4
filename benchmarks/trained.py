"""A train step and its calls, for the benchmarks that train."""

import jax
import jax.numpy as jnp
import optax

optimizer = optax.sgd(1e-3, momentum=0.9)


class Trained:
    """Calls of a step, each on the state that the last one left."""

    def __init__(self, step, params, batch, put=lambda x: x):
        self.step, self.batch = step, jax.tree.map(put, batch)
        self.state = jax.tree.map(lambda x: put(jnp.array(x)), (params, optimizer.init(params)))  # a copy: it is donated

    def __call__(self):
        self.state, loss = self.step(self.state, self.batch)
        return self.state, loss


def step_of(loss_of, average):
    def step(state, batch):
        params, momentum = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, momentum = optimizer.update(average(grads), momentum, params)
        return (optax.apply_updates(params, updates), momentum), loss

    return step
