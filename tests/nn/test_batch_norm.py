"""`nn.BatchNorm` and `nn.linen.BatchNorm`: n ranks with masks are one rank with all valid rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxmpi
from jaxmpi.testing import run_ranks

ROWS, FEATURES, STEPS = 6, 3, 2
VALID = [(3, 3, 3, 3), (5, 1, 3, 6), (5, 0, 3, 0), (0, 0, 2, 0)]  # valid rows of ranks 0 to 3
SHAPES = {"rows": (ROWS, FEATURES), "images": (ROWS, 4, 2, FEATURES)}
F64 = {"dtype": jnp.float64, "param_dtype": jnp.float64}
OPTIONS = {
    "fast": {},
    "two passes": {"use_fast_variance": False},
    "no scale": {"use_scale": False, "momentum": 0.5},
    "no bias": {"use_bias": False, "epsilon": 0.1},
}


def batches(n, valid, shape):
    """Make the rows of all ranks for each step, their expected outputs, and masks."""
    rng = np.random.default_rng(0)
    mask = np.arange(ROWS) < np.array(valid[:n])[:, None]
    for _ in range(STEPS):
        x, t = rng.normal(size=(2, n, *shape)) * 2 + np.arange(n).reshape(n, *[1] * len(shape))
        x[~mask] = 99.0  # which would show
        yield x, t, mask


def of_nnx(options, axis):
    kind = nnx.BatchNorm if axis is None else jaxmpi.nn.BatchNorm
    norm = kind(FEATURES, rngs=nnx.Rngs(0), axis_name=axis, **F64, **options)
    for stat in (norm.mean, norm.var):
        stat.set_value(stat.get_value().astype(jnp.float64))  # Flax makes them float32

    def step(norm, x, t, mask, share):
        def loss_of(norm, x):
            y = norm(x, mask=mask.reshape(-1, *[1] * (x.ndim - 1)))
            keep = jnp.broadcast_to(mask.reshape(-1, *[1] * (x.ndim - 1)), x.shape)
            return jnp.sum(jnp.where(keep, (y - t) ** 2, 0)) * share

        dnorm, dx = nnx.grad(loss_of, argnums=(0, 1))(norm, x)
        grads = nnx.to_pure_dict(nnx.state(dnorm, nnx.Param))
        return grads if axis is None else jaxmpi.tree_allreduce(grads), dx

    return norm, step, lambda norm: (norm.mean[...], norm.var[...])


def check(case, valid, shape, each):
    """`each` makes the argument of a step of the list of all ranks' values."""
    n = jaxmpi.size()
    with jax.enable_x64(True):
        ours, step, stats = of_nnx(OPTIONS[case], jaxmpi.AXIS)
        one, step_of_one, stats_of_one = of_nnx(OPTIONS[case], None)
        run = jaxmpi.nn.jit(step)
        for x, t, mask in batches(n, valid, SHAPES[shape]):
            total = max(mask.sum(), 1)
            share = n / total  # the mean over the ranks is over all valid rows
            grads, dx = run(ours, each(x), each(t), each(mask), share)
            if mask.any():
                want, dx_of_one = step_of_one(
                    one, x[mask], t[mask], np.ones(total, bool), 1 / total
                )
                for got, value in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
                    np.testing.assert_allclose(np.asarray(got), value, rtol=1e-12, atol=1e-12)
                mine = np.asarray(dx) if isinstance(dx, jaxmpi.PerRank) else np.asarray(dx)[None]
                here = range(n) if isinstance(dx, jaxmpi.PerRank) else [jaxmpi.rank()]
                places = np.cumsum(mask).reshape(mask.shape) - 1
                for r, of_rank in zip(here, mine, strict=True):
                    wanted = np.asarray(dx_of_one)[places[r][mask[r]]] * n
                    np.testing.assert_allclose(of_rank[mask[r]], wanted, rtol=1e-11, atol=1e-12)
            for got, value in zip(stats(ours), stats_of_one(one), strict=True):
                assert not isinstance(got, jaxmpi.PerRank)  # equal on all ranks
                np.testing.assert_allclose(np.asarray(got), value, rtol=1e-12, atol=1e-12)
        if each is own:
            bits = jaxmpi.allgather_object([np.asarray(x).tobytes() for x in stats(ours)])
            assert bits == [bits[0]] * n


def own(values):
    return values[jaxmpi.rank()]


@run_ranks(1, 2, 3, 4)
def test_batch_norm_with_masks_is_one_rank_with_all_rows():
    for valid in VALID[1:3]:
        check("fast", valid, "rows", own)


@pytest.mark.slow
@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", OPTIONS)
def test_batch_norm_with_masks_is_one_rank_with_all_rows_in_all_cases(case, shape):
    for valid in VALID:
        check(case, valid, shape, own)


@pytest.mark.slow
@run_ranks(2, backend="xla")
@pytest.mark.parametrize("case", OPTIONS)
def test_batch_norm_with_masks_is_one_rank_with_all_rows_on_xla(case):
    for valid in VALID:
        check(case, valid, "rows", own)


@pytest.mark.parametrize("case", ["fast", "two passes"])
def test_batch_norm_with_masks_is_one_rank_with_all_rows_simulated(case):
    with jaxmpi.simulate(3):
        for valid in VALID[1:3]:
            check(case, valid, "rows", lambda values: jaxmpi.PerRank(values))


@run_ranks(2, 3)
def test_batch_norm_without_a_mask_counts_every_row_of_unequal_batches():
    n, r = jaxmpi.size(), jaxmpi.rank()
    rows = [np.random.default_rng(q).normal(q, 1, (2 + 3 * q, FEATURES)) for q in range(n)]
    norm = jaxmpi.nn.BatchNorm(FEATURES, momentum=0.0, rngs=nnx.Rngs(0))
    norm(jnp.asarray(rows[r], jnp.float32))  # eagerly; then in a step
    for _ in range(2):
        np.testing.assert_allclose(norm.mean[...], np.concatenate(rows).mean(0), rtol=1e-5)
        np.testing.assert_allclose(norm.var[...], np.concatenate(rows).var(0), rtol=1e-5)
        jaxmpi.nn.jit(lambda norm, x: norm(x))(norm, jnp.asarray(rows[r], jnp.float32))


@run_ranks(4, axes={"data": 2, "model": 2})
def test_batch_norm_over_groups_of_ranks():
    r = jaxmpi.rank()
    x = np.random.default_rng(r).normal(r, 1, (5, FEATURES)).astype(np.float32)
    mask = np.arange(5) <= r
    sides = {"named": {"axis_name": "model"}, "pairs": {"axis_index_groups": [[0, 1], [2, 3]]}}
    for side in sides.values():
        norm = jaxmpi.nn.BatchNorm(FEATURES, momentum=0.0, rngs=nnx.Rngs(0), **side)
        jaxmpi.nn.jit(lambda norm, x, mask: norm(x, mask=mask[:, None]))(norm, x, mask)
        pair = [q for q in range(4) if q // 2 == r // 2]
        rows = [np.random.default_rng(q).normal(q, 1, (5, FEATURES))[: q + 1] for q in pair]
        np.testing.assert_allclose(norm.mean[...], np.concatenate(rows).mean(0), rtol=1e-5)


@run_ranks(1, 3)
def test_batch_norm_statistics_are_free_of_what_stands_in_rows_that_are_not_valid():
    n, r = jaxmpi.size(), jaxmpi.rank()
    x = np.array([[1.0, r], [3.0, r], [np.nan, np.inf]], np.float32)
    norm = jaxmpi.nn.BatchNorm(2, momentum=0.0, rngs=nnx.Rngs(0))
    y = norm(x, mask=np.array([[True], [True], [False]]))
    np.testing.assert_allclose(norm.mean[...], [2, (n - 1) / 2])
    np.testing.assert_allclose(norm.var[...], [1, np.var(np.arange(n))], atol=1e-6)
    assert np.isfinite(y[:2]).all()


LIKE_FLAX = {
    "plain": {},
    "features first": {"axis": 1},
    "bfloat16": {"dtype": jnp.bfloat16},
    "float16 in": {"x": np.float16},
    "float16 parameters": {"param_dtype": jnp.float16},
    "two passes": {"use_fast_variance": False},
    "used": {"use_running_average": True},
    "used bfloat16": {"use_running_average": True, "dtype": jnp.bfloat16},
    "one rank's": {"axis_name": None},
}


@pytest.mark.parametrize("case", LIKE_FLAX)
@pytest.mark.parametrize("masked", [False, True])
def test_batch_norm_on_one_rank_is_that_of_flax(case, masked):
    jaxmpi.init()
    options = {"use_running_average": False} | LIKE_FLAX[case]
    kind = options.pop("x", np.float32)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 4, 4)).astype(kind)
    mask = np.array([True, True, False, True, True]).reshape(5, 1, 1) if masked else None
    of_flax = {name: value for name, value in options.items() if name != "axis_name"}

    ours = jaxmpi.nn.BatchNorm(4, rngs=nnx.Rngs(0), **options)
    theirs = nnx.BatchNorm(4, rngs=nnx.Rngs(0), **of_flax)
    assert isinstance(ours, nnx.BatchNorm)
    compare(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)))
    compare(ours(x, mask=mask), theirs(x, mask=mask))
    compare(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)))

    ours, theirs = jaxmpi.nn.linen.BatchNorm(**options), linen.BatchNorm(**of_flax)
    variables = theirs.init(jax.random.key(0), x)
    compare(ours.init(jax.random.key(0), x), variables)
    call = lambda norm: norm.apply(variables, x, mutable=["batch_stats"], mask=mask)
    compare(call(ours), call(theirs))


WITHOUT_FLOAT32 = {"force_float32_reductions": False}
OF_LINEN = {  # dtype of the rows, options
    "float16": (np.float16, WITHOUT_FLOAT32 | {"dtype": jnp.float16, "param_dtype": jnp.float16}),
    "bfloat16": (jnp.bfloat16, WITHOUT_FLOAT32 | {"param_dtype": jnp.bfloat16}),
    "float16 statistics in float32": (np.float16, WITHOUT_FLOAT32),
    "integers": (np.int32, WITHOUT_FLOAT32 | {"use_fast_variance": False}),
    "integers alone": (np.int32, {"use_scale": False, "use_bias": False}),
}


@pytest.mark.parametrize("case", OF_LINEN)
def test_batch_norm_of_linen_has_the_dtypes_of_flax_and_counts_beyond_float16(case):
    jaxmpi.init()
    kind, options = OF_LINEN[case]
    kinds = (jaxmpi.nn.linen.BatchNorm, linen.BatchNorm)
    x = np.random.default_rng(0).normal([1, 7], 2, (70_000, 2)).astype(kind)
    both = [norm(use_running_average=False, momentum=0.5, **options) for norm in kinds]
    variables = both[0].init(jax.random.key(0), x[:1])
    run = jax.jit(
        lambda norm, x: norm.apply(variables, x, mutable=["batch_stats"]), static_argnums=0
    )
    ours, theirs = (run(norm, x) for norm in both)
    assert np.isfinite(np.asarray(ours[0], float)).all()
    compare(ours, theirs, 1e-2 if kind == np.float16 else None)


def compare(got, want, tolerance=None):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        tight = tolerance or (1e-6 if a.dtype.itemsize >= 4 else 1e-2)
        np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), tight, tight)


def test_batch_norm_changes_its_mode_as_that_of_flax():
    jaxmpi.init()
    norm = jaxmpi.nn.BatchNorm(2, rngs=nnx.Rngs(0))
    x = jnp.arange(6.0).reshape(3, 2)
    norm.eval()
    np.testing.assert_allclose(norm(x), x / np.sqrt(1 + 1e-5), rtol=1e-6)
    assert nnx.view(norm, use_running_average=False).use_running_average is False
    norm.use_running_average = None
    with pytest.raises(ValueError, match="No `use_running_average` argument was provided"):
        norm(x)


class Net(linen.Module):
    norm: type

    @linen.compact
    def __call__(self, x, mask=None):
        return self.norm(use_running_average=False, momentum=0.0)(linen.Dense(3)(x), mask=mask)


@run_ranks(2, 3)
def test_batch_norm_of_linen_with_masks_is_one_rank_with_all_rows():
    n, r = jaxmpi.size(), jaxmpi.rank()
    x = np.random.default_rng(0).normal(size=(n, ROWS, FEATURES)).astype(np.float32)
    for valid in VALID[:3]:
        mask = np.arange(ROWS) < np.array(valid[:n])[:, None]
        model, one = Net(jaxmpi.nn.linen.BatchNorm), Net(linen.BatchNorm)
        variables = model.init(jax.random.key(0), x[r])
        on_one = one.init(jax.random.key(0), x[r])
        assert jax.tree.structure(variables) == jax.tree.structure(on_one)
        call = jaxmpi.jit(
            lambda v, x, m, model=model: model.apply(v, x, m[:, None], mutable=["batch_stats"])
        )
        y, after = call(variables, x[r], mask[r])
        want, after_one = one.apply(variables, x[mask], mutable=["batch_stats"])
        np.testing.assert_allclose(
            y[mask[r]], np.asarray(want)[mask[:r].sum() :][: mask[r].sum()], rtol=1e-4, atol=1e-5
        )
        for got, value in zip(jax.tree.leaves(after), jax.tree.leaves(after_one), strict=True):
            np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)


@run_ranks(2, 3)
def test_batch_norm_sends_one_message():
    norm = jaxmpi.nn.BatchNorm(FEATURES, rngs=nnx.Rngs(0))
    plan = jaxmpi.explain(
        jaxmpi.nn.jit(lambda norm, x: norm(x)), norm, np.ones((4, FEATURES), np.float32)
    )
    assert plan.messages == 1
