"""`nn.average_batch_stats` averages statistics over ranks, in the forms of many libraries.

Each case is checked on real ranks, on simulated ones, and on xla, against NumPy's mean and variance
of all samples.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxmpi
from jaxmpi._nn.stat_names import named_leaves, pair_up
from jaxmpi.nn import average_batch_stats
from jaxmpi.testing import run_ranks

ROWS = (9, 2, 5, 1)  # of ranks 0 to 3
FEATURES = 3


def samples(n):
    """The rows of each rank; their means and spreads differ."""
    rng = np.random.default_rng(0)
    return [rng.normal(4.0 * r, 1 + r, (ROWS[r], FEATURES)).astype(np.float32) for r in range(n)]


def pooled(rows, weights=None):
    """The mean and variance of all rows, or with a weight for each rank, whatever its rows."""
    weights = [len(x) for x in rows] if weights is None else weights
    w = np.concatenate([np.full(len(x), w / len(x)) for x, w in zip(rows, weights, strict=True)])
    x = np.concatenate(rows).astype(np.float64)
    mean = np.average(x, 0, w)
    return mean, np.average((x - mean) ** 2, 0, w)


def each(trees):
    """Pick this rank's tree from a list of all ranks'; under simulation, take all."""
    if jaxmpi.init().backend != "simulate":
        return trees[jaxmpi.rank()]
    return jax.tree.map(lambda *xs: jaxmpi.PerRank(np.stack(xs)), *trees)


def on_rank(x, r):
    return np.asarray(x[r] if isinstance(x, jaxmpi.PerRank) else x)


def ranks_here():
    return range(jaxmpi.size()) if jaxmpi.init().backend == "simulate" else [jaxmpi.rank()]


# names: of a mean and a variance, the tree; of the result, both


def flat(mean, var):
    return lambda m, v, n: {mean: m, var: v}, lambda out: (out[mean], out[var])


def haiku(m, v, n):
    """Make Haiku's state of an exponential moving average after 3 steps with decay 0.9."""
    k = np.float32(1 - 0.9**3)
    fields = lambda x: {"average": x, "hidden": k * x, "counter": np.int32(3)}
    return {"bn/~/mean_ema": fields(m), "bn/~/var_ema": fields(v)}


def of_haiku(out):
    k = 1 - 0.9**3
    mean, var = out["bn/~/mean_ema"], out["bn/~/var_ema"]
    for r in ranks_here():
        np.testing.assert_allclose(
            on_rank(mean["hidden"], r), k * on_rank(mean["average"], r), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            on_rank(var["hidden"], r), k * on_rank(var["average"], r), rtol=1e-5
        )
        assert on_rank(mean["counter"], r) == on_rank(var["counter"], r) == 3
    return mean["average"], var["average"]


def squared(x):
    return jax.tree.map(lambda x: x**2, x)


def brax(m, v, n):
    count = {"hi": np.uint32(0), "lo": np.uint32(n)}
    return {
        "count": count,
        "mean": {"obs": m},
        "std": {"obs": np.sqrt(v)},
        "summed_variance": {"obs": n * v},
    }


def of_brax(out):
    for r in ranks_here():
        n = on_rank(out["count"]["lo"], r)
        squares = on_rank(out["summed_variance"]["obs"], r)
        np.testing.assert_allclose(squares / n, on_rank(out["std"]["obs"], r) ** 2, rtol=1e-5)
    return out["mean"]["obs"], squared(out["std"]["obs"])


def counted(squares):
    """The state of Welford's algorithm, with the sum of squares under one of its names."""

    def of(out):
        for r in ranks_here():
            # the count stays that of this rank, from which its next update continues
            assert on_rank(out["count"], r) == ROWS[r]
        if isinstance(out[squares], jaxmpi.PerRank):
            counts = np.asarray(ROWS[: jaxmpi.size()], np.float32)[:, None]
            return out["mean"], jaxmpi.PerRank(np.asarray(out[squares]) / counts)
        return out["mean"], out[squares] / out["count"]

    def make(m, v, n):
        return {"count": np.int32(n), "mean": m, squares: (n * v).astype(np.float32)}

    return make, of


WEIGHTED = {  # by counts of their own
    "welford m2": counted("m2"),
    "welford ssd": counted("ssd"),
    "brax": (brax, of_brax),
    "count and var": (
        lambda m, v, n: {"count": np.int32(n), "mean": m, "var": v},
        lambda out: (out["mean"], out["var"]),
    ),
    "float count": (
        lambda m, v, n: {"n": np.float32(n), "mu": m, "sigma": np.sqrt(v)},
        lambda out: (out["mu"], squared(out["sigma"])),
    ),
}
NAMED = {
    "flax": flat("mean", "var"),
    "torch": flat("layer1.bn.running_mean", "layer1.bn.running_var"),
    "camel": flat("runningMean", "runningVar"),
    "digits": flat("mean1", "var1"),
    "keras": flat("bn/moving_mean", "bn/moving_variance"),
    "std": (
        lambda m, v, n: {"obs_mean": m, "obs_std": np.sqrt(v)},
        lambda out: (out["obs_mean"], squared(out["obs_std"])),
    ),
    "fields": (
        lambda m, v, n: {"mean": [m, m], "variance": [v, v]},
        lambda out: (out["mean"][1], out["variance"][1]),
    ),
    "haiku": (haiku, of_haiku),
    "layer called var": (
        lambda m, v, n: {"var": {"mean": m, "var": v}},
        lambda out: (out["var"]["mean"], out["var"]["var"]),
    ),
}


def check_names(case, weight):
    n = jaxmpi.size()
    rows = samples(n)
    make, found = (NAMED | WEIGHTED)[case]
    trees = [make(x.mean(0), x.var(0), len(x)) for x in rows]
    given = {"weight": each([np.int32(len(x)) for x in rows])} if weight else {}
    out = average_batch_stats(each(trees), **given)
    mean, var = found(out)
    want_mean, want_var = pooled(rows, None if weight or case in WEIGHTED else np.ones(n))
    for r in ranks_here():
        np.testing.assert_allclose(on_rank(mean, r), want_mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(on_rank(var, r), want_var, rtol=1e-5)


CASES = [
    *((case, weight) for case in NAMED for weight in (False, True)),
    *((case, False) for case in WEIGHTED),
]


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("case", "weight"), CASES)
def test_average_batch_stats_is_that_of_all_samples(case, weight):
    check_names(case, weight)


@pytest.mark.slow
@run_ranks(2, backend="xla")
@pytest.mark.parametrize(("case", "weight"), CASES)
def test_average_batch_stats_is_that_of_all_samples_on_xla(case, weight):
    check_names(case, weight)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("case", "weight"), CASES)
def test_average_batch_stats_is_that_of_all_samples_simulated(case, weight, ranks):
    with jaxmpi.simulate(ranks):
        check_names(case, weight)


def check_repeated(part):
    """Statistics that are updated and averaged in turn are those of one rank that saw all."""
    n = jaxmpi.size()
    state = {"count": np.int64(0), "mean": np.zeros(2), "ssd": np.zeros(2)}
    rng = np.random.default_rng(0)
    batches = [[rng.normal(3.0 * (t % 4), 1 + r, (ROWS[r], 2)) for r in range(n)] for t in range(6)]
    states = [dict(state) for _ in range(n)]
    for batch in batches:
        for r in part:
            x, own = batch[r], states[r]
            count = own["count"] + len(x)
            d = x - own["mean"]
            mean = own["mean"] + d.sum(0) / count
            states[r] = {"count": count, "mean": mean, "ssd": own["ssd"] + (d * (x - mean)).sum(0)}
        out = average_batch_stats(each(states))
        again = average_batch_stats(out)
        for r in part:
            states[r] = {name: on_rank(x, r) for name, x in out.items()}
            for name, x in again.items():  # an average of averages is the same
                np.testing.assert_allclose(on_rank(x, r), states[r][name], rtol=1e-12)
    x = np.concatenate([x for batch in batches for x in batch])
    for r in part:
        assert states[r]["count"] == 6 * ROWS[r]
        np.testing.assert_allclose(states[r]["mean"], x.mean(0), rtol=1e-12)
        np.testing.assert_allclose(states[r]["ssd"] / states[r]["count"], x.var(0), rtol=1e-12)


@run_ranks(1, 2, 3)
def test_average_batch_stats_at_every_step_counts_no_sample_twice():
    with jax.enable_x64(True):
        check_repeated([jaxmpi.rank()])


def test_average_batch_stats_at_every_step_counts_no_sample_twice_simulated():
    with jaxmpi.simulate(3), jax.enable_x64(True):
        check_repeated(range(3))


@run_ranks(2, 3)
def test_average_batch_stats_in_a_step():
    rows = samples(jaxmpi.size())
    x = rows[jaxmpi.rank()]
    out = jaxmpi.jit(lambda m, v, n: average_batch_stats({"mean": m, "var": v}, n))(
        x.mean(0), x.var(0), float(len(x))
    )
    mean, var = pooled(rows)
    np.testing.assert_allclose(out["mean"], mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out["var"], var, rtol=1e-5)


@run_ranks(2, 3)
def test_average_batch_stats_of_flax():
    n, r = jaxmpi.size(), jaxmpi.rank()
    rows = samples(n)
    model = linen.BatchNorm(use_running_average=False, momentum=0.0)
    _, after = model.apply(model.init(jax.random.key(0), rows[r]), rows[r], mutable=["batch_stats"])
    norm = nnx.BatchNorm(FEATURES, momentum=0.0, rngs=nnx.Rngs(0))
    norm(rows[r])
    of_nnx = average_batch_stats(nnx.state(norm, nnx.BatchStat), weight=len(rows[r]))
    of_linen = average_batch_stats(after["batch_stats"], weight=len(rows[r]))
    mean, var = pooled(rows)
    for got in (of_linen, {name: x[...] for name, x in of_nnx.items()}):
        np.testing.assert_allclose(got["mean"], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got["var"], var, rtol=1e-4)
    spectral = nnx.SpectralNorm(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    kept = nnx.state(spectral, nnx.BatchStat)  # no variance, and equal on all ranks
    for x, y in zip(jax.tree.leaves(average_batch_stats(kept)), jax.tree.leaves(kept), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("named", [True, False])
@run_ranks(2, 3)
def test_average_batch_stats_of_equinox(named):
    """Both modes; a State of `make_with_state` has names, and one of the model alone has none."""
    rows = samples(jaxmpi.size())
    x = rows[jaxmpi.rank()]
    want_mean, want_var = pooled(rows)
    for mode, momentum, k in (("ema", None, 1), ("batch", 0.75, 1 - 0.75**2)):
        make = lambda mode=mode: eqx.nn.BatchNorm(FEATURES, axis_name="batch", mode=mode)
        norm = make()
        state = eqx.nn.make_with_state(make)()[1] if named else eqx.nn.State(norm)
        values, treedef = jax.tree.flatten(state)
        values = [np.asarray(False) if mode == "ema" else np.int32(2), k * x.mean(0), k * x.var(0)]
        got = jax.tree.leaves(
            average_batch_stats(treedef.unflatten(values), len(x), momentum=momentum)
        )
        assert got[0] == values[0]
        np.testing.assert_allclose(got[1], k * want_mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[2], k * want_var, rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"mode 'batch', whose state does not hold its momentum. Pass momentum="
    ):
        average_batch_stats(treedef.unflatten(values))


@run_ranks(1, 2, 3)
def test_average_batch_stats_keeps_the_digits_of_a_small_variance():
    stats = {"mean": jnp.array([100.0, 3000.0]), "var": jnp.array([1e-4, 0.04])}
    np.testing.assert_allclose(average_batch_stats(stats)["var"], stats["var"], rtol=1e-6)
    short = jax.tree.map(
        lambda x: x.astype(jnp.float16), {"mean": jnp.array([300.0]), "var": jnp.array([1.0])}
    )
    got = average_batch_stats(short, 60000)  # whose products are beyond float16
    np.testing.assert_allclose(got["var"], [1.0])
    assert got["var"].dtype == got["mean"].dtype == jnp.float16
    wave = {"mean": jnp.array([1j * jaxmpi.rank()]), "var": jnp.array([1.0])}
    np.testing.assert_allclose(
        average_batch_stats(wave)["var"], [1 + np.var(np.arange(jaxmpi.size()))], rtol=1e-6
    )


@run_ranks(2, 3)
def test_average_batch_stats_of_ranks_without_samples():
    n, r = jaxmpi.size(), jaxmpi.rank()
    own = {
        "mean": jnp.array([2.0 if r == n - 1 else np.nan]),
        "var": jnp.array([3.0 if r == n - 1 else np.nan]),
    }
    for out in (
        average_batch_stats(own, float(r == n - 1)),
        average_batch_stats(own | {"count": np.int32(7 * (r == n - 1))}),
    ):
        np.testing.assert_array_equal([out["mean"], out["var"]], [[2], [3]])
    fresh = {"count": np.int32(0), "mean": jnp.array([float(r)]), "m2": jnp.zeros(1)}
    out = average_batch_stats(fresh)  # nobody has any: all stays
    assert float(out["mean"][0]) == r and float(out["m2"][0]) == 0
    with pytest.raises(
        ValueError,
        match=r"count \['count'\] is 0 on rank 0 and not on others, .*\['m2'\].* Pass the variance",
    ):
        average_batch_stats({"count": np.int32(r), "mean": jnp.zeros(1), "m2": jnp.zeros(1)})
    with pytest.raises(
        ValueError, match=r"count \['count'\] is -2 on rank 1, and must be 0 or more"
    ):
        average_batch_stats(
            {"count": np.int32(-2 if r == 1 else 5), "mean": jnp.zeros(1), "var": jnp.zeros(1)}
        )
    with pytest.raises(ValueError, match=r"average_batch_stats: weight is -1.0. .*rank 1 did not"):
        average_batch_stats(
            {"mean": jnp.zeros(1), "var": jnp.zeros(1)}, weight=-1.0 if r == 1 else 1.0
        )
    with pytest.raises(jaxmpi.RankMismatchError):
        average_batch_stats({"mean": jnp.zeros(1)}, weight=None if r == 1 else 1.0)


@run_ranks(1, 2)
@pytest.mark.parametrize("count", [-1, np.nan, np.inf])
def test_average_batch_stats_refuses_a_count_that_is_none_on_any_number_of_ranks(count):
    stats = {"mean": jnp.zeros(1), "var": jnp.ones(1), "count": jnp.array(count)}
    with pytest.raises(
        ValueError, match=rf"count \['count'\] is {count}.* on rank 0, and must be 0 or more"
    ):
        average_batch_stats(stats)
    out = average_batch_stats(stats, weight=2.0)  # whose numbers count in the place of the counts
    np.testing.assert_array_equal([out["mean"], out["var"]], [[0], [1]])


UNKNOWN = {
    "variance without mean": (
        {"var": np.ones(2)},
        r"leaf \['var'\] is a spread .* no mean of shape \[2\].* as 'mean'",
    ),
    "of another shape": (
        {"mean": np.ones(3), "var": np.ones(2)},
        r"leaf \['var'\] is a spread of shape \[2\], and the mean beside it, \['mean'\], is "
        r"float32 of shape \[3\]",
    ),
    "mean of integers": (
        {"mean": np.int32([1]), "var": np.ones(1)},
        r"leaf \['var'\] .* the mean beside it, \['mean'\], is int32 of shape \[1\]. Pass floats",
    ),
    "logarithms": (
        {"log_mean": np.ones(1), "log_var": np.ones(1)},
        r"leaf \['log_var'\] is the logarithm or the inverse of a spread .* Pass the variance "
        r"itself",
    ),
    "logvar": (
        {"mean": np.ones(1), "bn/logvar": np.ones(1)},
        r"leaf \['bn/logvar'\] is the logarithm",
    ),
    "inverse": (
        {"mean": np.ones(1), "inv_std": np.ones(1)},
        r"leaf \['inv_std'\] is the logarithm or the inverse",
    ),
    "rstd": (
        {"mean": np.ones(1), "rstd": np.ones(1)},
        r"leaf \['rstd'\] is the logarithm or the inverse",
    ),
    "covariance": (
        {"mean": np.ones(2), "cov": np.ones((2, 2))},
        r"leaf \['cov'\] is a spread of shape \[2, 2\]",
    ),
    "no count": (
        {"mean": np.ones(2), "m2": np.ones(2)},
        r"leaf \['m2'\] is a sum over samples, .* as 'count', or as weight=",
    ),
    "no names": ([np.ones(2), np.ones(2)], r"leaf \[0\] has no name.*Pass a dict with names"),
    "other names": (
        {"mean": np.ones(2), "v": np.ones(2)},
        r"leaf \['v'\] stands beside the mean \['mean'\].*Call it 'var'",
    ),
    "a sum": (
        {"total": np.ones(2), "count": 3},
        r"leaf \['total'\] is a sum.*jaxmpi.merge_metrics",
    ),
}


@run_ranks(1, 2)
def test_average_batch_stats_refuses_what_it_cannot_know():
    for stats, said in UNKNOWN.values():
        with pytest.raises(ValueError, match="average_batch_stats: " + said):
            average_batch_stats(stats)
    with pytest.raises(TypeError, match=r"average_batch_stats: leaf \['name'\] is a str"):
        average_batch_stats({"name": "bn"})


@run_ranks(1, 2, 3)
def test_average_batch_stats_averages_what_is_no_variance():
    r, n = jaxmpi.rank(), jaxmpi.size()
    plain = {
        "mean": {"a": np.float32(r)},
        "second_moment": np.float32(r),
        "ema_w": np.float32(r),
        "steps": np.int64(r),
    }
    out = average_batch_stats(plain)
    assert (
        float(out["mean"]["a"]) == float(out["second_moment"]) == float(out["ema_w"]) == (n - 1) / 2
    )
    assert out["steps"] is plain["steps"]
    # by counts that are floats
    counted = average_batch_stats({"count": np.float32(r + 1), "mean": np.float32(r)})
    assert float(counted["mean"]) == pytest.approx(
        np.average(np.arange(n), weights=np.arange(n) + 1)
    )
    assert float(counted["count"]) == r + 1
    number = average_batch_stats({"mean": 1.0 * r, "var": 1.0}, weight=r + 1)
    assert float(number["mean"]) == pytest.approx(float(counted["mean"]))
    assert average_batch_stats({}) == {} and average_batch_stats({"step": 3}) == {"step": 3}


class Watched(list):
    """A list that counts the items that are read of it."""

    read = 0

    def __iter__(self):
        for x in super().__iter__():
            self.read += 1
            yield x

    def __getitem__(self, i):
        self.read += 1
        return super().__getitem__(i)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: {f"layer{i}": {"ema": np.float32(1)}},
        lambda i: {f"layer{i}_ema": np.float32(1)},
        lambda i: {f"layer{i}": {"mean": np.float32(1), "other_mean": np.float32(1)}},
        lambda i: {f"layer{i}_mean": np.float32(1), f"layer{i}_count": np.int32(1)},
        lambda i: {f"layer{i}_mean": np.float32(1), f"layer{i}_var": np.float32(1)},
    ],
)
def test_pair_up_reads_each_leaf_a_few_times(make):
    for n in (1, 40):
        stats = {name: value for i in range(n) for name, value in make(i).items()}
        named = Watched(named_leaves(stats, jax.tree.leaves(stats)))
        pair_up(named, weighted=False, momentum=None)
        assert named.read <= 8 * len(named)


def test_pair_up_takes_a_name_that_another_one_begins_with():
    stats = {"bn": np.float32(1), "bn/ema": np.float32(1)}
    named = [*named_leaves(stats, jax.tree.leaves(stats))]
    assert len(pair_up(named, weighted=False, momentum=None)) == 2
