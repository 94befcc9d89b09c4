"""A tree as the leaves of a checkpoint, and back.

A leaf is equal on all ranks ("all"), cut into equal shards that the ranks have one of each ("shard"), or each rank's own
("own"). The shards of any number of ranks are those of any other: only where they are cut differs. Over an axis, each group of
ranks has all shards; groups that differ can be restored with the same axes only.
"""

from collections.abc import Mapping, Sequence
from math import prod

import jax
import numpy as np
from jax.tree_util import GetAttrKey, KeyPath

from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends.simulate import PerRank
from jaxmpi._checkpoint.leaf_values import stored
from jaxmpi._checkpoint.manifest import Leaf, LeafValue, is_plain
from jaxmpi._errors import RankCountError
from jaxmpi._leaves import (
    PerRankState,
    PyTree,
    flatten_with_path,
    is_key,
    is_own,
    leaf_name,
    mark_of,
    marks_of,
    per_rank_variables,
)

__all__ = ["leaves_of", "left_out", "put_back"]


def leaves_of(tree: PyTree, axes: Mapping[str, int]) -> list[tuple[Leaf, LeafValue]]:
    """The leaves, with what this process has of each: an array, a number, or a `PerRank`.

    Args:
      tree: any pytree.
      axes: the names of the ranks and their sizes, AXIS among them.
    """
    paths, _ = flatten_with_path(tree, is_leaf=_is_per_rank)
    out = [_described(path, x, axes) for path, x in paths]
    called = [leaf.name for leaf, _ in out]
    if len(set(called)) < len(called):
        twice = next(name for name in called if called.count(name) > 1)
        raise ValueError(f"two leaves of the tree are called {twice}, and one would overwrite the other. Rename one of them.")
    return out


def left_out(like: PyTree) -> list[str]:
    """The names of the parts that `like` leaves out: `PerRankState(None)`, and nnx variables of each rank that hold None."""
    kinds = (PerRankState, *per_rank_variables())
    nodes, _ = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda x: isinstance(x, kinds))
    return [_name(path) for path, x in nodes if isinstance(x, kinds) and not jax.tree.leaves(x)]


def put_back(tree: PyTree, values: Sequence[LeafValue]) -> PyTree:
    """The tree with other values for its leaves, in the order of `leaves_of`."""
    return jax.tree.structure(tree, is_leaf=_is_per_rank).unflatten(values)


def _described(path: KeyPath, x: LeafValue, axes: Mapping[str, int]) -> tuple[Leaf, LeafValue]:
    """A leaf, and which ranks have what of it."""
    for i, key in enumerate(path):
        if (mark := mark_of(key)) and (mark.state or mark.of is not None):
            _check_ranks(path[:i], mark.state, mark.ranks, mark.axis, axes)
            break  # the shards in a state have its ranks and its axis
    cuts = [mark for mark in marks_of(path) if mark.state or mark.of is not None]
    if not cuts:
        return _array(path, x, "own" if is_own(path) else "all"), x
    shard, ranks, axis = cuts[-1], cuts[0].ranks, cuts[0].axis
    # in a state of one rank, and over one rank, an array is whole; a scalar is, on every rank
    if ranks == 1 or not shard.of:
        each = [mark for mark in marks_of(path) if mark.per_rank and mark not in cuts]
        return _over(_array(path, x, "own" if each else "all"), axis, axes), x
    leaf = _array(path, x, "shard")
    stacked = len(leaf.shape) - len(shard.of)
    leaf = leaf._replace(shape=(*leaf.shape[:stacked], *shard.of), stacked=stacked)
    return _over(leaf, axis, axes), x


def _check_ranks(path: KeyPath, state: bool, made: int, axis: Axis, axes: Mapping[str, int]) -> None:
    """Raise a ValueError with the path of what is cut if it is cut for other ranks than there are."""
    size = _ranks_along(path, axis, axes)
    if state and made not in (1, size):
        raise RankCountError(f"{leaf_name(path)} is a state of {made} ranks, and there are {size}.")
    if not state and made != size:
        raise RankCountError(f"{leaf_name(path)} is one of {made} shards, and there are {size} ranks.")


def _ranks_along(path: KeyPath, axis: Axis, axes: Mapping[str, int]) -> int:
    """The number of ranks along the axis of a node; raises a ValueError where they do not have it."""
    if not {*names(axis)} <= {*axes}:
        known = ", ".join(map(repr, axes))
        raise ValueError(f"{leaf_name(path)} is cut over axis {axis!r}, and the ranks have {known}. Name it in jaxmpi.init.")
    return prod(axes[name] for name in names(axis))


def _over(leaf: Leaf, axis: Axis, axes: Mapping[str, int]) -> Leaf:
    """A leaf of what is cut over an axis: what the ranks of a group have whole may differ between the groups."""
    if axis == AXIS:
        return leaf
    sizes = tuple((name, size) for name, size in axes.items() if name != AXIS)
    return leaf._replace(part="own" if leaf.part == "all" else leaf.part, axis=names(axis), axes=sizes)


def _array(path: KeyPath, x: LeafValue, part: str) -> Leaf:
    """A leaf as this rank has it."""
    name = _name(path)
    if is_plain(x):
        return Leaf(name, part, type(x).__name__, (), x)
    array = x.stack if isinstance(x, PerRank) else x
    if not isinstance(array, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(f"leaf {name} is a {type(x).__name__}, and a checkpoint holds arrays, numbers and text. Take it out.")
    if not is_key(array) and (array.dtype.names or array.dtype.kind in "OSUMm"):
        raise TypeError(f"leaf {name} has dtype {array.dtype}, and a checkpoint holds numbers. Take it out.")
    numbers = stored(array)
    shape = tuple(numbers.shape[1:] if isinstance(x, PerRank) else numbers.shape)
    return Leaf(name, part, str(array.dtype), shape)


def _name(path: KeyPath) -> str:
    """The name of a leaf, which is the same whichever ranks have it.

    In the state of `sharded` it is that of the leaf in the state of its inner transform, or below "master".
    """
    keys = []
    for key in path:
        mark = mark_of(key)
        if mark is None:
            keys.append(key)
        elif mark.state and mark.field == "master":
            keys.append(GetAttrKey("master"))
    return leaf_name(tuple(keys))


def _is_per_rank(x: object) -> bool:
    return isinstance(x, PerRank)
