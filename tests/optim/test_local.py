"""`local_sgd`: each rank's own steps, their mean, and DiLoCo's outer step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi.testing import run_ranks


def gradient(rank, step):
    return {"w": jnp.asarray(np.random.default_rng([rank, step]).normal(size=(4, 3)), jnp.float32)}


def start():
    return {"w": jnp.asarray(np.random.default_rng(9).normal(size=(4, 3)), jnp.float32)}


def train(tx, steps):
    step = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))
    params, history = start(), []
    state = tx.init(params)
    for i in range(steps):
        updates, state = step(gradient(jaxmpi.rank(), i), state, params)
        params = optax.apply_updates(params, updates)
        history.append(np.asarray(params["w"]))
    return history, state


def reference(make_inner, every, steps, outer=None):
    """All ranks in one process."""
    n = jaxmpi.size()
    inner = make_inner()
    ranks = [(start(), inner.init(start())) for _ in range(n)]
    anchor, outer_state = start(), outer.init(start()) if outer else None
    history = []
    for i in range(steps):
        for r, (p, s) in enumerate(ranks):
            u, s = inner.update(gradient(r, i), s, p)
            ranks[r] = optax.apply_updates(p, u), s
        if (i + 1) % every == 0:
            mean = jax.tree.map(lambda *x: sum(x) / n, *(p for p, _ in ranks))
            if outer:
                u, outer_state = outer.update(jax.tree.map(lambda a, m: a - m, anchor, mean), outer_state, anchor)
                anchor = optax.apply_updates(anchor, u)
            else:
                anchor = mean
            ranks = [(anchor, s) for _, s in ranks]
        history.append(np.asarray(ranks[jaxmpi.rank()][0]["w"]))
    return history


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("every", [1, 3])
def test_means_of_the_parameters(every):
    make = lambda: optax.adam(0.1)
    got, state = train(jaxmpi.local_sgd(make(), every), 7)
    for a, b in zip(got, reference(make, every, 7), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert state.anchor == () and state.outer == ()


@run_ranks(1, 2, 3)
def test_diloco():
    make, outer = lambda: optax.adamw(0.1), optax.sgd(0.7, momentum=0.9, nesterov=True)
    got, _ = train(jaxmpi.local_sgd(make(), 3, outer), 10)
    for a, b in zip(got, reference(make, 3, 10, outer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@run_ranks(2, 3)
def test_meeting_at_every_step_is_distributed_for_sgd():
    got, _ = train(jaxmpi.local_sgd(optax.sgd(0.1), 1), 5)
    want, _ = train(jaxmpi.distributed(optax.sgd(0.1)), 5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@run_ranks(2, 3)
def test_with_a_codec_and_with_accumulation():
    codec = jaxmpi.codecs.topk(1.0)
    got, state = train(jaxmpi.local_sgd(optax.sgd(0.1), 2, codec=codec), 6)
    np.testing.assert_allclose(got, reference(lambda: optax.sgd(0.1), 2, 6), rtol=1e-4, atol=1e-5)
    assert state.anchor != ()
    got, _ = train(jaxmpi.local_sgd(jaxmpi.accumulate(optax.sgd(0.1), 2), 4), 8)
    want = reference(lambda: jaxmpi.accumulate(optax.sgd(0.1), 2), 4, 8)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@run_ranks(2, 3)
def test_where_they_meet_they_are_equal():
    tx = jaxmpi.local_sgd(optax.sgd(0.1), 2)
    got, _ = train(tx, 4)
    same = lambda x: len(set(jaxmpi.allgather_object(x.tobytes()))) == 1
    assert [same(x) for x in got] == [False, True, False, True]


@run_ranks(2)
def test_a_step_without_parameters_is_refused():
    tx = jaxmpi.local_sgd(optax.sgd(0.1), 2)
    with pytest.raises(ValueError, match="local_sgd: update needs the parameters"):
        tx.update(gradient(0, 0), tx.init(start()))
    with pytest.raises(TypeError, match="outer is a float"):
        jaxmpi.local_sgd(optax.sgd(0.1), 2, 0.7)
