"""A tree as the leaves of a checkpoint, and back.

A leaf is equal on all ranks ("all"), cut into equal shards that the ranks have one of each ("shard"), or each rank's own
("own"). The shards of any number of ranks are those of any other: only where they are cut differs. Over an axis, each group of
ranks has all shards; groups that differ can be restored with the same axes only.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import jax
import numpy as np
from jax.tree_util import KeyPath

from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends.simulate import PerRank
from jaxmpi._checkpoint.leaf_values import stored
from jaxmpi._checkpoint.manifest import Leaf, LeafValue, is_plain
from jaxmpi._leaves import PerRankKey, PerRankState, PyTree, is_key, is_own, leaf_name
from jaxmpi._optim.sharded_array import ShardedArray
from jaxmpi._optim.sharded_state import ShardedState

__all__ = ["leaves_of", "left_out", "old_names", "put_back"]

INNER, MASTER = jax.tree_util.SequenceKey(0), jax.tree_util.GetAttrKey("master")  # of `ShardedState.parts`


def leaves_of(tree: PyTree, axes: Mapping[str, int]) -> list[tuple[Leaf, LeafValue]]:
    """The leaves, with what this process has of each: an array, a number, or a `PerRank`.

    Args:
      tree: any pytree.
      axes: the names of the ranks and their sizes, AXIS among them.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_stands_for_leaves)
    out = []
    for path, node in paths:
        if isinstance(node, ShardedState):
            size = _ranks_along(path, node.layout.axis, axes)
            if node.layout.ranks not in (1, size):
                raise ValueError(f"{leaf_name(path)} is a state of {node.layout.ranks} ranks, and there are {size}.")
            leaves = [_described((*path, *rest), x, part, shape) for rest, x, part, shape in _of_sharded(node)]
            out += [(_over(leaf, node.layout.axis, axes), x) for leaf, x in leaves]
        elif isinstance(node, ShardedArray):
            leaf, x = _of_sharded_array(path, node, _ranks_along(path, node.axis, axes))
            out.append((_over(leaf, node.axis, axes), x))
        else:
            out.append(_described(path, node, "own" if is_own(path) else "all", None))
    called = [leaf.name for leaf, _ in out]
    if len(set(called)) < len(called):
        twice = next(name for name in called if called.count(name) > 1)
        raise ValueError(f"two leaves of the tree are called {twice}, and one would overwrite the other. Rename one of them.")
    return out


def left_out(like: PyTree) -> list[str]:
    """The names of the parts that `like` leaves out, which are `PerRankState(None)`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda x: isinstance(x, PerRankState))
    return [_name(path) for path, x in paths if isinstance(x, PerRankState) and x.per_rank is None]


def old_names(like: PyTree) -> dict[str, str]:
    """What jaxmpi 0.1 called leaves of the states of `sharded`, by the names that they have now."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(like, is_leaf=_stands_for_leaves)
    states = [(path, node.parts) for path, node in nodes if isinstance(node, ShardedState)]
    leaves = [
        (path, rest) for path, parts in states for rest, _ in jax.tree_util.tree_leaves_with_path(parts, is_leaf=_is_per_rank)
    ]
    return {_name((*path, *_in_state(rest))): _name((*path, *rest)) for path, rest in leaves}


def put_back(tree: PyTree, values: Sequence[LeafValue]) -> PyTree:
    """The tree with other values for its leaves, in the order of `leaves_of`."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=_stands_for_leaves)
    rest = iter(values)
    new: list[PyTree] = []
    for node in nodes:
        if isinstance(node, ShardedState):
            inner = jax.tree.structure(node.parts, is_leaf=_is_per_rank)
            new.append(ShardedState.of(inner.unflatten([next(rest) for _ in range(inner.num_leaves)]), node.layout))
        elif isinstance(node, ShardedArray):
            new.append(ShardedArray(next(rest), node.of, node.ranks, node.axis))
        else:
            new.append(next(rest))
    return treedef.unflatten(new)


def _of_sharded_array(path: KeyPath, node: ShardedArray, size: int) -> tuple[Leaf, LeafValue]:
    if node.ranks != size:
        raise ValueError(f"{leaf_name(path)} is one of {node.ranks} shards, and there are {size} ranks.")
    leaf, x = _described(path, node.shard, "all", None)
    if not node.of or size == 1:
        return leaf, x
    stacked = len(leaf.shape) - len(node.of)
    return leaf._replace(part="shard", shape=(*leaf.shape[:stacked], *node.of), stacked=stacked), x


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


def _described(path: KeyPath, x: LeafValue, part: str, of: tuple[int, ...] | None) -> tuple[Leaf, LeafValue]:
    """A leaf, which may be a shard `of` an array."""
    name = _name(path)
    if is_plain(x):
        return Leaf(name, part, type(x).__name__, (), x), x
    array = x.stack if isinstance(x, PerRank) else x
    if not isinstance(array, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(f"leaf {name} is a {type(x).__name__}, and a checkpoint holds arrays, numbers and text. Take it out.")
    if not is_key(array) and (array.dtype.names or array.dtype.kind in "OSUMm"):
        raise TypeError(f"leaf {name} has dtype {array.dtype}, and a checkpoint holds numbers. Take it out.")
    numbers = stored(array)
    shape = tuple(numbers.shape[1:] if isinstance(x, PerRank) else numbers.shape) if of is None else of
    return Leaf(name, part, str(array.dtype), shape), x


def _name(path: KeyPath) -> str:
    """The name of a leaf, which is the same whether it is marked as each rank's own or not."""
    return leaf_name(tuple(key for key in path if not isinstance(key, PerRankKey)))


def _of_sharded(state: ShardedState) -> Iterator[tuple[KeyPath, LeafValue, str, tuple[int, ...] | None]]:
    """Path and value of each leaf, what part of it a rank has, and of what array it is a shard."""
    paths, _ = jax.tree_util.tree_flatten_with_path(state.parts, is_leaf=_is_per_rank)
    for (path, x), shape in zip(paths, state.layout.shapes, strict=False):
        of = shape if state.layout.ranks > 1 else None
        yield _in_state(path), x, "all" if of is None else "shard", of


def _in_state(path: KeyPath) -> KeyPath:
    """The path of a leaf of `ShardedState.parts` in the state: as in that of `inner`, or below "master"."""
    return path[1:] if path[0] == INNER else (MASTER, *path[1:])


def _stands_for_leaves(x: object) -> bool:
    return isinstance(x, ShardedState | ShardedArray | PerRank)


def _is_per_rank(x: object) -> bool:
    return isinstance(x, PerRank)
