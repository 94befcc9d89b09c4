"""Train a byte-level GPT on the sources of Python's standard library, which every machine has.

    python examples/gpt.py
    jaxmpi run -n 2 examples/gpt.py
    jaxmpi run -n 2 examples/gpt.py --sharded --accumulate 2
    jaxmpi run -n 2 examples/gpt.py --fully-sharded
    jaxmpi run -n 2 examples/gpt.py --local-every 50 --diloco
    jaxmpi run -n 2 examples/gpt.py --local-every 50 --diloco --fragments 3 --delay 5 --int8
    jaxmpi run -n 4 examples/gpt.py --local-every 50 --diloco --islands 2 --sharded

The layers are one `scan` over their stacked parameters, and each is computed again in the backward
pass (`remat`), so that memory does not grow with their number.
"""

import argparse
import sysconfig
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmpi

parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--steps", type=int, default=600, help="batches that are trained on")
parser.add_argument(
    "--batch-size", type=int, default=32, help="windows of text per step, over all ranks together"
)
parser.add_argument("--length", type=int, default=128, help="bytes of a window")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128, help="numbers for a byte, a multiple of 32")
parser.add_argument(
    "--megabytes", type=float, default=8.0, help="of text; the last 2 % are held out"
)
parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
parser.add_argument(
    "--accumulate", type=int, default=1, metavar="N", help="batches for one step of the optimizer"
)
parser.add_argument(
    "--sharded", action="store_true", help="share the optimizer's state out over the ranks (ZeRO-1)"
)
parser.add_argument(
    "--fully-sharded",
    action="store_true",
    help="and the parameters, one layer at a time whole (FSDP)",
)
parser.add_argument(
    "--local-every",
    type=int,
    metavar="N",
    help="let each rank take N steps of its own, then average",
)
parser.add_argument(
    "--islands",
    type=int,
    metavar="N",
    help="with --local-every: N groups of ranks, of which each takes its steps together",
)
parser.add_argument(
    "--diloco",
    action="store_true",
    help="with --local-every: an outer Nesterov step instead of the average",
)
parser.add_argument("--outer-lr", type=float, default=0.7, help="of that step")
parser.add_argument("--outer-momentum", type=float, default=0.9, help="of that step")
parser.add_argument(
    "--fragments",
    type=int,
    default=1,
    metavar="N",
    help="with --local-every: exchange 1/N at a time",
)
parser.add_argument(
    "--delay",
    type=int,
    default=0,
    metavar="N",
    help="with --local-every: go on for N steps meanwhile",
)
parser.add_argument(
    "--int8", action="store_true", help="with --local-every: send 8 bits for each number"
)
parser.add_argument(
    "--sample", type=int, default=300, metavar="N", help="bytes to write at the end"
)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
if args.sharded and args.fully_sharded:
    parser.error("--fully-sharded shares the optimizer's state out, too: leave out --sharded")
if args.local_every is not None and (args.local_every < 1 or args.fully_sharded):
    parser.error("--local-every is 1 or more, and not with --fully-sharded")
if args.islands is not None and args.islands < 1:
    parser.error("--islands is 1 or more")
if (
    args.diloco or args.islands or args.fragments != 1 or args.delay or args.int8
) and args.local_every is None:
    parser.error("--diloco, --islands, --fragments, --delay and --int8 go with --local-every")
if args.local_every and args.sharded and not args.islands:
    parser.error(
        "--local-every lets each rank have a state of its own: --sharded needs --islands, whose "
        "ranks share it out"
    )

jaxmpi.init(verbose=True, axes={"island": args.islands, "member": -1} if args.islands else None)
log = jaxmpi.get_logger("gpt")


def windows():
    """Return training and held-out text as [windows, length + 1] bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            files.append(path)
    order = np.random.default_rng(0).permutation(len(files))  # the held-out files are of all kinds
    text, limit = bytearray(), int(args.megabytes * 1e6)
    for i in order:
        text += files[i].read_bytes()
        if len(text) >= limit:
            break
    rows = np.frombuffer(bytes(text[:limit]), np.uint8)
    rows = rows[: len(rows) // (args.length + 1) * (args.length + 1)].reshape(-1, args.length + 1)
    held_out = max(1, len(rows) // 50)
    return rows[:-held_out], rows[-held_out:]


class Block(nn.Module):
    """Transformer block on [batch, length, width]; its second output is for `scan`."""

    @nn.compact
    def __call__(self, x, mask):
        h = nn.MultiHeadDotProductAttention(args.width // 32, use_bias=False)(
            nn.LayerNorm()(x), mask=mask
        )
        x = x + h
        h = nn.Dense(args.width)(nn.gelu(nn.Dense(4 * args.width)(nn.LayerNorm()(x))))
        return x + h, None


class GPT(nn.Module):
    """GPT from [batch, length] bytes to [batch, length, 256] logits of the next byte.

    The parameters of the blocks may be shards.
    """

    shards: bool = False

    @nn.compact
    def __call__(self, text):
        length = text.shape[1]
        embed = nn.Embed(256, args.width, embedding_init=nn.initializers.normal(0.02))
        shape = (args.length, args.width)
        position = self.param("position", nn.initializers.normal(0.02), shape)
        x = embed(text) + position[:length]
        block = nn.map_variables(Block, "params", jaxmpi.unshard) if self.shards else Block
        blocks = nn.scan(
            nn.remat(block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=args.layers,
        )
        x, _ = blocks(name="blocks")(x, nn.make_causal_mask(text))
        return embed.attend(nn.LayerNorm()(x))


train, test = windows()
if len(train) < args.batch_size:
    parser.error(
        f"--batch-size is {args.batch_size}, and the text has {len(train)} windows to train on"
    )
params = GPT().init(jax.random.key(args.seed), train[:1, :-1])["params"]
params = jaxmpi.synchronize(params)  # rank 0's, on every rank
count = sum(x.size for x in jax.tree.leaves(params))
if args.fully_sharded:
    params = jaxmpi.fully_shard(params, stacked={name: name == "blocks" for name in params})

updates_of_optimizer = max(1, args.steps // args.accumulate)
schedule = optax.warmup_cosine_decay_schedule(
    0.0, args.lr, min(100, updates_of_optimizer // 5), updates_of_optimizer
)
adamw = optax.chain(jaxmpi.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
if args.local_every:
    inner, outer = adamw, None
    if args.islands:
        within = jaxmpi.sharded if args.sharded else jaxmpi.distributed
        inner = within(adamw, axis="member")
    if args.diloco:
        outer = optax.sgd(args.outer_lr, momentum=args.outer_momentum, nesterov=True)
    optimizer = jaxmpi.local_sgd(
        inner,
        args.local_every,
        outer,
        codec=jaxmpi.codecs.int8() if args.int8 else None,
        axis="island" if args.islands else jaxmpi.AXIS,
        fragments=args.fragments,
        delay=args.delay,
    )
elif args.fully_sharded:
    optimizer = adamw
else:
    optimizer = (jaxmpi.sharded if args.sharded else jaxmpi.distributed)(adamw)
optimizer = jaxmpi.accumulate(optimizer, args.accumulate)
state = optimizer.init(params)
# With --local-every the ranks' parameters differ between their meetings. What is equal on all ranks
# only because it is along each of two axes cannot be declared yet.
equal = () if args.islands else (1,) if args.local_every else (0, 1)


def losses(params, text):
    """Return the nats per byte of each window."""
    outside = jaxmpi.unshard({name: x for name, x in params.items() if name != "blocks"})
    logits = GPT(args.fully_sharded).apply(
        {"params": {**outside, "blocks": params["blocks"]}}, text[:, :-1]
    )
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean(axis=1)


@partial(jaxmpi.jit, donate_argnums=(0, 1), replicated_argnums=equal, replicated_outnums=equal)
def step(params, state, text):
    loss, grads = jax.value_and_grad(lambda params: losses(params, text).mean())(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss  # the loss of this rank's windows


@jaxmpi.jit
def add_losses(params, text, mask, total):
    return total + jnp.sum(jnp.where(mask, losses(params, text), 0))


def held_out(params):
    """Return the nats per byte over all held-out windows, each on one of the ranks."""
    total = np.float32(0)
    for text, mask in jaxmpi.batches(test, 4 * args.batch_size, remainder="mask"):
        total = add_losses(params, text, mask, total)
    return float(jaxmpi.tree_allreduce(total, op="sum")) / len(test)


def whole(params):
    return jaxmpi.tree_allreduce(params) if args.local_every else params


def endless():
    epoch = 0
    while True:
        yield from jaxmpi.batches(train, args.batch_size, seed=args.seed, epoch=epoch)
        epoch += 1


log.info(f"{count / 1e6:.2f}M parameters, {train.size / 1e6:.1f} MB of text")
every = max(1, args.steps // 6)
recent, meter = [], jaxmpi.Throughput()
for number, text in zip(range(1, args.steps + 1), endless(), strict=False):
    params, state, loss = step(params, state, text)
    recent.append(loss)
    meter.add(len(text) * args.length)
    if number % every == 0 or number == args.steps:
        mean = jaxmpi.average_metrics(np.mean(jax.device_get(recent)))
        rate = meter.read()
        log.info(
            f"step {number:5}  train {mean:.4f}  held out {held_out(whole(params)):.4f} nats/byte  "
            f"bytes: {rate}"
        )
        recent, meter = [], jaxmpi.Throughput()

params = jaxmpi.local(jaxmpi.unshard(whole(params)))
if jaxmpi.rank() == 0 and args.sample:  # not a collective: the other ranks are done
    out, key = bytearray(b"def main(arguments):"), jax.random.key(args.seed)
    text = np.frombuffer(bytes(out).rjust(args.length, b"\n")[-args.length :], np.uint8)[None]
    predict = jax.jit(GPT().apply)
    for i in range(args.sample):
        logits = predict({"params": params}, text)[0, -1] / 0.7
        byte = int(jax.random.categorical(jax.random.fold_in(key, i), logits))
        text = np.concatenate([text[:, 1:], np.full((1, 1), byte, np.uint8)], axis=1)
        out.append(byte)
    print(out.decode(errors="replace"))
