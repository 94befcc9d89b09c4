"""Means over the ranks: the interface `Mean`, plain means, and weighted means.

`distributed`, `sharded`, `unshard`, `local_sgd`, `average_gradients`, `measure_noise_scale`,
`average_loss` and `average_metrics` form their means through a `Mean`. Like a
`jaxmpi.codecs.Codec`, it has the functions `init` and `mean`. Its `traits` say which arguments of
`update` it can be combined with.

With x_r the tree of rank r, and p ranks:

| class | result | selected by |
|---|---|---|
| `Allreduce` | (1/p) · Σ_r x_r, or another reduction, on all ranks | `op` |
| `ReduceScatter` | this rank's shard of (1/p) · Σ_r x_r | `sharded`, `unshard` |
| `Weighted` | Σ_r w_r·x_r / Σ_r w_r, formed by one of the other means | `weight` |
| `CodecMean`, `OneMessageMean` in codec.py | about (1/p) · Σ_r x_r, in fewer bytes | `codec` |
| `Adasum` in adasum.py | Σ_r c_r·x_r | `op="adasum"` |
| `MicroBatchMean` in deterministic.py | (1/M) · Σ_i x_i, in one order | `micro_batches` |

`Mean.weighted_mean` is `mean` with a weight, if there is one.
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
from jaxmpi._leaves import PyTree, is_inexact, widest
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
    "weight_error",
]

# The weight of this rank: a number of samples or tokens. Under `simulate`, a `PerRank` holds the
# weights of all ranks.
Weight: TypeAlias = ArrayLike | PerRank


# --- the interface -------------------------------------------------------------------------------


class Traits(NamedTuple):
    """Facts about a mean: the arguments it can be combined with, and how callers must use it.

    Attributes:
      argument: the argument that selects the mean, as errors name it, such as "op 'max'".
      weights: whether `update` may get a `weight`.
      functions: whether `update` may get functions of the parameters, such as `value_fn`.
      loss_op: the reduction, "mean" or "sum", of what travels beside the gradients (`value` and
        `grad`), and of what those functions return.
      shards: whether the gradients may be shards of `fully_shard` over another axis.
      has_state: whether the mean keeps a state between its calls.
      one_order: whether the mean adds in an order that does not depend on the number of ranks and
        threads. The inner transform is then evaluated in such an order, too.
      one_program: whether an eager call of the weighted mean is compiled as one program. A codec is
        not: it runs operation by operation.
      weights_first: whether the mean of the weights is formed first, in a message of its own, and
        the weights divided by it before they are factors: for codes of a narrow range, such as
        float16's, which only the ratios of the weights may reach. Others get w·x.
    """

    argument: str
    weights: bool = True
    functions: bool = True
    loss_op: str = "mean"
    shards: bool = True
    has_state: bool = False
    one_order: bool = False
    one_program: bool = True
    weights_first: bool = False


class Mean(ABC):
    """A way to form one tree from the trees of the ranks along an axis: a mean or, say, a maximum.

    Subclasses other than `Weighted` are frozen dataclasses: a mean is the key under which its
    compiled programs are cached, so means with equal fields share them.

    Attributes:
      function: the public function that forms the mean. Errors name it, and the ranks compare it
        with each message.
      axis: the axis of the ranks.
    """

    function: str
    axis: Axis

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """Facts about this mean."""

    @abstractmethod
    def init(self, params: PyTree) -> PyTree:
        """Return the state before the first call of `mean`, or () if the mean keeps none.

        Args:
          params: arrays with the shapes and dtypes of the `updates`.
        """

    @abstractmethod
    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """Return (means of `updates`, means of `extra`, new state).

        **Collective:** every rank along the axis calls it, with the same structure, shapes and
        dtypes. **Communication:** see each class.

        Args:
          updates: this rank's tree, such as its gradients. Its means have the same structure, and
            are equal on the ranks along the axis unless the class says otherwise.
          extra: a second tree of this rank, such as the loss or a weight. It is always reduced by
            `traits.loss_op`, without codec, shards or coefficients, and in the message of `updates`
            where that is possible. () sends nothing.
          state: the state that the last call returned, or that of `init`.
        """

    @final
    def weighted_by(self, weight: Weight | None, empty: float = 0.0) -> "Mean":
        """Return the weighted form of this mean, or this mean if there is no weight.

        Args:
          weight: the weight of this rank, or None.
          empty: the value of all results if the weights of all ranks are 0.
        """
        return self if weight is None else Weighted(self, weight, empty)

    @final
    def weighted_mean(
        self, updates: PyTree, extra: PyTree, weight: Weight | None, state: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return (means of `updates`, means of `extra`, new state), weighted if there is a weight.

        Weighted means are rounded to the dtypes of `updates` and `extra`.

        **Collective:** as `mean`. All ranks pass a weight, or none does.
        **Communication:** that of `mean`. A weight travels with `extra`; see `check_total` for what
        an eager call sends to check it.

        Args:
          updates: as in `mean`.
          extra: as in `mean`.
          weight: the weight of this rank, or None.
          state: as in `mean`.

        Raises:
          ValueError: the weight is wrong, as in `Weighted`.
        """
        means, extra_means, state = self.weighted_by(weight).mean(updates, extra, state)
        if weight is None:
            return means, extra_means, state
        return (
            _rounded(self.function, means, updates),
            _rounded(self.function, extra_means, extra),
            state,
        )

    @final
    def check(self, weight: Weight | None, functions: Sequence[str]) -> None:
        """Check that this mean can be combined with the arguments of an `update`.

        Args:
          weight: the weight that `update` got, or None.
          functions: the names of the callables that `update` got, such as "value_fn".

        Raises:
          ValueError: it cannot be combined with one of them.
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

    **Communication:** that of `tree_allreduce`. For "mean" and "sum", `extra` travels in the same
    message; for the other ops, in a second allreduce.
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
        # Without extra, send the tree as it is: errors then name the path of a leaf in it, and not
        # in a pair of trees.
        if not jax.tree.leaves(extra):
            return caller.allreduce(updates, self.op, axis=self.axis), extra, state
        # Both trees have the same reduction: they share a message.
        if self.op == self.traits.loss_op:
            means, extra = caller.allreduce((updates, extra), self.op, axis=self.axis)
            return means, extra, state
        means = caller.allreduce(updates, self.op, axis=self.axis)
        return means, caller.allreduce(extra, self.traits.loss_op, axis=self.axis), state


@final
@dataclass(frozen=True)
class ReduceScatter(Mean):
    """The mean of the ranks' trees, of which each rank gets its shard.

    The leaves of `updates` are stacks of all shards, `[size, *shard]`, as `all_shards` makes them.
    Each becomes this rank's shard of the mean, `[*shard]`. `extra` becomes its whole mean, which is
    equal on the ranks.

    **Communication:** a reduce_scatter, which sends (p-1)/p of the bytes of `updates` per rank, and
    an allreduce of `extra`.
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
    """A weighted mean, formed by another mean as the mean of w·x divided by the mean of w.

        Σ_r w_r·x_r / Σ_r w_r = ((1/p) · Σ_r w_r·x_r) / ((1/p) · Σ_r w_r)

    or, with `traits.weights_first`, as the mean of (w / mean of w)·x.

    The weight of a rank is its number of samples or tokens. These rules hold for every function of
    jaxmpi that takes a weight:

    - A weight is one real number of Python, NumPy or JAX: an integer, a float or a boolean; finite,
      and 0 or more. In an eager call, any other weight of any rank is a ValueError on every rank.
      In traced code the value of a weight is not known: a negative, infinite or NaN weight makes
      all results NaN, on every rank.
    - A rank with weight 0 does not count, whatever its values are, NaN included.
    - If all weights are 0 there is no mean. Gradients are then 0, and metrics NaN; the state stays
      as it was.
    - All ranks pass a weight, or none does.
    - Products, sums and results have 32 bits at least. The weight has the widest real dtype among
      those of the values, 32 bits at least.

    **Communication:** that of `inner`, with the weight in its `extra`; see also `check_total`.

    Args:
      inner: forms the means of the products and of the weight.
      weight: the weight of this rank.
      empty: the value of all results if all weights are 0.
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
        # On one rank a codec does not run, so its weighted mean may be one program as well.
        if self.inner.traits.one_program or self._size() == 1:
            weighted_means = _weighted_program(self.inner, self.empty)
        else:
            weighted_means = _weighted(self.inner, self.empty)
        mean_weight, means, extra, state = weighted_means(w, updates, extra, state)
        check_total(self.function, mean_weight, problem, self.axis)
        return means, extra, state

    def _size(self) -> int:
        return axis_size(self.axis, session.current(self.function))


# (mean weight, weighted means of the updates, weighted means of the extra, state)
WeightedTrees: TypeAlias = tuple[jax.Array, PyTree, PyTree, PyTree]


def _weighted(inner: Mean, empty: float) -> Callable[..., WeightedTrees]:
    """Return a function (w, updates, extra, state) -> `WeightedTrees`; `inner` forms the means."""
    function = inner.function

    def weighted_means(
        w: jax.Array, updates: PyTree, extra: PyTree, state: PyTree
    ) -> WeightedTrees:
        # w·x, and w itself, which travels with the extra
        extra_products = (w, scaled(function, extra, w))
        if inner.traits.weights_first:
            (mean_weight, extra_means), _, _ = Allreduce(function, axis=inner.axis).mean(
                extra_products, (), ()
            )
            divisor = jnp.where(mean_weight != 0, mean_weight, 1)
            means, _, new_state = inner.mean(scaled(function, updates, w / divisor), (), state)
            # They are means already, unless all weights are 0, or one is wrong.
            still_to_divide = jnp.where(
                (mean_weight != 0) & jnp.isfinite(mean_weight), 1, mean_weight
            )
        else:
            products = scaled(function, updates, w)
            means, (mean_weight, extra_means), new_state = inner.mean(
                products, extra_products, state
            )
            still_to_divide = mean_weight
        # mean of w·x / mean of w; without any sample, the state of the codec does not change
        return (
            mean_weight,
            _divided(function, means, still_to_divide, empty),
            _divided(function, extra_means, mean_weight, empty),
            jax.tree.map(lambda new, old: jnp.where(mean_weight != 0, new, old), new_state, state),
        )

    return weighted_means


@cache
def _weighted_program(inner: Mean, empty: float) -> Callable[..., WeightedTrees]:
    """Return `_weighted` as a function that is compiled as one program if it is called eagerly.

    `anywhere` holds the compiled programs, and the cache holds what it returns.
    """
    return anywhere(_weighted(inner, empty), inner.function, sends=True)


def as_weight(function: str, weight: Weight, tree: PyTree) -> tuple[jax.Array, str]:
    """Return (weight as an array, problem with the weight as text or "" if there is none).

    If several ranks run eagerly, only this rank may know that its weight is wrong. It must not
    raise alone, because the other ranks would wait for it in the next collective. So a wrong weight
    becomes NaN, which reaches all ranks in the mean of the weights: call `check_total` on it.

    Args:
      function: the name in the error.
      weight: the weight of this rank.
      tree: the values to weight. The weight gets the widest real dtype of its floats, 32 bits at
        least.

    Raises:
      ValueError: the weight is wrong, on one rank, or in traced code, where all ranks trace the
        same and so all of them raise.
    """
    real_dtypes = []  # a complex number is multiplied by a real weight
    for leaf in jax.tree.leaves(tree, is_leaf=is_per_rank):
        x = leaf.stack if isinstance(leaf, PerRank) else leaf
        if is_inexact(x):
            real_dtypes.append(jnp.finfo(jnp.result_type(x)).dtype)
    dtype = widest(*real_dtypes)
    problem = _weight_problem(weight)
    if problem and (session.size() == 1 or _jaxcompat.tracing()):
        raise ValueError(weight_error(function, problem))
    if problem:
        return jnp.full((), jnp.nan, dtype), problem
    if isinstance(weight, jax.core.Tracer):
        w = weight.astype(dtype)
        return jnp.where((w >= 0) & (w < jnp.inf), w, jnp.nan), ""
    # Numbers of Python and NumPy are rounded once, from 64 bits: JAX would first convert them to 32
    # bits. A PerRank is a tree of such numbers.
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64).astype(dtype)), weight), ""


def check_total(function: str, total: ArrayLike, problem: str, axis: Axis = AXIS) -> None:
    """Check the weights of all ranks after an eager call; do nothing in traced code.

    **Collective:** every rank calls it, those of all groups along an axis included.
    **Communication:** with an axis, an allreduce of one number over all ranks; and before it
    raises, an allgather of the texts.

    Args:
      function: the name in the error.
      total: the mean or sum of the weights of the ranks along the axis. It is not finite if the
        weight of any of them was wrong, or if the weights are too large to be added.
      problem: the problem with the weight of this rank, from `as_weight`.
      axis: the axis of the mean.

    Raises:
      ValueError: on all ranks, `total` is not finite.
    """
    if isinstance(total, jax.core.Tracer):
        return
    # The ranks of the other groups have another total, and must raise as well: add all totals.
    if axis != AXIS:
        total = Caller(function).allreduce(total, op="sum")
    if np.isfinite(np.asarray(total)).all():
        return
    problems = session.current(function).allgather_object(problem)
    ranks = [rank for rank, found in enumerate(problems) if found]
    if not ranks:
        raise ValueError(weight_error(function, "is too large for a sum"))
    raise ValueError(weight_error(function, problems[ranks[0]], ranks))


def scaled(function: str, tree: PyTree, w: jax.Array) -> PyTree:
    """Return w·x for each leaf x of `tree`, in 32 bits at least.

    For w = 0 it is 0, even of NaN: a rank without samples has a mean over nothing.

    Raises:
      TypeError: a leaf of integers or booleans, with its path.
    """

    def multiply(x: jax.Array) -> jax.Array:
        dtype = wide(x.dtype)
        return jnp.where(w == 0, 0, x.astype(dtype) * w.astype(dtype))

    return map_floats(function, multiply, tree)


def _divided(function: str, means: PyTree, mean_weight: jax.Array, empty: float) -> PyTree:
    """Return mean of w·x / mean of w, for each leaf.

    It is `empty` if the mean weight is 0, and NaN if the mean weight is not finite.
    """
    has_samples = mean_weight != 0
    # The divisor is never 0, so that no NaN arises in the branch that `where` does not select.
    divisor = jnp.where(
        has_samples & jnp.isfinite(mean_weight), mean_weight, jnp.where(has_samples, jnp.nan, 1)
    )
    return map_floats(
        function, lambda x: jnp.where(has_samples, x / divisor.astype(x.dtype), empty), means
    )


def _rounded(function: str, means: PyTree, like: PyTree) -> PyTree:
    """Return the means in the dtypes of `like`."""
    return map_floats(function, lambda mean, x: mean.astype(x.dtype), means, like)


def _weight_problem(weight: Weight) -> str:
    """Return the problem with a weight, such as "is -1.0".

    It is "" if there is none. The value of a traced weight is not known, so only its shape and
    dtype are checked.
    """
    x = weight.stack if isinstance(weight, PerRank) else weight
    if isinstance(x, int):  # it may be too large for float64
        return "" if 0 <= x < 2**1023 else f"is {int(x)}"[:80]
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


def weight_error(function: str, problem: str, ranks: list[int] | None = None) -> str:
    """Return the text of the error for a wrong weight; `ranks` are those that passed one."""
    where = f"; {in_words(ranks)} did not" if ranks else ""
    return (
        f"{function}: weight {problem}. Pass the number of samples of this rank, one finite number "
        f"of 0 or more{where}."
    )
