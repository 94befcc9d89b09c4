"""`merge_metrics` computes what one rank computes from all samples, on every backend."""

from importlib.util import find_spec

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmpi
from jaxmpi.testing import run_ranks

ROWS = (5, 2, 7, 1)  # of ranks 0 to 3


def samples(n):
    """Make values, truths and guesses of each rank, sorted so that no rank is like the others."""
    rng = np.random.default_rng(0)
    rows = []
    for r in range(n):
        values = rng.normal(8.0 * r, 1 + r, ROWS[r]).astype(np.float32)
        rows.append((values, rng.random(ROWS[r]) < 0.3 + 0.2 * r, rng.random(ROWS[r]) < 0.7))
    return rows


class F1(nnx.Metric):
    """F1 metric whose variables say how they are merged."""

    def __init__(self):
        state = lambda: nnx.metrics.MetricState(jnp.array(0), op="sum")
        self.tp, self.fp, self.fn = state(), state(), state()
        self.largest = nnx.metrics.MetricState(jnp.array(-jnp.inf), op="max")

    def reset(self):
        self.__init__()

    def update(self, *, values, truth, guess, mask=None, **_):
        keep = jnp.ones(truth.shape, bool) if mask is None else mask
        self.tp[...] += jnp.sum(keep & truth & guess)
        self.fp[...] += jnp.sum(keep & ~truth & guess)
        self.fn[...] += jnp.sum(keep & truth & ~guess)
        self.largest[...] = jnp.maximum(
            self.largest[...], jnp.max(jnp.where(keep, values, -jnp.inf))
        )

    def compute(self):
        return jnp.stack([2 * self.tp / (2 * self.tp + self.fp + self.fn), self.largest[...]])


class Range(nnx.Metric):
    """Range metric with its own merge method, which changes it in place."""

    def __init__(self):
        self.ends = nnx.metrics.MetricState(jnp.array([jnp.inf, -jnp.inf]))

    def update(self, *, values, **_):
        low, high = self.ends[...]
        self.ends[...] = jnp.stack(
            [jnp.minimum(low, values.min()), jnp.maximum(high, values.max())]
        )

    def merge(self, other):
        (a, b), (c, d) = self.ends[...], other.ends[...]
        self.ends[...] = jnp.stack([jnp.minimum(a, c), jnp.maximum(b, d)])

    def compute(self):
        return self.ends[1] - self.ends[0]


def of_nnx():
    return nnx.MultiMetric(
        loss=nnx.metrics.Average(), spread=nnx.metrics.Welford(), f1=F1(), span=Range()
    )


def computed(metrics):
    """Return the values that a MultiMetric computes, as a dict of arrays."""
    out = metrics.compute()
    spread = {"mean": out["spread"].mean, "std": out["spread"].standard_deviation}
    return {**out, "spread": spread | {"error": out["spread"].standard_error_of_mean}}


def wanted(rows):
    x, truth, guess = map(np.concatenate, zip(*rows, strict=True))
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):  # a row that is neither
        f1 = 2 * np.sum(truth & guess) / (np.sum(truth) + np.sum(guess))
    spread = {"mean": x.mean(), "std": x.std(), "error": x.std() / np.sqrt(len(x))}
    return {"loss": x.mean(), "spread": spread, "f1": np.array([f1, x.max()]), "span": np.ptp(x)}


def compare(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5), got, want)


def update(metrics, values, truth, guess):
    metrics.update(values=values, truth=truth, guess=guess)


def check_nnx():
    """Eagerly, of metrics that were updated eagerly and in a step; and in the step itself."""
    n = jaxmpi.size()
    rows = samples(n)
    mine = [jnp.asarray(x) for x in rows[jaxmpi.rank()]]
    eager, stepped = of_nnx(), of_nnx()
    update(eager, *mine)
    want = wanted(rows)
    compare(computed(jaxmpi.merge_metrics(eager)), want)
    compare(computed(jaxmpi.merge_metrics({"here": [eager]})["here"][0]), want)
    assert int(eager.loss.count[...]) == ROWS[jaxmpi.rank()]  # its own are left alone
    if len({len(x) for x, *_ in rows}) == 1 or jaxmpi.init().backend != "xla":
        jaxmpi.nn.jit(update)(stepped, *mine)
        compare(computed(jaxmpi.merge_metrics(stepped)), want)
        compare(jaxmpi.jit(lambda metrics: computed(jaxmpi.merge_metrics(metrics)))(eager), want)


class Dropped(nnx.Metric):
    """A metric that holds a model with this rank's PRNG keys, and a key that all ranks share."""

    def __init__(self, seed):
        self.model, self.key = nnx.Dropout(0.5, rngs=nnx.Rngs(seed)), jax.random.key(7)
        self.sum = nnx.metrics.MetricState(jnp.float32(seed), op="sum")


def key_of(metric):
    ((_, key),) = nnx.to_flat_state(nnx.state(metric.model, nnx.RngKey))
    return key[...]


@run_ranks(1, 2, 3)
def test_a_metric_may_hold_prng_keys():
    r, n = jaxmpi.rank(), jaxmpi.size()
    metric = Dropped(r + 1)
    for merge in (jaxmpi.merge_metrics, jaxmpi.jit(jaxmpi.merge_metrics)):
        merged = merge(metric)
        assert float(merged.sum[...]) == n * (n + 1) / 2
        assert merged.key == jax.random.key(7)
        assert key_of(merged) == key_of(Dropped(1))  # the model of rank 0, as it is


@run_ranks(1, 2, 3, 4)
def test_merge_metrics_of_nnx_is_one_rank_on_mpi():
    check_nnx()


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_merge_metrics_of_nnx_is_one_rank_on_xla():
    check_nnx()


@pytest.mark.parametrize("ranks", [1, 3])
def test_merge_metrics_of_nnx_is_one_rank_simulated(ranks):
    rows = [tuple(x[:1] for x in row) for row in samples(ranks)]
    metrics = of_nnx()
    with jaxmpi.simulate(ranks):
        stacks = [jaxmpi.PerRank(np.stack(xs)) for xs in zip(*rows, strict=True)]
        jaxmpi.nn.jit(update)(metrics, *stacks)
        compare(computed(jaxmpi.merge_metrics(metrics)), wanted(rows))
        compare(
            jaxmpi.jit(lambda metrics: computed(jaxmpi.merge_metrics(metrics)))(metrics),
            wanted(rows),
        )


@run_ranks(2, 3)
def test_merge_metrics_of_ranks_without_samples():
    metrics, r = of_nnx(), jaxmpi.rank()
    rows = samples(jaxmpi.size())
    if r == 1:
        update(metrics, *map(jnp.asarray, rows[1]))
    else:
        metrics.spread.mean[...] = jnp.nan  # as after an update with no rows
    compare(computed(jaxmpi.merge_metrics(metrics)), wanted([rows[1]]))


# metrics of clu, and others with its methods


@flax.struct.dataclass
class Sum:
    """Sum metric with a merge method alone."""

    total: jax.Array

    def merge(self, other):
        return Sum(self.total + other.total)

    def compute(self):
        return self.total


@flax.struct.dataclass
class Last:
    """The last of several steps, and the mean of several ranks, as clu's LastValue."""

    total: jax.Array
    count: jax.Array

    def merge(self, other):
        return other

    def reduce(self):
        return Last(self.total.sum(0), self.count.sum(0))

    def compute(self):
        return self.total / self.count


@flax.struct.dataclass
class Both:
    total: Sum
    last: Last

    def merge(self, other):
        return Both(self.total.merge(other.total), self.last.merge(other.last))

    def reduce(self):
        raise AssertionError("its metrics are reduced one by one")


def check_structs():
    n, r = jaxmpi.size(), jaxmpi.rank()
    make = lambda r: Both(Sum(jnp.float32(r + 1)), Last(jnp.float32(10 * r), jnp.float32(r + 1)))
    mine = make(r)
    if jaxmpi.init().backend == "simulate":
        mine = jax.tree.map(lambda *xs: jaxmpi.PerRank(np.stack(xs)), *map(make, range(n)))
    for out in (jaxmpi.merge_metrics(mine), jaxmpi.jit(jaxmpi.merge_metrics)(mine)):
        assert float(out.total.compute()) == n * (n + 1) / 2
        assert float(out.last.compute()) == pytest.approx(10 * (n - 1) / (n + 1))


@run_ranks(1, 2, 3)
def test_merge_metrics_by_their_methods_on_mpi():
    check_structs()


@run_ranks(2, backend="xla")
def test_merge_metrics_by_their_methods_on_xla():
    check_structs()


def test_merge_metrics_by_their_methods_simulated():
    with jaxmpi.simulate(3):
        check_structs()


def check_clu():
    from clu import metrics

    kinds = {"loss": metrics.Average, "std": metrics.Std, "last": metrics.LastValue}
    by_name = {name: kind.from_output("values") for name, kind in kinds.items()}
    collected = metrics.CollectingMetric.from_outputs(("values",))
    Metrics = metrics.Collection.create(**by_name, all=collected)
    rows = [x for x, *_ in samples(jaxmpi.size())]
    mine = Metrics.empty()
    for half in np.array_split(rows[jaxmpi.rank()], 2):
        mine = mine.merge(Metrics.single_from_model_output(values=half))
    merged = jaxmpi.merge_metrics(mine)
    out = {name: getattr(merged, name).compute() for name in ("loss", "last", "all")}
    x = np.concatenate(rows)
    last = np.concatenate([np.array_split(x, 2)[1] for x in rows])
    np.testing.assert_allclose(out["loss"], x.mean(), rtol=1e-5)
    # compute() of clu 0.0.12 calls jnp.clip as it was
    squares = merged.std.sum_of_squares / merged.std.count
    np.testing.assert_allclose(squares - out["loss"] ** 2, x.var(), rtol=1e-4)
    np.testing.assert_allclose(out["last"], last.mean(), rtol=1e-5)
    np.testing.assert_array_equal(out["all"]["values"], x)


@pytest.mark.skipif(find_spec("clu") is None, reason="clu is not installed")
@run_ranks(1, 2, 3)
def test_merge_metrics_of_clu():
    check_clu()


class Undeclared(nnx.Metric):
    def __init__(self, op=None):
        self.hits = nnx.metrics.MetricState(jnp.array(3), **({} if op is None else {"op": op}))


class Edges(nnx.Metric):
    def __init__(self, edges):
        self.edges = nnx.data(jnp.asarray(edges))


@run_ranks(1, 2)
def test_merge_metrics_refuses_what_it_cannot_merge():
    r, several = jaxmpi.rank(), jaxmpi.size() > 1
    with pytest.raises(
        TypeError,
        match=r"variable \['a'\].hits of Undeclared .*op='sum'\), or write Undeclared.merge",
    ):
        jaxmpi.merge_metrics({"a": Undeclared()})
    with pytest.raises(
        ValueError, match=r"op of variable .hits is 'mean'. Use one of sum, max, min"
    ):
        jaxmpi.merge_metrics(Undeclared("mean"))
    with pytest.raises(
        TypeError, match=r"\['f1'\] is a float, and no metric. Merge metrics before compute"
    ):
        jaxmpi.merge_metrics({"f1": 0.5})
    jaxmpi.merge_metrics(Edges([0.0, 1.0]))
    if several:
        with pytest.raises(TypeError, match=r"array .edges of Edges differs between the ranks"):
            jaxmpi.merge_metrics(Edges([0.0, r]))
        with pytest.raises(
            jaxmpi.RankMismatchError, match=r"merge_metrics: rank 1 has other metrics"
        ):
            jaxmpi.merge_metrics(nnx.metrics.Average() if r == 0 else nnx.metrics.Welford())
        full = Undeclared("sum")
        full.hits.set_value(jnp.array(2**31 - 1))
        with pytest.raises(
            ValueError,
            match=r"variable .hits adds up to 4294967294 over the ranks, which int32 cannot",
        ):
            jaxmpi.merge_metrics(full)
        full.hits.set_value(jnp.array(-(2**30) - 5))
        with pytest.raises(
            ValueError,
            match=r"variable .hits adds up to -2147483658 over the ranks, which int32 cannot",
        ):
            jaxmpi.merge_metrics(full)
        full.hits.set_value(jnp.array(-(2**30)))
        assert int(jaxmpi.merge_metrics(full).hits[...]) == -(2**31)
