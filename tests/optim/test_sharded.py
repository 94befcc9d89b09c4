"""`sharded`: numbers of `distributed`, 1/size of the state, and only transforms it is right for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi.testing import run_ranks

SHAPES = {"w": (13, 7), "b": (7,), "scale": (), "one": (1,), "none": (0, 3)}


def params(dtype=jnp.float32):
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def grads(rank, step):
    rng = np.random.default_rng([rank, step])
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


def train(tx, start, steps, state=None, first=0, ranks=None):
    state = tx.init(start) if state is None else state
    step = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))
    ps = start
    for i in range(first, first + steps):
        if ranks is None:
            mine = grads(jaxmpi.rank(), i)
        else:
            mine = jax.tree.map(lambda *x: sum(x) / ranks, *(grads(r, i) for r in range(ranks)))
        updates, state = step(mine, state, ps)
        ps = optax.apply_updates(ps, updates)
    return ps, state


@pytest.mark.slow
@run_ranks(1, 2, 3, 4)
def test_it_is_distributed():
    for inner in (
        optax.adam(0.1),
        optax.adamw(0.1),
        optax.lion(0.1),
        optax.rmsprop(0.1),
        optax.sgd(0.1, momentum=0.9),
    ):
        got, _ = train(jaxmpi.sharded(inner), params(), 4)
        want, _ = train(jaxmpi.distributed(inner), params(), 4)
        for name in SHAPES:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


@run_ranks(2, 3, 4)
def test_each_rank_has_its_share_of_the_state():
    big = {"w": jnp.zeros((1000, 1000)), "b": jnp.zeros(1000)}
    number = lambda state: sum(x.nbytes for x in jax.tree.leaves(state))
    whole, part = (
        number(jaxmpi.distributed(optax.adam(0.1)).init(big)),
        number(jaxmpi.sharded(optax.adam(0.1)).init(big)),
    )
    assert abs(part - whole / jaxmpi.size()) <= 64  # a padding and a counter


@run_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("dtype", "master_dtype"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")],
)
def test_sharded_parameters_are_the_rounded_masters_at_all_magnitudes(dtype, master_dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        low, high = (-4, 4) if dtype == "float16" else (-12, 10)
        pairs = rng.choice([-1, 1], size=(2, 99)) * 10.0 ** rng.uniform(low, high, size=(2, 99))
        start, to = {"w": jnp.asarray(pairs[0], dtype)}, pairs[1]
        tx = jaxmpi.sharded(optax.sgd(1.0), master_dtype=master_dtype)

        @jaxmpi.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        # the gradient leads the masters from the start to `to`, which may be tiny beside it
        grads = {"w": jnp.asarray(np.asarray(start["w"], np.float64) - to, master_dtype)}
        params, state = step(start, tx.init(start), grads)
        master = np.asarray(jaxmpi.unshard(state).master["w"])
        assert master.dtype == master_dtype
        np.testing.assert_array_equal(
            np.asarray(params["w"]), np.asarray(jnp.asarray(master).astype(dtype))
        )


@run_ranks(1, 2, 3)
def test_masters_in_float32():
    """Steps that are lost in bfloat16 add up in the masters."""
    tx = jaxmpi.sharded(optax.sgd(1e-3), master_dtype=jnp.float32)
    start = {"w": jnp.ones((3, 5), jnp.bfloat16)}
    step = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))
    state, ps = tx.init(start), start
    for _ in range(100):
        updates, state = step({"w": jnp.ones((3, 5), jnp.bfloat16)}, state, ps)
        ps = optax.apply_updates(ps, updates)
    assert ps["w"].dtype == jnp.bfloat16
    # without masters it stays 1
    np.testing.assert_array_equal(ps["w"], jnp.full((3, 5), 0.9, jnp.bfloat16))


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_from_these_ranks_to_others():
    """unshard gives the state of one rank; reshard of it goes on as if nothing had happened."""
    tx = jaxmpi.sharded(optax.adam(0.1), master_dtype=jnp.float32)
    ps, state = train(tx, params(), 3)
    whole = jaxmpi.unshard(state)
    assert {k: x.shape for k, x in whole.inner[0].mu.items()} == SHAPES
    one, one_state = reference(3)
    for name in SHAPES:
        np.testing.assert_allclose(
            whole.inner[0].mu[name], one_state[0].mu[name], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(whole.master[name], one[name], rtol=1e-5, atol=1e-6)
    again = jaxmpi.reshard(whole)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    end, _ = train(tx, ps, 2, state=again, first=3)
    straight, _ = train(tx, params(), 5)
    for name in SHAPES:
        np.testing.assert_array_equal(end[name], straight[name])


def reference(steps):
    tx, n = optax.adam(0.1), jaxmpi.size()
    ps = params()
    state = tx.init(ps)
    for i in range(steps):
        mean = jax.tree.map(lambda *x: sum(x) / n, *(grads(r, i) for r in range(n)))
        updates, state = tx.update(mean, state, ps)
        ps = optax.apply_updates(ps, updates)
    return ps, state


@run_ranks(2, 3)
def test_a_state_of_other_ranks_is_refused():
    tx = jaxmpi.sharded(optax.adam(0.1))
    state = tx.init(params())
    whole = jaxmpi.unshard(state)
    with pytest.raises(ValueError, match=r"was made for 1 ranks, and there are .*unshard.*reshard"):
        tx.update(grads(0, 0), whole, params())
    with pytest.raises(ValueError, match="reshard: the state is one of"):
        jaxmpi.reshard(state)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(grads(0, 0), state)


@run_ranks(2, 3)
def test_the_whole_state_has_the_shapes_of_the_inner_one():
    wide = {"w": jnp.ones((200, 300)), "b": jnp.ones(300)}
    not_biases = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    for inner in (
        optax.adamw(0.1, mask=not_biases),
        optax.chain(jaxmpi.clip_by_global_norm(0.1), optax.adam(0.1)),
        optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        optax.adam(optax.cosine_decay_schedule(0.1, 10)),
        optax.chain(optax.clip(0.1), optax.adagrad(0.1)),
    ):
        state = jaxmpi.sharded(inner).init(wide)
        got = [np.shape(x) for x in jax.tree.leaves(jaxmpi.unshard(state))]
        assert got == [x.shape for x in jax.tree.leaves(jax.eval_shape(inner.init, wide))]


@pytest.mark.slow
@run_ranks(2)
def test_one_collective_for_all_arrays_and_any_way_to_make_the_state():
    many = {str(i): jnp.ones(5) for i in range(12)}
    tx = jaxmpi.sharded(optax.adam(0.1))
    state = tx.init(many)
    text = str(jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p))(many, state, many))
    assert text.count("jaxmpi_collective") == 2
    shapes = jax.eval_shape(tx.init, many)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in jax.tree.leaves(state)]
    traced = jax.jit(tx.init)(many)
    for a, b in zip(jax.tree.leaves(traced), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    # the whole state is equal on all ranks, and is sent as such
    whole = jax.tree.map(lambda x: x + jaxmpi.rank(), jaxmpi.unshard(state))
    for x in jax.tree.leaves(jaxmpi.synchronize(whole, root=1)):
        np.testing.assert_array_equal(x, np.ones_like(x))


@pytest.mark.slow
@run_ranks(1, 2)
def test_states_can_be_donated():
    """No two of their arrays are one, and none is a parameter."""
    for tx in (
        jaxmpi.sharded(optax.adam(0.1), master_dtype=jnp.float32),
        jaxmpi.dynamic_loss_scale(jaxmpi.accumulate(jaxmpi.distributed(optax.adam(0.1)), 2)),
        jaxmpi.watch_replicas(
            jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.adam(0.1), codec=jaxmpi.codecs.int8()))
        ),
        jaxmpi.local_sgd(optax.adam(0.1), 2, optax.sgd(0.7)),
    ):
        step = jaxmpi.jit(lambda s, p, tx=tx: tx.update(p, s, p), donate_argnums=(0, 1))
        ps = jax.tree.map(jnp.array, params())
        ps, state = step(tx.init(ps), ps)
        step(state, ps)


@pytest.mark.slow
@run_ranks(2, 3)
def test_its_state_may_stand_in_what_is_replicated():
    """Per-rank parts of a state declared replicated may differ; synchronize keeps them."""
    inner = optax.adam(0.1)
    transforms = [
        jaxmpi.sharded(inner, master_dtype=jnp.float32),
        jaxmpi.accumulate(jaxmpi.sharded(inner), 2),
        jaxmpi.distributed(inner, codec=jaxmpi.codecs.int8()),
        jaxmpi.skip_nonfinite(
            jaxmpi.accumulate(jaxmpi.distributed(inner, codec=jaxmpi.codecs.topk(0.5)), 2)
        ),
    ]
    for tx in transforms:
        declared = {"replicated_argnums": (1, 2), "replicated_outnums": (0, 1)}
        step = jaxmpi.jit(lambda g, s, p, tx=tx: tx.update(g, s, p), **declared)
        ps, state = jaxmpi.synchronize((params(), tx.init(params())))
        for i in range(3):
            updates, state = step(grads(jaxmpi.rank(), i), state, ps)
            ps = optax.apply_updates(ps, updates)
        kept = jaxmpi.synchronize(state)
        for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(a, b)
        assert len(set(jaxmpi.allgather_object(repr(jax.tree.leaves(state))))) > 1
    with pytest.raises(
        ValueError, match=r"output .* is declared replicated but may differ across ranks"
    ):
        jaxmpi.jit(lambda g, s, p: inner.update(g, s, p), **declared)(
            grads(0, 0), inner.init(params()), params()
        )


@run_ranks(2)
def test_clip_by_global_norm_clips_as_optax_does():
    tree = grads(0, 0)
    for limit in (0.5, 1e6):
        got, _ = jaxmpi.clip_by_global_norm(limit).update(tree, None)
        want, _ = optax.clip_by_global_norm(limit).update(tree, optax.EmptyState())
        for name in SHAPES:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
    nan, _ = jaxmpi.clip_by_global_norm(1.0).update(
        {"a": jnp.array(np.nan), "b": jnp.ones(2)}, None
    )
    assert all(np.isnan(x).all() for x in jax.tree.leaves(nan))
    with pytest.raises(ValueError, match="max_norm is 0"):
        jaxmpi.clip_by_global_norm(0)
