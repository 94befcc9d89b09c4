"""`accumulate`: one communication for several steps, exact means, in a loop, too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi.testing import run_ranks


def test_every_one_is_inner():
    inner = optax.sgd(0.1)
    params = {"w": jnp.ones(3)}
    assert jax.tree.structure(jaxmpi.accumulate(inner, 1).init(params)) == jax.tree.structure(inner.init(params))


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
    assert [(entry.call.kind, entry.path, entry.times) for entry in entries] == [("allreduce", "cond:1", None)]
    if backend.transport == "native":
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
    np.testing.assert_allclose(np.asarray(updates)[:, 0], [0, 0, 0, -means[0], 0, 0, 0, -means[1]], rtol=1e-6)
    np.testing.assert_allclose(params["w"], [-sum(means)], rtol=1e-6)


@run_ranks(2, 3)
def test_weights_are_exact_and_zero_counts_for_nothing():
    r, n = jaxmpi.rank(), jaxmpi.size()
    tx = jaxmpi.distributed(optax.sgd(1.0))
    state = tx.init(jnp.zeros(2))
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        grads = jnp.full(2, jnp.nan if r == 0 else r, dtype)  # rank 0 has no samples, and a mean over none is NaN
        updates, _ = jax.jit(lambda g, w: tx.update(g, state, weight=w))(grads, jnp.int32(1000 * r))
        assert updates.dtype == dtype
        want = -sum(q * q for q in range(n)) / sum(range(n))
        np.testing.assert_allclose(np.asarray(updates, np.float32), [want] * 2, rtol=1e-2 if dtype != jnp.float32 else 1e-6)
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
