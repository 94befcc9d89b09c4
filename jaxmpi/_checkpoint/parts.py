"""A tree as the leaves of a checkpoint, and back.

A leaf is equal on all ranks ("all"), cut into equal shards that the ranks have one of each ("shard"), or each rank's own
("own"). The shards of any number of ranks are those of any other: only where they are cut differs.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi._backends.simulate import PerRank
from jaxmpi._errors import CheckpointError
from jaxmpi._leaves import PerRankKey, is_key, is_own, leaf_name
from jaxmpi._optim.sharded import ShardedState, shard_shape

__all__ = ["Leaf", "Reader", "difference", "leaves_of", "like", "part_of", "put_back", "to_host"]

PLAIN = (bool, int, float, str)
KEYS = {"fry": "threefry2x32", "urbg": "unsafe_rbg"}  # the names that JAX abbreviates in a dtype


class Leaf(NamedTuple):
    """What a checkpoint says about a leaf.

    Attributes:
      name: its path, such as "['params']['w']".
      part: "all", "shard" or "own".
      dtype: of the array, such as "float32"; "key<fry>" for PRNG keys; "int", "str" and so on for Python's own.
      shape: of the whole array; of the numbers that keys consist of.
      value: of a Python number or text.
    """

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...] = ()
    value: Any = None

    def __str__(self) -> str:
        kind = f"{self.dtype}{list(self.shape)}" if self.value is None else self.dtype
        return kind + (" of each rank" if self.part == "own" else "")

    @property
    def stored(self) -> bool:
        """Whether its numbers stand in a file."""
        return self.value is None and prod(self.shape) > 0

    @property
    def stored_dtype(self) -> str:
        """That of the numbers in the file."""
        return "uint32" if self.dtype.startswith("key") else self.dtype


Reader = Callable[[Leaf, int], np.ndarray]  # what a rank has of a leaf


def leaves_of(tree: Any, size: int) -> list[tuple[Leaf, Any]]:
    """The leaves, with what this process, of `size` ranks, has of each: an array, a number, or a `PerRank`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_stands_for_leaves)
    out = []
    for path, node in paths:
        if isinstance(node, ShardedState):
            if node.layout.ranks not in (1, size):
                raise ValueError(f"{leaf_name(path)} is a state of {node.layout.ranks} ranks, and there are {size}.")
            out += [_described((*path, *rest), x, part, shape) for rest, x, part, shape in _of_sharded(node)]
        else:
            out.append(_described(path, node, "own" if is_own(path) or isinstance(node, PerRank) else "all", None))
    return out


def put_back(tree: Any, values: Sequence[Any]) -> Any:
    """The tree with other values for its leaves, in the order of `leaves_of`."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=_stands_for_leaves)
    rest = iter(values)
    new = []
    for node in nodes:
        if isinstance(node, ShardedState):
            inner = jax.tree.structure(node.parts, is_leaf=_is_per_rank)
            new.append(ShardedState.of(inner.unflatten([next(rest) for _ in range(inner.num_leaves)]), node.layout))
        else:
            new.append(next(rest))
    return treedef.unflatten(new)


def difference(there: Sequence[Leaf], here: Sequence[Leaf]) -> str:
    """The first leaf that is not the same in a checkpoint and in a tree, in words; "" if there is none."""
    saved, wanted = {leaf.name: leaf for leaf in there}, {leaf.name: leaf for leaf in here}
    for name in [*saved, *wanted]:
        if name not in wanted:
            return f"leaf {name} ({saved[name]}) is in it, and not in `like`"
        if name not in saved:
            return f"leaf {name} ({wanted[name]}) of `like` is not in it"
        if (saved[name].dtype, saved[name].shape) != (wanted[name].dtype, wanted[name].shape):
            return f"leaf {name} is {saved[name]} in it, and {wanted[name]} in `like`"
    return ""


def whole(leaf: Leaf, ranks: int, read: Reader) -> np.ndarray:
    """A leaf that `ranks` ranks have saved; raises a CheckpointError where each has its own."""
    if leaf.part == "all":
        return read(leaf, 0)
    rows = [read(leaf, rank) for rank in range(ranks)]
    if leaf.part == "shard":
        return np.concatenate([row.reshape(-1) for row in rows])[: prod(leaf.shape)].reshape(leaf.shape)
    if any(row.tobytes() != rows[0].tobytes() for row in rows):
        raise CheckpointError(
            f"leaf {leaf.name} is each rank's own and was saved by {ranks}: that cannot be shared out among another number. "
            f"Go on with {ranks} ranks, or save where the ranks have just communicated."
        )
    return rows[0]


def part_of(leaf: Leaf, rank: int, size: int, saved: Leaf, ranks: int, read: Reader) -> np.ndarray:
    """What rank `rank` of `size` has of a leaf that `ranks` ranks have saved."""
    if saved.part == leaf.part != "all" and ranks == size:
        return read(saved, rank)
    if leaf.part != "shard":
        return whole(saved, ranks, read)
    shape = shard_shape(leaf.shape, size)
    start, stop = (prod(shape) * k for k in (rank, rank + 1))
    if saved.part == "shard":  # only what overlaps
        each = prod(shard_shape(saved.shape, ranks))
        first = min(start // each, ranks - 1)
        rows = [read(saved, r).reshape(-1) for r in range(first, min(-(-stop // each), ranks))]
        flat = np.concatenate(rows) if rows else np.empty(0, saved.dtype)
        total = max(0, prod(leaf.shape) - first * each)
        flat, start, stop = flat[:total], start - first * each, stop - first * each
    else:
        flat = whole(saved, ranks, read).reshape(-1)
    out = np.zeros(prod(shape), flat.dtype)
    piece = flat[start:stop]
    out[: piece.size] = piece
    return out.reshape(shape)


def like(leaf: Any, value: np.ndarray) -> Any:
    """`value` as the kind of array that `leaf` is, on its device."""
    if isinstance(leaf, np.ndarray | np.generic):
        return value if isinstance(leaf, np.ndarray) else value[()]
    if isinstance(leaf, PerRank):
        return PerRank(like(leaf.stack, np.broadcast_to(value, leaf.stack.shape)))
    if value.ndim > leaf.ndim + is_key(leaf):  # of simulated ranks that differ
        return PerRank(jax.device_put(value))
    if not is_key(leaf) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return value  # JAX would shorten it
    x = jax.device_put(value, leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None)
    return jax.random.wrap_key_data(x, impl=_kind(leaf)) if is_key(leaf) else x


def to_host(x: Any) -> np.ndarray:
    """A copy of an array, which stays as it is whatever becomes of the array."""
    return np.array(jax.random.key_data(x) if is_key(x) else x)


def _described(path: Any, x: Any, part: str, of: tuple[int, ...] | None) -> tuple[Leaf, Any]:
    """A leaf, which may be a shard `of` an array."""
    name = leaf_name([key for key in path if not isinstance(key, PerRankKey)])
    if type(x) in PLAIN and part == "all":
        return Leaf(name, "all", type(x).__name__, (), x), x
    array = x.stack if isinstance(x, PerRank) else x
    if not isinstance(array, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(f"leaf {name} is a {type(x).__name__}, and a checkpoint holds arrays, numbers and text. Take it out.")
    if not is_key(array) and (array.dtype.names or array.dtype.kind in "OSUMm"):
        raise TypeError(f"leaf {name} has dtype {array.dtype}, and a checkpoint holds numbers. Take it out.")
    stored = jax.eval_shape(jax.random.key_data, array) if is_key(array) else array
    shape = tuple(stored.shape[1:] if isinstance(x, PerRank) else stored.shape) if of is None else of
    return Leaf(name, part, str(array.dtype), shape), x


def _of_sharded(state: ShardedState) -> Iterator[tuple[Any, Any, str, tuple[int, ...] | None]]:
    """Path and value of each leaf, what part of it a rank has, and of what array it is a shard."""
    paths, _ = jax.tree_util.tree_flatten_with_path(state.parts, is_leaf=_is_per_rank)
    for (path, x), shape in zip(paths, state.layout.shapes, strict=False):
        of = shape if state.layout.ranks > 1 else None
        yield path, x, "all" if of is None else "shard", of


def _kind(key: Any) -> Any:
    """The implementation of PRNG keys; of a `ShapeDtypeStruct`, the dtype tells it."""
    tag = str(key.dtype).removeprefix("key<").removesuffix(">")
    return jax.random.key_impl(key) if isinstance(key, jax.Array) else KEYS.get(tag, tag)


def _stands_for_leaves(x: Any) -> bool:
    return isinstance(x, ShardedState | PerRank)


def _is_per_rank(x: Any) -> bool:
    return isinstance(x, PerRank)
