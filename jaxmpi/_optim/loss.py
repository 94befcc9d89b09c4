"""The loss over the ranks: `average_loss`, and the loss that `update` gets beside the gradients.

Each rank passes the loss of its samples; the inner transform needs the loss of all samples.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._marks import equal_on_all_ranks
from jaxmpi._optim.float_leaves import map_floats
from jaxmpi._optim.mean import Allreduce, Mean, Weight, as_weight
from jaxmpi._optim.sharded_array import Shard, is_shard
from jaxmpi._world import session

__all__ = ["ExtraArgs", "average_loss"]

P = ParamSpec("P")

LOCAL = ("value", "grad")

Function: TypeAlias = Callable[..., PyTree]  # its first argument is the parameters


# --- functions of the parameters -----------------------------------------------------------------


def average_loss(
    fun: Callable[P, PyTree], *, weight: Weight | None = None, axis: Axis = AXIS
) -> Callable[P, PyTree]:
    """Average a loss over the ranks: both its value and its gradient are means.

        f(θ, ...) = (1/p) · Σ_r f_r(θ, ...)
        ∇f(θ) = (1/p) · Σ_r ∇f_r(θ)

    on every rank, where f_r is `fun` with the samples of rank r. (The gradient of
    `tree_allreduce(fun(θ))` is ∇f_r, without a mean.) With weights both are weighted means, as in
    `distributed`.

        value_and_grad = optax.value_and_grad_from_state(jaxmpi.average_loss(loss))

    `distributed` and `sharded` apply it to the callables that their `update` gets, such as
    `value_fn`. It is for programs that evaluate the loss themselves: a line search, a
    Hessian-vector product, an implicit layer.

    **Collective:** every rank calls the function equally often, with equal θ.
    **Communication:** a mean of the value, and for each derivative one of the gradient.

    Args:
      fun: (θ, ...) -> a number, or a pytree of real or complex numbers; θ is a pytree that is equal
        on all ranks.
      weight: this rank's number of samples, or tokens, if the ranks have different numbers.
      axis: as in `tree_allreduce`: the means are over each group, on whose ranks θ is equal.

    Returns:
      A function of the same arguments, for forward and reverse differentiation.

    Raises:
      ValueError: when called, a weight that is negative or no scalar; an unknown axis.
      TypeError: when called, a result cannot be averaged; with its path.

    >>> f = average_loss(lambda w: (w - 1.0) ** 2)
    >>> float(f(3.0)), float(jax.grad(f)(3.0))
    (4.0, 4.0)
    """
    return over_ranks(fun, Allreduce("average_loss", axis=axis), weight)


def over_ranks(fun: Function, mean: Mean, weight: Weight | None) -> Function:
    """Return a function with its result and derivatives reduced over ranks, as `mean` does a loss.

    Args:
      fun: (params, ...) -> any pytree; params are equal on the ranks along the axis.
      mean: names the reduction in `traits.loss_op`, and the axis.
      weight: the weight of this rank, or None. A rank with weight 0 does not count, and the
        derivatives of its result may be NaN.
    """
    of_loss = Allreduce(mean.function, mean.traits.loss_op, mean.axis)
    counts = None if weight is None else as_weight(mean.function, weight, ())[0] != 0

    @wraps(fun)
    def reduced(params: PyTree, *args: object, **kwargs: object) -> PyTree:
        if session.size() == 1:
            return fun(params, *args, **kwargs)
        out = fun(_equal(mean.axis, params, counts), *args, **kwargs)
        return of_loss.average(out, (), weight, ())[0]

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


# --- extra arguments of `update` -----------------------------------------------------------------


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

    def reduced(
        self, grads: PyTree, local: dict[str, PyTree], mean: Mean, weight: Weight | None
    ) -> dict[str, object]:
        """Return the extra arguments for the inner transform.

        Args:
          grads: the mean of the gradients.
          local: `self.local`, reduced over the ranks.
          mean: the mean that has formed them.
          weight: the weight of this rank, or None.
        """
        reduced = self.others | local
        if self._grad_is_updates:
            reduced["grad"] = grads
        for name, fun in self.functions.items():
            reduced[name] = over_ranks(fun, mean, weight)
        return reduced

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
