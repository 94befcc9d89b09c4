"""Decisions taken together, adasum, equal bits for any number of ranks, and statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi._optim.adasum import coefficients
from jaxmpi.testing import run_ranks


def entries(step, *args):
    return step.program(*args).entries


# what is not finite


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_on_one_rank_is_a_step_that_nobody_takes(bad):
    tx = jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.adam(0.1)))
    plain = jaxmpi.distributed(optax.adam(0.1))
    step = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))
    params = {"w": jnp.ones(5), "b": jnp.zeros(())}
    state, want = tx.init(params), plain.init(params)
    last = jaxmpi.size() - 1
    for i in range(5):
        grads = {"w": np.full(5, 1.0 + i, np.float32), "b": np.float32(jaxmpi.rank())}
        if i == 2 and jaxmpi.rank() == last:
            grads["w"][3] = bad
        updates, state = step(grads, state, params)
        if i == 2:
            assert not any(np.any(x) for x in jax.tree.leaves(updates))
            assert bool(state.last)
        else:
            expected, want = plain.update(grads, want, params)
            for name in params:
                np.testing.assert_allclose(updates[name], expected[name], rtol=1e-6)
    assert jaxmpi.allgather_object(int(state.skipped)) == [1] * jaxmpi.size()
    for a, b in zip(jax.tree.leaves(state.inner), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@run_ranks(2, 3)
def test_the_flag_travels_with_the_gradients():
    tx = jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.adam(0.1)))
    params = {"w": jnp.ones(5), "b": jnp.zeros(())}
    step = jaxmpi.jit(lambda g, s, p: (tx.update(g, s, p), jaxmpi.any_rank(g["b"] > 0)))
    assert len(entries(step, params, tx.init(params), params)) == 1


@pytest.mark.parametrize("name", ["value", "grad"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_in_an_extra_argument_is_a_step_that_nobody_takes(name, ranks):
    tx = jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.contrib.reduce_on_plateau()))
    with jaxmpi.simulate(ranks):

        def step(w):
            is_last = jaxmpi.rank() == jaxmpi.size() - 1
            bad = jnp.where(is_last, jnp.nan, jnp.float32(1))
            given = {"value": 1.0, "grad": w + 0, name: bad if name == "value" else w * bad}
            return tx.update(w, tx.init(w), w, **given)

        updates, state = jaxmpi.jit(step)(jnp.ones(3))
        assert int(np.max(state.skipped)) == 1 and not np.any(updates)


@run_ranks(2, 3)
def test_votes():
    r, n = jaxmpi.rank(), jaxmpi.size()
    assert bool(jaxmpi.any_rank(r == n - 1)) and not bool(jaxmpi.any_rank(r == n))
    assert bool(jaxmpi.jit(lambda r: jaxmpi.any_rank(r == 0))(np.int32(r)))


@run_ranks(2, 3)
def test_a_rank_without_samples_stops_nobody():
    tx = jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.sgd(1.0)))
    r = jaxmpi.rank()
    grads, weight = jnp.full(3, np.nan if r == 0 else 2.0), np.int32(0 if r == 0 else 4)
    updates, state = jaxmpi.jit(lambda g, s, w: tx.update(g, s, weight=w))(
        grads, tx.init(jnp.zeros(3)), weight
    )
    np.testing.assert_allclose(updates, [-2.0] * 3)
    assert int(state.skipped) == 0


@run_ranks(1, 2, 3)
def test_the_loss_scale_finds_its_way():
    tx = jaxmpi.dynamic_loss_scale(
        jaxmpi.distributed(optax.sgd(1.0)), initial=2.0**20, growth_every=4
    )
    params = jnp.ones(3)
    state = tx.init(params)

    @jaxmpi.jit
    def step(params, state, x):
        def loss(p):
            product = jnp.sum(p.astype(jnp.float16) * x.astype(jnp.float16))
            return product * state.scale.astype(jnp.float16)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return updates, state

    scales, steps = [], []
    for _ in range(14):
        updates, state = step(params, state, np.full(3, 1.0 + jaxmpi.rank(), np.float32))
        scales.append(float(state.scale))
        steps.append(float(updates[0]))
    assert int(state.skipped) >= 4 and scales[3] == 2.0**16  # 65536 is infinite in float16
    taken = [u for u in steps if u]
    np.testing.assert_allclose(taken, -(jaxmpi.size() + 1) / 2, rtol=2e-3)
    assert 2.0**13 <= scales[-1] <= 2.0**16
    for bad in ({"initial": 0}, {"growth_every": 0}):
        with pytest.raises(ValueError, match="dynamic_loss_scale"):
            jaxmpi.dynamic_loss_scale(optax.sgd(1.0), **bad)


# replicas


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_parameters_under_a_loss_scale_have_the_state_of_long_ones(dtype):
    """Adam's second moment of a gradient of 1e-4 is 1e-8, which float16 does not have."""
    tx = jaxmpi.dynamic_loss_scale(jaxmpi.distributed(optax.adam(1e-3)), initial=1024.0)

    def trained(dtype):
        w = jnp.ones(3, dtype)
        state, step = tx.init(w), jax.jit(lambda g, s, w: tx.update(g, s, w))
        for i in range(20):
            scaled = (jnp.full(3, 1e-4 * (1 + i)) * state.scale).astype(dtype)
            updates, state = step(scaled, state, w)
        return updates, state

    jaxmpi.init()
    (got, state), (want, long_state) = trained(dtype), trained(jnp.float32)
    np.testing.assert_allclose(got, want, rtol=0.02)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(long_state), strict=True):
        assert x.dtype == y.dtype


@pytest.mark.parametrize("same", [True, False])
def test_the_loss_scale_divides_grad_as_the_gradients(same):
    inner = optax.GradientTransformationExtraArgs(
        lambda p: (), lambda g, s, p=None, *, grad, **_: ((g, grad), s)
    )
    jaxmpi.init()
    tx = jaxmpi.dynamic_loss_scale(jaxmpi.distributed(inner), initial=1024.0)
    g = jnp.asarray([1024.0, 2048.0])
    (updates, grad), _ = tx.update(g, tx.init(g), g, grad=g if same else 2 * g)
    np.testing.assert_array_equal(updates, [1, 2])
    np.testing.assert_array_equal(grad, [1, 2] if same else [2, 4])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_clipping_of_short_floats_rounds_once(dtype):
    jaxmpi.init()
    tx, g = jaxmpi.clip_by_global_norm(1.0), jnp.full(40000, 60000.0, dtype)
    exact = np.asarray(g, np.float64)
    got, _ = tx.update({"g": g}, tx.init(g))
    want = (exact / np.linalg.norm(exact)).astype(g.dtype)
    np.testing.assert_array_equal(got["g"], want)


@run_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64"])
def test_one_bit_on_one_rank_is_found(dtype):
    n, every = jaxmpi.size(), 4
    with jax.enable_x64(True):
        tx = jaxmpi.watch_replicas(jaxmpi.distributed(optax.sgd(0.0)), every)
        params = {
            "a": jnp.ones(3, dtype),
            "layer": {"kernel": jnp.ones((4, 5), dtype), "n": jnp.arange(3)},
        }
        grads = jax.tree.map(jnp.zeros_like, params)
        step = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p)[1])
        state = tx.init(params)
        for i in range(12):
            if i == 6 and jaxmpi.rank() == n - 1:
                bits = np.array(params["layer"]["kernel"]).copy()
                bits.view(np.uint8).reshape(-1)[-3] ^= 4
                params["layer"]["kernel"] = jnp.asarray(bits)
            state = step(grads, state, params)
            if int(state.found) < 0:
                jaxmpi.check_replicas(state, params)
        with pytest.raises(
            jaxmpi.RankMismatchError,
            match=rf"leaf \['layer'\]\['kernel'\] of the parameters on rank {n - 1} .* at step 8",
        ) as raised:
            jaxmpi.check_replicas(state, params)
    error = raised.value
    assert (error.function, error.leaf) == ("check_replicas", "['layer']['kernel']")
    assert error.ranks == (n - 1,) and error.advice.startswith("Make the parameters equal with")
    assert str(error) == f"{error.what} {error.advice}"


@run_ranks(2)
@pytest.mark.parametrize("change", ["double", "negate", "swap"])
def test_what_a_plain_sum_would_miss_is_found(change):
    changes = {"double": lambda x: 2 * x, "negate": lambda x: -x, "swap": lambda x: x[::-1]}
    tx = jaxmpi.watch_replicas(jaxmpi.distributed(optax.sgd(0.0)), 1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=1024), jnp.float32)
    params = {"w": changes[change](x) if jaxmpi.rank() else x}
    _, state = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))(params, tx.init(params), params)
    with pytest.raises(jaxmpi.RankMismatchError, match=r"leaf \['w'\] of the parameters on rank 1"):
        jaxmpi.check_replicas(state, params)
    _, state = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))(
        {"w": x}, state, jaxmpi.synchronize(params)
    )
    jaxmpi.check_replicas(state, params)  # they were made equal


@run_ranks(2, 3)
def test_equal_replicas_are_not():
    tx = jaxmpi.watch_replicas(jaxmpi.distributed(optax.sgd(0.1)), 1)
    params = {"w": jnp.array([np.nan, 0.0, 1.0])}
    state = tx.init(params)
    for _ in range(3):
        _, state = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))(params, state, params)
    assert int(state.found) == -1 and int(state.step) == 3


# noise


@run_ranks(2, 3, 4)
def test_the_noise_scale_is_that_of_known_gradients():
    """g = G + noise of variance v in each of d numbers: tr Σ = d·v."""
    d, v, n = 4000, 0.25, jaxmpi.size()
    tx = jaxmpi.measure_noise_scale(decay=0.99)
    state = tx.init(jnp.zeros(d))
    step = jaxmpi.jit(lambda g, s: tx.update(g, s))
    for i in range(60):
        noise = np.random.default_rng([i, jaxmpi.rank()]).normal(size=d) * np.sqrt(v)
        mean, state = step(jnp.asarray(0.1 + noise, jnp.float32), state)
    signal = d * 0.01
    np.testing.assert_allclose(state.noise, d * v, rtol=0.05)
    np.testing.assert_allclose(state.signal, signal, rtol=0.25)
    np.testing.assert_allclose(state.scale(16), 16 * state.noise / state.signal, rtol=1e-6)
    assert len(entries(step, jnp.zeros(d), state)) == 1
    np.testing.assert_allclose(np.asarray(mean).std(), np.sqrt(v / n), rtol=0.1)


@pytest.mark.parametrize(
    "give",
    [{"value": 1.0}, {"grad": np.ones(2, np.float32)}, {"value_fn": jnp.sum}, {"weight": 1}],
    ids=lambda give: next(iter(give)),
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_measure_noise_scale_refuses_what_it_would_not_average(give, ranks):
    tx = optax.chain(jaxmpi.measure_noise_scale(), optax.sgd(0.1))
    with (
        jaxmpi.simulate(ranks),
        pytest.raises(ValueError, match="measure_noise_scale: update got (a )?" + next(iter(give))),
    ):
        jaxmpi.jit(lambda w: tx.update(w, tx.init(w), w, **give))(jnp.ones(2))


def test_measure_noise_scale_refuses_gradients_of_single_samples():
    tx, w = jaxmpi.measure_noise_scale(), {"w": jnp.ones(2)}
    with (
        jaxmpi.simulate(2),
        pytest.raises(ValueError, match=r"measure_noise_scale: leaf \['w'\].* of single samples"),
    ):
        jaxmpi.jit(lambda w: tx.update({"w": jnp.ones((3, 2))}, tx.init(w), w))(w)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_the_noise_scale_leaves_out_a_step_that_is_not_finite(bad):
    """1e30 is finite, and its square is not."""
    tx = jaxmpi.measure_noise_scale()
    with jaxmpi.simulate(2):
        step = jaxmpi.jit(lambda g, s: tx.update(g, s)[1])
        good = jaxmpi.PerRank(np.float32([[1, 2], [3, 5]]))
        want = step(good, tx.init(jnp.zeros(2)))
        got = step(jaxmpi.PerRank(np.float32([[1, 2], [3, bad]])), want)
        got, want = (jax.tree.map(np.asarray, state) for state in (got, want))
    assert got == want and want.steps == 1 and np.isfinite(want.signal)


# adasum


def adasum_of(gs):
    """Return the adasum of the paper, two by two."""
    if len(gs) == 1:
        return gs[0]
    pairs = [gs[i : i + 2] for i in range(0, len(gs), 2)]

    def two(a, b):
        ab = a.ravel() @ b.ravel()
        return (1 - ab / (2 * a.ravel() @ a.ravel())) * a + (
            1 - ab / (2 * b.ravel() @ b.ravel())
        ) * b

    return adasum_of([two(*p) if len(p) == 2 else p[0] for p in pairs])


@run_ranks(1, 2, 3, 4)
def test_adasum():
    gs = [
        np.random.default_rng(r).normal(size=(7, 3)).astype(np.float32) + 0.5
        for r in range(jaxmpi.size())
    ]
    tx = jaxmpi.distributed(optax.sgd(1.0), op="adasum")
    tree = {
        "w": jnp.asarray(gs[jaxmpi.rank()]),
        "zero": jnp.zeros(2),
        "b": jnp.asarray(gs[jaxmpi.rank()][0]),
    }
    updates, _ = jaxmpi.jit(lambda g, s: tx.update(g, s))(tree, tx.init(tree))
    np.testing.assert_allclose(updates["w"], -adasum_of(gs), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(updates["b"], -adasum_of([g[0] for g in gs]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(updates["zero"], np.zeros(2))


def test_adasum_is_a_mean_of_equal_gradients_and_a_sum_of_orthogonal_ones():
    equal, orthogonal = jnp.ones((3, 3)), jnp.eye(3)
    assert float(coefficients(equal).sum()) == pytest.approx(1)
    np.testing.assert_allclose(coefficients(orthogonal), [1, 1, 1])


# the same bits


def trained_bits(micro_batches, steps):
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(240, 9)).astype(np.float32),
        "y": rng.normal(size=(240, 4)).astype(np.float32),
    }
    make = lambda *shape: jnp.asarray(
        np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32
    )
    params = {"w": make(9, 17), "b": make(17), "v": make(17, 4)}
    loss = lambda p, batch: jnp.mean(
        (jnp.tanh(batch["x"] @ p["w"] + p["b"]) @ p["v"] - batch["y"]) ** 2
    )
    tx = jaxmpi.distributed(optax.adamw(0.01), micro_batches=micro_batches)

    @jaxmpi.jit
    def step(params, state, batch):
        grads = jaxmpi.micro_batch_grads(jax.grad(loss), micro_batches)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, done = tx.init(params), 0
    while done < steps:
        for batch in jaxmpi.batches(data, 48, seed=1, epoch=done // 5):
            params, state = step(params, state, batch)
            done += 1
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves((params, state)))


@run_ranks(1, 2, 3, 4)
def test_any_number_of_ranks_gives_the_same_bits():
    """After 50 steps of 12 micro-batches the bits are those of one rank."""
    import hashlib

    digest = hashlib.sha256(trained_bits(12, 50)).hexdigest()
    assert set(jaxmpi.allgather_object(digest)) == {digest}
    from jaxmpi._backends.one_process import Single
    from jaxmpi._world import session

    alone = Single()
    with session.within(session.Session(alone, jaxmpi.World(*alone.place, backend="single"))):
        bits = hashlib.sha256(trained_bits(12, 50)).hexdigest()
    assert digest == bits


@run_ranks(2, 3)
def test_micro_batches_that_do_not_fit_are_refused():
    n = jaxmpi.size()
    grads = jaxmpi.micro_batch_grads(lambda p, b: p * b.sum(), 2 * n)
    with pytest.raises(
        ValueError,
        match=r"leaf the argument of the batch has shape \[5\], which cannot be cut into 2",
    ):
        grads(jnp.ones(()), jnp.ones(5))
    with pytest.raises(
        ValueError, match=rf"micro_batches is {n + 1}, which {n} ranks cannot share"
    ):
        jaxmpi.micro_batch_grads(lambda p, b: p, n + 1)(jnp.ones(()), jnp.ones(4))
    tx = jaxmpi.distributed(optax.sgd(1.0), micro_batches=2 * n)
    with pytest.raises(
        ValueError,
        match=r"leaf \['w'\] has shape \[3\], and its first axis must be the 2 micro-batches",
    ):
        tx.update({"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)}))
    with pytest.raises(ValueError, match="weight does not go together with micro_batches"):
        tx.update({"w": jnp.ones((2, 3))}, tx.init({"w": jnp.ones(3)}), weight=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_of_integers_among_micro_batches_stays(ranks):
    tx = jaxmpi.distributed(optax.identity(), micro_batches=2)
    with jaxmpi.simulate(ranks):

        def mean(x):
            n = np.zeros((len(x), 3), jax.dtypes.float0)
            out = tx.update({"n": n, "x": x}, (), None)[0]
            assert (out["n"].dtype, out["n"].shape) == (jax.dtypes.float0, (3,))
            return out["x"]

        x = np.arange(6.0, dtype=np.float32).reshape(ranks, 2 // ranks, 3)
        got = jaxmpi.jit(mean)(jaxmpi.PerRank(x) if ranks > 1 else x[0])
    np.testing.assert_array_equal(got, [1.5, 2.5, 3.5])


@run_ranks(2, 3)
def test_the_same_run_twice_gives_the_same_bits():
    assert trained_bits(12, 10) == trained_bits(12, 10)
