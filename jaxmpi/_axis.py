"""The ranks are a named axis of a train step, as the axes of `jax.vmap` and `jax.shard_map` are."""

from typing import TypeAlias

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmpi._leaves import PyTree

__all__ = [
    "AXIS",
    "DIFFERS",
    "EQUAL",
    "PARAMETERS",
    "WHOLE",
    "Axis",
    "as_shard",
    "as_whole",
    "bound",
    "equal_on_all_ranks",
    "may_differ",
    "names",
    "overlap",
    "sharded_axis",
    "with_parameters",
]

Axis: TypeAlias = str | tuple[str, ...]  # a name of the ranks, or several of them together

AXIS = "ranks"
EQUAL = "jaxmpi: equal on all ranks"
DIFFERS = "jaxmpi: may differ between the ranks"
PARAMETERS = "jaxmpi: parameters "
SHARD = "jaxmpi: a shard of an array over "
WHOLE = "jaxmpi: no shard"


def names(axis: Axis) -> tuple[str, ...]:
    """Those of an axis."""
    return axis if isinstance(axis, tuple) else (axis,)


def overlap(axis: Axis, other: Axis) -> bool:
    """Whether two axes have a name in common; AXIS has all of them."""
    both = {*names(axis)} & {*names(other)}
    return bool(both) or AXIS in (*names(axis), *names(other))


def bound(axis: Axis = AXIS) -> bool:
    """Whether the caller is traced with the axis bound: inside `jaxmpi.jit`, or a `shard_map` or `vmap` over it."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def equal_on_all_ranks(x: PyTree) -> PyTree:
    """`x`, of which the caller knows that it is equal on all ranks, such as a counter that all have advanced together.

    A branch with a collective may depend on it. It is an identity with a name, which `variation`
    looks for.
    """
    return checkpoint_name(x, EQUAL)


def may_differ(tree: PyTree) -> PyTree:
    """Arrays of which the caller means that each rank has its own, such as updates between two meetings of the ranks.

    Train state that takes them up is no sign of a forgotten mean. They are identities with a name,
    too.
    """
    if not bound() or lax.axis_size(AXIS) == 1:
        return tree
    return jax.tree.map(lambda x: checkpoint_name(x, DIFFERS), tree)


def as_shard(x: jax.Array, axis: Axis = AXIS) -> jax.Array:
    """`x`, this rank's shard of an array that is cut over the ranks along an axis. It is an identity with a name, too."""
    return checkpoint_name(x, SHARD + ", ".join(names(axis)))


def sharded_axis(name: str) -> Axis | None:
    """The axis of the shards that `as_shard` gives this name; None for any other name."""
    return tuple(name.removeprefix(SHARD).split(", ")) if name.startswith(SHARD) else None


def as_whole(x: jax.Array, axis: Axis = AXIS) -> jax.Array:
    """`x`, of which the caller knows that it is no shard, and equal on the ranks along an axis. It is an identity, too."""
    return equal_on_all_ranks(x) if axis == AXIS else checkpoint_name(x, WHOLE)


def with_parameters(tree: PyTree, text: str) -> PyTree:
    """Arrays that a call works with, whose parameters must be equal on all ranks, such as the root of a broadcast.

    The ranks compare the text with the program. It is the name of an identity on the first array,
    and no part of the program that runs.
    """
    leaves, treedef = jax.tree.flatten(tree)
    first = next(
        (i for i, x in enumerate(leaves) if getattr(x, "dtype", None) != jax.dtypes.float0), None
    )
    if first is None or not bound() or lax.axis_size(AXIS) == 1:
        return tree
    leaves[first] = checkpoint_name(leaves[first], PARAMETERS + text)
    return treedef.unflatten(leaves)
