"""Arrays in equal shards, one on each rank.

An array of n numbers is flattened, padded with zeros, and cut into p shards of ⌈n/p⌉ numbers: rank
r has the numbers from r·⌈n/p⌉ on. A shard has as many axes as its array, `[⌈n/p⌉, 1, ...]`, so that
a mask by `ndim` decides as for the array. A scalar is whole on every rank. In a stack of layers
each layer is cut by itself, and the stack axes stay.

`ShardedArray` is a shard as a leaf of trees that users hold. `Shard` is a shard while a transform
is evaluated on shards (see partition.py).
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NoReturn, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmpi._axis import AXIS, Axis, names, overlap
from jaxmpi._collectives import arrays
from jaxmpi._collectives.trees import Caller
from jaxmpi._errors import RankCountError
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._per_rank_state import PathMark, PathMarkKey, path_marks_of
from jaxmpi._world import session

__all__ = [
    "Shard",
    "ShardedArray",
    "all_shards",
    "check_shard_axis",
    "check_sharded_arrays",
    "gather_shards",
    "is_shard",
    "is_sharded_array",
    "join_shards",
    "local_shard",
    "make_shard",
    "make_sharded_array",
    "mask_padding",
    "refuse_shards",
    "shard_shape",
    "shard_value",
    "size_along",
]


# --- the ranks that have the shards --------------------------------------------------------------


def check_shard_axis(function: str, axis: Axis) -> None:
    """Raise an error that names `function` unless arrays can be sharded over an axis.

    Raises:
      TypeError: `axis` is neither a string nor a tuple of strings.
      ValueError: an axis that `init` was not given, such as the axis of a `vmap`; ranks that are
        named twice.
    """
    backend = session.current(function)
    arrays.check_axis(function, axis, backend)
    if other := [name for name in names(axis) if name not in backend.axes]:
        known = ", ".join(map(repr, backend.axes))
        raise ValueError(
            f"{function}: axis {other[0]!r} is no axis of the ranks, which have {known}. Name one "
            "of them."
        )


def size_along(axis: Axis) -> int:
    """Return the number of ranks along an axis: the number of shards."""
    return session.size() if axis == AXIS else arrays.axis_size(axis, session.current("axis_size"))


def _index_along(axis: Axis) -> jax.Array | int:
    """Return the index of this rank along an axis."""
    if axis == AXIS:
        return session.rank()
    return arrays.along(axis, session.current("axis_index")).index()


# --- layout --------------------------------------------------------------------------------------


def _columns(shape: tuple[int, ...], size: int) -> int:
    return -(-prod(shape) // size)


def shard_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of one of `size` equal shards of an array: as many axes as it has."""
    if size == 1 or not shape:
        return shape
    return (_columns(shape, size), *[1] * (len(shape) - 1))


def all_shards(x: ArrayLike, size: int, stack_axes: int = 0) -> jax.Array:
    """Return all shards of an array, `[size, *shard]`; for a scalar, `[size]` copies.

    With `stack_axes`, each array of a stack is cut by itself: `[size, *stack, *shard]`.
    """
    if jnp.ndim(x) == 0:
        return jnp.full(size, x)
    stack, shape = jnp.shape(x)[:stack_axes], jnp.shape(x)[stack_axes:]
    flat = jnp.reshape(x, (*stack, prod(shape)))
    padding = size * _columns(shape, size) - prod(shape)
    flat = jnp.pad(flat, [(0, 0)] * stack_axes + [(0, padding)])
    return jnp.moveaxis(flat.reshape(*stack, size, *shard_shape(shape, size)), stack_axes, 0)


def local_shard(x: jax.Array, stack_axes: int = 0, *, axis: Axis = AXIS) -> jax.Array:
    """Return this rank's shard of an array, or of a stack, that every rank has.

    A scalar is returned as it is.
    """
    size = size_along(axis)
    if size == 1 or jnp.ndim(x) == stack_axes:
        return x
    shards = all_shards(x, size, stack_axes)
    return lax.dynamic_index_in_dim(shards, _index_along(axis), keepdims=False)


def join_shards(shards: jax.Array, shape: tuple[int, ...], stack_axes: int = 0) -> jax.Array:
    """Return the array, or stack, of this shape from all its shards: `all_shards` undone."""
    stack, each = shape[:stack_axes], shape[stack_axes:]
    if stack_axes:
        flat = jnp.moveaxis(shards, 0, stack_axes).reshape(*stack, -1)
    else:
        flat = shards.reshape(-1)
    return flat[..., : prod(each)].reshape(shape)


def mask_padding(
    value: jax.Array,
    shape: tuple[int, ...],
    fill: ArrayLike,
    stack_axes: int = 0,
    *,
    axis: Axis = AXIS,
) -> jax.Array:
    """Return this rank's shard of an array of this shape with `fill` in its padding.

    Args:
      value: the shard; or the shards of a stack, which has `stack_axes` axes before theirs.
      shape: of one whole array.
      fill: the number that takes no part in the reduction that follows.
      stack_axes: the number of axes of the stack.
      axis: the axis over whose ranks the array is sharded.
    """
    size, numbers = size_along(axis), prod(shape)
    columns = _columns(shape, size)
    if columns * size == numbers:
        return value
    # Rank r has n - r·⌈n/p⌉ numbers, at most ⌈n/p⌉ and at least none.
    valid_of_rank = [min(max(numbers - r * columns, 0), columns) for r in range(size)]
    valid = jnp.asarray(valid_of_rank, jnp.int32)[_index_along(axis)]
    is_valid = lax.broadcasted_iota(jnp.int32, value.shape, stack_axes) < valid
    return jnp.where(is_valid, value, jnp.asarray(fill).astype(value.dtype))


# --- shards inside of a transform ----------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Shard:
    """This rank's shard of an array, while a transform is evaluated on shards.

    Attributes:
      value: the shard, of `shard_shape(shape, size)`; its padding may hold any numbers.
      shape: of the whole array.
      whole: the whole array, if this rank has it without communication or has gathered it; else
        None.
      axis: the axis over whose ranks the array is sharded.
    """

    def __init__(
        self,
        value: jax.Array,
        shape: tuple[int, ...],
        whole: jax.Array | None = None,
        *,
        axis: Axis = AXIS,
    ) -> None:
        self.value, self.shape, self.axis = value, shape, axis
        self.whole: Any = whole

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    def tree_flatten(
        self,
    ) -> tuple[tuple[jax.Array, jax.Array | None], tuple[tuple[int, ...], Axis]]:
        return (self.value, self.whole), (self.shape, self.axis)

    @classmethod
    def tree_unflatten(
        cls, layout: tuple[tuple[int, ...], Axis], children: tuple[jax.Array, jax.Array | None]
    ) -> "Shard":
        return cls(children[0], layout[0], children[1], axis=layout[1])


def is_shard(x: object) -> TypeGuard[Shard]:
    """Return whether x is a `Shard`; for `is_leaf`."""
    return isinstance(x, Shard)


def make_shard(
    value: jax.Array, shape: tuple[int, ...], whole: jax.Array | None = None, *, axis: Axis = AXIS
) -> Shard | jax.Array:
    """Return a `Shard`; on one rank, and for a scalar, return the array itself."""
    return Shard(value, shape, whole, axis=axis) if shape and size_along(axis) > 1 else value


def shard_value(x: Shard | jax.Array, axis: Axis = AXIS) -> jax.Array:
    """Return this rank's shard of a `Shard` or of an array that every rank has."""
    return x.value if isinstance(x, Shard) else local_shard(x, axis=axis)


def gather_shards(shards: list[Shard]) -> list[jax.Array]:
    """Return the whole arrays, on every rank; all shards are over one axis.

    The arrays that are not known yet take one allgather together, and are kept in `Shard.whole`.
    """
    missing = [x for x in shards if x.whole is None]
    if missing:
        values = [x.value for x in missing]
        stacks = Caller("sharded").allgather(values, axis=missing[0].axis)
        for x, stack in zip(missing, stacks, strict=True):
            x.whole = join_shards(stack, x.shape)
    return [x.whole for x in shards]


# --- shards as leaves of trees -------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class ShardedArray:
    """An array of which each rank has a shard: equal flat pieces, the last one padded.

    It is a pytree node with one child, so that optax, `jax.grad`, `jax.lax.scan` and `jax.tree.map`
    go through to this rank's shard. An array of n numbers has p shards of ⌈n/p⌉, with as many axes
    as the array: `[⌈n/p⌉, 1, ...]`, so that a mask by `ndim` is right. A scalar is whole on every
    rank. In a stack of layers each layer is cut by itself, and the first axis stays.

    `fully_shard` makes it, and `unshard` makes it whole.

    Attributes:
      shard: this rank's shard; `jax.tree.map` may put any other tree here.
      of: the shape of the array, or of one array of a stack.
      ranks: the number of shards.
      axis: the axis over whose ranks the array is sharded; each group along it has all shards.
    """

    def __init__(self, shard: PyTree, of: tuple[int, ...], ranks: int, axis: Axis = AXIS) -> None:
        self.shard, self.of, self.ranks, self.axis = shard, of, ranks, axis

    @property
    def stack(self) -> tuple[int, ...]:
        """Lengths of the axes before those of one array: the number of layers in a stack."""
        shape = np.shape(jax.tree.leaves(self.shard)[0])  # an nnx variable may be around the array
        return shape[: len(shape) - len(self.of)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array, with the axis of a stack."""
        return (*self.stack, *self.of)

    @property
    def dtype(self) -> np.dtype:
        return self.shard.dtype

    def __repr__(self) -> str:
        over = f", axis={self.axis!r}" if self.axis != AXIS else ""
        return f"ShardedArray({self.shard!r}, of={self.of}, ranks={self.ranks}{over})"

    # A shard has the dtype and often the number of axes of a parameter, so arithmetic with one
    # would broadcast without an error. Every operator is refused, and every conversion to a number
    # or an array. Only == and != are those of any object, its identity: containers and libraries
    # use them to find a node again, and their result is one bool, which cannot broadcast.
    __array_ufunc__ = None  # NumPy leaves arithmetic to the methods below

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        what = (
            f"This is one rank's shard of an array {list(self.of)}, which would broadcast against "
            "whole arrays"
        )
        if self.ranks == 1:
            what = f"This is a ShardedArray of the array {list(self.of)}"
        raise TypeError(
            f"{what}, and cannot be computed with. Use jaxmpi.unshard of it, or, in the state of "
            "jaxmpi.sharded, jaxmpi.unshard(state).inner."
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

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[PathMarkKey, PyTree]], "ArrayLayout"]:
        key = PathMarkKey(PathMark.of_shard(self.of, self.ranks, self.axis))
        return ((key, self.shard),), (self.of, self.ranks, self.axis)

    def tree_flatten(self) -> tuple[tuple[PyTree], "ArrayLayout"]:
        return (self.shard,), (self.of, self.ranks, self.axis)

    @classmethod
    def tree_unflatten(cls, layout: "ArrayLayout", children: Sequence[PyTree]) -> "ShardedArray":
        return cls(children[0], *layout)


ArrayLayout: TypeAlias = tuple[tuple[int, ...], int, Axis]  # of a `ShardedArray`: of, ranks, axis


def is_sharded_array(x: object) -> TypeGuard[ShardedArray]:
    """Return whether x is a `ShardedArray`; for `is_leaf`."""
    return isinstance(x, ShardedArray)


def make_sharded_array(x: jax.Array, stack_axes: int = 0, *, axis: Axis = AXIS) -> ShardedArray:
    """Return a `ShardedArray` of an array that every rank has, in traced code."""
    shard = local_shard(x, stack_axes, axis=axis)
    return ShardedArray(shard, jnp.shape(x)[stack_axes:], size_along(axis), axis)


def check_sharded_arrays(function: str, tree: PyTree) -> None:
    """Raise a ValueError for a `ShardedArray` that does not fit the ranks, with its path.

    It was made for another number of ranks, or over an axis that they do not have. The shards in a
    `ShardedState` are left to the check of the state.
    """
    axes = session.current(function).axes
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded_array):
        if not is_sharded_array(x) or any(mark.state for mark in path_marks_of(path)):
            continue
        if not {*names(x.axis)} <= {*axes}:
            raise ValueError(
                f"{function}: leaf {leaf_name(path)} is a shard over axis {x.axis!r}, and the "
                f"ranks have {', '.join(map(repr, axes))}. Name the axis in "
                "jaxmpi.init(axes=...), or make new shards with jaxmpi.fully_shard."
            )
        if x.ranks != (size := size_along(x.axis)):
            along = "" if x.axis == AXIS else f" along axis {x.axis!r}"
            raise RankCountError(
                f"{function}: leaf {leaf_name(path)} is one of {x.ranks} shards, and there are "
                f"{size} ranks{along}. Make new shards with jaxmpi.fully_shard; to keep these "
                f"numbers, call jaxmpi.save on {x.ranks} ranks{along}, and jaxmpi.restore into "
                "the new shards."
            )


def refuse_shards(function: str, tree: PyTree, axis: Axis = AXIS) -> None:
    """Raise a ValueError with the path of the first leaf that is sharded over an axis."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded_array):
        if is_sharded_array(x) and overlap(axis, x.axis):
            raise ValueError(
                f"{function}: leaf {leaf_name(path)} is a ShardedArray, of which each rank has "
                "another part. Its gradients, by jaxmpi.unshard, are means over the ranks "
                "already: give them to a plain optax optimizer."
            )
