"""Means of gradients and losses over the ranks.

tx = optax.chain(jaxmpi.average_gradients(), optax.clip_by_global_norm(1.0), optax.adam(1e-3))
"""

from collections.abc import Callable
from typing import ParamSpec

import optax

from jaxmpi._axis import AXIS, Axis
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import check_shapes, map_floats
from jaxmpi._optim.objective import Given, over_ranks
from jaxmpi._optim.weights import Weight, as_weight, weighted_mean

__all__ = ["average_gradients", "average_loss", "mean", "mean_of_all", "rounded"]

P = ParamSpec("P")


def average_gradients(*, axis: Axis = AXIS) -> optax.GradientTransformationExtraArgs:
    """An optax transform that averages its updates over all ranks.

    g ← (1/p) · Σ_r g_r; with the extra argument `weight` of `update`, g ← Σ_r w_r·g_r / Σ_r w_r as
    in `distributed`. What comes before it in a chain acts on this rank's gradients, what comes
    after on the average. `value`, `grad` and functions would reach the others in the chain as this
    rank's own, so `update` takes none of them: `distributed` does.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** that of `tree_allreduce`.

    Args:
      axis: as in `tree_allreduce`: the ranks of each group average theirs. The gradients may be
        shards of `fully_shard` over another axis.

    Raises:
      ValueError: `update` gets `value`, `grad` or a function; gradients of other shapes than the
        parameters', such as those of single samples; weights as in `distributed`.

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
        given = Given(extra_args, None)
        if local := [*given.local, *given.functions]:
            raise ValueError(
                f"average_gradients: update got {' and '.join(local)}, and the transforms that "
                "follow would take this rank's "
                "as that of all ranks. Use jaxmpi.distributed(inner) in the place of "
                "average_gradients, with them as inner."
            )
        if params is not None:
            check_shapes("average_gradients", updates, params)
        return mean("average_gradients", updates, weight, axis), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def average_loss(
    fun: Callable[P, PyTree], *, weight: Weight | None = None, axis: Axis = AXIS
) -> Callable[P, PyTree]:
    """A function with the mean of `fun` over all ranks as its value, and the mean of the gradients as its gradient.

    f(θ, ...) = (1/p) · Σ_r f_r(θ, ...), and ∇f(θ) = (1/p) · Σ_r ∇f_r(θ) on every rank, where f_r is
    `fun` with the samples of rank r. (The gradient of `tree_allreduce(fun(θ))` is this rank's own,
    ∇f_r.) With weights both are weighted means, as in `distributed`.

        value_and_grad = optax.value_and_grad_from_state(jaxmpi.average_loss(loss))

    `distributed` and `sharded` do this to the functions that their `update` gets, such as
    `value_fn`. It is for programs that evaluate the loss themselves: a line search, a
    Hessian-vector product, an implicit layer.

    **Collective:** every rank calls the function equally often, with equal θ.
    **Communication:** a mean of the value, and for each derivative one of the gradient.

    Args:
      fun: (θ, ...) -> a number, or a pytree of real or complex numbers; θ is a pytree that is equal
        on all ranks.
      weight: this rank's number of samples, or tokens, if the ranks have different ones.
      axis: as in `tree_allreduce`: the means are those of each group, on whose ranks θ is equal.

    Returns:
      A function of the same arguments, for forward and reverse differentiation.

    Raises:
      ValueError: when called, a weight that is negative or no scalar; an unknown axis.
      TypeError: when called, a result that cannot be averaged, with its path.

    >>> f = average_loss(lambda w: (w - 1.0) ** 2)
    >>> float(f(3.0)), float(jax.grad(f)(3.0))
    (4.0, 4.0)
    """
    return mean_of_all("average_loss", fun, weight, axis)


def mean_of_all(
    function: str, fun: Callable[..., PyTree], weight: Weight | None, axis: Axis = AXIS
) -> Callable[..., PyTree]:
    """`average_loss`, for a function that says its name in errors."""
    counts = None if weight is None else as_weight(function, weight, ())[0] != 0
    return over_ranks(fun, lambda out: mean(function, out, weight, axis), counts, axis=axis)


def mean(function: str, updates: PyTree, weight: Weight | None, axis: Axis = AXIS) -> PyTree:
    """The mean over the ranks along an axis, weighted where there is a weight, in the dtypes of `updates`."""
    means = weighted_mean(function, updates, weight, axis=axis)
    return means if weight is None else rounded(function, means, updates)


def rounded(function: str, means: PyTree, like: PyTree) -> PyTree:
    """The means in the dtypes of `like`."""
    return map_floats(function, lambda mean, x: mean.astype(x.dtype), means, like)
