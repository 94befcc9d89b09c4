"""`optax.tree.*` on the states of jaxmpi's transforms, and on shards."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi import codecs
from jaxmpi.testing import run_ranks

PARAMS = {
    "a": np.arange(21.0, dtype=np.float32).reshape(7, 3),
    "b": np.ones(5, np.float32),
    "c": np.float32(2),
}


def adam():
    return optax.adam(0.1)


DILOCO = {"outer": optax.sgd(0.7, momentum=0.9)}
MAKE = {
    "distributed": lambda: jaxmpi.distributed(adam()),
    **{
        f"codec {name}": lambda codec=codec: jaxmpi.distributed(adam(), codec=codec)
        for name, codec in (
            ("bf16", codecs.bf16()),
            ("int8", codecs.int8()),
            ("topk", codecs.topk(0.5)),
            ("powersgd", codecs.powersgd(1)),
        )
    },
    "micro_batches": lambda: jaxmpi.distributed(adam(), micro_batches=6),
    "sharded": lambda: jaxmpi.sharded(adam()),
    "sharded masters": lambda: jaxmpi.sharded(adam(), master_dtype=jnp.float32),
    "accumulate": lambda: jaxmpi.accumulate(jaxmpi.distributed(adam()), 2),
    "accumulate sharded": lambda: jaxmpi.accumulate(jaxmpi.sharded(adam()), 2),
    "local_sgd": lambda: jaxmpi.local_sgd(adam(), 2),
    "local_sgd outer": lambda: jaxmpi.local_sgd(adam(), 2, **DILOCO),
    "local_sgd codec": lambda: jaxmpi.local_sgd(adam(), 2, codec=codecs.topk(0.5)),
    "local_sgd streaming": lambda: jaxmpi.local_sgd(adam(), 4, fragments=2, delay=1, **DILOCO),
    "local_sgd streaming codec": lambda: jaxmpi.local_sgd(
        adam(), 4, fragments=3, codec=codecs.int8()
    ),
    "skip_nonfinite": lambda: jaxmpi.skip_nonfinite(jaxmpi.distributed(adam())),
    "skip_nonfinite sharded": lambda: jaxmpi.skip_nonfinite(jaxmpi.sharded(adam())),
    "dynamic_loss_scale": lambda: jaxmpi.dynamic_loss_scale(jaxmpi.distributed(adam())),
    "watch_replicas": lambda: jaxmpi.watch_replicas(jaxmpi.distributed(adam())),
    "chain": lambda: optax.chain(
        jaxmpi.clip_by_global_norm(1.0), jaxmpi.average_gradients(), adam()
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda lr: jaxmpi.sharded(optax.adam(lr))
    )(0.1),
    "masked": lambda: optax.masked(jaxmpi.sharded(adam()), {"a": True, "b": True, "c": True}),
}


def number(tree, name):
    """The number of adam's own that has this name; other parts of a state may have one, too."""
    found = []
    for path, x in optax.tree.get_all_with_path(tree, name):
        if "ScaleByAdamState" in str(path[-1]):
            found.append(x)
    (value,) = found
    return value


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def arrays(tree):
    """The arrays of a state of one rank, which are in `ShardedArray`s of one shard."""
    is_sharded = lambda x: isinstance(x, jaxmpi.ShardedArray)
    return jax.tree.map(lambda x: x.shard if is_sharded(x) else x, tree, is_leaf=is_sharded)


def functions_of_optax(name):
    tx, plain = MAKE[name](), adam()
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    more = lambda x: x + 1
    want = optax.tree.map_params(plain, more, plain.init(params))

    mapped = optax.tree.map_params(tx, more, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    whole = jaxmpi.unshard(mapped)
    same(arrays(number(whole, "mu")), want[0].mu)
    same(arrays(number(whole, "nu")), want[0].nu)
    assert number(whole, "count") == 0  # which is none of the parameters'
    names = optax.tree.map_params(
        tx, lambda _: "like a parameter", state, transform_non_params=lambda _: "no such"
    )
    assert number(names, "count") == "no such"
    assert set(jax.tree.leaves(number(names, "mu"))) == {"like a parameter"}

    # below a count of its own, optax.tree.set looks into tuples and dicts only
    if name == "inject_hyperparams":
        changed = optax.tree.set(state, lr=jnp.float32(0.5))
        assert optax.tree.get(changed, "lr") == 0.5
    else:
        changed = optax.tree.set(
            state, lambda path, _: "ScaleByAdamState" in str(path[-1]), count=jnp.int32(4)
        )
        assert number(changed, "count") == 4
    assert jax.tree.structure(changed) == jax.tree.structure(state)
    for function in (
        optax.tree.zeros_like,
        partial(optax.tree.scale, 2),
        partial(optax.tree.cast, dtype=jnp.float32),
    ):
        assert jax.tree.structure(function(state)) == jax.tree.structure(state)
    return tx, params, state


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("ranks", [1, 3])
def test_functions_of_optax_on_simulated_ranks(name, ranks):
    with jaxmpi.simulate(ranks):
        functions_of_optax(name)


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_functions_of_optax():
    for name in MAKE:
        tx, params, state = functions_of_optax(name)
        assert jax.tree.structure(jax.eval_shape(tx.init, params)) == jax.tree.structure(state), (
            name
        )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MAKE
        if "sharded" not in name and name not in ("inject_hyperparams", "masked")
    ],
)
def test_map_params_with_other_trees(name):
    """Other trees work where there are no shards, as on one rank."""
    labels = {"a": 1.0, "b": 2.0, "c": 3.0}
    for ranks in (1, 3):
        with jaxmpi.simulate(ranks):
            tx = MAKE[name]()
            state = tx.init(jax.tree.map(jnp.asarray, PARAMS))
            assert (
                number(optax.tree.map_params(tx, lambda _, label: label, state, labels), "mu")
                == labels
            )


# shards are no whole arrays


@run_ranks(1, 2, 3)
def test_shards_are_not_taken_for_whole_arrays():
    params, n = jax.tree.map(jnp.asarray, PARAMS), jaxmpi.size()
    tx = jaxmpi.sharded(optax.chain(optax.ema(0.5), adam()), master_dtype=jnp.float32)
    state = tx.init(params)
    whole = jaxmpi.unshard(state)
    same(whole.master, params)
    assert {k: x.shape for k, x in optax.tree.get(whole, "ema").items()} == {
        k: x.shape for k, x in params.items()
    }
    if n == 1:
        same(state.inner, whole.inner)
        return
    ema = optax.tree.get(state, "ema")
    assert jax.tree.structure(state.inner[0].ema) == jax.tree.structure(ema)
    message = r"one rank's shard of an array \[5\], .*jaxmpi.unshard\(state\).inner"
    for mix in (
        lambda x: params["b"] - x,
        lambda x: x - params["b"],
        lambda x: jnp.float32(0.5) * x,
        lambda x: np.ones(5) + x,
        lambda x: np.float64(3) * x,
        lambda x: x / 2,
        lambda x: jnp.add(params["b"], x),
        lambda x: np.asarray(x),
        lambda x: x[0],
        lambda x: -x,
        lambda x: x > 0,
    ):
        with pytest.raises(TypeError, match=message):
            mix(ema["b"])
    with pytest.raises(TypeError, match="one rank's shard"):
        jax.tree.map(lambda p, x: p - x, params, ema)
    with pytest.raises(ValueError, match="ShardedArray"):
        jax.tree.map(lambda x, p: p - x, ema, params)
    with pytest.raises(ValueError, match="ShardedArray"):
        optax.tree.map_params(tx, lambda x, p: p - x, state, params)


def loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_schedule_free_evaluation():
    """Whole state evaluates as plain optax does with all rows; shards raise an error."""
    n, r = jaxmpi.size(), jaxmpi.rank()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 8)).astype(np.float32), rng.normal(size=(12, 2)).astype(np.float32)
    start = {"w": jnp.asarray(rng.normal(size=(8, 2)), jnp.float32), "b": jnp.zeros(2)}

    def trained(tx, jit, x, y):
        @jit
        def step(params, state, x, y):
            updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
            return optax.apply_updates(params, updates), state

        params, state = start, tx.init(start)
        for _ in range(4):
            params, state = step(params, state, x, y)
        return params, state

    inner = optax.contrib.schedule_free_adamw(1e-2)
    params, state = trained(inner, jax.jit, x, y)
    want = optax.contrib.schedule_free_eval_params(state, params)
    mine = slice(r * 12 // n, (r + 1) * 12 // n)
    params, state = trained(jaxmpi.sharded(inner), jaxmpi.jit, x[mine], y[mine])
    got = optax.contrib.schedule_free_eval_params(jaxmpi.unshard(state).inner, params)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6)
    if n > 1:
        with pytest.raises(TypeError, match="unshard"):
            optax.contrib.schedule_free_eval_params(state.inner, params)
