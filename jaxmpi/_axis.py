"""Axis of the ranks: a named axis of a train step, as those of `jax.vmap` and `jax.shard_map`."""

from typing import TypeAlias

from jax import lax

__all__ = ["AXIS", "Axis", "bound", "names", "overlap"]

Axis: TypeAlias = str | tuple[str, ...]  # a name of the ranks, or several of them together

AXIS = "ranks"


def names(axis: Axis) -> tuple[str, ...]:
    """Return the names in an axis as a tuple."""
    return axis if isinstance(axis, tuple) else (axis,)


def overlap(axis: Axis, other: Axis) -> bool:
    """Return whether two axes have a name in common; AXIS has all names."""
    both = {*names(axis)} & {*names(other)}
    return bool(both) or AXIS in (*names(axis), *names(other))


def bound(axis: Axis = AXIS) -> bool:
    """Return whether the axis is bound: inside `jaxmpi.jit`, or a `shard_map` or `vmap` over it."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True
