"""Law 1: n ranks with batch b train as one rank with batch n·b."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmpi
from jaxmpi.testing import run_ranks

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.01),
}
SAMPLES = 24  # 1, 2, 3 and 4 ranks divide it


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.tanh(linen.Dense(16, param_dtype=jnp.float64)(x))
        return linen.Dense(3, param_dtype=jnp.float64)(x)


def linen_model():
    net = LinenNet()
    return net.init(jax.random.key(jaxmpi.rank()), jnp.ones((1, 5)))[
        "params"
    ], lambda p, x: net.apply({"params": p}, x)


def nnx_model():
    rngs = nnx.Rngs(jaxmpi.rank())
    linear = lambda n, m: nnx.Linear(n, m, param_dtype=jnp.float64, rngs=rngs)
    graph, params = nnx.split(nnx.Sequential(linear(5, 16), jnp.tanh, linear(16, 3)), nnx.Param)
    return params, lambda p, x: nnx.merge(graph, p)(x)


def train(params, apply, tx, x, y, steps=6):
    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((apply(p, x) - y) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(loss)
    return params, state, jnp.stack(losses)


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("make_model", [linen_model, nnx_model], ids=["linen", "nnx"])
@pytest.mark.parametrize("chained", [False, True], ids=["distributed", "average_gradients"])
def test_ranks_train_as_one(optimizer, make_model, chained):
    with jax.enable_x64(True):
        generator = np.random.default_rng(5)
        x, y = generator.normal(size=(SAMPLES, 5)), generator.normal(size=(SAMPLES, 3))
        params, apply = make_model()
        params = jaxmpi.synchronize(params)
        inner = OPTIMIZERS[optimizer]()
        tx = (
            optax.chain(jaxmpi.average_gradients(), inner) if chained else jaxmpi.distributed(inner)
        )

        mine = jaxmpi.shard((x, y))[:]
        got, state, losses = train(params, apply, tx, *mine)
        # plain optax, the whole batch
        want, want_state, want_losses = train(params, apply, OPTIMIZERS[optimizer](), x, y)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
        np.testing.assert_allclose(jaxmpi.average_metrics(losses), want_losses, rtol=0, atol=1e-12)
        end, start = (np.asarray(jax.tree.leaves(tree)[0]) for tree in (got, params))
        assert np.abs(end - start).max() > 1e-3


@run_ranks(2, 3)
def test_op_sum_sums():
    r, n = jaxmpi.rank(), jaxmpi.size()
    tx = jaxmpi.distributed(optax.sgd(1.0), op="sum")
    updates, _ = tx.update(jnp.array([r + 1.0]), tx.init(jnp.zeros(1)))
    np.testing.assert_allclose(updates, [-n * (n + 1) / 2])


@run_ranks(2, 3)
def test_clipping_before_and_after_the_average():
    r, n = jaxmpi.rank(), jaxmpi.size()
    grads = jnp.array([3.0 * (r + 1), 4.0 * (r + 1)])
    before = optax.chain(optax.clip_by_global_norm(1.0), jaxmpi.average_gradients())
    after = optax.chain(jaxmpi.average_gradients(), optax.clip_by_global_norm(n))
    mean_norm = 5.0 * (n + 1) / 2
    np.testing.assert_allclose(before.update(grads, before.init(grads))[0], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(
        after.update(grads, after.init(grads))[0],
        np.array([0.6, 0.8]) * min(n, mean_norm),
        rtol=1e-6,
    )


@pytest.mark.slow
@run_ranks(1, 2)
def test_extra_arguments_reach_inner():
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    tx = jaxmpi.distributed(optax.GradientTransformationExtraArgs(lambda p: (), update))
    tx.update(jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1), value=jnp.float32(3))
    assert seen["value"] == 3


@run_ranks(1, 2)
def test_state_is_that_of_inner():
    params = {"w": jnp.ones(3), "frozen": None}
    state = jaxmpi.distributed(optax.adam(1.0)).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(optax.adam(1.0).init(params))


@run_ranks(1)
def test_one_rank_has_the_jaxpr_of_plain_optax():
    params = {"w": jnp.arange(3.0), "b": jnp.float32(1)}

    def step(tx):
        def f(params, state):
            grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2) * p["b"])(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return str(jax.make_jaxpr(f)(params, tx.init(params)))

    assert step(jaxmpi.distributed(optax.adam(0.1))) == step(optax.adam(0.1))


@run_ranks(2)
def test_more_ranks_have_one_collective_in_the_jaxpr():
    tx = jaxmpi.distributed(optax.adam(0.1))
    params = {"w": jnp.arange(3.0), "b": jnp.float32(1)}
    jaxpr = str(jax.make_jaxpr(lambda g, s: tx.update(g, s))(params, tx.init(params)))
    assert jaxpr.count("jaxmpi_collective") == 1
