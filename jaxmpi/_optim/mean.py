"""Means over the ranks: one interface, whichever way a mean is formed.

`distributed`, `sharded`, `fully_shard`, `local_sgd`, `average_gradients` and `average_metrics` take
a `Mean`. It has an `init` and a `mean`, as a `jaxmpi.codecs.Codec` of the user's own, and its
`traits` say what it goes together with.

| class | the mean | asked for by |
|---|---|---|
| `Allreduce` | (1/p) · Σ_r x_r, or another reduction, on all ranks | `op` |
| `ReduceScatter` | this rank's shard of (1/p) · Σ_r x_r | `sharded`, `unshard` |
| `Weighted` | Σ_r w_r·x_r / Σ_r w_r, by any of the others | `weight` |
| `CodecMean`, `OneMessageMean` in codec.py | about (1/p) · Σ_r x_r, in fewer bytes | `codec` |
| `Adasum` in adasum.py | Σ_r c_r·x_r | `op="adasum"` |
| `MicroBatchMean` in deterministic.py | (1/M) · Σ_i x_i, in one order | `micro_batches` |
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS, Axis
from jaxmpi._backends.one_process import PerRank
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._consistency.mismatch import in_words
from jaxmpi._jit.api import anywhere
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, widest
from jaxmpi._optim.float_leaves import map_floats, wide
from jaxmpi._world import session

__all__ = [
    "Allreduce",
    "Mean",
    "ReduceScatter",
    "Traits",
    "Weight",
    "Weighted",
    "as_weight",
    "check_total",
    "scaled",
]

# the weight of one rank; of simulated ranks, a `PerRank`
Weight: TypeAlias = ArrayLike | PerRank


# --- the interface -------------------------------------------------------------------------------


class Traits(NamedTuple):
    """The arguments that a mean goes together with.

    Attributes:
      argument: the argument that asks for the mean, as errors name it, such as "op 'max'".
      weights: whether `update` may get a `weight`.
      functions: whether `update` may get functions of the parameters, such as `value_fn`.
      loss_op: the reduction of the loss, "mean" or "sum": of `value`, `grad` and what functions
        return.
      shards: whether the gradients may be shards of `fully_shard` over another axis.
      has_state: whether the mean keeps a state between its calls.
      one_order: whether all sums have one order for any number of ranks and threads, and those of
        the inner transform must have, too.
      one_program: whether an eager call of the weighted mean is compiled as one program; a codec
        runs operation by operation.
    """

    argument: str
    weights: bool = True
    functions: bool = True
    loss_op: str = "mean"
    shards: bool = True
    has_state: bool = False
    one_order: bool = False
    one_program: bool = True


class Mean(ABC):
    """A way to form one tree from the trees of the ranks along an axis.

    Two means that are equal have equal fields: the programs that are compiled for one serve both.

    Attributes:
      function: the public function that forms the mean, for errors and for the comparison of the
        ranks.
      axis: the axis of the ranks.
    """

    function: str
    axis: Axis

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """The arguments that this mean goes together with."""

    @abstractmethod
    def init(self, params: PyTree) -> PyTree:
        """Return the state before the first call, for arrays like `params`; () without one."""

    @abstractmethod
    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """Return the means of `updates`, those of `extra`, and the new state.

        **Collective:** every rank along the axis calls it, with the same structure and shapes.

        Args:
          updates: this rank's tree, such as its gradients.
          extra: what is reduced by `traits.loss_op` whichever way the mean is formed: a loss, or a
            weight. Where it can, it travels in the message of `updates`; () sends nothing.
          state: that of the last call, or of `init`.
        """

    @final
    def by(self, weight: Weight | None, empty: float = 0.0) -> "Mean":
        """Return the mean that is weighted, or this one if there is no weight.

        Args:
          weight: the weight of this rank, or None.
          empty: the result if all weights are 0.
        """
        return self if weight is None else Weighted(self, weight, empty)

    @final
    def average(
        self, updates: PyTree, extra: PyTree, weight: Weight | None, state: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return what `mean` does; if there is a weight, weighted, and in the dtypes of the trees.

        Raises:
          ValueError: the weight is wrong, as in `Weighted`.
        """
        means, extra_means, state = self.by(weight).mean(updates, extra, state)
        if weight is None:
            return means, extra_means, state
        return (
            _rounded(self.function, means, updates),
            _rounded(self.function, extra_means, extra),
            state,
        )

    @final
    def check(self, weight: Weight | None, functions: Sequence[str]) -> None:
        """Raise a ValueError for arguments of `update` that do not go together with this mean.

        Args:
          weight: the weight that `update` got, or None.
          functions: the names of the functions that it got.
        """
        argument = self.traits.argument
        if weight is not None and not self.traits.weights:
            raise ValueError(
                f"{self.function}: weight does not go together with {argument}. Leave one of them "
                "out."
            )
        if functions and not self.traits.functions:
            raise ValueError(
                f"{self.function}: {' and '.join(functions)} does not go together with {argument}. "
                "Use op 'mean'."
            )
        # The loops of a line search must be the same on all ranks, not only along the axis.
        if functions and self.axis != AXIS:
            raise ValueError(
                f"{self.function}: {' and '.join(functions)} does not go together with axis "
                f"{self.axis!r}. Leave one of them out."
            )


# --- plain means, and other reductions -----------------------------------------------------------


@final
@dataclass(frozen=True)
class Allreduce(Mean):
    """The mean of the ranks' trees, or another reduction, leaf by leaf, on every rank.

    **Communication:** that of `tree_allreduce`; for "mean" and "sum", `extra` is in the same
    message.
    """

    function: str
    op: str = "mean"
    axis: Axis = AXIS

    @property
    def traits(self) -> Traits:
        return Traits(
            f"op {self.op!r}",
            weights=self.op == "mean",
            functions=self.op in ("mean", "sum"),
            loss_op="sum" if self.op == "sum" else "mean",
        )

    def init(self, params: PyTree) -> PyTree:
        return ()

    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        caller = Caller(self.function)
        if not jax.tree.leaves(extra):  # errors name a leaf of the updates by its path
            return caller.allreduce(updates, self.op, axis=self.axis), extra, state
        if self.op == self.traits.loss_op:  # one message
            means, extra = caller.allreduce((updates, extra), self.op, axis=self.axis)
            return means, extra, state
        means = caller.allreduce(updates, self.op, axis=self.axis)
        return means, caller.allreduce(extra, self.traits.loss_op, axis=self.axis), state


@final
@dataclass(frozen=True)
class ReduceScatter(Mean):
    """The mean of the ranks' trees in shards, one on each rank.

    The leaves of `updates` are stacks of all shards, `[size, ...]`, as `all_shards` makes them, and
    each becomes this rank's shard. `extra` becomes its whole mean.

    **Communication:** (p-1)/p of the bytes of `updates`, and an allreduce of `extra`.
    """

    function: str
    axis: Axis = AXIS

    @property
    def traits(self) -> Traits:
        return Traits("shards")

    def init(self, params: PyTree) -> PyTree:
        return ()

    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        caller = Caller(self.function)
        shards = caller.reduce_scatter(updates, op="mean", axis=self.axis)
        return shards, caller.allreduce(extra, op="mean", axis=self.axis), state


# --- weights -------------------------------------------------------------------------------------


@final
class Weighted(Mean):
    """A weighted mean, Σ_r w_r·x_r / Σ_r w_r, formed as the mean of w·x over the mean of w.

    The weight of a rank is its number of samples or tokens. There is one rule for every function
    that takes a weight:

    - It is one real number of Python, NumPy or JAX: an integer, a float or a boolean; finite, and 0
      or more. Called eagerly, any other weight of any rank is a ValueError on every rank. In traced
      code the value of a weight is not known: a negative, infinite or NaN weight makes all results
      NaN, on every rank.
    - A rank with weight 0 does not count, whatever its values are, NaN included.
    - If all weights are 0 there is no mean. Gradients are then 0, and metrics NaN; the state stays
      as it was.
    - All ranks pass a weight, or none does.
    - Products, sums and results have 32 bits at least, the weight the widest dtype of the values.

    Args:
      inner: forms the means of the products and of the weight, which is part of its `extra`.
      weight: the weight of this rank.
      empty: the result if all weights are 0.
    """

    def __init__(self, inner: Mean, weight: Weight, empty: float = 0.0) -> None:
        self.function, self.axis = inner.function, inner.axis
        self.inner, self.weight, self.empty = inner, weight, empty

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def init(self, params: PyTree) -> PyTree:
        return self.inner.init(params)

    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        w, problem = as_weight(self.function, self.weight, (updates, extra))
        form = _weighted(self.inner, self.empty)
        # On one rank a codec does not run.
        if self.inner.traits.one_program or self._size() == 1:
            form = _weighted_program(self.inner, self.empty)
        total, means, extra, state = form(w, updates, extra, state)
        check_total(self.function, total, problem, self.axis)
        return means, extra, state

    def _size(self) -> int:
        return axis_size(self.axis, session.current(self.function))


WeightedTrees: TypeAlias = tuple[jax.Array, PyTree, PyTree, PyTree]


def _weighted(inner: Mean, empty: float) -> Callable[..., WeightedTrees]:
    """Return a function for the mean weight, the weighted means and the state of `inner`."""

    def form(w: jax.Array, updates: PyTree, extra: PyTree, state: PyTree) -> WeightedTrees:
        products = scaled(inner.function, updates, w)
        sent = (w, scaled(inner.function, extra, w))
        means, (total, extra_means), after = inner.mean(products, sent, state)
        return (
            total,
            _divided(inner.function, means, total, empty),
            _divided(inner.function, extra_means, total, empty),
            jax.tree.map(lambda new, old: jnp.where(total != 0, new, old), after, state),
        )

    return form


@cache
def _weighted_program(inner: Mean, empty: float) -> Callable[..., WeightedTrees]:
    """Return `_weighted` as one program if it is called eagerly, which the cache keeps."""
    return anywhere(_weighted(inner, empty), inner.function, sends=True)


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
    ranks = [rank for rank, found in enumerate(problems) if found]
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


def _divided(function: str, means: PyTree, total: jax.Array, empty: float) -> PyTree:
    """Return means of products / mean of weights; `empty` if it is zero, NaN if not finite."""
    some = total != 0
    safe = jnp.where(some & jnp.isfinite(total), total, jnp.where(some, jnp.nan, 1))
    return map_floats(function, lambda x: jnp.where(some, x / safe.astype(x.dtype), empty), means)


def _rounded(function: str, means: PyTree, like: PyTree) -> PyTree:
    """Return the means in the dtypes of `like`."""
    return map_floats(function, lambda mean, x: mean.astype(x.dtype), means, like)


def _problem(weight: Weight) -> str:
    """Return the problem with a weight as text; "" if there is none, or it is not known yet."""
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
