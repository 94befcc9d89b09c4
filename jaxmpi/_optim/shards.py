"""Arrays as equal shards of the ranks: n numbers, flat, padded with zeros to p shards of ⌈n/p⌉."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi._collectives.trees import tree_allgather
from jaxmpi._world import session

__all__ = ["Shard", "gathered", "is_shard", "joined", "masked", "own", "part", "rows", "shard", "shard_shape"]


@jax.tree_util.register_pytree_node_class
class Shard:
    """This rank's shard of an array.

    Attributes:
      value: the shard, of `shard_shape(shape, size)`; the padding may hold anything.
      shape: of the whole array.
      whole: the whole array, where this rank has it without communication or has gathered it; or None.
    """

    def __init__(self, value: Any, shape: tuple[int, ...], whole: Any = None) -> None:
        self.value, self.shape, self.whole = value, shape, whole

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...]]:
        return (self.value, self.whole), self.shape

    @classmethod
    def tree_unflatten(cls, shape: tuple[int, ...], children: Any) -> "Shard":
        return cls(children[0], shape, children[1])


def is_shard(x: Any) -> bool:
    """Whether x is a `Shard`; for `is_leaf`."""
    return isinstance(x, Shard)


def shard(value: Any, shape: tuple[int, ...], whole: Any = None) -> Any:
    """A `Shard`; on one rank, and of a scalar, the array itself."""
    return Shard(value, shape, whole) if shape and session.size() > 1 else value


def part(x: Any) -> Any:
    """This rank's shard of an array or of a `Shard`; a scalar stays as it is."""
    return x.value if is_shard(x) else own(x)


def shard_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The shape of one of `size` equal shards of an array: as many axes as it has."""
    return shape if size == 1 else (_columns(shape, size), *[1] * (len(shape) - 1)) if shape else ()


def rows(x: Any, size: int, stacked: int = 0) -> jax.Array:
    """All shards of an array `[...]`, `[size, *shard]`; of a scalar, `[size]` copies.

    Of a stack of arrays, with `stacked` axes before theirs, each is cut by itself: `[size, *stack, *shard]`.
    """
    if jnp.ndim(x) == 0:
        return jnp.full(size, x)
    stack, shape = jnp.shape(x)[:stacked], jnp.shape(x)[stacked:]
    flat = jnp.reshape(x, (*stack, prod(shape)))
    flat = jnp.pad(flat, [(0, 0)] * stacked + [(0, size * _columns(shape, size) - prod(shape))])
    return jnp.moveaxis(flat.reshape(*stack, size, *shard_shape(shape, size)), stacked, 0)


def own(x: Any, stacked: int = 0) -> jax.Array:
    """This rank's shard of an array that every rank has, or of each of a stack; a scalar stays as it is."""
    size = session.size()
    if size == 1 or jnp.ndim(x) == stacked:
        return x
    return lax.dynamic_index_in_dim(rows(x, size, stacked), session.rank(), keepdims=False)


def joined(shards: Any, shape: tuple[int, ...], stacked: int = 0) -> jax.Array:
    """The array of this shape whose shards are the rows of `[size, *shard]`; a stack of arrays, of `[size, *stack, *shard]`."""
    stack, each = shape[:stacked], shape[stacked:]
    flat = jnp.moveaxis(shards, 0, stacked).reshape(*stack, -1) if stacked else shards.reshape(-1)
    return flat[..., : prod(each)].reshape(shape)


def gathered(shards: list[Shard]) -> list[jax.Array]:
    """The whole arrays, on every rank, in one allgather of those that are not known to be whole already."""
    missing = [i for i, x in enumerate(shards) if x.whole is None]
    for i, x in zip(missing, tree_allgather([shards[i].value for i in missing]) if missing else [], strict=True):
        shards[i].whole = joined(x, shards[i].shape)
    return [x.whole for x in shards]


def masked(value: Any, shape: tuple[int, ...], fill: Any, stacked: int = 0) -> jax.Array:
    """A shard of an array of this shape, or those of a stack, with `fill` in the place of the padding."""
    size, numbers = session.size(), prod(shape)
    columns = _columns(shape, size)
    if columns * size == numbers:
        return value
    valid = jnp.asarray([min(max(numbers - r * columns, 0), columns) for r in range(size)], jnp.int32)[session.rank()]
    return jnp.where(lax.broadcasted_iota(jnp.int32, value.shape, stacked) < valid, value, fill)


def _columns(shape: tuple[int, ...], size: int) -> int:
    return -(-prod(shape) // size)
