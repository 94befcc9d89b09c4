"""Axis of the ranks: a named axis of a train step, as those of `jax.vmap` and `jax.shard_map`.

A function tells the analysis of a program what it knows of an array by an identity with a name,
`jax.ad_checkpoint.checkpoint_name`, which costs nothing at run time. Names with facts are
subclasses of `str`. Their text contains the facts, because JAX may replace a name by an equal one.
"""

from typing import TypeAlias

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmpi._leaves import PyTree

__all__ = [
    "AXIS",
    "DIFFERS",
    "EQUAL",
    "WHOLE",
    "Axis",
    "as_shard",
    "as_whole",
    "bound",
    "equal_on_all_ranks",
    "may_differ",
    "names",
    "overlap",
    "parameters_in",
    "sharded_axis",
    "with_parameters",
]

Axis: TypeAlias = str | tuple[str, ...]  # a name of the ranks, or several of them together

AXIS = "ranks"
EQUAL = "jaxmpi: equal on all ranks"
DIFFERS = "jaxmpi: may differ between the ranks"
WHOLE = "jaxmpi: no shard"


class ShardName(str):
    """Name of an identity on a shard, with the axis over which the whole array is sharded."""

    axis: tuple[str, ...]


class ParametersName(str):
    """Name of an identity on an argument of a call, with the parameters of the call as text."""

    parameters: str


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


def equal_on_all_ranks(x: PyTree) -> PyTree:
    """Return `x`, marked as equal on all ranks, such as a counter that all increment together.

    A branch with a collective may depend on it.
    """
    return checkpoint_name(x, EQUAL)


def may_differ(tree: PyTree) -> PyTree:
    """Return arrays, marked as different on each rank on purpose, such as those of local updates.

    Train state that receives them is no sign of a forgotten mean.
    """
    if not bound() or lax.axis_size(AXIS) == 1:
        return tree
    return jax.tree.map(lambda x: checkpoint_name(x, DIFFERS), tree)


def as_shard(x: jax.Array, axis: Axis = AXIS) -> jax.Array:
    """Return `x`, marked as this rank's shard of an array that is sharded over an axis."""
    name = ShardName(f"jaxmpi: a shard of an array over {', '.join(names(axis))}")
    name.axis = names(axis)
    return checkpoint_name(x, name)


def sharded_axis(name: str) -> tuple[str, ...] | None:
    """Return the axis in a name that `as_shard` has given; None for any other name."""
    return name.axis if isinstance(name, ShardName) else None


def as_whole(x: jax.Array, axis: Axis = AXIS) -> jax.Array:
    """Return `x`, marked as a whole array that is equal on the ranks along an axis."""
    return equal_on_all_ranks(x) if axis == AXIS else checkpoint_name(x, WHOLE)


def with_parameters(tree: PyTree, text: str) -> PyTree:
    """Return the arrays of a call, marked with parameters that must be equal on all ranks.

    The ranks compare the text, such as the root of a broadcast, with the program. It is the name of
    an identity on the first array, and no part of the program that runs.
    """
    leaves, treedef = jax.tree.flatten(tree)
    first = None
    for i, x in enumerate(leaves):
        if getattr(x, "dtype", None) != jax.dtypes.float0:
            first = i
            break
    if first is None or not bound() or lax.axis_size(AXIS) == 1:
        return tree
    name = ParametersName(f"jaxmpi: parameters {text}")
    name.parameters = text
    leaves[first] = checkpoint_name(leaves[first], name)
    return treedef.unflatten(leaves)


def parameters_in(name: str) -> str | None:
    """Return the text in a name that `with_parameters` has given; None for any other name."""
    return name.parameters if isinstance(name, ParametersName) else None
