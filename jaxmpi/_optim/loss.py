"""The loss over the ranks: `average_loss`, and the loss as an extra argument of `update`.

Some optax transforms need the loss, as a number (`value`) or as a function of the parameters
(`value_fn`). Each rank passes the loss of its samples, and the inner transform has to get the loss
of all samples: `ExtraArgs` reduces the arguments, and `over_ranks` the functions.
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
from jaxmpi._marks import equal_along, equal_on_all_ranks
from jaxmpi._optim.float_leaves import map_floats
from jaxmpi._optim.mean import Allreduce, Mean, Weight, as_weight
from jaxmpi._optim.sharded_array import Shard, is_shard
from jaxmpi._world import session

__all__ = ["ExtraArgs", "as_floats", "average_loss", "have_identical_leaves", "refuse_per_rank"]

P = ParamSpec("P")

REDUCED_ARGUMENTS = ("value", "grad")  # arrays of this rank, for which `inner` gets means

Function: TypeAlias = Callable[..., PyTree]  # (params, ...) -> any pytree


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
    `value_fn`. Call it yourself in programs that evaluate the loss themselves: a line search, a
    Hessian-vector product, an implicit layer.

    **Collective:** every rank calls the function equally often, with equal θ.
    **Communication:** for each call, an allreduce of the value; for each derivative, forward or
    reverse, an allreduce of the bytes of θ. A weight travels with the value. On one rank, none.

    Args:
      fun: (θ, ...) -> a number, or a pytree of real or complex numbers; θ is a pytree that is equal
        on all ranks.
      weight: this rank's number of samples, or tokens, if the ranks have different numbers.
      axis: as in `tree_allreduce`: the means are over each group, on whose ranks θ is equal.

    Returns:
      A function of the same arguments, for forward and reverse differentiation. Its result has the
      structure, shapes and dtypes of the result of `fun`.

    Raises:
      ValueError: a weight that is negative or no scalar: here on one rank and in traced code, else
        when the function is called, on all ranks. When the function is called on several ranks, an
        unknown axis.
      TypeError: when the function is called on several ranks, a result cannot be averaged, with its
        path.

    >>> f = average_loss(lambda w: (w - 1.0) ** 2)
    >>> float(f(3.0)), float(jax.grad(f)(3.0))
    (4.0, 4.0)
    """
    return over_ranks(fun, Allreduce("average_loss", axis=axis), weight)


def over_ranks(fun: Function, mean: Mean, weight: Weight | None) -> Function:
    """Return `fun` with its result and its derivatives reduced over the ranks.

    The result is reduced by an allreduce. The parameters go through `_equal_params`, which gives
    the derivatives with respect to them the same reduction.

    Args:
      fun: (params, ...) -> any pytree; params are equal on the ranks along the axis.
      mean: the mean of the gradients, whose `traits.loss_op` is the reduction, along its axis.
      weight: the weight of this rank, or None. A rank with weight 0 does not count, and the
        derivatives of its result may be NaN.
    """
    loss_mean = Allreduce(mean.function, mean.traits.loss_op, mean.axis)
    has_samples = None if weight is None else as_weight(mean.function, weight, ())[0] != 0

    @wraps(fun)
    def reduced(params: PyTree, *args: object, **kwargs: object) -> PyTree:
        if session.size() == 1:
            return fun(params, *args, **kwargs)
        out = fun(_equal_params(mean.axis, params, has_samples), *args, **kwargs)
        return loss_mean.weighted_mean(out, (), weight, ())[0]

    return reduced


# The derivative of an allreduce treats the parameters of each rank as separate variables, and gives
# ∇f_r on rank r. But θ is one variable: it and its tangent are equal on all ranks. The identity
# below has the mean over the ranks as its derivative. In forward mode, the mean of equal tangents
# changes nothing; in reverse mode, the mean of the cotangents ∇f_r is ∇f. For a sum, the transpose
# of the allreduce has multiplied the cotangents by the number of ranks already, so that their mean
# is Σ_r ∇f_r.


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _equal_params(axis: Axis, params: PyTree, has_samples: ArrayLike | None) -> PyTree:
    """Return `params`; their derivatives are means over the ranks along `axis`.

    Args:
      axis: the axis on whose ranks they are equal.
      params: the parameters.
      has_samples: False on a rank with weight 0: its tangents are 0, so that a NaN in the
        derivatives of its loss reaches no other rank. None without weights.
    """
    return equal_along(params, axis)


@_equal_params.defjvp
def _equal_params_jvp(
    axis: Axis, primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]
) -> tuple[PyTree, PyTree]:
    params, has_samples = primals
    mean = Caller("average_loss").allreduce(tangents[0], op="mean", axis=axis)
    if has_samples is not None:
        mean = map_floats(
            "average_loss", lambda t: jnp.where(has_samples, t, jnp.zeros_like(t)), mean
        )
    return equal_along(params, axis), mean


# --- extra arguments of `update` -----------------------------------------------------------------


class ExtraArgs:
    """The extra arguments of an `update`, sorted by how they are reduced over the ranks.

    Attributes:
      local: this rank's `value` and `grad`, as floats, which the caller averages over the ranks;
        without `grad` if it is the same arrays as the gradients, which are averaged anyway.
      functions: functions of the parameters and of this rank's samples, such as `value_fn`.
      others: all other arguments, which are passed on as they are.
    """

    def __init__(self, extra_args: dict[str, object], updates: PyTree) -> None:
        self.local: dict[str, PyTree] = {}
        self.functions: dict[str, Function] = {}
        self.others: dict[str, object] = {}
        for name, x in extra_args.items():
            if callable(x):
                self.functions[name] = x
            elif name not in REDUCED_ARGUMENTS:
                self.others[name] = x
        for name in REDUCED_ARGUMENTS:
            if name in extra_args:
                self.local[name] = jax.tree.map(as_floats, extra_args[name])
        self._grad_is_updates = have_identical_leaves(extra_args.get("grad"), updates)
        if self._grad_is_updates:
            del self.local["grad"]

    def reduced(
        self, grads: PyTree, averaged: dict[str, PyTree], mean: Mean, weight: Weight | None
    ) -> dict[str, object]:
        """Return the extra arguments for the inner transform.

        Args:
          grads: the mean of the gradients.
          averaged: `self.local`, reduced over the ranks.
          mean: the mean that has formed them.
          weight: the weight of this rank, or None.
        """
        reduced = self.others | averaged
        if self._grad_is_updates:
            reduced["grad"] = grads
        for name, fun in self.functions.items():
            reduced[name] = over_ranks(fun, mean, weight)
        return reduced

    def mark_equal(self, trees: PyTree) -> PyTree:
        """Return state and parameters marked as equal on all ranks, if there are functions.

        The loop of a line search depends on them and calls `value_fn`, which communicates. The
        analysis refuses such a loop unless all ranks are sure to take it equally often.
        """
        if not self.functions or session.size() == 1:
            return trees

        def mark(x: PyTree) -> PyTree:
            if is_shard(x):  # the whole array is equal, the shard is not
                return Shard(x.value, x.shape, equal_on_all_ranks(x.whole), axis=x.axis)
            return equal_on_all_ranks(x)

        return jax.tree.map(mark, trees, is_leaf=is_shard)


def refuse_per_rank(function: str, extra_args: dict[str, object]) -> None:
    """Raise a ValueError if a link of a chain gets arguments that it would have to reduce.

    The links after it get the same arguments, so it cannot: they would use this rank's values.
    """
    extra = ExtraArgs({name: x for name, x in extra_args.items() if x is not None}, None)
    if per_rank := [*extra.local, *extra.functions]:
        raise ValueError(
            f"{function}: update got {' and '.join(per_rank)}, and the transforms that follow "
            "would get this rank's value as if it were equal on all ranks. Use "
            "jaxmpi.distributed(inner) instead, with those transforms as inner."
        )


def as_floats(x: ArrayLike) -> ArrayLike:
    """Return x as floats: a mean of integers would be rounded down. float0 stays as it is."""
    dtype = jnp.result_type(x)
    if dtype == jax.dtypes.float0:
        return x
    return jnp.asarray(x, None if jnp.issubdtype(dtype, jnp.inexact) else float)


def have_identical_leaves(tree: PyTree, other: PyTree) -> bool:
    """Return whether two trees have one structure, and the very same arrays as leaves."""
    if tree is None:
        return False
    leaves, treedef = jax.tree.flatten(tree)
    other_leaves, other_treedef = jax.tree.flatten(other)
    if treedef != other_treedef:
        return False
    return all(x is y for x, y in zip(leaves, other_leaves, strict=True))
