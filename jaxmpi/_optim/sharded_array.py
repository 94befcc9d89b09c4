"""`ShardedArray`: an array with a shard on each rank, as a leaf of parameters, gradients and states of optimizers."""

from collections.abc import Sequence
from typing import NoReturn, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._axis import AXIS, Axis, names, overlap
from jaxmpi._errors import RankCountError
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._optim.shards import own, size_along
from jaxmpi._per_rank_state import Mark, MarkKey, marks_of
from jaxmpi._world import session

__all__ = ["ShardedArray", "check_ranks", "cut", "is_sharded_array", "refuse_shards"]


@jax.tree_util.register_pytree_with_keys_class
class ShardedArray:
    """An array of which each rank has a shard: flat equal parts, the last one padded.

    It is a pytree node with one child, so that optax, `jax.grad`, `jax.lax.scan` and `jax.tree.map`
    go through to this rank's shard. An array of n numbers has p shards of ⌈n/p⌉, with as many axes
    as the array: `[⌈n/p⌉, 1, ...]`, so that a mask by `ndim` is right. A scalar is whole on every
    rank. Of a stack of layers each is cut by itself, and the first axis stays.

    Made by `fully_shard`, made whole by `unshard`.

    Attributes:
      shard: this rank's shard; any tree of `jax.tree.map` may stand there.
      of: the shape of the array, or of one array of a stack.
      ranks: the number of shards.
      axis: the axis over whose ranks the array is sharded; each group along it has all shards.
    """

    def __init__(self, shard: PyTree, of: tuple[int, ...], ranks: int, axis: Axis = AXIS) -> None:
        self.shard, self.of, self.ranks, self.axis = shard, of, ranks, axis

    @property
    def stack(self) -> tuple[int, ...]:
        """The lengths of the axes before those of one array: the number of layers in a stack."""
        shape = np.shape(jax.tree.leaves(self.shard)[0])  # an nnx variable may be around the array
        return shape[: len(shape) - len(self.of)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array, with the axis of a stack."""
        return (*self.stack, *self.of)

    @property
    def dtype(self) -> np.dtype:
        return self.shard.dtype

    def __repr__(self) -> str:
        over = f", axis={self.axis!r}" if self.axis != AXIS else ""
        return f"ShardedArray({self.shard!r}, of={self.of}, ranks={self.ranks}{over})"

    # A shard has the dtype and often the rank of a parameter, so arithmetic with one would
    # broadcast without an error. Every operator is refused, and every conversion to a number or an
    # array.
    __array_ufunc__ = None  # NumPy leaves arithmetic to the methods below

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        what = f"This is one rank's shard of an array {list(self.of)}, which would broadcast against whole arrays"
        if self.ranks == 1:
            what = f"This is a ShardedArray of the array {list(self.of)}"
        raise TypeError(
            f"{what}, and nothing to compute with. Take jaxmpi.unshard of it, or, in the state of "
            "jaxmpi.sharded, "
            "jaxmpi.unshard(state).inner."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _refuse
    )
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = (
        __rmod__
    ) = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __getitem__ = __len__ = __iter__ = (
        _refuse
    )
    __bool__ = __float__ = __int__ = __array__ = __jax_array__ = _refuse

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[MarkKey, PyTree]], "ArrayLayout"]:
        return ((MarkKey(Mark.of_shard(self.of, self.ranks, self.axis)), self.shard),), (
            self.of,
            self.ranks,
            self.axis,
        )

    def tree_flatten(self) -> tuple[tuple[PyTree], "ArrayLayout"]:
        return (self.shard,), (self.of, self.ranks, self.axis)

    @classmethod
    def tree_unflatten(cls, layout: "ArrayLayout", children: Sequence[PyTree]) -> "ShardedArray":
        return cls(children[0], *layout)


ArrayLayout: TypeAlias = tuple[tuple[int, ...], int, Axis]  # of a `ShardedArray`: of, ranks, axis


def is_sharded_array(x: object) -> TypeGuard[ShardedArray]:
    """Whether x is a `ShardedArray`; for `is_leaf`."""
    return isinstance(x, ShardedArray)


def cut(x: jax.Array, stacked: int = 0, *, axis: Axis = AXIS) -> ShardedArray:
    """Return this rank's shard of an array that every rank has, in traced code."""
    return ShardedArray(own(x, stacked, axis=axis), jnp.shape(x)[stacked:], size_along(axis), axis)


def check_ranks(function: str, tree: PyTree) -> None:
    """Raise a ValueError that names a leaf which was cut for another number of ranks, or over an axis that they don't have.

    The shards in a `ShardedState` are left to its own check.
    """
    axes = session.current(function).axes
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded_array):
        if not is_sharded_array(x) or any(mark.state for mark in marks_of(path)):
            continue
        if not {*names(x.axis)} <= {*axes}:
            raise ValueError(
                f"{function}: leaf {leaf_name(path)} is a shard over axis {x.axis!r}, and the "
                "ranks have "
                f"{', '.join(map(repr, axes))}. Name the axis in jaxmpi.init(axes=...), or make "
                "new shards with "
                "jaxmpi.fully_shard."
            )
        if x.ranks != (size := size_along(x.axis)):
            along = "" if x.axis == AXIS else f" along axis {x.axis!r}"
            raise RankCountError(
                f"{function}: leaf {leaf_name(path)} is one of {x.ranks} shards, and there are "
                f"{size} ranks{along}. Make new "
                "ones with jaxmpi.fully_shard; to go on with these numbers, save them on "
                f"{x.ranks} ranks{along} with "
                "jaxmpi.save, and jaxmpi.restore them into the new ones."
            )


def refuse_shards(function: str, tree: PyTree, axis: Axis = AXIS) -> None:
    """Raise a ValueError if a tree has shards over an axis, where whole arrays are wanted, with the path of the first."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded_array):
        if is_sharded_array(x) and overlap(axis, x.axis):
            raise ValueError(
                f"{function}: leaf {leaf_name(path)} is a ShardedArray, of which each rank has "
                "another part. Its gradients, "
                "by jaxmpi.unshard, are means over the ranks already: give them to a plain optax "
                "optimizer."
            )
