"""Arrays as equal shards of the ranks: n numbers, flat, padded with zeros to p shards of ⌈n/p⌉."""

from math import prod
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._collectives import arrays
from jaxmpi._collectives.trees import Caller
from jaxmpi._world import session

__all__ = [
    "Shard",
    "check_cut",
    "gathered",
    "is_shard",
    "joined",
    "masked",
    "own",
    "part",
    "rows",
    "shard",
    "shard_shape",
    "size_along",
]


def check_cut(function: str, axis: Axis) -> None:
    """Raise an error that names `function` unless arrays can be cut over an axis: a name of the ranks, or a tuple of some.

    Raises:
      TypeError: no text, and no tuple of texts.
      ValueError: a name that `init` was not given, that of a `vmap` included; some of the ranks
        twice.
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
    """The number of ranks along an axis, which is that of the shards."""
    return session.size() if axis == AXIS else arrays.axis_size(axis, session.current("axis_size"))


def _index_along(axis: Axis) -> jax.Array | int:
    """This rank's number along an axis."""
    return (
        session.rank()
        if axis == AXIS
        else arrays.along(axis, session.current("axis_index")).index()
    )


@jax.tree_util.register_pytree_node_class
class Shard:
    """This rank's shard of an array.

    Attributes:
      value: the shard, of `shard_shape(shape, size)`; the padding may hold anything.
      shape: of the whole array.
      whole: the whole array, where this rank has it without communication or has gathered it; or
        None.
      axis: of the ranks that have the shards.
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
    """Whether x is a `Shard`; for `is_leaf`."""
    return isinstance(x, Shard)


def shard(
    value: jax.Array, shape: tuple[int, ...], whole: jax.Array | None = None, *, axis: Axis = AXIS
) -> Shard | jax.Array:
    """A `Shard`; on one rank, and of a scalar, the array itself."""
    return Shard(value, shape, whole, axis=axis) if shape and size_along(axis) > 1 else value


def part(x: Shard | jax.Array, axis: Axis = AXIS) -> jax.Array:
    """This rank's shard of an array or of a `Shard`; a scalar stays as it is."""
    return x.value if isinstance(x, Shard) else own(x, axis=axis)


def shard_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The shape of one of `size` equal shards of an array: as many axes as it has."""
    return shape if size == 1 else (_columns(shape, size), *[1] * (len(shape) - 1)) if shape else ()


def rows(x: ArrayLike, size: int, stacked: int = 0) -> jax.Array:
    """All shards of an array `[...]`, `[size, *shard]`; of a scalar, `[size]` copies.

    Of a stack of arrays, with `stacked` axes before theirs, each is cut by itself:
    `[size, *stack, *shard]`.
    """
    if jnp.ndim(x) == 0:
        return jnp.full(size, x)
    stack, shape = jnp.shape(x)[:stacked], jnp.shape(x)[stacked:]
    flat = jnp.reshape(x, (*stack, prod(shape)))
    flat = jnp.pad(flat, [(0, 0)] * stacked + [(0, size * _columns(shape, size) - prod(shape))])
    return jnp.moveaxis(flat.reshape(*stack, size, *shard_shape(shape, size)), stacked, 0)


def own(x: jax.Array, stacked: int = 0, *, axis: Axis = AXIS) -> jax.Array:
    """This rank's shard of an array that every rank has, or of each of a stack; a scalar stays as it is."""
    size = size_along(axis)
    if size == 1 or jnp.ndim(x) == stacked:
        return x
    return lax.dynamic_index_in_dim(rows(x, size, stacked), _index_along(axis), keepdims=False)


def joined(shards: jax.Array, shape: tuple[int, ...], stacked: int = 0) -> jax.Array:
    """The array of this shape whose shards are the rows of `[size, *shard]`; a stack of arrays, of `[size, *stack, *shard]`."""
    stack, each = shape[:stacked], shape[stacked:]
    flat = jnp.moveaxis(shards, 0, stacked).reshape(*stack, -1) if stacked else shards.reshape(-1)
    return flat[..., : prod(each)].reshape(shape)


def gathered(shards: list[Shard]) -> list[jax.Array]:
    """The whole arrays, on every rank, in one allgather of those that are not known to be whole already; all of one axis."""
    missing = [x for x in shards if x.whole is None]
    stacks = (
        Caller("sharded").allgather([x.value for x in missing], axis=missing[0].axis)
        if missing
        else []
    )
    for x, stack in zip(missing, stacks, strict=True):
        x.whole = joined(stack, x.shape)
    return [x.whole for x in shards]


def masked(
    value: jax.Array,
    shape: tuple[int, ...],
    fill: ArrayLike,
    stacked: int = 0,
    *,
    axis: Axis = AXIS,
) -> jax.Array:
    """A shard of an array of this shape, or those of a stack, with `fill` in the place of the padding."""
    size, numbers = size_along(axis), prod(shape)
    columns = _columns(shape, size)
    if columns * size == numbers:
        return value
    valid = jnp.asarray(
        [min(max(numbers - r * columns, 0), columns) for r in range(size)], jnp.int32
    )[_index_along(axis)]
    here = lax.broadcasted_iota(jnp.int32, value.shape, stacked) < valid
    return jnp.where(here, value, jnp.asarray(fill).astype(value.dtype))


def _columns(shape: tuple[int, ...], size: int) -> int:
    return -(-prod(shape) // size)
