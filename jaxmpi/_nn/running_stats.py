"""Running statistics of all ranks as one: means, variances, and the counts that weigh them.

The leaves that belong together are found by their names first (`stat_names`). Then one program with
two rounds of messages computes all means, and all variances around them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxmpi._collectives.tree_calls import refuse_stray
from jaxmpi._collectives.trees import Caller
from jaxmpi._consistency.mismatch import in_words
from jaxmpi._jit.api import anywhere
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, widest
from jaxmpi._nn.stat_names import FUNCTION, StatGroup, StatLeaf, named_leaves, pair_up
from jaxmpi._optim.float_leaves import sum_of
from jaxmpi._optim.mean import Weight, as_weight, check_total
from jaxmpi._world import session

__all__ = ["average_batch_stats"]

GOOD, BAD_COUNT, NO_SAMPLES = range(3)  # what a program finds out about the counts of a group


def average_batch_stats(
    stats: PyTree,
    weight: Weight | None = None,
    *,
    momentum: float | None = None,
) -> PyTree:
    """Combine the running means and variances of all ranks, before evaluation or saving.

    With the shares a_r = w_r / Σ_q w_q of the ranks' samples,

        μ = Σ_r a_r · μ_r
        σ² = Σ_r a_r · (σ_r² + |μ_r - μ|²)

    These are the mean and variance of all ranks' samples together, where each rank's are those of
    its own. The weight w_r is `weight`; by default the count that stands beside the mean, as in the
    states of Welford's algorithm; 1 without one.

    Each rank's BatchNorm keeps statistics of its own batches, unless it has
    `axis_name=jaxmpi.AXIS`. A variance is paired with the mean beside it by name: "mean" and "var"
    of Flax, "mean_ema" and "var_ema" of Haiku, "running_mean" and "running_var" of torch,
    "moving_mean" and "moving_variance" of Keras, the pairs in an `equinox.nn.State`. A standard
    deviation ("std") becomes σ. A sum of squares around the mean ("m2", "ssd", "summed_variance")
    becomes n_r·σ², with n_r the count beside it. Any other float x, such as a second moment,
    becomes Σ_r a_r · x_r.

    Counts and other integers stay this rank's. So a state that was averaged can be updated and
    averaged again, at every step or once at the end, and no sample counts twice; the number of all
    samples is `jaxmpi.tree_allreduce(count, "sum")`. A rank with weight 0 does not count, and all
    stays as it is where all weights are 0.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes; all pass a
    weight, or none does.
    **Communication:** the bytes of the statistics, in two rounds.

    Args:
      stats: Flax's "batch_stats", an `nnx.State` of `nnx.BatchStat`, Haiku's state, an
        `equinox.nn.State`, or any pytree whose leaves have names.
      weight: the number of samples that this rank's statistics stand for: one finite number of 0
        or more.
      momentum: that of Equinox's BatchNorm in the mode "batch", whose state does not hold it.

    Returns:
      The same structure. Its floats are JAX arrays, and equal on all ranks, except sums of squares
      where the counts differ.

    Raises:
      ValueError: a variance without a mean of its shape beside it; a float beside a mean that may
        or may not be its variance; a logarithm or an inverse of a variance; floats without any
        name; a sum of squares without a count, or with the count 0 on some ranks only; on all
        ranks, a weight or count of any rank that is no such number.
      TypeError: a leaf that is no array or number, with its path.

    >>> average_batch_stats({"mean": jnp.zeros(1), "var": jnp.ones(1)}, weight=32)["var"]
    Array([1.], dtype=float32)
    """
    backend = session.current(FUNCTION)
    refuse_stray(FUNCTION, stats, backend)
    leaves, treedef = jax.tree.flatten(stats, is_leaf=is_per_rank)
    named = list(named_leaves(stats, leaves))
    groups = pair_up(named, weighted=weight is not None, momentum=momentum)
    arrays = [group.arrays(leaves) for group in groups]
    w, problem = None, ""
    if weight is not None:
        means = [x["mean"] if is_per_rank(x["mean"]) else jnp.asarray(x["mean"]) for x in arrays]
        w, problem = as_weight(FUNCTION, weight, means)
    if not groups:
        return stats
    if backend.place.size == 1 and not any(map(is_per_rank, leaves)):
        if weight is None:
            for group in groups:
                _check_counts(group, named, leaves, _count_problem(group, leaves))
        for i, leaf in enumerate(named):
            leaves[i] = jnp.asarray(leaves[i]) if leaf.is_float else leaves[i]
        return treedef.unflatten(leaves)
    outs, problems, total = _combine(w, momentum, arrays)
    if weight is not None:
        check_total(FUNCTION, total, problem)
    for group, found in zip(groups, problems, strict=True):
        _check_counts(group, named, leaves, found)
    for group, out in zip(groups, outs, strict=True):
        for i, x in group.places(out):
            leaves[i] = x
    return treedef.unflatten(leaves)


class _LocalStats(NamedTuple):
    """Statistics of one rank in a group, in 32 bits at least."""

    mean: jax.Array
    variances: list[jax.Array]  # in the order of "variance", "deviation", "squares"
    weight: jax.Array
    samples: jax.Array
    scale: jax.Array  # 1 - momentum^t for Equinox's BatchNorm in the mode "batch"; 1 for others


def _combined(
    weight: jax.Array | None, momentum: float | None, groups: list[dict[str, PyTree]]
) -> tuple[list[dict[str, PyTree]], list[jax.Array], jax.Array]:
    """Return the new arrays of the groups, their problems, and the sum of the weights."""
    local = [_local_stats(group, weight, momentum) for group in groups]

    # First round: W = Σ w_r and μ = Σ w_r·μ_r / W; and the sums whose ratio k scales Haiku's
    # hidden values.
    sums = [_times(x.weight, [x.mean]) for x in local]
    hidden = [(_norm(x["hidden"]), _norm([x["mean"], *x["variance"]])) for x in groups]
    sent = (weight, [x.weight for x in local], sums, hidden)
    given, totals, sums, hidden = Caller(FUNCTION).allreduce(sent, op="sum")
    centers = [_over(W, x, [y.mean])[0] for W, x, y in zip(totals, sums, local, strict=True)]

    # Second round: σ² = Σ w_r·(σ_r² + |μ_r - μ|²) / W. The mean of squares minus |μ|² would cancel
    # most digits.
    around = []
    for x, center in zip(local, centers, strict=True):
        d = x.mean - center
        around.append(_times(x.weight, [v + jnp.real(d * jnp.conj(d)) for v in x.variances]))
    # A rank without samples cannot hold its share n_r·σ² of the sum of squares.
    empty = []
    for x, group in zip(local, groups, strict=True):
        empty.append((jnp.any(x.samples == 0) & bool(group["squares"])).astype(jnp.int32))
    around, empty = Caller(FUNCTION).allreduce((around, empty), op="sum")

    outs, problems = [], []
    for i, group in enumerate(groups):
        W, x = totals[i], local[i]
        variances = _over(W, around[i], x.variances)
        outs.append(_put_back(group, x, centers[i], variances, hidden[i]))
        some_empty = (empty[i] > 0) & jnp.any(W > 0)
        problem = jnp.where(some_empty, NO_SAMPLES, GOOD)
        problems.append(jnp.where(jnp.any(jnp.isnan(W)), BAD_COUNT, problem))
    return outs, problems, given


_combine = anywhere(_combined, FUNCTION)


def _local_stats(
    group: Mapping[str, PyTree], weight: jax.Array | None, momentum: float | None
) -> _LocalStats:
    """Return this rank's means, variances and weight of one group."""
    mean = _wide(group["mean"])
    real = jnp.finfo(mean.dtype).dtype
    # w: the weight of the caller, or the count beside the mean, or 1. n: the count, or w.
    n = _count_of(group["count"], real)
    w = jnp.ones((), real) if n is None else n
    if weight is not None:
        w = weight.astype(real)
    n = w if n is None else n
    # In the mode "batch", Equinox stores (1 - momentum^t) times the average; at t = 0 it is 0.
    scale = jnp.ones((), real)
    if group["counter"]:
        t = jnp.asarray(group["counter"][0])
        scale = jnp.where(t > 0, 1 - jnp.asarray(momentum, real) ** t, 1)
    variances = [_wide(x) / scale for x in group["variance"]]
    variances += [jnp.square(_wide(x)) for x in group["deviation"]]
    variances += [_wide(x) / jnp.where(n == 0, 1, n) for x in group["squares"]]
    # A weight that is no number of samples becomes NaN, and so the sum on all ranks.
    w = jnp.where((w >= 0) & (w < jnp.inf), w, jnp.nan)
    return _LocalStats(mean / scale, variances, w, n, scale)


def _put_back(
    group: Mapping[str, PyTree],
    local: _LocalStats,
    mean: jax.Array,
    variances: list[jax.Array],
    hidden: tuple[jax.Array, jax.Array],
) -> dict[str, PyTree]:
    """Return the mean and variances of all ranks in the roles and dtypes of the group."""
    left = iter(variances)  # in the order of `_LocalStats.variances`
    new = {
        "mean": [mean * local.scale],
        "variance": [next(left) * local.scale for _ in group["variance"]],
        "deviation": [jnp.sqrt(next(left)) for _ in group["deviation"]],
        "squares": [local.samples * next(left) for _ in group["squares"]],
    }
    new["hidden"] = []
    if group["hidden"]:
        dtype = widest(*hidden)
        k = hidden[0].astype(dtype) / jnp.where(hidden[1] == 0, 1, hidden[1]).astype(dtype)
        for x in (mean, *new["variance"]):
            dtype = widest(k, x)
            new["hidden"].append(k.astype(dtype) * x.astype(dtype))
    old = {name: [group["mean"]] if name == "mean" else group[name] for name in new}
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), new, old)


def _wide(x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(widest(x.dtype))


def _norm(arrays: Sequence[ArrayLike]) -> jax.Array:
    return sum_of(jnp.sum(jnp.abs(_wide(x))) for x in arrays)


def _count_of(count: Sequence[ArrayLike], dtype: np.dtype) -> jax.Array | None:
    """Return a count as a float; None if the group has none."""
    if len(count) == 2:
        return jnp.asarray(count[0], dtype) * 2.0**32 + jnp.asarray(count[1], dtype)
    return jnp.asarray(count[0]).astype(dtype) if count else None


def _count_problem(group: StatGroup, leaves: Sequence[PyTree]) -> int:
    """Return the problem of the count of a group on one rank; none in traced code."""
    for i in group.count:
        if isinstance(leaves[i], jax.core.Tracer):
            return GOOD
        n = np.asarray(leaves[i])
        if not np.all((n >= 0) & (n < np.inf)):
            return BAD_COUNT
    return GOOD


def _times(w: jax.Array, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Return products with a weight, which are zero for weight zero even if x is not finite."""
    return [jnp.where(w == 0, 0, w * x) for x in xs]


def _over(
    total: jax.Array,
    sums: Sequence[jax.Array],
    local: Sequence[jax.Array],
) -> list[jax.Array]:
    """Return sums divided by the sum of weights, or this rank's own values if that is 0."""
    safe = jnp.where(total == 0, 1, total)
    return [jnp.where(total == 0, y, x / safe) for x, y in zip(sums, local, strict=True)]


def _check_counts(
    group: StatGroup,
    named: Sequence[StatLeaf],
    leaves: Sequence[PyTree],
    found: ArrayLike,
) -> None:
    """Raise the problem that a program has found with the counts of a group, on all ranks."""
    if isinstance(found, jax.core.Tracer) or found == GOOD or not group.count:
        return
    backend = session.current(FUNCTION)
    counts = [leaves[i] for i in group.count]
    if any(map(is_per_rank, counts)):
        by_rank = [np.max([np.asarray(x)[r] for x in counts], 0) for r in range(backend.place.size)]
    else:
        mine = [np.asarray(x) for x in backend.transport.arrays.local([*map(jnp.asarray, counts)])]
        by_rank = backend.allgather_object(np.max(mine, 0))
    text = named[group.count[0]].text
    if found == BAD_COUNT:
        wrong = [r for r, n in enumerate(by_rank) if not np.all((n >= 0) & (n < np.inf))]
        raise ValueError(
            f"{FUNCTION}: count {text} is {by_rank[wrong[0]]} on {in_words(wrong[:1])}, and must "
            "be 0 or more. Count in 64 bits, or in floats, what is beyond 2^31."
        )
    squares = named[group.squares[0]].text
    ranks = [r for r, n in enumerate(by_rank) if not np.all(n)]
    raise ValueError(
        f"{FUNCTION}: count {text} is 0 on {in_words(ranks)} and not on others, so that {squares} "
        "cannot hold a share of the squares of all ranks there. Pass the variance, "
        "squares / max(count, 1), as 'var' in its place."
    )
