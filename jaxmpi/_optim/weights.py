"""Weighted means over the ranks: one rule for every function that takes a weight.

out = Σ_r w_r·x_r / Σ_r w_r

A weight is what the values of this rank count: its number of samples or tokens.

- It is one real number of Python, NumPy or JAX: an integer, a float or a boolean; finite, and 0 or
  more. Called eagerly, a weight of any rank that is something else is a ValueError on every rank.
  In traced code the values of a weight are not known: one that is negative, infinite or NaN makes
  NaN of everything, on every rank.
- A rank with weight 0 does not count, whatever its values are, NaN included.
- Where all weights are 0 there is no mean. Gradients are 0 then, and metrics are NaN.
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
from jaxmpi._backends.simulate import PerRank
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

# what the values of a rank count; a `PerRank` of simulated ranks
Weight: TypeAlias = ArrayLike | PerRank
MeanOverRanks = Callable[[str, PyTree], PyTree]  # of a function's name and a tree


@cache  # as what a mean has compiled is kept with this
def mean_over(axis: Axis) -> MeanOverRanks:
    """The mean of every leaf along an axis of the ranks, on each of them."""
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
    """The mean over the ranks; with a weight, in 32 bits at least, in one message that has the weight, too.

    Args:
      function: for errors.
      tree: this rank's values; with a weight, real or complex ones.
      weight: of this rank, or None for a plain mean.
      over_ranks: forms the means of the weights and the products; it may return this rank's part of
        them only. `mean_over` by default.
      empty: the result where all weights are 0.
      axis: of the ranks, that `over_ranks` is along.
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
    """The mean of the weights, and that of a tree: called eagerly, one program."""

    def mean(w: jax.Array, tree: PyTree) -> tuple[jax.Array, PyTree]:
        total, means = over_ranks(function, (w, scaled(function, tree, w)))
        return total, divided(function, means, total, empty)

    return anywhere(mean, function, sends=True)


def as_weight(function: str, weight: Weight, tree: PyTree) -> tuple[jax.Array, str]:
    """A weight in the dtype of the sums of `tree`, NaN where it is no weight; and what is wrong with it, as far as known.

    Raises:
      ValueError: it is wrong, where no other rank has to be told: on one rank, and in traced code.
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
    # Numbers of Python and NumPy are rounded once, from 64 bits: JAX would make integers of 32 bits
    # of them first. may be a PerRank
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64).astype(dtype)), weight), ""


def check_total(function: str, total: ArrayLike, problem: str, axis: Axis = AXIS) -> None:
    """Raise on all ranks if the weight of one of them was no weight, now that `total` has told them.

    Args:
      function: for the error.
      total: the mean of the weights; nothing is raised in traced code.
      problem: what is wrong with the weight of this rank, of `as_weight`.
      axis: that the mean is along; the ranks of other groups are told, too.
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
    """`tree` times a weight, in 32 bits at least; zero for weight zero, whatever is in it."""
    return map_floats(
        function,
        lambda x: jnp.where(w == 0, 0, x.astype(wide(x.dtype)) * w.astype(wide(x.dtype))),
        tree,
    )


def divided(function: str, means: PyTree, total: jax.Array, empty: float = 0.0) -> PyTree:
    """Means of products / mean of weights; `empty` where that is zero, and NaN where it is not finite."""
    some = total != 0
    safe = jnp.where(some & jnp.isfinite(total), total, jnp.where(some, jnp.nan, 1))
    return map_floats(function, lambda x: jnp.where(some, x / safe.astype(x.dtype), empty), means)


def _problem(weight: Weight) -> str:
    """What is wrong with a weight, in words; "" if nothing is, or it is not known yet."""
    x = weight.stack if isinstance(weight, PerRank) else weight
    if isinstance(x, int):
        return "" if 0 <= x < 2**1023 else f"is {x}"[:80]
    try:
        shape, dtype = jnp.shape(x)[is_per_rank(weight) :], jnp.result_type(x)
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
    return f"{function}: weight {problem}. Pass the number of samples of this rank, one finite number of 0 or more{where}."


def _leaves(tree: PyTree) -> list[ArrayLike | PerRank]:
    return jax.tree.leaves(tree, is_leaf=is_per_rank)


def _array(x: ArrayLike | PerRank) -> ArrayLike:
    return x.stack if isinstance(x, PerRank) else x


def _inexact(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact)
