"""`accumulate`: one communication for several steps, exact means, in a loop, too."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi._job.process import stderr
from jaxmpi.testing import run_ranks


def test_every_one_is_inner():
    inner = optax.sgd(0.1)
    params = {"w": jnp.ones(3)}
    state = jaxmpi.accumulate(inner, 1).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(inner.init(params))


@run_ranks(2, 3)
def test_it_communicates_once_every_few_steps():
    """Counted on the native transport, where later calls are compared with the next message."""
    tx = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(1.0)), 3)
    backend = jaxmpi._world.session.current("test")
    step = jaxmpi.jit(lambda g, s: tx.update(g, s))
    grads, state = {"w": jnp.full(1000, jaxmpi.rank() + 1.0)}, tx.init({"w": jnp.zeros(1000)})
    first, calls = [], []
    for _ in range(6):
        before = backend.progress()[0]
        updates, state = jax.block_until_ready(step(grads, state))
        calls.append(backend.progress()[0] - before)
        first.append(np.asarray(updates["w"])[0])
    mean = -(jaxmpi.size() + 1) / 2
    np.testing.assert_allclose(first, [0, 0, mean] * 2)
    assert int(state.calls) == 0
    entries = step.program(grads, state).entries
    assert [(entry.call.kind, entry.path, entry.times) for entry in entries] == [
        ("allreduce", "cond:1", None)
    ]
    if backend.transport.name == "native":
        assert calls[1:] == [0, 1, 0, 0, 1]


@run_ranks(1, 2, 3)
def test_in_a_scan():
    tx = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(1.0)), 4)

    @jaxmpi.jit
    def step(params, state, xs):
        def micro(carry, x):
            params, state = carry
            updates, state = tx.update({"w": x}, state, params, weight=x[0])
            return (optax.apply_updates(params, updates), state), updates["w"]

        return jax.lax.scan(micro, (params, state), xs)

    r, n = jaxmpi.rank(), jaxmpi.size()
    all_xs = np.arange(1.0, 8 * n + 1).reshape(n, 8, 1)
    params = {"w": jnp.zeros(1)}
    (params, _), updates = step(params, tx.init(params), all_xs[r].astype(np.float32))
    means = [(part**2).sum() / part.sum() for part in (all_xs[:, :4], all_xs[:, 4:])]
    np.testing.assert_allclose(
        np.asarray(updates)[:, 0], [0, 0, 0, -means[0], 0, 0, 0, -means[1]], rtol=1e-6
    )
    np.testing.assert_allclose(params["w"], [-sum(means)], rtol=1e-6)


@run_ranks(2, 3)
def test_weights_are_exact_and_zero_counts_for_nothing():
    r, n = jaxmpi.rank(), jaxmpi.size()
    tx = jaxmpi.distributed(optax.sgd(1.0))
    state = tx.init(jnp.zeros(2))
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        # rank 0 has no samples, and a mean over none is NaN
        grads = jnp.full(2, jnp.nan if r == 0 else r, dtype)
        updates, _ = jax.jit(lambda g, w: tx.update(g, state, weight=w))(grads, jnp.int32(1000 * r))
        assert updates.dtype == dtype
        want = -sum(q * q for q in range(n)) / sum(range(n))
        np.testing.assert_allclose(
            np.asarray(updates, np.float32), [want] * 2, rtol=1e-2 if dtype != jnp.float32 else 1e-6
        )
    nothing, _ = tx.update(jnp.full(2, jnp.nan), state, weight=0)
    np.testing.assert_array_equal(nothing, [0, 0])


@pytest.mark.slow
@run_ranks(1, 2)
def test_bad_weights():
    tx = jaxmpi.distributed(optax.sgd(1.0))
    state = tx.init(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"weight is -1(\.0)?\. Pass the number of samples"):
        tx.update(jnp.ones(2), state, weight=-1)
    with pytest.raises(ValueError, match=r"weight has shape \[2\]"):
        tx.update(jnp.ones(2), state, weight=jnp.ones(2))
    with pytest.raises(TypeError, match=r"leaf \['n'\] is int32, which has no gradient"):
        tx.update({"n": jnp.ones(2, jnp.int32)}, state, weight=1)
    updates, _ = jax.jit(lambda w: tx.update(jnp.ones(2), state, weight=w))(-1.0)
    assert np.isnan(updates).all()


@pytest.mark.parametrize("every", [0, -1])
def test_bad_every(every):
    with pytest.raises(ValueError, match="every is"):
        jaxmpi.accumulate(optax.sgd(1.0), every)
    with pytest.raises(ValueError, match="every is"):
        jaxmpi.local_sgd(optax.sgd(1.0), every)
    with pytest.raises(ValueError, match="every is"):
        jaxmpi.watch_replicas(optax.sgd(1.0), every)


@pytest.mark.parametrize("count", [2.5, True, "2", None])
def test_a_number_of_steps_is_an_integer(count):
    sgd, nothing = optax.sgd(1.0), "is .*, not an integer"
    for make in (jaxmpi.accumulate, jaxmpi.local_sgd, jaxmpi.watch_replicas):
        with pytest.raises(TypeError, match=f"{make.__name__}: every {nothing}"):
            make(sgd, count)
    for name in ("fragments", "delay"):
        with pytest.raises(TypeError, match=f"local_sgd: {name} {nothing}"):
            jaxmpi.local_sgd(sgd, 4, **{name: count})
    with pytest.raises(TypeError, match=f"dynamic_loss_scale: growth_every {nothing}"):
        jaxmpi.dynamic_loss_scale(sgd, growth_every=count)
    with pytest.raises(TypeError, match=f"codecs.int8: block {nothing}"):
        jaxmpi.codecs.int8(count)
    with pytest.raises(TypeError, match=f"codecs.powersgd: rank {nothing}"):
        jaxmpi.codecs.powersgd(count)
    with pytest.raises(TypeError, match=f"micro_batch_grads: micro_batches {nothing}"):
        jaxmpi.micro_batch_grads(jax.grad(jnp.sum), count)
    if count is not None:
        with pytest.raises(TypeError, match=f"distributed: micro_batches {nothing}"):
            jaxmpi.distributed(sgd, micro_batches=count)
    assert jaxmpi.accumulate(sgd, np.int32(2)) and jaxmpi.local_sgd(sgd, np.int64(2))


@run_ranks(2)
def test_a_wrong_weight_is_told_where_it_was_passed():
    tx, g = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(1.0)), 2), jnp.ones(2)
    state, weight = tx.init(g), -1 if jaxmpi.rank() == 1 else 2
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stderr, "say", said.append)
        _, state = tx.update(g, state, weight=weight)
    assert len(said) == (jaxmpi.rank() == 1)
    assert all(re.search(r"accumulate: weight is -1\. .*on all ranks", text) for text in said)
    with pytest.raises(ValueError, match=r"distributed: weight is nan\..*rank 1 did not"):
        tx.update(g, state, weight=2)


def test_init_names_a_leaf_that_cannot_be_accumulated():
    jaxmpi.init()
    tx = jaxmpi.accumulate(optax.sgd(1.0), 2)
    with pytest.raises(TypeError, match=r"accumulate: leaf \['key'\] is key<fry>"):
        tx.init({"key": jax.random.key(0), "w": jnp.ones(2)})


# `value` and `grad` of a window


def recorder():
    """Return a transform whose state is the `value` and `grad` that its last update got."""

    def update(updates, state, params=None, *, value, grad, **_):
        return updates, {"value": jnp.float32(value), "grad": grad}

    return optax.GradientTransformationExtraArgs(
        lambda params: {"value": jnp.zeros(()), "grad": jnp.zeros_like(params)}, update
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("wrap", ["distributed", "sharded"])
def test_inner_gets_the_value_of_the_window(ranks, weighted, wrap):
    tx = jaxmpi.accumulate(getattr(jaxmpi, wrap)(recorder()), 3)
    values = np.asarray([[2, 4, 5], [np.nan, 1, 7]][:ranks], np.float32)
    weights = np.asarray([[1, 1, 4], [0, 9, 2]][:ranks], np.float32)
    if not weighted:
        values = np.nan_to_num(values)
    with jaxmpi.simulate(ranks):

        @jaxmpi.jit
        def window(w, values, weights):
            state = tx.init(w)
            for i in range(3):
                g = jnp.full(4, values[i])
                given = {"weight": weights[i]} if weighted else {}
                _, state = tx.update(g, state, w, value=values[i], grad=g, **given)
            return jax.tree.leaves(jaxmpi.unshard(state.inner))

        got = window(
            jnp.zeros(4), *(jaxmpi.PerRank(x) if ranks > 1 else x[0] for x in (values, weights))
        )
    rows = np.nan_to_num(values)
    want = np.average(rows, weights=weights if weighted else None)
    for x in got:
        np.testing.assert_allclose(x, np.full(np.shape(x), want), rtol=1e-6)


def test_accumulate_refuses_a_value_that_is_no_scalar():
    jaxmpi.init()
    tx, w = jaxmpi.accumulate(jaxmpi.distributed(optax.lbfgs()), 2), jnp.ones(3)
    with pytest.raises(ValueError, match=r"accumulate: update got value of shape \[3\]"):
        tx.update(w, tx.init(w), w, value=w)


def test_grad_stands_for_the_gradients_however_update_is_called():
    jaxmpi.init()
    tx, w = jaxmpi.accumulate(recorder(), 2), jnp.ones(3)
    for update in (tx.update, jax.jit(tx.update)):
        state = tx.init(w)
        for g in (2 * w, 4 * w):
            _, state = update(g, state, w, value=1.0, grad=g + 0)
        np.testing.assert_array_equal(state.inner["grad"], 3 * w)


# the last window


def batches_of(rank, n_batches):
    """(mean, samples) of one rank's batches, with other numbers of samples on each rank."""
    return [
        (np.float32(3 * i + 2 * rank + 1), np.float32(1 + (i + rank) % 3)) for i in range(n_batches)
    ]


def one_step(inner, params, state, some, weighted):
    """`inner` on the mean over some batches of all ranks, which one device would have."""
    pairs = [batches_of(rank, 8)[i] for rank in range(jaxmpi.size()) for i in some]
    values, weights = np.transpose(pairs)
    mean = np.average(values, weights=weights if weighted else None)
    updates, state = inner.update({"w": jnp.full(2, mean, jnp.float32)}, state, params)
    return optax.apply_updates(params, updates), state


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("transform", ["distributed", "sharded"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("how", ["static", "argument", "eager"])
def test_flush_is_one_step_over_what_is_left(transform, weighted, how):
    inner = optax.adam(0.1)
    tx = jaxmpi.accumulate(getattr(jaxmpi, transform)(inner), 3)

    def update(params, state, flush, mean, samples):
        given = {"weight": samples} if weighted else {}
        updates, state = tx.update({"w": jnp.full(2, mean)}, state, params, flush=flush, **given)
        return optax.apply_updates(params, updates), state

    if how == "static":
        step = jaxmpi.jit(update, static_argnums=2)
    elif how == "argument":
        step = jaxmpi.jit(update, replicated_argnums=2)
    else:
        step = update
    params = {"w": jnp.zeros(2)}
    state, expected, inner_state = tx.init(params), params, inner.init(params)
    for _ in range(2):  # epochs of 3, 3 and 2 batches, and of 3 and 3
        for epoch in ([range(3), range(3, 6), range(6, 8)], [range(3), range(3, 6)]):
            last = epoch[-1][-1]
            for i in range(last + 1):
                mean, samples = batches_of(jaxmpi.rank(), 8)[i]
                params, state = step(params, state, i == last, mean, samples)
            for some in epoch:
                expected, inner_state = one_step(inner, expected, inner_state, some, weighted)
            np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-5)
            assert int(state.calls) == 0


@run_ranks(1, 2)
def test_flush_of_every_call_is_inner():
    params = {"w": jnp.zeros(2)}
    for every in (1, 3):
        tx = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(1.0)), every)
        updates, _ = tx.update(
            {"w": jnp.full(2, jaxmpi.rank() + 1.0)}, tx.init(params), params, flush=True
        )
        np.testing.assert_allclose(updates["w"], [-(jaxmpi.size() + 1) / 2] * 2)


@run_ranks(2)
def test_ranks_that_differ_in_flush_are_told():
    tx = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(1.0)), 3)
    update = lambda g, s, flush: tx.update(g, s, flush=flush)
    grads, state, flush = jnp.ones(2), tx.init(jnp.zeros(2)), jaxmpi.rank() == 0
    with pytest.raises(
        jaxmpi.RankMismatchError, match=r"decided by rank 0: .* at test_accumulate.py"
    ):
        jaxmpi.jit(update, static_argnums=2)(grads, state, flush)
    with pytest.raises(
        jaxmpi.RankMismatchError, match=r"argument 2: .* is named in replicated_argnums"
    ):
        jaxmpi.jit(update, replicated_argnums=2)(grads, state, flush)
    with pytest.raises(ValueError, match=r"which branch is taken may differ.*replicated_argnums"):
        jaxmpi.jit(update)(grads, state, flush)
    np.testing.assert_array_equal(jaxmpi.tree_allreduce(jnp.ones(2)), [1, 1])


@pytest.mark.parametrize("transform", ["skip_nonfinite", "dynamic_loss_scale", "watch_replicas"])
def test_flush_reaches_accumulate_through_other_transforms(transform):
    jaxmpi.init()
    inner = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(1.0)), 3)
    wrap = getattr(jaxmpi, transform)
    tx = optax.chain(wrap(inner, 1) if transform == "watch_replicas" else wrap(inner))
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    scale = optax.tree.get(state, "scale", 1.0)
    updates, _ = tx.update({"w": jnp.full(2, 2.0) * scale}, state, params, flush=True)
    np.testing.assert_allclose(updates["w"], [-2, -2])


def test_flush_of_simulated_ranks():
    tx = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(1.0)), 3)
    with jaxmpi.simulate(3):
        step = jaxmpi.jit(lambda g, s, w: tx.update(g, s, weight=w, flush=True))
        x, w = np.array([1, 2, 6], np.float32), np.array([0, 1, 3], np.float32)
        updates, _ = step(jaxmpi.PerRank(x), tx.init(np.float32(0)), jaxmpi.PerRank(w))
    np.testing.assert_allclose(updates, -5)


@pytest.mark.parametrize("flush", [1.5, np.ones(2, bool), "yes"])
def test_flush_is_one_boolean(flush):
    jaxmpi.init()
    tx = jaxmpi.accumulate(optax.sgd(1.0), 3)
    with pytest.raises(TypeError, match=r"accumulate: flush is .*Pass True in the last call"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), flush=flush)
