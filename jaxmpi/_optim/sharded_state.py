"""The state of `sharded`: which of its arrays are shards, the state that one rank would have, and the way back."""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.tree_util import KeyPath

from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends.simulate import PerRank
from jaxmpi._collectives.trees import Caller
from jaxmpi._consistency.equal_leaves import EqualLeaf, check_equal_leaves
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PerRankState, PyTree, is_key, is_own, leaf_name
from jaxmpi._optim.sharded_array import ShardedArray
from jaxmpi._optim.shards import check_cut, gathered, is_shard, joined, own, part, size_along
from jaxmpi._world import session

__all__ = [
    "Layout",
    "ShardedState",
    "check_equal",
    "check_fits",
    "check_ranks",
    "layout_of",
    "reshard",
    "stored",
    "whole_state",
]


NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, PerRank)


class Layout(NamedTuple):
    """Which leaves of a state are shards, in the order of `jax.tree.leaves`: the shape of the whole array, or None.

    Attributes:
      ranks: the number of shards, 1 where they are whole.
      shapes: of the leaves.
      axis: of the ranks that have the shards.
    """

    ranks: int
    shapes: tuple[tuple[int, ...] | None, ...]
    axis: Axis = AXIS


@partial(jax.tree_util.register_dataclass, data_fields=("own",), meta_fields=("layout",))
class ShardedState:
    """The state of `sharded`.

    Attributes:
      own: `inner` and `master`: a `PerRankState`, unless it is the state of one rank.
      layout: for how many ranks, and what the shards are parts of.
    """

    def __init__(self, own: PerRankState | tuple[PyTree, PyTree], layout: Layout) -> None:
        self.own, self.layout = own, layout

    @classmethod
    def of(cls, parts: tuple[PyTree, PyTree], layout: Layout) -> "ShardedState":
        return cls(parts if layout.ranks == 1 else PerRankState(parts), layout)

    @property
    def parts(self) -> tuple[PyTree, PyTree]:
        return self.own.per_rank if isinstance(self.own, PerRankState) else self.own

    @property
    def inner(self) -> PyTree:
        """The state of the inner transform, for this rank's shards."""
        return self.parts[0]

    @property
    def master(self) -> PyTree:
        """This rank's shards of the parameters in `master_dtype`; () without."""
        return self.parts[1]

    def __repr__(self) -> str:
        over = f", axis={self.layout.axis!r}" if self.layout.axis != AXIS else ""
        return f"ShardedState(inner={self.inner!r}, master={self.master!r}, ranks={self.layout.ranks}{over})"


def whole_state(state: ShardedState) -> ShardedState:
    """Return the state that one rank would have, on every rank, of one that `check_fits`."""
    parts = _whole_parts(state) if state.layout.ranks > 1 else state.parts
    return ShardedState.of(parts, state.layout._replace(ranks=1))


def reshard(state: ShardedState) -> ShardedState:
    """A state of one rank, from `unshard`, cut for the ranks that there are now along the axis of the state.

    **Collective:** every rank calls it, with a state that is equal on all ranks, or along its axis. Called eagerly, it compares
    checksums of the state first.
    **Communication:** 16 bytes.

    Raises:
      ValueError: the state is that of several ranks; the ranks do not have its axis.
      RankMismatchError: on every rank, a leaf that is not equal on the ranks, with its path and the ranks.
    """
    check_cut("reshard", state.layout.axis)
    if state.layout.ranks != 1:
        raise ValueError(f"reshard: the state is one of {state.layout.ranks} ranks. Call jaxmpi.unshard on them, then reshard.")
    check_equal("reshard", state, state.layout.axis)
    return ShardedState.of(_own_parts(state), state.layout._replace(ranks=size_along(state.layout.axis)))


def check_equal(function: str, tree: PyTree, axis: Axis | None = None) -> None:
    """Raise a RankMismatchError on all ranks unless what is whole in a tree is equal on the ranks that share its arrays.

    Whole are all arrays but shards and what is in a `PerRankState`. Those of a `ShardedArray` or `ShardedState` must be equal
    along its axis, all others along `axis`.

    Args:
      function: for the error.
      tree: any pytree.
      axis: None for the axis of the shards in the tree. If they have several, or there are none, only what is part of them
        is compared.
    """
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_unit)
    axes = {x.axis if isinstance(x, ShardedArray) else x.layout.axis for _, x in paths if _is_sharded(x)}
    if axis is None and len(axes) == 1:
        (axis,) = axes
    found: list[tuple[KeyPath, object, Axis]] = []
    for path, x in paths:
        if is_own(path):
            continue
        if isinstance(x, ShardedState):
            shapes = (None,) * len(x.layout.shapes) if x.layout.ranks == 1 else x.layout.shapes
            leaves = jax.tree_util.tree_leaves_with_path(x.parts)
            found += [
                ((*path, *inner), y, x.layout.axis)
                for (inner, y), shape in zip(leaves, shapes, strict=False)
                if shape is None and not is_own(inner)
            ]
        elif isinstance(x, ShardedArray):
            if not x.of:
                found.append((path, x.shard, x.axis))
        elif axis is not None:
            found.append((path, x, axis))
    equal = [
        EqualLeaf(leaf_name(path), x, along)
        for path, x, along in found
        if isinstance(x, NUMBERS) and getattr(x, "dtype", None) != np.dtype(object)
    ]
    check_equal_leaves(session.current(function), function, equal)


def _is_sharded(x: object) -> bool:
    return isinstance(x, ShardedArray | ShardedState)


def _is_unit(x: object) -> bool:
    return _is_sharded(x) or isinstance(x, PerRank)


@partial(anywhere, name="unshard")
def _whole_parts(state: ShardedState) -> tuple[PyTree, PyTree]:
    leaves, treedef = jax.tree.flatten(state.parts)
    wholes = {i: shape for i, shape in enumerate(state.layout.shapes[: len(leaves)]) if shape is not None}
    for i, x in Caller("unshard").allgather({i: leaves[i] for i in wholes}, axis=state.layout.axis).items():
        leaves[i] = joined(x, wholes[i])
    return treedef.unflatten(leaves)


@partial(anywhere, name="reshard")
def _own_parts(state: ShardedState) -> tuple[PyTree, PyTree]:
    leaves, treedef = jax.tree.flatten(state.parts)
    pairs = zip(leaves, state.layout.shapes, strict=False)
    return treedef.unflatten([x if shape is None else own(x, axis=state.layout.axis) for x, shape in pairs])


def layout_of(state: PyTree, params: PyTree, axis: Axis) -> Layout:
    """Which leaves of a state are sharded: arrays with the shape of a parameter, and the masters."""

    def shape_of(x: object) -> tuple[int, ...]:
        return tuple(getattr(x, "shape", ()))

    shapes = [shape_of(x) or None for x in jax.tree.leaves(params)]
    leaves = jax.tree.leaves(state, is_leaf=is_shard)
    of_inner = [shape_of(x) if shape_of(x) in shapes and not is_key(x) else None for x in leaves]
    return Layout(size_along(axis), (*of_inner, *shapes), axis)


def stored(state: PyTree, layout: Layout) -> PyTree:
    """This rank's shards of the leaves that are sharded, and the others whole."""
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_shard)
    pairs = list(zip(leaves, layout.shapes, strict=False))
    wholes = iter(gathered([x for x, shape in pairs if is_shard(x) and shape is None]))
    return treedef.unflatten([part(x, layout.axis) if shape else next(wholes) if is_shard(x) else x for x, shape in pairs])


def check_fits(function: str, state: ShardedState) -> None:
    """Raise a ValueError that names `function` unless the ranks have the axis of a state, and as many as it has shards."""
    check_cut(function, state.layout.axis)
    check_ranks(function, state, state.layout.axis)


def check_ranks(function: str, state: ShardedState, axis: Axis) -> None:
    """Raise a ValueError that names `function` where a state was made for another axis, or another number of ranks."""
    made, size = state.layout, size_along(axis)
    if names(made.axis) != names(axis):
        raise ValueError(
            f"{function}: the state was made for axis {made.axis!r}, and this is axis {axis!r}. Make a new one with init, or "
            f"use axis={made.axis!r}."
        )
    if made.ranks != size:
        along = "" if axis == AXIS else f" along axis {axis!r}"
        raise ValueError(
            f"{function}: the state was made for {made.ranks} ranks, and there are {size}{along}. On {made.ranks} ranks call "
            "jaxmpi.unshard(state) and save that; then call jaxmpi.reshard on it here."
        )
