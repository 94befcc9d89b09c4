"""`fully_shard` and `unshard`: numbers of `distributed`, 1/size of the parameters on a rank.

One layer at a time is whole.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optim_cases import OPTIMIZERS, SHARDED_VARIANTS, check

import jaxmpi
from jaxmpi.testing import run_ranks

ELEMENTWISE = [name for name in OPTIMIZERS if name != "lamb"]
TABLE = pytest.mark.parametrize("variant", SHARDED_VARIANTS)


@TABLE
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_simulated_ranks_train_as_one(variant, optimizer):
    with jaxmpi.simulate(3):
        check(f"fully {variant}", optimizer)


@run_ranks(2, 3)
@pytest.mark.parametrize("variant", ["plain", "accumulate"])
def test_ranks_train_as_one(variant):
    check(f"fully {variant}", "adamw")


@pytest.mark.exhaustive
@run_ranks(1, 2, 3, 4)
@TABLE
def test_ranks_train_as_one_with_every_optimizer(variant):
    for optimizer in ELEMENTWISE:
        check(f"fully {variant}", optimizer)


@pytest.mark.exhaustive
@run_ranks(3)
@TABLE
def test_ranks_train_as_one_under_plain_jit(variant):
    check(f"fully {variant}", "adamw", jit=jax.jit)


@pytest.mark.exhaustive
@run_ranks(2, 3, backend="xla")
@TABLE
def test_ranks_of_xla_train_as_one(variant):
    check(f"fully {variant}", "adamw")


def tree(dtype=jnp.float32):
    rng = np.random.default_rng(1)
    shapes = {"w": (13, 7), "b": (7,), "scale": (), "one": (1,), "none": (0, 3)}
    floats = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    return {
        **floats,
        "half": floats["w"].astype(jnp.bfloat16),
        "count": jnp.arange(3),
        "key": jax.random.key(0),
        "no": None,
    }


@run_ranks(1, 2, 3, 4)
def test_what_is_cut_and_made_whole_again_is_the_same():
    for stacked in (
        False,
        {
            "w": True,
            **dict.fromkeys(["b", "scale", "one", "none", "half", "count", "key", "no"], False),
        },
    ):
        shards = jaxmpi.fully_shard(tree(), stacked=stacked)
        for whole in (jaxmpi.unshard(shards), jaxmpi.jit(jaxmpi.unshard)(shards)):
            assert jax.tree.structure(whole) == jax.tree.structure(tree())
            for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(tree()), strict=True):
                assert x.dtype == y.dtype
                if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
                    x, y = jax.random.key_data(x), jax.random.key_data(y)
                np.testing.assert_array_equal(jaxmpi.local(x), y)
        assert shards["w"].shape == (13, 7)
    p = jaxmpi.size()
    assert shards["w"].shard.shape == ((13, -(-7 // p)) if p > 1 else (13, 7))


def layers(count=4, width=6):
    rng = np.random.default_rng(2)
    return {
        "w": jnp.asarray(rng.normal(size=(count, width, width)) / 3),
        "b": jnp.zeros((count, width)),
        "s": jnp.ones(count),
    }


def block(x, p):
    return jnp.tanh(x @ p["w"] * p["s"] + p["b"])


def scanned(stack, x, whole):
    layer = jax.checkpoint(lambda x, p: (block(x, whole(p)), None))
    return jnp.mean(jax.lax.scan(layer, x, stack)[0] ** 2)


def unrolled(stack, x):
    for i in range(len(stack["s"])):
        x = block(x, jax.tree.map(lambda p, i=i: p[i], stack))
    return jnp.mean(x**2)


def x_of(rank, rows=3):
    return jnp.asarray(np.random.default_rng([3, rank]).normal(size=(rows, 6)))


def check_layers():
    """A scan over layers, each gathered by itself, has the gradients of one rank's whole batch."""
    with jax.enable_x64(True):
        p = jaxmpi.size()
        stack = layers()
        shards = jaxmpi.fully_shard(stack, stacked=True)
        step = jaxmpi.jit(
            lambda shards, x: jaxmpi.unshard(jax.grad(scanned)(shards, x, jaxmpi.unshard))
        )
        batch = next(iter(jaxmpi.batches(np.concatenate([x_of(r) for r in range(p)]), 3 * p)))
        got = jaxmpi.local(step(shards, batch))
        want = jax.tree.map(
            lambda *g: sum(g) / p, *(jax.grad(unrolled)(stack, x_of(r)) for r in range(p))
        )
        for name, g in want.items():
            np.testing.assert_allclose(got[name], g, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@run_ranks(1, 2, 3, 4)
def test_layers_of_a_scan():
    check_layers()


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_layers_of_a_scan_on_xla():
    check_layers()


def test_layers_of_a_scan_on_simulated_ranks():
    with jaxmpi.simulate(3):
        check_layers()


@run_ranks(2, 3, 4)
def test_three_times_the_parameters_are_sent():
    p = jaxmpi.size()
    stack = {"w": jnp.ones((5, 4 * p, 3)), "b": jnp.ones((5, p))}
    shards = jaxmpi.fully_shard(stack, stacked=True)

    def loss(shards):
        def layer(x, shard):
            whole = jaxmpi.unshard(shard)
            return jnp.tanh(x * whole["w"].sum() + whole["b"].mean()), None

        return jax.lax.scan(jax.checkpoint(layer), 1.0 + jaxmpi.rank(), shards)[0]

    plan = jaxmpi.explain(jaxmpi.jit(jax.grad(loss)), shards)
    assert [(e.call.kind, e.times) for e in plan.entries] == [
        ("allgather", 5),
        ("allgather", 5),
        ("reduce_scatter", 5),
    ]
    assert plan.sent_bytes == pytest.approx(
        3 * (p - 1) / p * sum(x.nbytes for x in jax.tree.leaves(stack))
    )


@run_ranks(2, 3)
def test_an_optimizer_that_looks_across_elements_is_refused():
    params = {"w": jnp.ones((130, 140)), "b": jnp.ones(140)}
    shards = jaxmpi.fully_shard(params)
    for inner, name in (
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "clip_by_global_norm"),
        (optax.adafactor(0.1), "clip_by_block_rms"),
        (optax.lamb(0.1), "scale_by_trust_ratio"),
        (optax.lars(0.1), "scale_by_trust_ratio"),
        (optax.contrib.muon(0.1), "scale_by_muon"),
        (optax.apply_if_finite(optax.sgd(0.1), 5), "apply_if_finite"),
    ):
        state = inner.init(shards)
        step = jaxmpi.jit(lambda g, s, p, inner=inner: inner.update(g, s, p))
        with pytest.raises(
            ValueError,
            match=rf"is a shard, and depends on {name}.* at test_fully_shard.*elementwise opt",
        ):
            step(shards, state, shards)


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_of_a_scan_are_shards_to_the_check(remat):
    with jaxmpi.simulate(2), jax.enable_x64(True):
        shards = jaxmpi.fully_shard(layers(), stacked=True)
        wrap = jax.checkpoint if remat else lambda f: f
        layer = wrap(lambda x, p: (block(x, jaxmpi.unshard(p)), None))
        loss = lambda shards: jnp.mean(jax.lax.scan(layer, x_of(0), shards)[0] ** 2)
        with pytest.raises(ValueError, match="depends on clip_by_global_norm"):
            jaxmpi.jit(lambda shards: clip_of(jax.grad(loss)(shards), 0.01))(shards)
        ours = jaxmpi.clip_by_global_norm(0.01)
        got = jaxmpi.unshard(
            jaxmpi.jit(lambda shards: ours.update(jax.grad(loss)(shards), None)[0])(shards)
        )
        want = clip_of(jax.grad(lambda stack: unrolled(stack, x_of(0)))(layers()), 0.01)
        for name, g in want.items():
            np.testing.assert_allclose(got[name], g, rtol=1e-12, atol=1e-14)


def clip_of(tree, limit):
    return optax.clip_by_global_norm(limit).update(tree, optax.EmptyState())[0]


@run_ranks(1, 2, 3)
def test_transforms_of_jaxmpi_on_shards():
    """A step that one rank cannot take is skipped by all; accumulation is that of optax."""
    shards = jaxmpi.fully_shard({"w": jnp.arange(7.0), "s": jnp.float32(1)})
    tx = jaxmpi.skip_nonfinite(optax.sgd(1.0))
    step = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))
    bad = jax.tree.map(
        lambda x: x.at[-1].set(jnp.nan) if x.ndim and jaxmpi.rank() == 0 else x, shards
    )
    updates, state = step(bad, tx.init(shards), shards)
    assert int(state.skipped) == 1
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(updates))
    assert int(step(shards, state, shards)[1].skipped) == 1
    kept = jaxmpi.synchronize(shards)
    for x, y in zip(jax.tree.leaves(kept), jax.tree.leaves(shards), strict=True):
        np.testing.assert_array_equal(x, y)


@run_ranks(1, 2, 3)
def test_shards_where_whole_arrays_are_wanted_are_refused():
    shards = jaxmpi.fully_shard({"w": jnp.arange(7.0)})
    for call in (
        lambda: jaxmpi.distributed(optax.sgd(0.1)).init(shards),
        lambda: jaxmpi.sharded(optax.sgd(0.1)).init(shards),
        lambda: jaxmpi.tree_allreduce(shards),
        lambda: jaxmpi.jit(jaxmpi.tree_allreduce)(shards),
    ):
        with pytest.raises(
            ValueError, match=r"leaf \['w'\] is a ShardedArray.*jaxmpi.unshard, are means"
        ):
            call()
    with pytest.raises(ValueError, match=r"fully_shard: leaf \['w'\] is a ShardedArray already"):
        jaxmpi.fully_shard(shards)
    with pytest.raises(TypeError, match=r"fully_shard: leaf \['f'\] is a function"):
        jaxmpi.fully_shard({"f": lambda: 0})
    with pytest.raises(ValueError, match=r"fully_shard: leaf \['s'\] is a scalar, no stack"):
        jaxmpi.fully_shard({"s": 1.0}, stacked=True)


@run_ranks(1, 2, 3)
def test_shards_of_other_ranks_are_refused():
    other = jaxmpi.ShardedArray(jnp.ones(3), of=(12,), ranks=5)
    for call in (
        jaxmpi.unshard,
        jaxmpi.jit(jaxmpi.unshard),
        lambda tree: jaxmpi.clip_by_global_norm(1.0).update(tree, None),
    ):
        with pytest.raises(
            ValueError,
            match=r"leaf \['w'\] is one of 5 shards, and there are .* ranks.*jaxmpi.restore",
        ):
            call({"w": other})


@run_ranks(1, 2)
def test_a_wrong_weight_of_a_derivative_is_named():
    shards = jaxmpi.fully_shard(jnp.arange(5.0))
    with pytest.raises(ValueError, match=r"unshard: weight is -1\. Pass the number"):
        jax.grad(lambda s: jnp.sum(jaxmpi.unshard(s, weight=-1)))(shards)


def test_outside_of_a_step():
    """Simulated ranks and those of xla exist only inside jaxmpi.jit; unshard alone is a step."""
    with jaxmpi.simulate(2):
        shards = jaxmpi.fully_shard({"w": jnp.arange(5.0)})
        np.testing.assert_array_equal(jaxmpi.unshard(shards)["w"], np.arange(5.0))
        with pytest.raises(RuntimeError, match=r"inside of jaxmpi.jit"):
            jax.jit(jaxmpi.unshard)(
                jax.tree.map(
                    lambda x: x[0], shards, is_leaf=lambda x: isinstance(x, jaxmpi.PerRank)
                )
            )


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_outside_of_a_step_on_xla():
    shards = jaxmpi.fully_shard({"w": jnp.arange(5.0)})
    np.testing.assert_array_equal(jaxmpi.unshard(shards)["w"], np.arange(5.0))
    with pytest.raises(RuntimeError, match=r"Use jaxmpi.jit instead of jax.jit"):
        jax.jit(jaxmpi.unshard)(shards)


# models


def check_gradient(whole, cut, loss, loss_of_shards):
    """The gradient of shards is the mean of all ranks', and a step of optax keeps the structure."""
    x = jnp.asarray(np.random.default_rng(jaxmpi.rank()).normal(size=(4, 6)), jnp.float32)
    shards, adam = cut(whole), optax.adam(0.1)

    @jaxmpi.jit
    def step(shards, state, x):
        grads = jax.grad(loss_of_shards)(shards, x)
        updates, state = adam.update(grads, state, shards)
        return jaxmpi.unshard(grads), optax.apply_updates(shards, updates)

    got, after = step(shards, adam.init(shards), x)
    want = jaxmpi.tree_allreduce(jax.grad(loss)(whole, x))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert jax.tree.structure(after) == jax.tree.structure(shards)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(6)(nn.gelu(nn.Dense(12)(nn.LayerNorm()(x)))), None


class Stack(nn.Module):
    """Three blocks in a scan; `sharded` ones are made whole one at a time."""

    sharded: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.map_variables(Block, "params", jaxmpi.unshard) if self.sharded else Block
        kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        blocks = nn.scan(nn.remat(block, prevent_cse=False), length=3, **kinds)
        return blocks(name="blocks")(nn.Dense(6)(x), None)[0]


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_linen():
    params = Stack().init(jax.random.key(0), jnp.ones((1, 6)))["params"]
    stacked = {name: name == "blocks" for name in params}

    def loss_of_shards(shards, x):
        outer = jaxmpi.unshard({name: p for name, p in shards.items() if name != "blocks"})
        return jnp.mean(
            Stack(sharded=True).apply({"params": {**outer, "blocks": shards["blocks"]}}, x) ** 2
        )

    loss = lambda params, x: jnp.mean(Stack().apply({"params": params}, x) ** 2)
    check_gradient(
        params, lambda params: jaxmpi.fully_shard(params, stacked=stacked), loss, loss_of_shards
    )


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_train_state_of_flax():
    params = Stack().init(jax.random.key(0), jnp.ones((1, 6)))
    loss = lambda params, x: jnp.mean(Stack().apply(params, x) ** 2)
    x = jnp.asarray(np.random.default_rng(jaxmpi.rank()).normal(size=(4, 6)), jnp.float32)
    ends = []
    for start, tx, whole in (
        (params, jaxmpi.distributed(optax.adam(0.1)), lambda tree: tree),
        (jaxmpi.fully_shard(params), optax.adam(0.1), jaxmpi.unshard),
    ):
        state = TrainState.create(apply_fn=None, params=start, tx=tx)
        gradient = jax.grad(lambda params, x, whole=whole: loss(whole(params), x))
        step = jaxmpi.jit(
            lambda state, x, gradient=gradient: state.apply_gradients(
                grads=gradient(state.params, x)
            )
        )
        for _ in range(3):
            state = step(state, x)
        ends.append(jaxmpi.unshard(state.params))
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_nnx():
    model = nnx.Sequential(nnx.Linear(6, 5, rngs=nnx.Rngs(0)), nnx.Linear(5, 2, rngs=nnx.Rngs(1)))
    graph, params = nnx.split(model)
    loss = lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2)
    check_gradient(
        params, jaxmpi.fully_shard, loss, lambda shards, x: loss(jaxmpi.unshard(shards), x)
    )


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_equinox():
    params, static = eqx.partition(
        eqx.nn.MLP(6, 2, 5, 2, key=jax.random.key(0)), eqx.is_inexact_array
    )
    loss = lambda params, x: jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)
    check_gradient(
        params, jaxmpi.fully_shard, loss, lambda shards, x: loss(jaxmpi.unshard(shards), x)
    )
