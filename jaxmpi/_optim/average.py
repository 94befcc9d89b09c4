"""`average_gradients` and `average_loss`: means of gradients and losses over the ranks.

clip = optax.clip_by_global_norm(1.0)
tx = optax.chain(jaxmpi.average_gradients(), clip, optax.adam(1e-3))
"""

from collections.abc import Callable
from typing import ParamSpec

import optax

from jaxmpi._axis import AXIS, Axis
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import check_shapes, map_floats
from jaxmpi._optim.objective import ExtraArgs, over_ranks
from jaxmpi._optim.weights import Weight, as_weight, weighted_mean

__all__ = ["average_gradients", "average_loss", "mean", "mean_of_all", "rounded"]

P = ParamSpec("P")


def average_gradients(*, axis: Axis = AXIS) -> optax.GradientTransformationExtraArgs:
    """Average gradients over the ranks: an optax transform for a chain.

    g ← (1/p) · Σ_r g_r; with the extra argument `weight` of `update`, g ← Σ_r w_r·g_r / Σ_r w_r as
    in `distributed`. Transforms before it in a chain get this rank's gradients, transforms after it
    the mean. Those after it would get this rank's `value`, `grad` and callables without a mean, so
    `update` refuses them: use `distributed` for those.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** that of `tree_allreduce`.

    Args:
      axis: as in `tree_allreduce`: the mean is over each group of ranks. The gradients may be
        shards of `fully_shard` over another axis.

    Raises:
      ValueError: `update` gets `value`, `grad` or a callable; gradients have other shapes than the
        parameters, such as those of single samples; weights as in `distributed`.

    >>> import jax.numpy as jnp
    >>> tx = optax.chain(average_gradients(), optax.sgd(0.5))
    >>> updates, state = tx.update(jnp.array([2.0]), tx.init(jnp.array([0.0])))
    >>> updates
    Array([-1.], dtype=float32)
    """

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        weight: Weight | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, PyTree]:
        extra = ExtraArgs(extra_args, None)
        if local := [*extra.local, *extra.functions]:
            raise ValueError(
                f"average_gradients: update got {' and '.join(local)}, and the transforms that "
                "follow would get this rank's value as if it were equal on all ranks. Use "
                "jaxmpi.distributed(inner) instead, with those transforms as inner."
            )
        if params is not None:
            check_shapes("average_gradients", updates, params)
        return mean("average_gradients", updates, weight, axis), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


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
    return mean_of_all("average_loss", fun, weight, axis)


def mean_of_all(
    function: str, fun: Callable[..., PyTree], weight: Weight | None, axis: Axis = AXIS
) -> Callable[..., PyTree]:
    """Return `average_loss(fun)`, with `function` as the name in errors."""
    counts = None if weight is None else as_weight(function, weight, ())[0] != 0
    return over_ranks(fun, lambda out: mean(function, out, weight, axis), counts, axis=axis)


def mean(function: str, updates: PyTree, weight: Weight | None, axis: Axis = AXIS) -> PyTree:
    """Return the mean over ranks, weighted if there is a weight, in the dtypes of `updates`."""
    means = weighted_mean(function, updates, weight, axis=axis)
    return means if weight is None else rounded(function, means, updates)


def rounded(function: str, means: PyTree, like: PyTree) -> PyTree:
    """Return the means in the dtypes of `like`."""
    return map_floats(function, lambda mean, x: mean.astype(x.dtype), means, like)
