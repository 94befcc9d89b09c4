"""Train a deep equilibrium model on handwritten digits.

One layer is applied until its output no longer changes.

    python examples/deq.py
    jaxmpi run -n 2 examples/deq.py

Its output is the solution of z = f(z, x), found in a while_loop, and differentiated by the implicit
function theorem (Bai et al. 2019, "Deep equilibrium models") with optimistix: neither keeps
jaxmpi.jit from averaging the gradients. It needs `pip install optimistix scikit-learn`.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
from sklearn.datasets import load_digits

import jaxmpi

parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=96, help="over all ranks together")
parser.add_argument("--width", type=int, default=64, help="numbers in z")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

jaxmpi.init(verbose=True)
log = jaxmpi.get_logger("deq")

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
train, test = (images[:1440], labels[:1440]), (images[1440:], labels[1440:])
if not jaxmpi.size() <= args.batch_size <= 1440:
    parser.error(
        f"--batch-size is {args.batch_size}, for {jaxmpi.size()} ranks and 1440 training images"
    )

solver = optx.FixedPointIteration(rtol=1e-4, atol=1e-4)


def layer(z, weights_and_image):
    """Apply a contraction in z: no row of the matrix adds up to more than 0.9.

    A contraction has exactly one fixed point.
    """
    weights, x = weights_and_image
    rows = jnp.sum(jnp.abs(weights["z"]), axis=1, keepdims=True)
    return jnp.tanh(weights["z"] * jnp.minimum(1, 0.9 / rows) @ z + weights["x"] @ x + weights["b"])


def logits(weights, x):
    """Return the [10] logits of an image [64]."""
    solution = optx.fixed_point(layer, solver, jnp.zeros(args.width), (weights, x), max_steps=100)
    return weights["out"] @ solution.value


def losses(weights, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(
        jax.vmap(logits, (None, 0))(weights, x), y
    )


keys = jax.random.split(jax.random.key(args.seed), 3)
draw = lambda key, *shape: jax.random.normal(key, shape) / np.sqrt(shape[-1])
weights = {
    "z": draw(keys[0], args.width, args.width),
    "x": draw(keys[1], args.width, 64),
    "b": jnp.zeros(args.width),
    "out": draw(keys[2], 10, args.width),
}
optimizer = jaxmpi.distributed(optax.adam(args.lr))
state = optimizer.init(weights)


@jaxmpi.jit
def step(weights, state, batch):
    loss, grads = jax.value_and_grad(lambda w: losses(w, batch).mean())(weights)
    updates, state = optimizer.update(grads, state, weights)
    return optax.apply_updates(weights, updates), state, loss


@jaxmpi.jit
def right(weights, batch, mask):
    x, y = batch
    hits = jnp.argmax(jax.vmap(logits, (None, 0))(weights, x), axis=1) == y
    return jaxmpi.tree_allreduce(jnp.sum(hits & mask), op="sum")


for epoch in range(args.epochs):
    for batch in jaxmpi.batches(train, args.batch_size, seed=args.seed, epoch=epoch):
        weights, state, loss = step(weights, state, batch)
    log.info(f"epoch {epoch:2}  train loss {jaxmpi.average_metrics(loss):.6f}")
hits = sum(int(right(weights, *part)) for part in jaxmpi.batches(test, 120, remainder="mask"))
log.info(f"test accuracy {100 * hits / len(test[1]):.2f} %")
