"""Clipping by the global norm, in 32 bits at least."""

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import with_parameters
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import map_floats, wide

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with the norm of short floats in float32, where their squares fit.

    g ← g · min(1, max_norm / ‖g‖). Which gradient that is, depends on where it stands:

        optax.chain(clip, jaxmpi.distributed(tx))               # this rank's own, before the mean
        jaxmpi.distributed(optax.chain(clip, tx))               # the mean
        jaxmpi.sharded(optax.chain(clip, tx))                   # the mean, of which each rank has a shard

    The second and third are what one rank with the whole batch does. `optax.clip_by_global_norm` may stand there, too.

    **Collective:** inside of `sharded`, where every rank is; elsewhere not.
    **Communication:** one number for each array, inside of `sharded`.

    Args:
      max_norm: above 0.

    Raises:
      ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm is {max_norm}. It must be above 0.")

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        updates = with_parameters(updates, f"clip_by_global_norm max_norm={max_norm}")
        numbers = [x for x in jax.tree.leaves(updates) if x.dtype != jax.dtypes.float0]
        norm = jnp.sqrt(sum((_square(x) for x in numbers), jnp.zeros((), jnp.float32)))
        factor = jnp.where(norm <= max_norm, 1.0, max_norm / norm)
        return map_floats("clip_by_global_norm", lambda x: x * factor.astype(x.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _square(x: jax.Array) -> jax.Array:
    """The sum of squares, in 32 bits at least."""
    size = jnp.abs(x)
    return jnp.sum(jnp.square(size.astype(wide(size.dtype))))
