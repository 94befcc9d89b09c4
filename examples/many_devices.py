"""Train a small network on handwritten digits; many_devices.py differs in six lines."""

import jax
import numpy as np
import optax
from flax import nnx
import jaxmpi
from sklearn.datasets import load_digits

jaxmpi.init()
digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target


def batches(data, size, seed, epoch):
    order = np.random.default_rng((seed, epoch)).permutation(len(labels))
    for start in range(0, len(order) - size + 1, size):
        yield tuple(x[order[start : start + size]] for x in data)


rngs = nnx.Rngs(0)
network = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
graph, params = nnx.split(network)
optimizer = jaxmpi.distributed(optax.adam(1e-3))
state = optimizer.init(params)


@jaxmpi.jit
def step(params, state, batch):
    def loss_of(params):
        x, y = batch
        logits = nnx.merge(graph, params)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


for epoch in range(5):
    for batch in jaxmpi.batches((images, labels), 96, seed=0, epoch=epoch):
        params, state, loss = step(params, state, batch)
    jaxmpi.get_logger("train").info("loss %.4f", jaxmpi.average_metrics(loss))
