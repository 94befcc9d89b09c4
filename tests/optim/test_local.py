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


# fragments and delays


def many(seed=9):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


SHAPES = {"a": (4, 3), "b": (5,), "c": (2, 2, 3), "d": (300,)}


def streamed(tx, steps):
    """The parameters after each step, of this rank."""
    step = jaxmpi.jit(lambda g, s, p: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, s, p)))
    params, history = many(), []
    state = tx.init(params)
    for i in range(steps):
        params, state = step(many([jaxmpi.rank(), i]), state, params)
        history.append(jax.device_get(params))
    return history, state


def streamed_reference(inner, every, steps, outer, fragments, delay):
    """All ranks in one process: θ = mean θ_then + (θ - θ_then), `delay` steps after each fragment's turn."""
    n = jaxmpi.size()
    sizes, parts = [0] * fragments, [[] for _ in range(fragments)]
    for name in SHAPES:
        f = sizes.index(min(sizes))
        parts[f].append(name)
        sizes[f] += int(np.prod(SHAPES[name]))
    ranks = [(many(), inner.init(many())) for _ in range(n)]
    anchors = [{name: many()[name] for name in part} for part in parts]
    outers = [outer.init(anchor) if outer else None for anchor in anchors]
    sent, history = {}, []
    for i in range(steps):
        for r, (p, s) in enumerate(ranks):
            u, s = inner.update(many([r, i]), s, p)
            ranks[r] = optax.apply_updates(p, u), s
        for f, part in enumerate(parts):
            first = f * every // fragments
            if (i + 1) % every == first and not delay:
                sent[f] = [{name: p[name] for name in part} for p, _ in ranks]
            if (i + 1) % every == (first + delay) % every and f in sent:
                left = sent.pop(f)
                mean = jax.tree.map(lambda *x: sum(x) / n, *left)
                if outer:
                    way = jax.tree.map(lambda a, m: a - m, anchors[f], mean)
                    u, outers[f] = outer.update(way, outers[f], anchors[f])
                    mean = optax.apply_updates(anchors[f], u)
                anchors[f] = mean
                for r, (p, _) in enumerate(ranks):
                    p.update({name: mean[name] + (p[name] - left[r][name]) for name in part})
            if (i + 1) % every == first and delay:
                sent[f] = [{name: p[name] for name in part} for p, _ in ranks]
        history.append(jax.device_get(ranks[jaxmpi.rank()][0]))
    return history


def near(got, want, **tolerance):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        for name in SHAPES:
            np.testing.assert_allclose(a[name], b[name], err_msg=f"{name} after step {i}", **tolerance)


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.mark.slow
@run_ranks(1, 2, 3)
@pytest.mark.parametrize(("fragments", "delay"), [(1, 2), (3, 0), (3, 2), (4, 4)])
@pytest.mark.parametrize("diloco", [False, True])
def test_fragments_arrive_later(fragments, delay, diloco):
    outer = NESTEROV if diloco else None
    tx = jaxmpi.local_sgd(optax.adam(0.1), 5, outer, fragments=fragments, delay=delay)
    got, state = streamed(tx, 14)
    near(got, streamed_reference(optax.adam(0.1), 5, 14, outer, fragments, delay), rtol=1e-5, atol=2e-6)
    assert len(state.fragments) == fragments
    for x in jax.tree.leaves([fragment.anchor for fragment in state.fragments]):
        assert len(set(jaxmpi.allgather_object(np.asarray(x).tobytes()))) == 1


@pytest.mark.slow
@run_ranks(2, 3)
@pytest.mark.parametrize("codec", ["bf16", "f16", "int8", "topk"])
def test_fragments_of_fewer_bytes(codec):
    codec = jaxmpi.codecs.topk(1.0) if codec == "topk" else getattr(jaxmpi.codecs, codec)()
    got, _ = streamed(jaxmpi.local_sgd(optax.sgd(0.01), 4, NESTEROV, codec=codec, fragments=2, delay=1), 14)
    want = streamed_reference(optax.sgd(0.01), 4, 14, NESTEROV, 2, 1)
    near(got, want, rtol=0.02, atol=0.02)


@pytest.mark.slow
@run_ranks(2)
def test_fragments_and_delays_that_cannot_be_are_refused():
    sgd = optax.sgd(0.1)
    for options, words in [
        ({"fragments": 0}, "fragments is 0"),
        ({"fragments": 5}, "fragments is 5. It must be at least 1, and at most every=4"),
        ({"delay": 4}, "delay is 4. It must be 0 or more, and below every=4"),
        ({"delay": -1}, "delay is -1"),
        ({"delay": 1, "codec": jaxmpi.codecs.powersgd()}, "this codec takes several messages"),
    ]:
        with pytest.raises(ValueError, match=words):
            jaxmpi.local_sgd(sgd, 4, **options)


@run_ranks(2)
def test_a_step_without_parameters_is_refused():
    tx = jaxmpi.local_sgd(optax.sgd(0.1), 2)
    with pytest.raises(ValueError, match="local_sgd: update needs the parameters"):
        tx.update(gradient(0, 0), tx.init(start()))
    with pytest.raises(TypeError, match="outer is a float"):
        jaxmpi.local_sgd(optax.sgd(0.1), 2, 0.7)
