"""Classify 1797 handwritten digits with a small Flax CNN, on one rank or many.

    python examples/digits.py
    jaxmpi run -n 2 examples/digits.py
    JAXMPI_BACKEND=xla jaxmpi run -n 2 examples/digits.py
    jaxmpi run -n 2 examples/digits.py --codec int8

Batches, augmentation and evaluation do not know the number of ranks, so neither does the loss
curve. docs/optimizers.md explains --codec, --sharded, --local-every and --accumulate.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
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
parser.add_argument(
    "--dtype", choices=("float32", "float64"), default="float32", help="of images and parameters"
)
parser.add_argument(
    "--codec",
    choices=("bf16", "f16", "int8", "topk", "powersgd"),
    help="what is sent in the place of gradients",
)
parser.add_argument(
    "--sharded", action="store_true", help="share the optimizer's state out over the ranks"
)
parser.add_argument(
    "--accumulate", type=int, default=1, metavar="N", help="batches for one step of the optimizer"
)
parser.add_argument(
    "--local-every",
    type=int,
    metavar="N",
    help="let each rank take N steps of its own, then average",
)
parser.add_argument(
    "--diloco",
    action="store_true",
    help="with --local-every: an outer Nesterov step instead of the average",
)
parser.add_argument(
    "--outer-lr",
    type=float,
    default=0.3,
    help="of --diloco; the paper's 0.7 is for hundreds of steps of one's own",
)
parser.add_argument("--explain", action="store_true", help="print what a step sends, first")
args = parser.parse_args()
if not 0 <= args.warmup < 1 or args.epochs < 1 or args.accumulate < 1:
    parser.error("--warmup is from 0 to less than 1, and --epochs and --accumulate are 1 or more")
if args.local_every is not None and (args.local_every < 1 or args.sharded):
    parser.error(
        "--local-every is 1 or more, and each rank then has a state of its own: not with --sharded"
    )
if (args.diloco and args.local_every is None) or (args.codec and args.sharded):
    parser.error("--diloco goes with --local-every, and --codec without --sharded")
jax.config.update("jax_enable_x64", args.dtype == "float64")

jaxmpi.init(verbose=True)
log = jaxmpi.get_logger("digits")

# The data: small enough that every rank holds all of it. `number` is the sample's own, whichever
# rank it is on.
pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
images = (pixels[order] / 16).astype(args.dtype).reshape(-1, 8, 8, 1)
data = {"image": images, "label": labels[order].astype(np.int32), "number": np.arange(len(order))}
train, test = jax.tree.map(lambda x: x[:1437], data), jax.tree.map(lambda x: x[1437:], data)


class CNN(nnx.Module):
    """CNN from [batch, 8, 8, 1] images to [batch, 10] logits.

    It is smooth throughout: the kinks of ReLU and max-pooling would amplify round-off.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), param_dtype=args.dtype, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), param_dtype=args.dtype, rngs=rngs)
        self.dense1 = nnx.Linear(4 * 4 * 64, 128, param_dtype=args.dtype, rngs=rngs)
        self.dense2 = nnx.Linear(128, 10, param_dtype=args.dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.gelu(self.conv1(x))
        x = nnx.avg_pool(nnx.gelu(self.conv2(x)), (2, 2), (2, 2))
        x = nnx.gelu(self.dense1(x.reshape(len(x), -1)))
        return self.dense2(x)


steps = len(jaxmpi.batches(train, args.batch_size))
if not steps:
    parser.error(
        f"--batch-size is {args.batch_size}, and there are {len(train['label'])} training images"
    )
updates = max(1, args.epochs * steps // args.accumulate)  # steps of the optimizer
schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, int(args.warmup * updates), updates)
codecs = {"topk": lambda: jaxmpi.codecs.topk(0.05), "powersgd": lambda: jaxmpi.codecs.powersgd(16)}
codec = codecs.get(args.codec, getattr(jaxmpi.codecs, args.codec))() if args.codec else None
if args.local_every:
    outer = optax.sgd(args.outer_lr, momentum=0.9, nesterov=True) if args.diloco else None
    optimizer = jaxmpi.local_sgd(optax.adamw(schedule), args.local_every, outer, codec=codec)
elif args.sharded:
    optimizer = jaxmpi.sharded(optax.adamw(schedule))
else:
    # AdamW on the mean of all ranks' gradients
    optimizer = jaxmpi.distributed(optax.adamw(schedule), codec=codec)
optimizer = jaxmpi.accumulate(optimizer, args.accumulate)
# arguments that are equal on all ranks; with --local-every each rank's parameters differ
equal = (1,) if args.local_every else (0, 1)

graph, params = nnx.split(CNN(rngs=nnx.Rngs(args.seed)), nnx.Param)
params = jaxmpi.synchronize(params)  # rank 0's, on every rank
state = optimizer.init(params)


def shift(image, key):
    """Move an image by -1, 0 or 1 pixel in each direction."""
    row, column = jax.random.randint(key, (2,), 0, 3)
    return jax.lax.dynamic_slice(
        jnp.pad(image, ((1, 1), (1, 1), (0, 0))), (row, column, 0), image.shape
    )


@partial(
    jaxmpi.jit, donate_argnums=(0, 1), replicated_argnums=(*equal, 3), replicated_outnums=equal
)
def step(params, state, batch, key):
    x = batch["image"]
    if args.augment:
        # a key for each image: keys for each rank would make images depend on the number of ranks
        shifted = lambda image, number: shift(image, jax.random.fold_in(key, number))
        x = jax.vmap(shifted)(x, batch["number"])

    def loss_of(params):
        logits = nnx.merge(graph, params)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss  # the loss of this rank's images


@jaxmpi.jit
def count(params, batch, mask, counts):
    """Add a batch to the counts of recognized images and of all images."""
    right = nnx.merge(graph, params)(batch["image"]).argmax(-1) == batch["label"]
    return counts + jnp.stack([jnp.sum(mask & right), jnp.sum(mask)])


def evaluate(params):
    """Count the correctly classified test images, and all of them; each is on one rank."""
    counts = np.zeros(2, np.int32)
    # 360 = 2·128 + 104: a mask covers what is missing
    for batch, mask in jaxmpi.batches(test, 128, remainder="mask"):
        counts = count(params, batch, mask, counts)
    return jaxmpi.tree_allreduce(counts, op="sum")


digits = 15 if args.dtype == "float64" else 6
rates = []  # images/s over all ranks, for each epoch
for epoch in range(args.epochs):
    key = jax.random.fold_in(jax.random.key(args.seed), epoch)
    losses = []
    meter = jaxmpi.Throughput()
    batches = jaxmpi.batches(train, args.batch_size, seed=args.seed, epoch=epoch)
    for batch in jaxmpi.progress(batches, desc=f"epoch {epoch + 1}", leave=False):
        if args.explain and epoch == 0 and not losses:
            jaxmpi.explain(step, params, state, batch, key)
        params, state, loss = step(params, state, batch, key)
        losses.append(loss)
        meter.add(len(batch["label"]))
    losses = jax.device_get(losses)  # waits for the last step
    rates.append(meter.read().per_second)
    loss = jaxmpi.average_metrics(np.mean(losses))
    correct, total = evaluate(jaxmpi.tree_allreduce(params) if args.local_every else params)
    rate = schedule((epoch + 1) * steps // args.accumulate - 1)
    log.info(
        f"epoch {epoch + 1:2}/{args.epochs}  lr {rate:.2e}  train loss {loss:.{digits}e}  "
        f"test accuracy {correct / total:.2%}  {rates[-1]:.0f} images/s"
    )

if jaxmpi.rank() == 0:
    rate = np.median(rates[1:] or rates)  # the first epoch compiles
    ranks = f"{jaxmpi.size()} rank{'s' * (jaxmpi.size() > 1)}"
    print(
        f"test accuracy {100 * correct / total:.2f} % ({correct} of {total}), "
        f"{rate:.0f} images/s on {ranks}"
    )
