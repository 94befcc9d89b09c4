"""Weighted means over the ranks: one rule for every function that takes a weight.

    out = Σ_r w_r·x_r / Σ_r w_r

The weight of a rank is its number of samples or tokens.

- It is one real number of Python, NumPy or JAX: an integer, a float or a boolean; finite, and 0 or
  more. Called eagerly, any other weight of any rank is a ValueError on every rank. In traced code
  the value of a weight is not known: a negative, infinite or NaN weight makes all results NaN, on
  every rank.
- A rank with weight 0 does not count, whatever its values are, NaN included.
- If all weights are 0 there is no mean. Gradients are then 0, and metrics NaN.
- All ranks pass a weight, or none does.
- Products and sums are formed in 32 bits at least, the weight in the widest dtype among the values.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS, Axis
from jaxmpi._backends.one_process import PerRank
from jaxmpi._collectives.trees import Caller
from jaxmpi._consistency.mismatch import in_words
from jaxmpi._jit.api import anywhere
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, widest
from jaxmpi._optim.float_leaves import map_floats, wide
from jaxmpi._world import session

__all__ = [
    "MeanOverRanks",
    "Weight",
    "as_weight",
    "check_total",
    "divided",
    "mean_over",
    "scaled",
    "weighted_mean",
]

# the weight of one rank; of simulated ranks, a `PerRank`
Weight: TypeAlias = ArrayLike | PerRank
MeanOverRanks = Callable[[str, PyTree], PyTree]  # of a function's name and a tree


# Cached: the compiled programs of a mean are kept by the identity of this function.
@cache
def mean_over(axis: Axis) -> MeanOverRanks:
    """Return the function that averages every leaf along an axis, for all ranks."""
    return lambda function, tree: Caller(function).allreduce(tree, op="mean", axis=axis)


def weighted_mean(
    function: str,
    tree: PyTree,
    weight: Weight | None,
    over_ranks: MeanOverRanks | None = None,
    *,
    empty: float = 0.0,
    axis: Axis = AXIS,
) -> PyTree:
    """Return the mean over the ranks; with a weight, the weighted mean in one message.

    A weighted mean is formed and returned in 32 bits at least.

    Args:
      function: the name in errors.
      tree: this rank's values; with a weight, real or complex numbers.
      weight: the weight of this rank, or None for a plain mean.
      over_ranks: forms the means of weights and products; it may return this rank's shards of them.
        `mean_over` by default.
      empty: the result if all weights are 0.
      axis: the axis of `over_ranks`.
    """
    over_ranks = over_ranks or mean_over(axis)
    if weight is None:
        return over_ranks(function, tree)
    w, problem = as_weight(function, weight, tree)
    total, out = _mean_of(function, over_ranks, empty)(w, tree)
    check_total(function, total, problem, axis)
    return out


@cache
def _mean_of(
    function: str, over_ranks: MeanOverRanks, empty: float
) -> Callable[[jax.Array, PyTree], tuple[jax.Array, PyTree]]:
    """Return a function for the mean weight and the weighted mean: one program if eager."""

    def mean(w: jax.Array, tree: PyTree) -> tuple[jax.Array, PyTree]:
        total, means = over_ranks(function, (w, scaled(function, tree, w)))
        return total, divided(function, means, total, empty)

    return anywhere(mean, function, sends=True)


def as_weight(function: str, weight: Weight, tree: PyTree) -> tuple[jax.Array, str]:
    """Return a weight in the dtype of the sums of `tree`, and the problem with it ("" if none).

    A wrong weight is returned as NaN, which reaches the other ranks in the mean of the weights.

    Raises:
      ValueError: the weight is wrong, and no other rank has to know: on one rank, or in traced
        code, where all ranks trace the same.
    """
    dtype = widest(*(jnp.finfo(x.dtype).dtype for x in map(_array, _leaves(tree)) if _inexact(x)))
    problem = _problem(weight)
    if problem and (session.size() == 1 or _jaxcompat.tracing()):
        raise ValueError(_message(function, problem))
    if problem:
        return jnp.full((), jnp.nan, dtype), problem
    if isinstance(weight, jax.core.Tracer):
        w = weight.astype(dtype)
        return jnp.where((w >= 0) & (w < jnp.inf), w, jnp.nan), ""
    # Numbers of Python and NumPy are rounded once, from 64 bits: JAX would first convert them to 32
    # bits. A PerRank is a tree of such numbers.
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64).astype(dtype)), weight), ""


def check_total(function: str, total: ArrayLike, problem: str, axis: Axis = AXIS) -> None:
    """Raise a ValueError on all ranks if the weight of any rank was wrong: `total` is then NaN.

    Args:
      function: the name in the error.
      total: the mean of the weights; nothing is raised in traced code.
      problem: the problem with the weight of this rank, from `as_weight`.
      axis: the axis of the mean; the ranks of all groups raise.
    """
    if isinstance(total, jax.core.Tracer):
        return
    total = total if axis == AXIS else Caller(function).allreduce(total, op="sum")
    if np.isfinite(np.asarray(total)).all():
        return
    problems = session.current(function).allgather_object(problem)
    ranks = [rank for rank, said in enumerate(problems) if said]
    raise ValueError(
        _message(function, problems[ranks[0]], ranks)
        if ranks
        else _message(function, "is too large for a sum")
    )


def scaled(function: str, tree: PyTree, w: jax.Array) -> PyTree:
    """Return `tree` times a weight, in 32 bits at least; zero for weight zero, even of NaN."""
    return map_floats(
        function,
        lambda x: jnp.where(w == 0, 0, x.astype(wide(x.dtype)) * w.astype(wide(x.dtype))),
        tree,
    )


def divided(function: str, means: PyTree, total: jax.Array, empty: float = 0.0) -> PyTree:
    """Return means of products / mean of weights; `empty` if it is zero, NaN if not finite."""
    some = total != 0
    safe = jnp.where(some & jnp.isfinite(total), total, jnp.where(some, jnp.nan, 1))
    return map_floats(function, lambda x: jnp.where(some, x / safe.astype(x.dtype), empty), means)


def _problem(weight: Weight) -> str:
    """Return the problem with a weight in words; "" if there is none, or it is not known yet."""
    x = weight.stack if isinstance(weight, PerRank) else weight
    if isinstance(x, int):
        return "" if 0 <= x < 2**1023 else f"is {x}"[:80]
    try:
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if is_per_rank(weight):  # the first axis of the stack counts the ranks
            shape = shape[1:]
    except (TypeError, ValueError):
        return f"is a {type(weight).__name__}"
    if shape != () or not (
        jnp.issubdtype(dtype, jnp.floating)
        or jnp.issubdtype(dtype, jnp.integer)
        or dtype == jnp.bool_
    ):
        return f"has shape {list(shape)} and dtype {dtype}"
    if isinstance(x, jax.core.Tracer):
        return ""
    values = np.asarray(x, np.float64).reshape(-1)
    wrong = values[~((values >= 0) & (values < np.inf))]
    return f"is {wrong[0]}" if wrong.size else ""


def _message(function: str, problem: str, ranks: list[int] | None = None) -> str:
    where = f"; {in_words(ranks)} did not" if ranks else ""
    return (
        f"{function}: weight {problem}. Pass the number of samples of this rank, one finite number "
        f"of 0 or more{where}."
    )


def _leaves(tree: PyTree) -> list[ArrayLike | PerRank]:
    return jax.tree.leaves(tree, is_leaf=is_per_rank)


def _array(x: ArrayLike | PerRank) -> ArrayLike:
    return x.stack if isinstance(x, PerRank) else x


def _inexact(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact)
