"""Metrics of all ranks as one: their states are gathered, merged, and computed once.

A metric that is no mean, such as F1 or a standard deviation, cannot be averaged over the ranks.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi import _jaxcompat
from jaxmpi._collectives.objects import agreed
from jaxmpi._collectives.tree_calls import refuse_stray
from jaxmpi._collectives.trees import Caller
from jaxmpi._consistency.identity import structure_of
from jaxmpi._consistency.mismatch import outliers, ranks_have
from jaxmpi._errors import RankMismatchError
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, is_key, widest
from jaxmpi._world import session

if TYPE_CHECKING:
    from flax import nnx

__all__ = ["merge_metrics"]

FUNCTION = "merge_metrics"
OPS: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}

Metric: TypeAlias = Any  # of nnx or clu, or anything else that has a method merge


def merge_metrics(metrics: PyTree) -> PyTree:
    """Merge the metrics of all ranks into one that has seen the samples of all.

    `merge_metrics(metrics).compute()` is what one rank computes from all samples. This rank's
    metrics stay as they are; do not merge a merged metric again, as its samples would count twice.

    - `nnx.metrics.Average`, `Accuracy`: totals and counts are added.
    - `nnx.metrics.Welford`: n = Σ n_r, μ = Σ n_r μ_r / n, m2 = Σ (m2_r + n_r (μ_r - μ)²).
    - `nnx.MultiMetric`, and any metric that holds others: one by one.
    - A metric with a method `merge(self, other)`, which returns the merged metric or changes self:
      by that, in the order of the ranks. Those of `clu.metrics`, and a `Collection` of them, are
      reduced as `Collection.reduce` does it.
    - Another `nnx.Metric`: by the `op` of its variables, "sum", "max" or "min":
      `self.tp = nnx.metrics.MetricState(jnp.array(0), op="sum")`.

    **Collective:** every rank calls it, eagerly or in a step, with metrics of the same structure.
    **Communication:** every rank's states to every other.

    Args:
      metrics: an `nnx.Metric`, a `clu` metric or collection, or a pytree of such.

    Returns:
      New metrics of the same types, equal on all ranks.

    Raises:
      TypeError: something that is no metric, or an `nnx.Metric` of which nobody can tell how it is
        merged, with its path.
      ValueError: an `op` that is unknown; outside of a step, a sum of integers that its dtype
        cannot hold. In a step, integers wrap.
      RankMismatchError: the metrics of the ranks differ in structure or, in a step, in shapes.

    >>> from flax import nnx
    >>> metrics = nnx.MultiMetric(loss=nnx.metrics.Average(), spread=nnx.metrics.Welford())
    >>> metrics.update(values=jnp.arange(4.0))
    >>> jaxmpi.merge_metrics(metrics).compute()["loss"]
    Array(1.5, dtype=float32)
    """
    paths = jax.tree_util.tree_flatten_with_path(metrics, is_leaf=_is_metric)[0]
    for path, x in paths:
        if not _is_metric(x):
            raise TypeError(
                f"{FUNCTION}: {jax.tree_util.keystr(path) or 'the argument'} is a "
                f"{type(x).__name__}, and no metric. Merge metrics before compute(), and add "
                "counts by jaxmpi.tree_allreduce(counts, 'sum')."
            )
    copies = _gathered(metrics)
    columns = zip(*(jax.tree.leaves(copy, is_leaf=_is_metric) for copy in copies), strict=True)
    merged = []
    for (path, _), column in zip(paths, columns, strict=True):
        merged.append(_merged(list(column), jax.tree_util.keystr(path)))
    return jax.tree.structure(metrics, is_leaf=_is_metric).unflatten(merged)


def _is_metric(x: object) -> bool:
    from flax import nnx

    if isinstance(x, type | nnx.Variable):
        return False
    return isinstance(x, nnx.Metric) or callable(getattr(x, "merge", None))


def _gathered(metrics: PyTree) -> list[PyTree]:
    """Return the metrics of each rank, as new objects."""
    backend = session.current(FUNCTION)
    refuse_stray(FUNCTION, metrics, backend)
    leaves, treedef = jax.tree.flatten(metrics, is_leaf=is_per_rank)
    ranks = range(backend.place.size)
    copies = []
    if _jaxcompat.tracing():
        stacks = Caller(FUNCTION).allgather(leaves)
        for r in ranks:
            copies.append(treedef.unflatten([x[r] for x in stacks]))
        return copies
    if len(backend.ranks_here) == len(ranks):
        for r in ranks:
            copies.append(treedef.unflatten([x[r] if is_per_rank(x) else x for x in leaves]))
        return copies
    # They are sent as objects: lists of predictions may have other lengths on other ranks.
    agreed(FUNCTION)
    mine = [_numbers(x) for x in backend.transport.arrays.local(leaves)]
    structures, values = zip(*backend.allgather_object((structure_of(treedef), mine)), strict=True)
    if len(set(structures)) > 1:
        others = outliers(structures)
        usual = next(x for r, x in enumerate(structures) if r not in others)
        raise RankMismatchError(
            f"{FUNCTION}: {ranks_have(others)} other metrics than most: "
            f"{structures[others[0]][:200]} in the place of {usual[:200]}.",
            advice="Build and update the same metrics on every rank.",
            function=FUNCTION,
            ranks=others,
        )
    for of_rank in values:
        received = [_like(leaf, x) for leaf, x in zip(leaves, of_rank, strict=True)]
        copies.append(treedef.unflatten(received))
    return copies


def _numbers(x: object) -> np.ndarray:
    """Return an array, or the data of PRNG keys, as an array of NumPy."""
    if isinstance(x, jax.Array) and is_key(x):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _like(leaf: object, numbers: np.ndarray) -> jax.Array | np.ndarray:
    """Return what `_numbers` has made of a leaf, as an array or PRNG keys like this rank's."""
    if not isinstance(leaf, jax.Array):
        return numbers
    if is_key(leaf):
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(leaf))
    return jnp.asarray(numbers)


def _merged(copies: list[Metric], where: str) -> Metric:
    """Return one metric for those of all ranks."""
    from flax import nnx

    first = copies[0]
    if not callable(getattr(first, "merge", None)):
        return _merged_variables(copies, where)
    fields = {} if isinstance(first, nnx.Metric) else getattr(first, "__dict__", {})
    # clu reduces a collection metric by metric
    if fields and all(callable(getattr(x, "merge", None)) for x in fields.values()):
        merged = {}
        for name in fields:
            merged[name] = _merged([vars(x)[name] for x in copies], f"{where}.{name}")
        return type(first)(**merged)
    # clu merges devices by this: by merge, LastValue would be that of the last of them
    if hasattr(first, "_reduce_merge"):
        return reduce(lambda x, y: x._reduce_merge(y), copies)
    if callable(getattr(first, "reduce", None)) and _alike(copies):
        return jax.tree.map(lambda *xs: jnp.stack(xs), *copies).reduce()
    return reduce(_merge_two, copies)


def _merge_two(metric: Metric, other: Metric) -> Metric:
    out = metric.merge(other)
    return metric if out is None else out


def _alike(copies: Sequence[Metric]) -> bool:
    """Return whether the states have equal shapes, and can be stacked."""
    shapes = [[np.shape(x) for x in jax.tree.leaves(copy)] for copy in copies]
    return all(shape == shapes[0] for shape in shapes)


def _merged_variables(copies: list["nnx.Metric"], where: str) -> "nnx.Metric":
    """Return the first of some nnx metrics, with the accumulated variables of all."""
    from flax import nnx

    def stop(x: object) -> bool:
        return _is_metric(x) or isinstance(x, nnx.Variable)

    of_models = (nnx.Param, nnx.BatchStat, nnx.RngState)  # a metric may hold a model, which stays
    first = copies[0]
    welford = isinstance(first, nnx.metrics.Welford)
    for name, attribute in vars(first).items():
        if name.startswith("_pytree__") or (welford and name in ("count", "mean", "m2")):
            continue
        # attributes may be metrics, variables, arrays, or containers of these
        nodes, treedef = jax.tree_util.tree_flatten_with_path(attribute, is_leaf=stop)
        columns = zip(*(jax.tree.leaves(vars(x)[name], is_leaf=stop) for x in copies), strict=True)
        new = []
        for (path, node), column in zip(nodes, columns, strict=True):
            text = f"{where}.{name}{jax.tree_util.keystr(path)}"
            if _is_metric(node):
                new.append(_merged(list(column), text))
                continue
            new.append(node)
            if isinstance(node, nnx.Variable) and not isinstance(node, of_models):
                op = _op(first, name, node, text)
                node.set_value(_reduced(op, [x.get_value() for x in column], text))
            elif isinstance(node, jax.Array | np.ndarray):
                _check_constant(first, column, text)
        if any(map(_is_metric, new)):
            setattr(first, name, treedef.unflatten(new))
    if welford and len(copies) > 1:
        _merge_welford(copies, where)
    return first


def _op(metric: "nnx.Metric", name: str, variable: "nnx.Variable[Any]", text: str) -> str:
    """Return how a variable of a metric is merged: a name in OPS."""
    from flax import nnx

    known = isinstance(metric, nnx.metrics.Average) and name in ("total", "count")
    op = variable.get_metadata().get("op", "sum" if known else None)
    if op is None:
        kind = type(metric).__name__
        raise TypeError(
            f"{FUNCTION}: nobody can tell how variable {text} of {kind} is merged. Make it "
            f"nnx.metrics.MetricState(x, op='sum'), or write {kind}.merge(self, other)."
        )
    if op not in OPS:
        ops = ", ".join(OPS)
        raise ValueError(f"{FUNCTION}: op of variable {text} is {op!r}. Use one of {ops}.")
    return str(op)


def _reduced(op: str, values: Sequence[jax.Array | np.ndarray], text: str) -> jax.Array:
    """Return the sum, maximum or minimum of all ranks' values, in their dtype."""
    stack = jnp.stack(values)
    if op == "sum" and jnp.issubdtype(stack.dtype, jnp.inexact):
        wide = widest(stack.dtype)
        return jnp.sum(stack.astype(wide), 0).astype(stack.dtype)
    if op == "sum" and not isinstance(stack, jax.core.Tracer):
        totals = np.asarray(np.asarray(stack).astype(object).sum(0), object).reshape(-1)
        limits = None if stack.dtype == np.bool_ else jnp.iinfo(stack.dtype)
        for total in totals:
            if limits is None or not limits.min <= total <= limits.max:
                raise ValueError(
                    f"{FUNCTION}: variable {text} adds up to {total} over the ranks, which "
                    f"{stack.dtype} cannot hold. Accumulate it in a wider dtype."
                )
    return OPS[op](stack, 0).astype(stack.dtype)


def _merge_welford(copies: list[Any], where: str) -> None:
    """Merge by Chan's formula, into the first of the metrics.

    n = Σ n_r, μ = Σ n_r μ_r / n, m2 = Σ (m2_r + n_r (μ_r - μ)²)
    """
    first = copies[0]
    counts = jnp.stack([x.count.get_value() for x in copies])
    means = jnp.stack([x.mean.get_value() for x in copies])
    m2s = jnp.stack([x.m2.get_value() for x in copies])
    some = counts > 0  # a rank without samples may have computed NaN
    n = counts.astype(widest(means.dtype))
    mean = jnp.sum(jnp.where(some, n * means, 0), 0) / jnp.maximum(jnp.sum(n, 0), 1)
    m2 = jnp.sum(jnp.where(some, m2s + n * jnp.square(means - mean), 0), 0)
    first.count.set_value(_reduced("sum", list(counts), f"{where}.count"))
    first.mean.set_value(mean.astype(means.dtype))
    first.m2.set_value(m2.astype(m2s.dtype))


def _check_constant(
    metric: "nnx.Metric",
    values: Sequence[jax.Array | np.ndarray],
    text: str,
) -> None:
    """Raise unless an array that is no variable, such as thresholds, is equal on all ranks."""
    if any(isinstance(x, jax.core.Tracer) for x in values):
        return
    first = _numbers(values[0])
    has_nan = first.dtype.kind in "fc"
    if not all(np.array_equal(_numbers(x), first, equal_nan=has_nan) for x in values):
        kind = type(metric).__name__
        raise TypeError(
            f"{FUNCTION}: array {text} of {kind} differs between the ranks. Make it "
            f"nnx.metrics.MetricState(x, op='sum'), or write {kind}.merge(self, other)."
        )
