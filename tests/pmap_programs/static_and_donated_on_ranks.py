"""A regression for the devices of several hosts, each of which reads its own rows.

The function has a static argument, a broadcast one, and memory that it takes over.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmpi

jaxmpi.init()

BATCH, STEPS, FEATURES = 24, 6, 4
TX = optax.adam(0.1)


def loss_fn(params, x, y, key, dropout):
    hidden = jnp.tanh(x @ params["in"])
    if dropout:
        hidden = hidden * jax.random.bernoulli(key, 0.5, hidden.shape) * 2
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@partial(
    jaxmpi.pmap,
    axis_name="devices",
    in_axes=(0, 0, 0, None, None),
    static_broadcasted_argnums=4,
    donate_argnums=(0, 1),
)
def update(params, opt_state, batch, key, dropout):
    key = jax.random.fold_in(key, jax.lax.axis_index("devices"))
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch, key, dropout)
    loss, grads = jax.lax.pmean((loss, grads), axis_name="devices")
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def local_batches():
    host, hosts = jaxmpi.rank(), jaxmpi.size()
    rng, per_host = np.random.default_rng(1), BATCH // hosts
    weights = rng.normal(size=FEATURES)
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, FEATURES))[host * per_host : (host + 1) * per_host]
        x = x.astype(np.float32).reshape(jax.local_device_count(), -1, FEATURES)
        yield x, np.sin(x @ weights).astype(np.float32)


def main():
    key = jax.random.key(0)
    params = {"in": 0.3 * jax.random.normal(key, (FEATURES, 8)), "out": jnp.ones(8)}
    n = jax.local_device_count()
    params, opt_state = jax.tree.map(lambda x: jnp.stack([x] * n), (params, TX.init(params)))
    losses = []
    for step, batch in enumerate(local_batches()):
        dropout = step % 2 == 0
        params, opt_state, loss = update(
            params, opt_state, batch, jax.random.fold_in(key, step), dropout
        )
        losses.append(float(loss[0]))
    return losses


if __name__ == "__main__":
    print(main())
