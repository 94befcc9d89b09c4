"""Islands of devices that train one model each: gradients within, now and then a mean over all."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, STEPS, FEATURES = 24, 6, 5


def islands(n):
    count = next(k for k in range(2, n + 1) if n % k == 0)
    return np.arange(n).reshape(count, -1).tolist()


def train_step(params, batch, rates):
    groups = islands(lax.axis_size("i"))
    x, y = batch

    def loss_fn(params):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        center = lax.pmean(hidden.mean(0), "i", axis_index_groups=groups)
        return jnp.mean((hidden - center - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    grads = lax.pmean(grads, "i", axis_index_groups=groups)
    params = jax.tree.map(lambda p, g: p - rates * g, params, grads)
    losses = lax.all_gather(lax.pmean(loss, "i", axis_index_groups=groups), "i")
    return params, losses


def main():
    update = jax.pmap(train_step, axis_name="i", in_axes=(0, 0, None))
    rng, n = np.random.default_rng(2), jax.local_device_count()
    params = {"w": np.full((n, FEATURES, 1), 0.2), "b": np.zeros((n, 1))}
    params, history = jax.tree.map(jnp.asarray, params), []
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, FEATURES))
        y = np.sin(x[:, :1])
        batch = [part.reshape(n, -1, part.shape[-1]) for part in (x, y)]
        params, losses = update(params, batch, 0.3)
        history += losses[0].tolist()
    return history


if __name__ == "__main__":
    print(main())
