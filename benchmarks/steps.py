"""Times a train step of one model in this process, and says so in one line of JSON; benchmarks/gpu.sh compares processes.

    JAXMPI_BACKEND=single python benchmarks/steps.py digits >> results.jsonl
    JAXMPI_BACKEND=xla python benchmarks/steps.py digits >> results.jsonl
    python benchmarks/steps.py compare < results.jsonl

The losses come from a second program, in full float32 and without the choices that XLA makes anew in each process: they can be
compared to 1e-5. At size 1 the backend xla keeps its all-reduces, and XLA fuses around them, so the last bits differ.
"""

import argparse
import json
import os
import platform
import sys
import time
from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmpi

PACKAGES = ("jax", "jaxlib", "flax", "optax")
LOSS_STEPS = 5
LOSS_TOLERANCE = 1e-5  # relative
REPRODUCIBLE = {"xla_gpu_deterministic_ops": True}  # no atomics and no autotuning; the CPU needs neither


class CNN(nnx.Module):
    """[batch, 8, 8, 1] to [batch, 10]: that of examples/digits.py."""

    def __init__(self, *, rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(4 * 4 * 64, 128, rngs=rngs)
        self.dense2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.gelu(self.conv1(x))
        x = nnx.avg_pool(nnx.gelu(self.conv2(x)), (2, 2), (2, 2))
        x = nnx.gelu(self.dense1(x.reshape(len(x), -1)))
        return self.dense2(x)


def conv_norm(features_in, features, size, stride, *, rngs):
    """A convolution and its BatchNorm over the batches of all ranks."""
    return nnx.Sequential(
        nnx.Conv(features_in, features, (size, size), strides=stride, use_bias=False, rngs=rngs),
        nnx.BatchNorm(features, use_running_average=False, axis_name=jaxmpi.AXIS, rngs=rngs),
    )


class Block(nnx.Module):
    """gelu(x + norm(conv(gelu(norm(conv(x)))))); x is projected where its shape changes."""

    def __init__(self, features_in, features, stride, *, rngs):
        self.first = conv_norm(features_in, features, 3, stride, rngs=rngs)
        self.second = conv_norm(features, features, 3, 1, rngs=rngs)
        same = stride == 1 and features_in == features
        self.project = None if same else conv_norm(features_in, features, 1, stride, rngs=rngs)

    def __call__(self, x):
        y = self.second(nnx.gelu(self.first(x)))
        return nnx.gelu(y + (x if self.project is None else self.project(x)))


class ResNet(nnx.Module):
    """[batch, height, width, 3] to [batch, 10]: ResNet-18, at two blocks a stage, with a stem for small images, and smooth.

    The kinks of ReLU would amplify round-off: a loss that agrees to 1e-7 in the third step did to 4e-3 in the fifth.
    """

    def __init__(self, width, blocks_per_stage, *, rngs):
        self.stem = conv_norm(3, width, 3, 2, rngs=rngs)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for stage in range(4):
            blocks.append(Block(widths[stage], widths[stage + 1], 1 if stage == 0 else 2, rngs=rngs))
            blocks += [Block(widths[stage + 1], widths[stage + 1], 1, rngs=rngs) for _ in range(blocks_per_stage - 1)]
        self.blocks = nnx.Sequential(*blocks)
        self.head = nnx.Linear(8 * width, 10, rngs=rngs)

    def __call__(self, x):
        x = self.blocks(nnx.gelu(self.stem(x)))
        return self.head(x.mean((1, 2)))


def train(model, optimizer, batch, steps, **jit_kwargs):
    """Train on one batch; returns the seconds and the loss of each step, the first of which compiles."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    state = jax.tree.map(jnp.copy, (params, rest, optimizer.init(params)))  # the model stays; the steps donate theirs
    optimizer = jaxmpi.distributed(optimizer)

    @partial(jaxmpi.jit, donate_argnums=0, replicated_argnums=0, replicated_outnums=0, **jit_kwargs)
    def step(state, batch):
        params, rest, opt_state = state

        def loss_of(params):
            model = nnx.merge(graph, params, rest, copy=True)  # BatchNorm writes to its own
            loss = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()
            return loss, nnx.split(model, nnx.Param, ...)[2]

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), loss

    seconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    return seconds, losses


def measure(args):
    """Train and return what there is to say of it."""
    world = jaxmpi.init()
    if args.what == "digits":
        model, optimizer, shape = CNN(rngs=nnx.Rngs(0)), optax.adamw(3e-3), (8, 8, 1)
    else:
        model, optimizer = ResNet(args.width, args.blocks, rngs=nnx.Rngs(0)), optax.sgd(0.01, momentum=0.9)
        shape = (args.image_size, args.image_size, 3)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.standard_normal((args.batch_size, *shape), np.float32),
        "label": rng.integers(0, 10, args.batch_size, np.int32),
    }
    batch = jax.tree.map(jnp.asarray, jaxmpi.shard(batch)[:])  # on the device: the step is what is timed

    with jax.default_matmul_precision("highest"):  # no TF32
        _, losses = train(model, optimizer, batch, LOSS_STEPS, compiler_options=REPRODUCIBLE)
    seconds, _ = train(model, optimizer, batch, args.warmup + args.steps)
    return {
        "model": args.what,
        "backend": world.backend,
        "ranks": world.size,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": world.device.device_kind,
        "platform": world.device.platform,
        "versions": {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "batch": args.batch_size,
        "shape": shape,
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "step_ms": [round(1e3 * s, 4) for s in seconds[args.warmup :]],
        "losses": losses,
    }


def compare(results):
    """Print the backends side by side; return whether their losses agree."""
    versions = ", ".join(f"{name} {number}" for name, number in results[0]["versions"].items())
    print(f"{results[0]['machine']}, {results[0]['device']}, 1 rank, {versions}")
    agree = True
    for model in dict.fromkeys(r["model"] for r in results):
        of_model = [r for r in results if r["model"] == model]
        first, ms = of_model[0], {}
        steps = sum(len(r["step_ms"]) for r in of_model if r["backend"] == "single")
        shape = "×".join(map(str, first["shape"]))
        print(f"\n{model}: {first['parameters']} parameters, batch {first['batch']} of {shape}, {steps} steps each")
        for backend in ("single", "xla"):
            ms[backend] = np.concatenate([r["step_ms"] for r in of_model if r["backend"] == backend])
            low, median, high = np.percentile(ms[backend], [25, 50, 75])
            print(f"  {backend:6} median {median:9.3f} ms, quartiles {low:9.3f} to {high:9.3f}")
        print(f"  ratio xla / single: {np.median(ms['xla']) / np.median(ms['single']):.3f}")
        finals = {r["backend"]: r["losses"][-1] for r in of_model}
        difference = max(abs(r["losses"][-1] / first["losses"][-1] - 1) for r in of_model)
        same = difference <= LOSS_TOLERANCE  # False for nan
        agree &= same
        print(
            f"  loss after {len(first['losses'])} steps: single {finals['single']:.7f}, xla {finals['xla']:.7f}, relative "
            f"difference {difference:.1e} (at most {LOSS_TOLERANCE:.0e}): {'agree' if same else 'DIFFER'}"
        )
    return agree


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("what", choices=["digits", "resnet", "compare"], help="the model, or the lines of JSON on stdin")
parser.add_argument("--batch-size", type=int, default=48, help="images per step, over all ranks together")
parser.add_argument("--steps", type=int, default=100, help="timed steps")
parser.add_argument("--warmup", type=int, default=5, help="steps before them; the first one compiles")
parser.add_argument("--image-size", type=int, default=64, help="pixels of a side, for the ResNet")
parser.add_argument("--width", type=int, default=64, help="features of the ResNet's first stage")
parser.add_argument("--blocks", type=int, default=2, help="blocks in each of the ResNet's four stages")
args = parser.parse_args()

if args.what == "compare":
    sys.exit(int(not compare([json.loads(line) for line in sys.stdin])))
result = measure(args)
if jaxmpi.rank() == 0:
    print(json.dumps(result))
