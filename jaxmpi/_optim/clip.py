"""Gradient clipping by the global norm of whole arrays and of shards."""

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import Axis
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._marks import as_whole, with_parameters
from jaxmpi._optim.float_leaves import map_floats, squared_norm, sum_of, wide
from jaxmpi._optim.sharded_array import check_sharded_arrays, is_sharded_array, mask_padding

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clip gradients by their global norm: g ← g · min(1, max_norm / ‖g‖).

    The norm is formed in float32 at least, in which the squares of short floats fit. The place in
    the chain decides which gradient is clipped:

        optax.chain(clip, jaxmpi.distributed(tx))  # this rank's gradient, before the mean
        jaxmpi.distributed(optax.chain(clip, tx))  # the mean
        jaxmpi.sharded(optax.chain(clip, tx))      # the mean, of which each rank has a shard
        optax.chain(clip, tx)                      # with `fully_shard`: the mean, in shards

    All but the first clip as one rank with the whole batch does. In the second and third,
    `optax.clip_by_global_norm` works, too.

    **Collective:** inside of `sharded` and on shards, every rank calls `update`; elsewhere no.
    **Communication:** inside of `sharded`, one number for each array; on shards, one number for
    each axis over which there are shards.

    Args:
      max_norm: above 0.

    Raises:
      ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm is {max_norm}. It must be above 0.")

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        updates = with_parameters(updates, f"clip_by_global_norm max_norm={max_norm}")
        norm = jnp.sqrt(_sum_of_squares(updates))
        factor = jnp.where(norm <= max_norm, 1.0, max_norm / norm)

        def clip(x: jax.Array) -> jax.Array:
            # rounded after the product: the factor alone may be 0 in short floats
            return (x.astype(wide(x.dtype)) * factor.astype(wide(x.dtype))).astype(x.dtype)

        return map_floats("clip_by_global_norm", clip, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _sum_of_squares(tree: PyTree) -> jax.Array:
    """Return the sum of the squares of all numbers, those in other ranks' shards included."""
    check_sharded_arrays("clip_by_global_norm", tree)
    squares: list[jax.Array] = []
    squares_along: dict[Axis, list[jax.Array]] = {}  # of this rank's shards, by their axis
    for x in jax.tree.leaves(tree, is_leaf=is_sharded_array):
        if is_sharded_array(x) and x.of:
            square = squared_norm(mask_padding(x.shard, x.of, 0, len(x.stack), axis=x.axis))
            squares_along.setdefault(x.axis, []).append(square)
        elif is_sharded_array(x):  # a scalar is whole on every rank
            squares.append(squared_norm(as_whole(x.shard, x.axis)))
        elif jnp.result_type(x) != jax.dtypes.float0:
            squares.append(squared_norm(x))
    # one allreduce for each axis; its result is equal along the axis, which the mark says
    for axis, of_shards in squares_along.items():
        here = sum_of(of_shards)
        total = Caller("clip_by_global_norm").allreduce(here, op="sum", axis=axis)
        squares.append(as_whole(total, axis))
    return sum_of(squares)
