"""The state of `sharded`: which of its arrays are shards, the state that one rank would have, and the way back."""

from functools import partial
from typing import NamedTuple

import jax

from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._collectives.trees import tree_allgather
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PerRankState, PyTree, is_key
from jaxmpi._optim.shards import check_cut, gathered, is_shard, joined, own, part, size_along

__all__ = ["Layout", "ShardedState", "check_ranks", "layout_of", "reshard", "stored", "whole_state"]


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
    """The state that one rank would have, on every rank; `unshard` does this."""
    check_cut("unshard", state.layout.axis)
    check_ranks("unshard", state, state.layout.axis)
    parts = _whole_parts(state) if state.layout.ranks > 1 else state.parts
    return ShardedState.of(parts, state.layout._replace(ranks=1))


def reshard(state: ShardedState) -> ShardedState:
    """A state of one rank, from `unshard`, cut for the ranks that there are now along the axis of the state.

    **Collective:** every rank calls it, with the same state; the ranks of a group, where the state has an axis.
    **Communication:** none.

    Raises:
      ValueError: the state is that of several ranks; the ranks do not have its axis.
    """
    check_cut("reshard", state.layout.axis)
    if state.layout.ranks != 1:
        raise ValueError(f"reshard: the state is one of {state.layout.ranks} ranks. Call jaxmpi.unshard on them, then reshard.")

    return ShardedState.of(_own_parts(state), state.layout._replace(ranks=size_along(state.layout.axis)))


@partial(anywhere, name="unshard")
def _whole_parts(state: ShardedState) -> tuple[PyTree, PyTree]:
    leaves, treedef = jax.tree.flatten(state.parts)
    wholes = {i: shape for i, shape in enumerate(state.layout.shapes[: len(leaves)]) if shape is not None}
    for i, x in tree_allgather({i: leaves[i] for i in wholes}, axis=state.layout.axis).items():
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
