"""`ShardedState`: the optimizer's state of `sharded`, in shards.

`unshard` gathers it to the state of one rank, and `reshard` shards that again, for any number of
ranks. `check_equal` compares the leaves that are not shards.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends.one_process import PerRank
from jaxmpi._collectives.trees import Caller
from jaxmpi._consistency.values import EqualLeaf, check_equal_leaves
from jaxmpi._errors import RankCountError
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PyTree, is_key, leaf_name
from jaxmpi._optim.sharded_array import (
    ShardedArray,
    check_shard_axis,
    gather_shards,
    is_shard,
    is_sharded_array,
    join_shards,
    local_shard,
    shard_value,
    size_along,
)
from jaxmpi._per_rank_state import (
    PathMark,
    PathMarkKey,
    flatten_with_path,
    is_per_rank_leaf,
    is_variable,
)
from jaxmpi._world import session

__all__ = [
    "ShardedState",
    "StateLayout",
    "check_equal",
    "check_state_fits",
    "check_state_ranks",
    "from_nnx_dicts",
    "is_sharded",
    "is_sharded_state",
    "reshard",
    "shards_of",
    "to_nnx_dicts",
    "whole_state",
    "with_shards",
]


# the types of leaves that are compared
NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, PerRank)


class StateLayout(NamedTuple):
    """The ranks that have the shards of a state.

    Attributes:
      ranks: the number of shards of each array; 1 if the arrays are whole, as after `unshard`.
      axis: the axis over whose ranks they are sharded.
    """

    ranks: int
    axis: Axis = AXIS


@jax.tree_util.register_pytree_with_keys_class
class ShardedState:
    """The state of `sharded`.

    Each array with the shape of a parameter is a `ShardedArray`; all other arrays are equal on the
    ranks that have the shards.

    Attributes:
      parts: the two children of this pytree node, with a `ShardedArray` for each sharded array: the
        state of the inner transform, and the parameters in `master_dtype` (() without).
      layout: the number of shards, and their axis.

    >>> import jax.numpy as jnp, jaxmpi, optax
    >>> state = jaxmpi.sharded(optax.sgd(0.1, momentum=0.9)).init({"w": jnp.ones(3)})
    >>> jaxmpi.unshard(state).inner[0].trace["w"]
    Array([0., 0., 0.], dtype=float32)
    """

    def __init__(self, parts: tuple[PyTree, PyTree], layout: StateLayout) -> None:
        self.parts, self.layout = parts, layout

    @property
    def inner(self) -> PyTree:
        """State of the inner transform; after `unshard`, with a plain array per `ShardedArray`."""
        # the arrays of one rank are whole, and may be computed with
        return shards_of(self.parts[0]) if self.layout.ranks == 1 else self.parts[0]

    @property
    def master(self) -> PyTree:
        """Parameters in `master_dtype`, with arrays as in `inner`; () without `master_dtype`."""
        return shards_of(self.parts[1]) if self.layout.ranks == 1 else self.parts[1]

    def __repr__(self) -> str:
        over = f", axis={self.layout.axis!r}" if self.layout.axis != AXIS else ""
        return (
            f"ShardedState(inner={self.inner!r}, master={self.master!r}, "
            f"ranks={self.layout.ranks}{over})"
        )

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[PathMarkKey, PyTree], ...], StateLayout]:
        inner, master = (PathMarkKey(mark) for mark in _marks(self.layout))
        return ((inner, self.parts[0]), (master, self.parts[1])), self.layout

    def tree_flatten(self) -> tuple[tuple[PyTree, PyTree], StateLayout]:
        return self.parts, self.layout

    @classmethod
    def tree_unflatten(cls, layout: StateLayout, children: Sequence[PyTree]) -> "ShardedState":
        inner, master = children
        return cls((inner, master), layout)


def _marks(layout: StateLayout) -> tuple[PathMark, PathMark]:
    """Return the keys of the fields `inner` and `master` in a path."""
    return PathMark.of_state("inner", *layout), PathMark.of_state("master", *layout)


def is_sharded_state(x: object) -> TypeGuard[ShardedState]:
    """Return whether x is a `ShardedState`; for `is_leaf`."""
    return isinstance(x, ShardedState)


def is_sharded(x: object) -> bool:
    """Return whether x is a `ShardedState`, `ShardedArray` or nnx dict of one; for `is_leaf`."""
    return is_sharded_state(x) or is_sharded_array(x) or _is_nnx_dict(x)


def _is_nnx_dict(x: object) -> bool:
    """Return whether x has the fields of a `ShardedState` or `ShardedArray` as keys.

    `nnx.state` and `nnx.split` make such dicts, or an `nnx.State`, of all pytree nodes.
    """
    if not isinstance(x, Mapping) or not x:
        return False
    return all(isinstance(key, PathMark) and (key.state or key.of is not None) for key in x)


def from_nnx_dicts(tree: PyTree) -> PyTree:
    """Return the tree with a `ShardedState` or `ShardedArray` for each of nnx's dicts of one."""
    if is_sharded_array(tree) or is_sharded_state(tree):
        return tree
    if not _is_nnx_dict(tree):
        return jax.tree.map(
            lambda x: from_nnx_dicts(x) if _is_nnx_dict(x) else x, tree, is_leaf=_is_nnx_dict
        )
    mark = next(iter(tree))
    if mark.of is not None:
        return ShardedArray(from_nnx_dicts(tree[mark]), mark.of, mark.ranks, mark.axis)
    layout = StateLayout(mark.ranks, mark.axis)
    inner, master = (from_nnx_dicts(tree[mark]) if mark in tree else () for mark in _marks(layout))
    return ShardedState((inner, master), layout)


def to_nnx_dicts(x: PyTree) -> PyTree:
    """Return a `ShardedState` as the dicts that `nnx.state` makes of it; else x as it is.

    nnx drops nodes without arrays, so `from_nnx_dicts` returns () for an `optax.EmptyState()`.
    """
    if not is_sharded_state(x):
        return x

    def each(y: PyTree) -> PyTree:
        return {PathMark.of_shard(y.of, y.ranks, y.axis): y.shard} if is_sharded_array(y) else y

    fields = {}
    for mark, field in zip(_marks(x.layout), x.parts, strict=True):
        if jax.tree.leaves(field):
            fields[mark] = jax.tree.map(each, field, is_leaf=is_sharded_array)
    return fields


def shards_of(tree: PyTree) -> PyTree:
    """Return the tree with this rank's shard for each `ShardedArray`."""
    return jax.tree.map(
        lambda x: x.shard if is_sharded_array(x) else x, tree, is_leaf=is_sharded_array
    )


def whole_state(state: ShardedState) -> ShardedState:
    """Gather a state: return the state that one rank would have, on every rank.

    **Collective:** every rank calls it, with a state that has passed `check_state_fits`.
    **Communication:** an all-gather of the shards: (p-1)/p of the bytes of the sharded arrays.
    """
    return _gather(state) if state.layout.ranks > 1 else state


def reshard(tree: PyTree) -> PyTree:
    """Shard states that `unshard` has made whole, for the present number of ranks.

    The tree may be an `nnx.Optimizer`, `optimizer = jaxmpi.reshard(optimizer)`, or an `nnx.state`
    of one. An `nnx.state` of an optimizer without arrays, such as `optax.sgd`, stays as it is.

    **Collective:** every rank calls it, with states that are equal on all ranks, or along their
    axes. Called eagerly, it compares checksums of each state first.
    **Communication:** 16 bytes for a state.

    Args:
      tree: a whole state of `sharded`, or any pytree that contains such states.

    Returns:
      The pytree with each state in shards, one on each rank along its axis.

    Raises:
      TypeError: there is no state of `sharded` in the tree.
      ValueError: a state is still in shards; the ranks do not have its axis.
      RankMismatchError: on every rank, a leaf that is not equal on the ranks, with its path and the
        ranks.
    """
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_sharded)
    found = [i for i, x in enumerate(nodes) if is_sharded_state(from_nnx_dicts(x))]
    if not found and not _is_of_optimizer_without_arrays(tree):
        raise TypeError(
            f"reshard: there is no state of jaxmpi.sharded in the {type(tree).__name__}. Pass the "
            "result of jaxmpi.unshard(state), or a pytree that contains it."
        )
    for i in found:
        is_nnx_dict, state = _is_nnx_dict(nodes[i]), from_nnx_dicts(nodes[i])
        check_shard_axis("reshard", state.layout.axis)
        if state.layout.ranks != 1:
            raise RankCountError(
                f"reshard: the state is one of {state.layout.ranks} ranks. Call jaxmpi.unshard on "
                "those ranks, then reshard on these."
            )
        check_equal("reshard", state, state.layout.axis)
        nodes[i] = to_nnx_dicts(_shard(state)) if is_nnx_dict else _shard(state)
    return treedef.unflatten(nodes)


def _is_of_optimizer_without_arrays(tree: PyTree) -> bool:
    """Return whether a tree has the `nnx.state` of an optimizer whose transform has no arrays.

    Of such an optimizer nnx keeps the step count only.
    """
    nnx = sys.modules.get("flax.nnx")  # imported, if there is a variable in the tree
    if nnx is None:
        return False
    kinds = {type(x) for x in jax.tree.leaves(tree, is_leaf=is_variable)}
    has_arrays = any(
        issubclass(kind, nnx.optimizer.OptArray | nnx.optimizer.OptVariable) for kind in kinds
    )
    return nnx.optimizer.OptState in kinds and not has_arrays


def check_equal(function: str, tree: PyTree, axis: Axis | None = None) -> None:
    """Raise a RankMismatchError on all ranks if leaves that must be equal on ranks are not.

    All arrays are compared but shards and the leaves of a `PerRankState`. The scalars of a
    `ShardedArray` and the whole arrays of a `ShardedState` must be equal along its axis, all other
    arrays along `axis`.

    Args:
      function: for the error.
      tree: any pytree.
      axis: None for the axis of the shards in the tree. If they have several axes, or there are no
        shards, only arrays in a `ShardedArray` or `ShardedState` are compared.
    """
    paths, _ = flatten_with_path(
        from_nnx_dicts(tree), is_leaf=lambda x: _is_shards(x) or isinstance(x, PerRank)
    )
    axes = {x.axis if is_sharded_array(x) else x.layout.axis for _, x in paths if _is_shards(x)}
    if axis is None and len(axes) == 1:
        (axis,) = axes
    found: list[tuple[KeyPath, object, Axis]] = []
    for path, x in paths:
        if is_per_rank_leaf(path):
            continue
        if is_sharded_state(x):
            # its arrays that are not shards, or have been made whole by `unshard` (ranks == 1)
            for inner, y in flatten_with_path(x.parts, is_leaf=is_sharded_array)[0]:
                if is_per_rank_leaf(inner):
                    continue
                if not is_sharded_array(y):
                    found.append(((*path, *inner), y, x.layout.axis))
                elif y.ranks == 1:
                    found.append(((*path, *inner), *jax.tree.leaves(y.shard), x.layout.axis))
        elif is_sharded_array(x):
            if not x.of:  # a scalar is whole on every rank
                found.append((path, *jax.tree.leaves(x.shard), x.axis))
        elif axis is not None:
            found.append((path, x, axis))
    equal = []
    for path, x, along in found:
        if isinstance(x, NUMBERS) and getattr(x, "dtype", None) != np.dtype(object):
            equal.append(EqualLeaf(leaf_name(path), x, along))
    check_equal_leaves(session.current(function), function, equal)


def _is_shards(x: object) -> bool:
    return is_sharded_array(x) or is_sharded_state(x)


@partial(anywhere, name="unshard", sends=True)
def _gather(state: ShardedState) -> ShardedState:
    nodes, treedef = jax.tree.flatten(state.parts, is_leaf=is_sharded_array)
    cuts = {i: x for i, x in enumerate(nodes) if is_sharded_array(x)}
    stacks = Caller("unshard").allgather(
        {i: x.shard for i, x in cuts.items()}, axis=state.layout.axis
    )
    for i, x in cuts.items():
        whole = jax.tree.map(partial(join_shards, shape=x.of), stacks[i])
        nodes[i] = ShardedArray(whole, x.of, 1, x.axis)
    return ShardedState(treedef.unflatten(nodes), state.layout._replace(ranks=1))


@partial(anywhere, name="reshard")
def _shard(state: ShardedState) -> ShardedState:
    axis = state.layout.axis
    ranks = size_along(axis)

    def each(x: PyTree) -> PyTree:
        if not is_sharded_array(x):
            return x
        return ShardedArray(
            jax.tree.map(partial(local_shard, axis=axis), x.shard), x.of, ranks, axis
        )

    parts = jax.tree.map(each, state.parts, is_leaf=is_sharded_array)
    return ShardedState(parts, state.layout._replace(ranks=ranks))


def with_shards(state: PyTree, params: PyTree, axis: Axis) -> PyTree:
    """Return a state with a `ShardedArray` for each array that has the shape of a parameter.

    Args:
      state: the state of the inner transform, which may have a `Shard` for any array.
      params: the whole parameters.
      axis: the axis over whose ranks the state is sharded.
    """
    shapes = {jnp.shape(x) for x in jax.tree.leaves(params)} - {()}
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_shard)
    is_cut = [tuple(getattr(x, "shape", ())) in shapes and not is_key(x) for x in leaves]
    # a shard of an array of another shape is gathered
    missing = [i for i, x in enumerate(leaves) if is_shard(x) and not is_cut[i]]
    for i, whole in zip(missing, gather_shards([leaves[i] for i in missing]), strict=True):
        leaves[i] = whole
    for i, x in enumerate(leaves):
        if is_cut[i]:
            leaves[i] = ShardedArray(shard_value(x, axis), tuple(x.shape), size_along(axis), axis)
    return jax.tree.map(_around_variable, treedef.unflatten(leaves), is_leaf=is_variable)


def _around_variable(x: PyTree) -> PyTree:
    """Return a `ShardedArray` of an nnx variable for a variable of a `ShardedArray`.

    Anything else is returned as it is. An `nnx.Optimizer` updates its state with the `nnx.state` of
    the new one, which has no variables. There, a `ShardedArray` inside of a variable is a dict, and
    would become the value of the variable.
    """
    if not is_variable(x):
        return x
    leaves, treedef = jax.tree.flatten(x, is_leaf=is_sharded_array)
    if len(leaves) != 1 or not is_sharded_array(leaves[0]):
        return x
    return ShardedArray(
        treedef.unflatten([leaves[0].shard]), leaves[0].of, leaves[0].ranks, leaves[0].axis
    )


def check_state_fits(function: str, state: ShardedState) -> None:
    """Raise a ValueError unless the ranks have the axis of a state, and its number of shards."""
    check_shard_axis(function, state.layout.axis)
    check_state_ranks(function, state, state.layout.axis)


def check_state_ranks(function: str, state: ShardedState, axis: Axis) -> None:
    """Raise a ValueError if a state was made for another axis, or another number of ranks."""
    made, size = state.layout, size_along(axis)
    if names(made.axis) != names(axis):
        raise ValueError(
            f"{function}: the state was made for axis {made.axis!r}, and this is axis {axis!r}. "
            f"Make a new one with init, or use axis={made.axis!r}."
        )
    if made.ranks != size:
        along = "" if axis == AXIS else f" along axis {axis!r}"
        raise RankCountError(
            f"{function}: the state was made for {made.ranks} ranks, and there are {size}{along}. "
            f"On {made.ranks} ranks, call jaxmpi.unshard(state) and save the result; restore it "
            "here, and call jaxmpi.reshard on it."
        )
