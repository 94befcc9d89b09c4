"""Classify handwritten digits as examples/digits.py does, with flax.linen instead of nnx.

The model and its calls differ. The options for the optimizer, --dtype and --explain are left out;
the rest is the same, line by line.

    python examples/digits_linen.py
    jaxmpi run -n 2 examples/digits_linen.py

Batches, augmentation and evaluation do not know the number of ranks, so neither does the loss
curve.
"""

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxmpi

parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--epochs", type=int, default=30, help="passes over the 1437 training images")
parser.add_argument(
    "--batch-size",
    type=int,
    default=48,
    help="images per step, over all ranks together, at most 1437",
)
parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
parser.add_argument(
    "--warmup",
    type=float,
    default=0.1,
    help="share of all steps in which the learning rate rises, less than 1",
)
parser.add_argument(
    "--seed",
    type=int,
    default=0,
    help="of parameters, order and augmentation; the test images stay the same",
)
parser.add_argument(
    "--augment",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="shift images by up to 1 pixel",
)
args = parser.parse_args()
if not 0 <= args.warmup < 1 or args.epochs < 1:
    parser.error("--warmup is from 0 to less than 1, and --epochs is 1 or more")

jaxmpi.init(verbose=True)
log = jaxmpi.get_logger("digits-linen")

# The data: small enough that every rank holds all of it. `number` is the sample's own, whichever
# rank it is on.
pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
images = (pixels[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
data = {"image": images, "label": labels[order].astype(np.int32), "number": np.arange(len(order))}
train, test = jax.tree.map(lambda x: x[:1437], data), jax.tree.map(lambda x: x[1437:], data)


class CNN(nn.Module):
    """CNN from [batch, 8, 8, 1] images to [batch, 10] logits.

    It is smooth throughout: the kinks of ReLU and max-pooling would amplify round-off.
    """

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Conv(32, (3, 3))(x))
        x = nn.avg_pool(nn.gelu(nn.Conv(64, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.gelu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


steps = len(jaxmpi.batches(train, args.batch_size))
if not steps:
    parser.error(
        f"--batch-size is {args.batch_size}, and there are {len(train['label'])} training images"
    )
updates = args.epochs * steps  # steps of the optimizer
schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, int(args.warmup * updates), updates)
# AdamW on the mean of all ranks' gradients
optimizer = jaxmpi.distributed(optax.adamw(schedule))

model = CNN()
params = model.init(jax.random.key(args.seed), images[:1])
params, state = jaxmpi.synchronize((params, optimizer.init(params)))  # rank 0's, on every rank


def shift(image, key):
    """Move an image by -1, 0 or 1 pixel in each direction."""
    row, column = jax.random.randint(key, (2,), 0, 3)
    return jax.lax.dynamic_slice(
        jnp.pad(image, ((1, 1), (1, 1), (0, 0))), (row, column, 0), image.shape
    )


@partial(jaxmpi.jit, donate_argnums=(0, 1), replicated_argnums=(0, 1, 3), replicated_outnums=(0, 1))
def step(params, state, batch, key):
    x = batch["image"]
    if args.augment:
        # a key for each image: keys for each rank would make images depend on the number of ranks
        shifted = lambda image, number: shift(image, jax.random.fold_in(key, number))
        x = jax.vmap(shifted)(x, batch["number"])

    def loss_of(params):
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss  # the loss of this rank's images


@jaxmpi.jit
def count(params, batch, mask, counts):
    """Add a batch to the counts of recognized images and of all images."""
    right = model.apply(params, batch["image"]).argmax(-1) == batch["label"]
    return counts + jnp.stack([jnp.sum(mask & right), jnp.sum(mask)])


def evaluate(params):
    """Count the correctly classified test images, and all of them; each is on one rank."""
    counts = np.zeros(2, np.int32)
    # 360 = 2·128 + 104: a mask covers what is missing
    for batch, mask in jaxmpi.batches(test, 128, remainder="mask"):
        counts = count(params, batch, mask, counts)
    return jaxmpi.tree_allreduce(counts, op="sum")


rates = []  # images/s over all ranks, for each epoch
for epoch in range(args.epochs):
    key = jax.random.fold_in(jax.random.key(args.seed), epoch)
    losses = []
    meter = jaxmpi.Throughput()
    batches = jaxmpi.batches(train, args.batch_size, seed=args.seed, epoch=epoch)
    for batch in jaxmpi.progress(batches, desc=f"epoch {epoch + 1}", leave=False):
        params, state, loss = step(params, state, batch, key)
        losses.append(loss)
        meter.add(len(batch["label"]))
    losses = jax.device_get(losses)  # waits for the last step
    rates.append(meter.read().per_second)
    loss = jaxmpi.average_metrics(np.mean(losses))
    correct, total = evaluate(params)
    rate = schedule((epoch + 1) * steps - 1)
    log.info(
        f"epoch {epoch + 1:2}/{args.epochs}  lr {rate:.2e}  train loss {loss:.6e}  "
        f"test accuracy {correct / total:.2%}  {rates[-1]:.0f} images/s"
    )

if jaxmpi.rank() == 0:
    rate = np.median(rates[1:] or rates)  # the first epoch compiles
    ranks = f"{jaxmpi.size()} rank{'s' * (jaxmpi.size() > 1)}"
    print(
        f"test accuracy {100 * correct / total:.2f} % ({correct} of {total}), "
        f"{rate:.0f} images/s on {ranks}"
    )
