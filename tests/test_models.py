"""Law 1 for whole models: n ranks with batch b train as one with batch n·b, on every backend."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmpi
from jaxmpi.testing import run_ranks

STEPS, BATCH = 4, 24  # 24 = 1·24 = 2·12 = 3·8 = 4·6 = 8·3
F64 = {"dtype": jnp.float64, "param_dtype": jnp.float64}


class Data:
    """`BATCH` images of 8×8×2 and sequences of 5 words, with targets."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.images = rng.normal(size=(STEPS, BATCH, 8, 8, 2))
        self.words = rng.normal(size=(STEPS, BATCH, 5, 8))
        self.targets = rng.normal(size=(STEPS, BATCH, 3))


class LinenCNN(nn.Module):
    axis: str | None

    @nn.compact
    def __call__(self, x):
        def norm(x):
            return nn.gelu(
                nn.BatchNorm(use_running_average=False, axis_name=self.axis, momentum=0.9, **F64)(x)
            )

        x = norm(nn.Conv(4, (3, 3), **F64)(x)).mean((1, 2))
        return nn.Dense(3, **F64)(norm(nn.Dense(6, **F64)(x)))


def linen_cnn(axis):
    model = LinenCNN(axis)
    variables = LinenCNN(None).init(jax.random.key(0), jnp.zeros((1, 8, 8, 2)))

    def forward(params, stats, x):
        out, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return out, new["batch_stats"]

    return variables["params"], variables["batch_stats"], forward


class NnxCNN(nnx.Module):
    def __init__(self, axis, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs, **F64)
        self.norm1 = nnx.BatchNorm(4, axis_name=axis, momentum=0.9, rngs=rngs, **F64)
        self.hidden = nnx.Linear(4, 6, rngs=rngs, **F64)
        self.norm2 = nnx.BatchNorm(6, axis_name=axis, momentum=0.9, rngs=rngs, **F64)
        self.dense = nnx.Linear(6, 3, rngs=rngs, **F64)

    def __call__(self, x):
        x = nnx.gelu(self.norm1(self.conv(x))).mean((1, 2))
        return self.dense(nnx.gelu(self.norm2(self.hidden(x))))


def nnx_cnn(axis):
    graph, params, stats = nnx.split(NnxCNN(axis, nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    stats = jax.tree.map(lambda x: x.astype(jnp.float64), stats)  # Flax makes them float32

    def forward(params, stats, x):
        model = nnx.merge(graph, params, stats, copy=True)
        out = model(x)
        return out, nnx.state(model, nnx.BatchStat)

    return params, stats, forward


def transformer(axis):
    """Run three blocks of attention in a `lax.scan`, each under `jax.checkpoint`.

    Activations are normalized over the ranks, if there are any.
    """
    rng = np.random.default_rng(1)
    shapes = {"qkv": (3, 8, 24), "out": (3, 8, 8), "up": (3, 8, 16), "down": (3, 16, 8)}
    params = {name: rng.normal(size=shape) / 3 for name, shape in shapes.items()} | {
        "head": rng.normal(size=(8, 3))
    }

    def normalize(x):
        mean, square = x.mean((0, 1)), (x**2).mean((0, 1))
        if axis is not None:
            mean, square = lax.pmean((mean, square), axis)
        return (x - mean) / jnp.sqrt(square - mean**2 + 1e-3)

    @jax.checkpoint
    def block(x, w):
        q, k, v = jnp.split(normalize(x) @ w["qkv"], 3, axis=-1)
        x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v @ w["out"]
        return x + jax.nn.gelu(normalize(x) @ w["up"]) @ w["down"], None

    def forward(params, stats, x):
        layers = {name: w for name, w in params.items() if name != "head"}
        return lax.scan(block, x, layers)[0].mean(1) @ params["head"], stats

    return jax.tree.map(jnp.asarray, params), (), forward


MODELS = {"linen CNN": linen_cnn, "nnx CNN": nnx_cnn, "transformer": transformer}


def make_step(forward, optimizer, average):
    def step(params, stats, state, x, y):
        def loss_of(params):
            out, new = forward(params, stats, x)
            return jnp.mean((out - y) ** 2), new

        (loss, stats_out), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), stats_out, state, average(loss)

    return step


def train(step, state, batches):
    losses = []
    for batch in batches:
        *state, loss = step(*state, *batch)
        losses.append(loss)
    return state, losses


def optimizer_of():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def check(model, wrap, part):
    """Check a model: `wrap` makes one step for all ranks, `part` a rank's part of a batch."""
    with jax.enable_x64(True):
        data = Data()
        inputs = data.words if model == "transformer" else data.images
        params, stats, forward = MODELS[model](None)
        plain = optimizer_of()
        whole = list(zip(inputs, data.targets, strict=True))
        want = train(
            jax.jit(make_step(forward, plain, lambda x: x)),
            (params, stats, plain.init(params)),
            whole,
        )
        ours = jaxmpi.distributed(optimizer_of())
        forward = MODELS[model](jaxmpi.AXIS)[2]
        step = wrap(make_step(forward, ours, partial(lax.pmean, axis_name=jaxmpi.AXIS)))
        parts = [(part(x), part(y)) for x, y in whole]
        got = train(step, (params, stats, ours.init(params)), parts)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12, atol=1e-12)


def jit(step):
    return jaxmpi.jit(
        step, donate_argnums=(1, 2), replicated_argnums=(0, 1, 2), replicated_outnums=(0, 1, 2, 3)
    )


def own_rows(x):
    return jnp.asarray(np.split(x, jaxmpi.size())[jaxmpi.rank()])


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
@run_ranks(1, 2, 3, 4, timeout_seconds=120)
def test_n_ranks_train_as_one_on_mpi(model):
    check(model, jit, own_rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
@run_ranks(2, backend="xla", timeout_seconds=120)
def test_n_ranks_train_as_one_on_xla(model):
    check(model, jit, own_rows)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("model", MODELS)
def test_simulated_ranks_train_as_one(model, n):
    with jaxmpi.simulate(n):
        check(model, jit, lambda x: jaxmpi.PerRank(np.stack(np.split(x, n))))
