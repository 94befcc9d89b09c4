"""Extra arguments of `update`: the loss, its gradient and functions that evaluate them.

Each rank passes the loss of its samples; the inner transform needs the loss of all samples.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._marks import equal_on_all_ranks
from jaxmpi._optim.float_leaves import map_floats
from jaxmpi._optim.sharded_array import Shard, is_shard
from jaxmpi._world import session

__all__ = ["ExtraArgs", "over_ranks"]

LOCAL = ("value", "grad")

Function: TypeAlias = Callable[..., PyTree]  # its first argument is the parameters


class ExtraArgs:
    """The extra arguments of an `update`, by how they are reduced over the ranks.

    Attributes:
      local: `value` and `grad`, which are averaged over the ranks; without `grad` if it is the same
        arrays as the gradients.
      functions: functions of the parameters and of this rank's samples, such as `value_fn`.
      others: all other arguments, which are passed on as they are.
    """

    def __init__(self, extra_args: dict[str, object], updates: PyTree) -> None:
        self.local = {
            name: jax.tree.map(_float, extra_args[name]) for name in LOCAL if name in extra_args
        }
        self.functions: dict[str, Function] = {
            name: x for name, x in extra_args.items() if callable(x)
        }
        self.others = {
            name: x for name, x in extra_args.items() if name not in self.local and not callable(x)
        }
        self._grad_is_updates = _same(extra_args.get("grad"), updates)
        if self._grad_is_updates:
            del self.local["grad"]

    def check_axis(self, function: str, axis: Axis) -> None:
        """Raise a ValueError if there are functions and an axis.

        The loops of a line search must be the same on all ranks, not only along the axis.
        """
        if self.functions and axis != AXIS:
            raise ValueError(
                f"{function}: {' and '.join(self.functions)} does not go together with axis "
                f"{axis!r}. Leave one of them out."
            )

    def reduced(
        self, mean: PyTree, local: dict[str, PyTree], over: Callable[[Function], Function]
    ) -> dict[str, object]:
        """Return the extra arguments for the inner transform.

        Args:
          mean: the mean of the gradients.
          local: `self.local`, averaged over the ranks.
          over: returns the mean over ranks of a function.
        """
        grad = {"grad": mean} if self._grad_is_updates else {}
        return (
            self.others | local | grad | {name: over(fun) for name, fun in self.functions.items()}
        )

    def marked(self, trees: PyTree) -> PyTree:
        """Mark state and parameters as equal on all ranks.

        The loop of a line search, which calls `value_fn`, depends on them.
        """
        if not self.functions or session.size() == 1:
            return trees
        mark = lambda x: (
            Shard(x.value, x.shape, equal_on_all_ranks(x.whole), axis=x.axis)
            if is_shard(x)
            else equal_on_all_ranks(x)
        )
        return jax.tree.map(mark, trees, is_leaf=is_shard)


def over_ranks(
    fun: Function,
    reduce: Callable[[PyTree], PyTree],
    counts: ArrayLike | None = None,
    *,
    axis: Axis = AXIS,
) -> Function:
    """Return a function of parameters with its result and derivatives reduced over ranks.

    Args:
      fun: (params, ...) -> any pytree; params are equal on the ranks along the axis.
      reduce: a linear function whose result is equal on them.
      counts: whether this rank's result counts; None if all ranks count. The derivatives of a
        result that does not count may be NaN.
      axis: all ranks by default.
    """

    @wraps(fun)
    def reduced(params: PyTree, *args: object, **kwargs: object) -> PyTree:
        if session.size() == 1:
            return fun(params, *args, **kwargs)
        return reduce(fun(_equal(axis, params, counts), *args, **kwargs))

    return reduced


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _equal(axis: Axis, params: PyTree, counts: ArrayLike | None) -> PyTree:
    """Return `params`, which are equal on the ranks, as their tangents are.

    So the transpose is the mean of the cotangents.
    """
    return _marked(axis, params)


def _marked(axis: Axis, params: PyTree) -> PyTree:
    return equal_on_all_ranks(params) if axis == AXIS else params


@_equal.defjvp
def _equal_jvp(
    axis: Axis, primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]
) -> tuple[PyTree, PyTree]:
    params, counts = primals
    mean = Caller("average_loss").allreduce(tangents[0], op="mean", axis=axis)
    if counts is not None:
        mean = map_floats("average_loss", lambda t: jnp.where(counts, t, jnp.zeros_like(t)), mean)
    return _marked(axis, params), mean


def _float(x: ArrayLike) -> ArrayLike:
    """Return x as floats: a mean of integers would be rounded. float0 stays as it is."""
    dtype = jnp.result_type(x)
    return (
        x
        if dtype == jax.dtypes.float0
        else jnp.asarray(x, None if jnp.issubdtype(dtype, jnp.inexact) else float)
    )


def _same(tree: PyTree, other: PyTree) -> bool:
    """Return whether two trees have the identical arrays as leaves."""
    one, two = jax.tree.flatten(tree), jax.tree.flatten(other)
    return (
        tree is not None
        and one[1] == two[1]
        and all(x is y for x, y in zip(one[0], two[0], strict=True))
    )
