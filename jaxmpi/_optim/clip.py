"""Clipping by the global norm, in 32 bits at least."""

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import Axis, as_whole, with_parameters
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import map_floats, sum_of, wide
from jaxmpi._optim.sharded_array import check_sharded_arrays, is_sharded_array, mask_padding

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with the norm of short floats in float32, where their squares fit.

    g ← g · min(1, max_norm / ‖g‖). Which gradient that is, depends on where it stands:

        optax.chain(clip, jaxmpi.distributed(tx))               # this rank's own, before the mean
        jaxmpi.distributed(optax.chain(clip, tx))               # the mean
        jaxmpi.sharded(optax.chain(clip, tx))                   # the mean, of which each rank has a shard
        optax.chain(clip, tx)                                   # the same, of the shards of `fully_shard`

    All but the first are what one rank with the whole batch does. `optax.clip_by_global_norm` may
    stand in the middle two.

    **Collective:** inside of `sharded`, and on shards, where every rank is; elsewhere not.
    **Communication:** one number for each array, inside of `sharded`; one number in all, on shards,
    or for each of their axes.

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
        return map_floats(
            "clip_by_global_norm", lambda x: x * factor.astype(x.dtype), updates
        ), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _sum_of_squares(tree: PyTree) -> jax.Array:
    """That of all numbers, on whatever ranks they are."""
    check_sharded_arrays("clip_by_global_norm", tree)
    squares: list[jax.Array] = []
    here: dict[Axis, list[jax.Array]] = {}  # of the shards over an axis
    leaves = jax.tree.leaves(tree, is_leaf=is_sharded_array)
    for x in leaves:
        if is_sharded_array(x) and x.of:  # a scalar is whole on every rank
            square = _square(mask_padding(x.shard, x.of, 0, len(x.stack), axis=x.axis))
            here.setdefault(x.axis, []).append(square)
        elif is_sharded_array(x):
            squares.append(_square(as_whole(x.shard, x.axis)))
        elif x.dtype != jax.dtypes.float0:
            squares.append(_square(x))
    for axis, of_shards in here.items():
        squares.append(
            as_whole(
                Caller("clip_by_global_norm").allreduce(sum_of(of_shards), op="sum", axis=axis),
                axis,
            )
        )
    return sum_of(squares)


def _square(x: jax.Array) -> jax.Array:
    """The sum of squares, in 32 bits at least."""
    size = jnp.abs(x)
    return jnp.sum(jnp.square(size.astype(wide(size.dtype))))
