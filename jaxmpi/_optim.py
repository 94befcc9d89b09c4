"""Averaging gradients, as optax transforms.

tx = jaxmpi.distributed(optax.adam(1e-3))
tx = optax.chain(jaxmpi.average_gradients(), optax.clip_by_global_norm(1.0), optax.adam(1e-3))
"""

from typing import Any

import optax

from jaxmpi._collectives import check_op, tree_allreduce

__all__ = ["average_gradients", "distributed"]


def average_gradients() -> optax.GradientTransformation:
    """An optax transform that averages its updates over all ranks.

    g ← (1/p) · Σ_r g_r. What comes before it in a chain acts on this rank's gradients, what comes after on the average.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** that of `tree_allreduce`.

    >>> import jax.numpy as jnp
    >>> tx = optax.chain(average_gradients(), optax.sgd(0.5))
    >>> updates, state = tx.update(jnp.array([2.0]), tx.init(jnp.array([0.0])))
    >>> updates
    Array([-1.], dtype=float32)
    """
    return optax.stateless(lambda updates, params: tree_allreduce(updates, op="mean"))


def distributed(inner: optax.GradientTransformation, *, op: str = "mean") -> optax.GradientTransformationExtraArgs:
    """Feed `inner` the gradients of all ranks in place of this rank's own.

    g ← (1/p) · Σ_r g_r for "mean"; then inner. The state is that of `inner`, unchanged, and stays equal on all ranks as long as
    it and the parameters start equal: see `synchronize`.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** that of `tree_allreduce`, in `update` alone.

    Args:
      inner: any optax transform.
      op: "mean" for losses that average over the rank's batch, "sum" for losses that sum; also "max", "min", "prod".

    Raises:
      ValueError: an unknown op.
      TypeError: `inner` is no optax transform.

    >>> import jax.numpy as jnp
    >>> tx = distributed(optax.sgd(0.5))
    >>> updates, state = tx.update(jnp.array([2.0]), tx.init(jnp.array([0.0])))
    >>> updates
    Array([-1.], dtype=float32)
    """
    check_op("distributed", op)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(f"distributed: inner is a {type(inner).__name__}. Pass an optax transform, such as optax.adam(1e-3).")
    inner = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        return inner.update(tree_allreduce(updates, op=op), state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)
