"""A pytree as the leaves of a checkpoint, and back.

A leaf is replicated (equal on all ranks), sharded (the ranks have one of equal shards each), or per
rank. A leaf that was saved in shards can be cut into any number of shards. Over an axis of the
ranks, each group of ranks has all shards; where the groups differ, only the same axes can restore
them.
"""

from collections.abc import Hashable, Mapping, Sequence
from math import prod

import jax
import numpy as np
from jax.sharding import AbstractMesh, Sharding
from jax.tree_util import GetAttrKey, KeyPath

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends.one_process import PerRank
from jaxmpi._checkpoint.manifest import Layout, Leaf, LeafValue, holds_numbers, is_plain
from jaxmpi._errors import RankCountError
from jaxmpi._leaves import PyTree, is_key, leaf_name
from jaxmpi._per_rank_state import (
    PerRankState,
    flatten_with_path,
    is_per_rank_leaf,
    path_mark_of,
    path_marks_of,
    per_rank_variables,
)

__all__ = ["leaves_of", "like", "omitted", "put_back", "to_host"]

KEY_NAMES = {"fry": "threefry2x32", "urbg": "unsafe_rbg"}  # abbreviated by JAX in a dtype


# a tree and its leaves


def leaves_of(tree: PyTree, axes: Mapping[str, int]) -> list[tuple[Leaf, LeafValue]]:
    """Return each leaf with this process's value: an array, a Python number, or a `PerRank`.

    Args:
      tree: any pytree.
      axes: the names of the axes of ranks and their sizes, AXIS among them.

    Raises:
      TypeError: a leaf that a checkpoint cannot hold.
      ValueError: two leaves of one name; an axis that the ranks do not have.
      RankCountError: shards that were made for another number of ranks.
    """
    paths, _ = flatten_with_path(tree, is_leaf=_is_per_rank)
    leaves = [(_leaf(path, x, axes), x) for path, x in paths]
    seen = set()
    for leaf, _ in leaves:
        if leaf.name in seen:
            raise ValueError(
                f"two leaves of the tree are called {leaf.name}, and one would overwrite the "
                "other. Rename one of them."
            )
        seen.add(leaf.name)
    return leaves


def omitted(like: PyTree) -> list[str]:
    """Return the names of the nodes of `like` that ask for nothing.

    These are `PerRankState(None)`, and nnx variables of per-rank types that hold None.
    """
    types = (PerRankState, *per_rank_variables())
    nodes, _ = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda x: isinstance(x, types))
    empty = []
    for path, node in nodes:
        if isinstance(node, types) and not jax.tree.leaves(node):
            empty.append(_name(path))
    return empty


def put_back(tree: PyTree, values: Sequence[LeafValue]) -> PyTree:
    """Return the tree with other values for its leaves, in the order of `leaves_of`."""
    return jax.tree.structure(tree, is_leaf=_is_per_rank).unflatten(values)


def _is_per_rank(x: object) -> bool:
    return isinstance(x, PerRank)


def _name(path: KeyPath) -> str:
    """Return the name of a leaf, which is the same however the leaf is laid out over the ranks.

    In the state of `sharded` it is the name in the state of its inner transform, or below "master".
    """
    keys = []
    for key in path:
        mark = path_mark_of(key)
        if mark is None:
            keys.append(key)
        elif mark.state and mark.field == "master":
            keys.append(GetAttrKey("master"))
    return leaf_name(tuple(keys))


def _leaf(path: KeyPath, x: LeafValue, axes: Mapping[str, int]) -> Leaf:
    """Return the leaf at a path, with its layout by the marks in the path."""
    # 1. The outermost shards or state of `sharded` must be made for the ranks that there are.
    #    Shards inside of a state have its ranks and its axis.
    for i, key in enumerate(path):
        mark = path_mark_of(key)
        if mark and (mark.state or mark.of is not None):
            _check_ranks(path[:i], mark.state, mark.ranks, mark.axis, axes)
            break
    marks = path_marks_of(path)
    cuts = [mark for mark in marks if mark.state or mark.of is not None]
    if not cuts:
        return _array(path, x, "per-rank" if is_per_rank_leaf(path) else "replicated")
    shard, ranks, axis = cuts[-1], cuts[0].ranks, cuts[0].axis
    # 2. In a state of one rank, or over one rank, arrays are not cut; scalars never are.
    if ranks == 1 or not shard.of:
        per_rank = any(mark.per_rank for mark in marks if mark not in cuts)
        return _over(_array(path, x, "per-rank" if per_rank else "replicated"), axis, axes)
    # 3. A shard: the shape is that of the array, after the axes that stack arrays.
    leaf = _array(path, x, "sharded")
    stacked = len(leaf.shape) - len(shard.of)
    leaf = leaf._replace(shape=(*leaf.shape[:stacked], *shard.of), stacked=stacked)
    return _over(leaf, axis, axes)


def _check_ranks(
    path: KeyPath, state: bool, made: int, axis: Axis, axes: Mapping[str, int]
) -> None:
    """Raise an error with the path of what is cut if it is cut for other ranks than there are."""
    if not {*names(axis)} <= {*axes}:
        known = ", ".join(map(repr, axes))
        raise ValueError(
            f"{leaf_name(path)} is cut over axis {axis!r}, and the ranks have {known}. Name it in "
            "jaxmpi.init."
        )
    size = prod(axes[name] for name in names(axis))
    if state and made not in (1, size):
        raise RankCountError(f"{leaf_name(path)} is a state of {made} ranks, and there are {size}.")
    if not state and made != size:
        raise RankCountError(
            f"{leaf_name(path)} is one of {made} shards, and there are {size} ranks."
        )


def _over(leaf: Leaf, axis: Axis, axes: Mapping[str, int]) -> Leaf:
    """Return a leaf over an axis: what is equal within a group of ranks may differ between them."""
    if axis == AXIS:
        return leaf
    sizes = tuple((name, size) for name, size in axes.items() if name != AXIS)
    layout: Layout = "sharded" if leaf.layout == "sharded" else "per-rank"
    return leaf._replace(layout=layout, axis=names(axis), axes=sizes)


def _array(path: KeyPath, x: LeafValue, layout: Layout) -> Leaf:
    """Return a leaf with the dtype and shape that this rank has."""
    name = _name(path)
    if is_plain(x):
        return Leaf(name, layout, type(x).__name__, (), x)
    array = x.stack if isinstance(x, PerRank) else x
    if not isinstance(array, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(
            f"leaf {name} is a {type(x).__name__}, and a checkpoint holds arrays, numbers and "
            "text. Take it out."
        )
    if isinstance(array, np.ma.MaskedArray):  # np.asarray would drop the mask
        raise TypeError(
            f"leaf {name} is a MaskedArray, and a checkpoint holds no masks. Put its `data` and "
            "its `mask` into the tree as two arrays."
        )
    if not is_key(array) and not holds_numbers(str(array.dtype)):
        raise TypeError(
            f"leaf {name} has dtype {array.dtype}, and a checkpoint holds numbers. Take it out."
        )
    shape = _stored_shape(array)
    return Leaf(name, layout, str(array.dtype), shape[1:] if isinstance(x, PerRank) else shape)


# the values of leaves


def to_host(x: jax.Array | np.ndarray | np.generic, *, copy: bool) -> np.ndarray:
    """Return the numbers of an array or of PRNG keys; a copy stays as it is when they change."""
    data = jax.random.key_data(x) if is_key(x) else x
    return np.array(data) if copy else np.asarray(data)


def like(leaf: LeafValue, value: LeafValue) -> LeafValue:
    """Return a restored value as what `leaf` is: an array on its device, or a Python number.

    An array has a weak type if `leaf` has one, so that what is computed with it has the same dtype.

    Args:
      leaf: of the tree that the value is restored into.
      value: a Python number or text; or an array, stacked where simulated ranks differ.
    """
    if not isinstance(value, np.ndarray):
        return value
    if isinstance(leaf, PerRank):
        return PerRank(like(leaf.stack, np.broadcast_to(value, _stored_shape(leaf.stack))))
    stacked = value.ndim > len(_stored_shape(leaf))
    if is_plain(leaf) and not stacked:
        return type(leaf)(value.item())
    if isinstance(leaf, np.generic) and not stacked:
        return value[()]
    on_host = is_plain(leaf) or isinstance(leaf, np.ndarray | np.generic)
    x = value if on_host else _on_device(leaf, value, stacked)
    return PerRank(x) if stacked else x


def _on_device(
    leaf: jax.Array | jax.ShapeDtypeStruct, value: np.ndarray, stacked: bool
) -> jax.Array | np.ndarray:
    """Return the value as a JAX array on the devices of `leaf`."""
    if not is_key(leaf) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return value  # JAX would make 32 bits of 64
    x = jax.device_put(value, None if stacked else _sharding(leaf))
    if is_key(leaf):
        return jax.random.wrap_key_data(x, impl=_key_impl(leaf))
    return _jaxcompat.as_weak(x) if leaf.weak_type else x


def _sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> Sharding | None:
    """Return the sharding that `leaf` asks for; None if it may be on any device."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    # That of `jax.eval_shape` can have a mesh without devices.
    abstract = isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh)
    return None if abstract else leaf.sharding


def _stored_shape(x: LeafValue) -> tuple[int, ...]:
    """Return the shape of the numbers that are stored of a leaf."""
    if is_plain(x):
        return ()
    return tuple(jax.eval_shape(jax.random.key_data, x).shape if is_key(x) else x.shape)


def _key_impl(key: jax.Array | jax.ShapeDtypeStruct) -> Hashable:
    """Return the implementation of PRNG keys; only the dtype of a `ShapeDtypeStruct` tells it."""
    tag = str(key.dtype).removeprefix("key<").removesuffix(">")
    return jax.random.key_impl(key) if isinstance(key, jax.Array) else KEY_NAMES.get(tag, tag)
