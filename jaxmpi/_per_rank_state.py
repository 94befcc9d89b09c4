"""Marks of per-rank state: which leaves of a tree have another value on each rank.

Most leaves of a train state are equal on all ranks. The others are below a `PerRankState`, in a
`ShardedArray` or a `ShardedState`, or in a variable of `flax.nnx` that is per rank by its type. A
mark in the path of a leaf tells them apart.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import KeyEntry, KeyPath, PyTreeDef

__all__ = [
    "PER_RANK",
    "STATISTIC",
    "PathMark",
    "PathMarkKey",
    "PerRankState",
    "flatten_with_path",
    "in_shard",
    "is_per_rank_leaf",
    "is_variable",
    "path_mark_of",
    "path_marks_of",
    "per_rank_variables",
    "shard_axis",
]


class PathMark(str):
    """A key in the path of a leaf that tells which ranks have the leaf.

    The fields of `PerRankState`, `ShardedArray` and `ShardedState` have marks as their names.
    `jax.tree_util` keeps the type of a key, but `flax.nnx` does not: `nnx.state` and `nnx.split`
    turn every pytree node into a dict whose keys are the names of the fields. So the name itself
    carries the facts. It is a subclass of `str`: nnx passes it on unchanged, and no field of a
    user's class has it.

    The text of a mark contains all of its attributes. JAX and nnx cache tree structures and return
    either of two structures whose keys are equal, so equal marks must have equal attributes.

    Attributes:
      field: the name of the field in the name of a leaf; "" if the mark is left out there.
      per_rank: whether the leaves below it have different values on each rank.
      of: the shape of the whole array, or of one array of a stack, whose shards are below; None if
        the leaves below are no shards.
      state: whether the leaves below belong to a `ShardedState`.
      ranks: the number of shards.
      axis: the axis of the ranks over which the array is sharded.
    """

    field: str = ""
    per_rank: bool = True
    of: tuple[int, ...] | None = None
    state: bool = False
    ranks: int = 1
    axis: str | tuple[str, ...] = ()

    @classmethod
    def of_shard(cls, of: tuple[int, ...], ranks: int, axis: str | tuple[str, ...]) -> "PathMark":
        """Return the name of the field `ShardedArray.shard`."""
        mark = cls(f"ShardedArray(of={of}, ranks={ranks}, axis={axis!r}).shard")
        mark.field, mark.of, mark.ranks, mark.axis = "shard", of, ranks, axis
        return mark

    @classmethod
    def of_state(cls, field: str, ranks: int, axis: str | tuple[str, ...]) -> "PathMark":
        """Return the name of a field of `ShardedState`; it is per rank on several ranks only."""
        mark = cls(f"ShardedState(ranks={ranks}, axis={axis!r}).{field}")
        mark.field, mark.per_rank, mark.state = field, ranks > 1, True
        mark.ranks, mark.axis = ranks, axis
        return mark


PER_RANK = PathMark("PerRankState.per_rank")
PER_RANK.field = "per_rank"
# `flatten_with_path` puts these before ".value" in the path of a variable
VARIABLE = PathMark("nnx variable of each rank")
STATISTIC = PathMark("nnx batch statistic of each rank")


class PathMarkKey(jax.tree_util.GetAttrKey):  # type: ignore[misc]
    """Pytree key of a field whose name is a `PathMark`."""

    def __str__(self) -> str:
        return f".{self.name.field}" if self.name.field else ""


@jax.tree_util.register_pytree_with_keys_class
class PerRankState:
    """State that differs between the ranks: keys, environments, statistics of local batches.

    All other leaves of a train state are equal on all ranks. In a `PerRankState`,

    - `save` writes every rank's values, and `restore` gives each rank its own back. On another
      number of ranks it raises unless all ranks had the same; `PerRankState(None)` in `like` leaves
      the part out;
    - `synchronize` keeps each rank's values; `watch_replicas` and JAXMPI_CHECK do not compare them;
    - `jaxmpi.jit` lets them differ in the arguments and outputs that are named as replicated.

    It is a pytree node with one child, and goes through `jax.jit`, `jax.grad` and optimizers as a
    tuple would. Structure, shapes and dtypes are the same on all ranks. (`PerRank` is something
    else: the stacked arrays of simulated ranks.)

    Attributes:
      per_rank: any pytree.

    >>> import jax, jaxmpi
    >>> run = {"step": 0, "key": PerRankState(jaxmpi.rank_key(jax.random.key(0)))}
    >>> key, noise_key = jax.random.split(run["key"].per_rank)
    >>> run["key"] = PerRankState(key)
    """

    def __init__(self, per_rank: Any) -> None:
        self.per_rank = per_rank

    def __repr__(self) -> str:
        return f"PerRankState({self.per_rank!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[PathMarkKey, Any]], None]:
        return ((PathMarkKey(PER_RANK), self.per_rank),), None

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.per_rank,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> "PerRankState":
        return cls(*children)


def per_rank_variables() -> tuple[type, ...]:
    """Return the types of per-rank nnx variables: batch statistics first, metrics, PRNG keys."""
    nnx = sys.modules.get("flax.nnx")  # whoever has a variable has imported it
    return (nnx.BatchStat, nnx.metrics.MetricState, nnx.RngState) if nnx is not None else ()


def is_variable(x: object) -> bool:
    """Return whether x is an nnx variable: a pytree node with one child for JAX, a leaf for nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[KeyPath, Any]], PyTreeDef]:
    """Flatten a tree as `jax.tree_util.tree_flatten_with_path`, with marks for nnx variables.

    Code that asks which ranks have a leaf takes its path from here: the paths of `jax.tree_util` do
    not contain the type of a variable.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    types = per_rank_variables()
    if not types:
        return paths, treedef
    marked = []
    # Stop at each per-rank variable, and add its mark to the paths of the leaves below it.
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, lambda x: isinstance(x, types) or (is_leaf is not None and is_leaf(x))
    )
    for path, node in nodes:
        if not isinstance(node, types):
            marked.append((path, node))
            continue
        mark = STATISTIC if isinstance(node, types[0]) else VARIABLE
        for rest, leaf in jax.tree_util.tree_leaves_with_path(node, is_leaf):
            marked.append(((*path, PathMarkKey(mark), *rest), leaf))
    return marked, treedef


def path_mark_of(key: KeyEntry) -> PathMark | None:
    """Return the mark in a key: the name of a field, or the dict key that nnx makes of it."""
    is_field = isinstance(key, jax.tree_util.GetAttrKey)
    name = getattr(key, "name" if is_field else "key", None)
    return name if isinstance(name, PathMark) else None


def path_marks_of(path: KeyPath) -> list[PathMark]:
    """Return the marks in the path of a leaf, outermost first."""
    return [mark for mark in map(path_mark_of, path) if mark is not None]


def is_per_rank_leaf(path: KeyPath) -> bool:
    """Return whether each rank has its own value of the leaf at a path of `flatten_with_path`."""
    marks = path_marks_of(path)
    # In a `ShardedState`, the mark of the state decides, and not the marks of the shards in it.
    in_state = any(mark.state for mark in marks)
    return any(mark.per_rank for mark in marks if not (in_state and mark.of is not None))


def in_shard(path: KeyPath) -> bool:
    """Return whether the leaf at a path is the shard of a `ShardedArray` of the user."""
    return shard_axis(path) is not None


def shard_axis(path: KeyPath) -> str | tuple[str, ...] | None:
    """Return the axis over which the user's `ShardedArray` at a path is sharded, or None.

    The arrays in a `ShardedState` belong to `sharded`, which handles them itself, so they do not
    count.
    """
    marks = path_marks_of(path)
    if any(mark.state for mark in marks):
        return None
    return next((mark.axis for mark in marks if mark.of is not None), None)
