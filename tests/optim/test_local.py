"""`local_sgd`: each rank's own steps, their mean, and DiLoCo's outer step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxmpi
from jaxmpi._lowering.exact_updates import update_to
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
                u, outer_state = outer.update(
                    jax.tree.map(lambda a, m: a - m, anchor, mean), outer_state, anchor
                )
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


# equal bits after each round

DTYPES = ["float32", "bfloat16", "float16"]


def spread(seed, exponents):
    """Make a leaf of each dtype: numbers of all magnitudes and both signs, and zeros."""
    rng = np.random.default_rng(seed)
    tree = {}
    for dtype in DTYPES:
        low, high = exponents if dtype != "float16" else (-4, 3)
        x = rng.choice([-1, 1], size=(40, 25)) * 10.0 ** rng.uniform(low, high, size=(40, 25))
        x[0] = 0.0
        tree[dtype] = jnp.asarray(x, dtype)
    return tree


def bits_equal(tree):
    """Return, for each leaf, whether its bits are equal on all ranks."""
    mine = [np.asarray(x).tobytes() for x in jax.tree.leaves(jaxmpi.local(tree))]
    return [
        len(set(of_ranks)) == 1 for of_ranks in zip(*jaxmpi.allgather_object(mine), strict=True)
    ]


def rounds(tx, steps, every, exponents=(-12, 8)):
    """Train on gradients of all magnitudes; parameters grow, shrink and change sign."""
    params = spread(9, exponents)
    state = tx.init(params)

    @jaxmpi.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(1, steps + 1):
        params, state = step(params, state, spread([jaxmpi.rank(), i], exponents))
        yield i, params, state


MEETINGS = {
    "means": {},
    "outer": {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)},
    "codec": {"codec": jaxmpi.codecs.bf16()},
    "codec and outer": {"codec": jaxmpi.codecs.topk(0.25), "outer": optax.sgd(0.5)},
    "fragments": {"fragments": 2, "delay": 0},
}


def check_rounds(options, ranks):
    apart = 0
    for i, params, _ in rounds(jaxmpi.local_sgd(optax.sgd(1.0), 2, **options), 4, 2):
        same = bits_equal(params)
        if "fragments" in options:  # the second of the two meets half a round later
            assert not all(same)
            apart += sum(same)
        else:
            assert same == [i % 2 == 0] * len(DTYPES), i
    assert "fragments" not in options or apart == 6


@run_ranks(2, 3)
@pytest.mark.parametrize("name", MEETINGS)
def test_local_sgd_equal_bits_after_each_round(name):
    check_rounds(MEETINGS[name], jaxmpi.size())


@pytest.mark.slow
@run_ranks(2, backend="xla", timeout_seconds=400)
@pytest.mark.parametrize("name", MEETINGS)
def test_local_sgd_equal_bits_after_each_round_on_xla(name):
    check_rounds(MEETINGS[name], jaxmpi.size())


def test_local_sgd_equal_bits_after_each_round_of_simulated_ranks():
    with jaxmpi.simulate(3):
        tx = jaxmpi.local_sgd(optax.sgd(1.0), 2)
        params = spread(9, (-12, 8))
        state = tx.init(params)

        @jaxmpi.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for i in range(1, 5):
            grads = [spread([rank, i], (-12, 8)) for rank in range(3)]
            grads = jax.tree.map(lambda *xs: jaxmpi.PerRank(jnp.stack(xs)), *grads)
            params, state = step(params, state, grads)
            rows = [np.asarray(params[dtype].stack) for dtype in DTYPES]
            assert [len({row.tobytes() for row in x}) == 1 for x in rows] == [i % 2 == 0] * 3


AROUND = {
    "skip_nonfinite": (1, jaxmpi.skip_nonfinite),
    "accumulate": (2, lambda tx: jaxmpi.accumulate(tx, 2)),
    "accumulate in accumulate": (4, lambda tx: jaxmpi.accumulate(jaxmpi.accumulate(tx, 2), 2)),
    "accumulate in skip_nonfinite": (2, lambda tx: jaxmpi.skip_nonfinite(jaxmpi.accumulate(tx, 2))),
}


@run_ranks(2)
@pytest.mark.parametrize("name", AROUND)
def test_local_sgd_equal_bits_after_each_round_inside_of_other_transforms(name):
    """Updates may come out of a `lax.cond` or a `where`; the sum with the parameters is outside."""
    calls, around = AROUND[name]
    for i, params, _ in rounds(around(jaxmpi.local_sgd(optax.sgd(1.0), 2)), 4 * calls, 2):
        assert bits_equal(params) == [i // calls % 2 == 0] * len(DTYPES), i


INNER_JITS = {
    "update": (jax.jit, lambda f: f),
    "apply_updates": (lambda f: f, jax.jit),
    "both": (jax.jit, jax.jit),
    "jit in jit": (lambda f: f, lambda f: jax.jit(lambda p, u: jax.jit(f)(p, u))),
}


@run_ranks(2)
@pytest.mark.parametrize("name", INNER_JITS)
def test_local_sgd_equal_bits_after_each_round_with_an_inner_jit(name):
    around_update, around_apply = INNER_JITS[name]
    tx = jaxmpi.local_sgd(optax.sgd(1.0), 2)
    update, apply_updates = around_update(tx.update), around_apply(optax.apply_updates)
    params = spread(9, (-12, 8))
    state = tx.init(params)

    @jaxmpi.jit
    def step(params, state, grads):
        updates, state = update(grads, state, params)
        return apply_updates(params, updates), state

    for i in range(1, 5):
        params, state = step(params, state, spread([jaxmpi.rank(), i], (-12, 8)))
        assert bits_equal(params) == [i % 2 == 0] * len(DTYPES), i


@run_ranks(2, 3)
def test_local_sgd_parameters_after_a_round_are_the_mean():
    n, start = jaxmpi.size(), spread(9, (-12, 8))
    ((_, params, _),) = rounds(jaxmpi.local_sgd(optax.sgd(1.0), 1), 1, 1)
    for dtype in DTYPES:
        here = [start[dtype] - spread([rank, 1], (-12, 8))[dtype] for rank in range(n)]
        here = np.stack([np.asarray(x, np.float64) for x in here])
        # a sum of n numbers and a rounding, beside the largest of them
        tolerance = (n + 1) * 2.0**-23 * np.abs(here).max(0)
        tolerance += float(jnp.finfo(dtype).eps) * np.abs(here.mean(0)) + float(
            jnp.finfo(dtype).tiny
        )
        assert np.all(np.abs(np.asarray(params[dtype], np.float64) - here.mean(0)) <= tolerance), (
            dtype
        )


@run_ranks(2)
def test_local_sgd_parameters_that_have_met_can_be_saved(tmp_path):
    directory = jaxmpi.broadcast_object(str(tmp_path))
    for i, params, state in rounds(jaxmpi.local_sgd(optax.sgd(1.0), 2), 2, 2):
        if i % 2 == 0:
            jaxmpi.save(directory, i, {"params": params, "state": state}, background=False)
        else:
            with pytest.raises(jaxmpi.RankMismatchError, match="is not equal on all ranks"):
                jaxmpi.save(directory, i, {"params": params}, background=False)


@run_ranks(2)
def test_local_sgd_equal_bits_in_the_loops_and_states_that_programs_have():
    tx = jaxmpi.local_sgd(optax.sgd(1.0), 2)
    params = spread(9, (-12, 8))
    grads = [spread([jaxmpi.rank(), i], (-12, 8)) for i in range(4)]

    @jaxmpi.jit
    def scanned(params, state, grads):
        def body(carry, grads):
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(body, (params, state), grads)[0]

    together, _ = scanned(params, tx.init(params), jax.tree.map(lambda *xs: jnp.stack(xs), *grads))
    assert all(bits_equal(together))

    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    step = jaxmpi.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for g in grads:
        state = step(state, g)
    assert all(bits_equal(state.params))

    class Model(nnx.Module):
        def __init__(self):
            for name, x in params.items():
                setattr(self, name, nnx.Param(x))

    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @jaxmpi.nn.jit
    def nnx_step(model, optimizer, grads):
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, grads)
        optimizer.update(model, state)

    for g in grads:
        nnx_step(model, optimizer, g)
    assert all(bits_equal(nnx.state(model, nnx.Param)))
    for dtype in DTYPES:
        np.testing.assert_array_equal(state.params[dtype], together[dtype])


@run_ranks(2)
def test_local_sgd_with_a_delay_has_equal_anchors_and_equal_bits_where_no_rank_has_moved_since():
    tx = jaxmpi.local_sgd(optax.sgd(1.0), 3, delay=2)
    params = spread(9, (-12, 8))
    state = tx.init(params)
    step = jaxmpi.jit(
        lambda p, s, g: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, s, p))
    )
    still = jax.tree.map(jnp.zeros_like, params)
    for i in range(1, 6):  # sent after the third call, used after the fifth
        params, state = step(
            params, state, spread([jaxmpi.rank(), i], (-12, 8)) if i <= 3 else still
        )
        assert bits_equal(params) == [i == 5] * 3
    assert all(bits_equal(state.fragments[0].anchor))


def test_update_to_leads_there_where_a_float_does():
    """x + u is `to` if any float u leads there, and else next to it, for pairs of float16."""
    all_bits = np.arange(1 << 16, dtype=np.uint16)
    grid = jax.lax.bitcast_convert_type(jnp.asarray(all_bits), jnp.float16)
    updates = np.asarray(grid)[np.isfinite(np.asarray(grid))]
    some = np.random.default_rng(3).permutation(updates)[:300]
    reached = 0
    for x, to in zip(some[:150], some[150:], strict=True):
        with np.errstate(over="ignore"):
            sums = np.float16(x) + updates
        u = update_to(jnp.asarray(x), jnp.asarray(to))
        got = np.float16(x) + np.float16(u)
        if np.any(sums == to):
            reached += 1
            assert got == to, (x, to)
        else:
            nearest = np.nanmin(np.abs(sums.astype(np.float64) - float(to)))
            assert abs(float(got) - float(to)) <= 1.01 * nearest, (x, to)
    assert 20 < reached < 150


def test_update_to_is_replaced_where_a_program_adds_it():
    delta = float(np.spacing(np.float32(1)))
    x = jnp.asarray([-1.0, -(1 + delta), 1e8, -0.0, 1e-45, jnp.inf], jnp.float32)
    to = jnp.asarray([1.5 + delta, 1.5 + delta, 1e-8, 0.0, -1e-45, 2.0], jnp.float32)
    assert not np.all(np.asarray(x + update_to(x, to)) == np.asarray(to))
    with jaxmpi.simulate(2):
        step = jaxmpi.jit(
            lambda x, to: (
                optax.apply_updates(x, update_to(x, to)),
                jaxmpi.tree_allreduce(to.sum()),
            )
        )
        got, _ = step(x, to)
        assert np.asarray(got).tobytes() == np.asarray(to).tobytes()


def through_cond(x, to, flag):
    u, _ = jax.lax.cond(flag > 0, lambda: (update_to(x, to), 1.0), lambda: (jnp.zeros_like(x), 2.0))
    return x + u


def through_cond_and_where(x, to, flag):
    u = jax.lax.cond(
        flag > 0, lambda: jnp.where(flag > 2, 0, update_to(x, to)), lambda: jnp.zeros_like(x)
    )
    return jnp.where(flag == -1, 0.0, u) + x


def another_start(x, to, flag):
    """The update leads from 2 x: the sum stays as it is."""
    return x + jax.lax.cond(flag > 0, lambda: update_to(2 * x, to), lambda: jnp.zeros_like(x))


PATHS = {
    "update in a jit": lambda x, to, flag: x + jax.jit(update_to)(x, to),
    "sum in a jit": lambda x, to, flag: jax.jit(optax.apply_updates)(x, update_to(x, to)),
    "sum in a jit in a jit": lambda x, to, flag: jax.jit(lambda x, u: jax.jit(jnp.add)(x, u))(
        x, update_to(x, to)
    ),
    "where": lambda x, to, flag: x + jnp.where(flag > 0, update_to(x, to), 0),
    "select": lambda x, to, flag: x + jax.lax.select(flag > 0, update_to(x, to), jnp.zeros_like(x)),
    "cond": through_cond,
    "cond and where": through_cond_and_where,
    "in a scan": lambda x, to, flag: jax.lax.scan(
        lambda c, _: (through_cond(c, to, flag), None), x, None, length=2
    )[0],
}


@pytest.mark.parametrize("name", PATHS)
def test_update_to_is_replaced_on_its_way_to_the_sum(name):
    delta = float(np.spacing(np.float32(1)))
    x = jnp.asarray([-1.0, -(1 + delta), 1e8, 3.0], jnp.float32)
    to = jnp.asarray([1.5 + delta, 1.5 + delta, 1e-8, 0.0], jnp.float32)
    with jaxmpi.simulate(2):
        step = jaxmpi.jit(
            lambda x, to, flag: (PATHS[name](x, to, flag), jaxmpi.tree_allreduce(to.sum()))
        )
        np.testing.assert_array_equal(step(x, to, 1.0)[0], to)
        takes_no_flag = "jit" in name
        np.testing.assert_array_equal(step(x, to, -1.0)[0], to if takes_no_flag else x)
        step = jaxmpi.jit(
            lambda x, to, flag: (another_start(x, to, flag), jaxmpi.tree_allreduce(to.sum()))
        )
        np.testing.assert_allclose(step(x, to, 1.0)[0], to - x, rtol=1e-6)


# fragments and delays


def many(seed=9):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


SHAPES = {"a": (4, 3), "b": (5,), "c": (2, 2, 3), "d": (300,)}


def streamed(tx, steps):
    """The parameters after each step, of this rank."""
    step = jaxmpi.jit(
        lambda g, s, p: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, s, p))
    )
    params, history = many(), []
    state = tx.init(params)
    for i in range(steps):
        params, state = step(many([jaxmpi.rank(), i]), state, params)
        history.append(jax.device_get(params))
    return history, state


def streamed_reference(inner, every, steps, outer, fragments, delay):
    """Compute DiLoCo of all ranks here: θ = mean θ_then + (θ - θ_then).

    The mean arrives `delay` steps after each fragment's turn.
    """
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
            np.testing.assert_allclose(
                a[name], b[name], err_msg=f"{name} after step {i}", **tolerance
            )


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.mark.slow
@run_ranks(1, 2, 3)
@pytest.mark.parametrize(("fragments", "delay"), [(1, 2), (3, 0), (3, 2), (4, 4)])
@pytest.mark.parametrize("diloco", [False, True])
def test_fragments_arrive_later(fragments, delay, diloco):
    outer = NESTEROV if diloco else None
    tx = jaxmpi.local_sgd(optax.adam(0.1), 5, outer, fragments=fragments, delay=delay)
    got, state = streamed(tx, 14)
    near(
        got,
        streamed_reference(optax.adam(0.1), 5, 14, outer, fragments, delay),
        rtol=1e-5,
        atol=2e-6,
    )
    assert len(state.fragments) == fragments
    for x in jax.tree.leaves([fragment.anchor for fragment in state.fragments]):
        assert len(set(jaxmpi.allgather_object(np.asarray(x).tobytes()))) == 1


@pytest.mark.slow
@run_ranks(2, 3)
@pytest.mark.parametrize("codec", ["bf16", "f16", "int8", "topk"])
def test_fragments_of_fewer_bytes(codec):
    codec = jaxmpi.codecs.topk(1.0) if codec == "topk" else getattr(jaxmpi.codecs, codec)()
    got, _ = streamed(
        jaxmpi.local_sgd(optax.sgd(0.01), 4, NESTEROV, codec=codec, fragments=2, delay=1), 14
    )
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
