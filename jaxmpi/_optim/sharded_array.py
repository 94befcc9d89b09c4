"""Arrays that are cut over the ranks, as leaves of the trees that users hold: parameters, gradients, states of optimizers."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi._leaves import PyTree, ShardKey, leaf_name
from jaxmpi._optim.shards import own
from jaxmpi._world import session

__all__ = ["ShardedArray", "check_ranks", "cut", "is_sharded_array", "refuse_shards"]


@jax.tree_util.register_pytree_with_keys_class
class ShardedArray:
    """An array of which each rank has a shard: flat equal parts, the last one padded.

    It is a pytree node with one child, so that optax, `jax.grad`, `jax.lax.scan` and `jax.tree.map` go through to this rank's
    shard. An array of n numbers has p shards of ⌈n/p⌉, with as many axes as the array: `[⌈n/p⌉, 1, ...]`, so that a mask by
    `ndim` is right. A scalar is whole on every rank. Of a stack of layers each is cut by itself, and the first axis stays.

    Made by `fully_shard`, made whole by `unshard`.

    Attributes:
      shard: this rank's; any tree of `jax.tree.map` may stand there.
      of: the shape of the array, or of one of a stack.
      ranks: the number of shards.
    """

    def __init__(self, shard: Any, of: tuple[int, ...], ranks: int) -> None:
        self.shard, self.of, self.ranks = shard, of, ranks

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes before those of one array."""
        shape = jnp.shape(self.shard)
        return shape[: len(shape) - len(self.of)]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole array."""
        return (*self.stack, *self.of)

    @property
    def dtype(self) -> Any:
        return self.shard.dtype

    def __repr__(self) -> str:
        return f"ShardedArray({self.shard!r}, of={self.of}, ranks={self.ranks})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], tuple[tuple[int, ...], int]]:
        return ((ShardKey("shard"), self.shard),), (self.of, self.ranks)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[tuple[int, ...], int]]:
        return (self.shard,), (self.of, self.ranks)

    @classmethod
    def tree_unflatten(cls, layout: tuple[tuple[int, ...], int], children: Any) -> "ShardedArray":
        return cls(children[0], *layout)


def is_sharded_array(x: Any) -> bool:
    """Whether x is a `ShardedArray`; for `is_leaf`."""
    return isinstance(x, ShardedArray)


def cut(x: jax.Array, stacked: int = 0) -> ShardedArray:
    """This rank's shard of an array that every rank has, in traced code."""
    return ShardedArray(own(x, stacked), jnp.shape(x)[stacked:], session.size())


def check_ranks(function: str, tree: PyTree) -> None:
    """Raise a ValueError that names a leaf which was cut for another number of ranks."""
    size = session.size()
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded_array):
        if is_sharded_array(x) and x.ranks != size:
            raise ValueError(
                f"{function}: leaf {leaf_name(path)} is one of {x.ranks} shards, and there are {size} ranks. Make new ones "
                f"with jaxmpi.fully_shard; to go on with these numbers, save them on {x.ranks} ranks with jaxmpi.save, and "
                "jaxmpi.restore them into the new ones."
            )


def refuse_shards(function: str, tree: PyTree) -> None:
    """Raise a ValueError if a tree has shards, where whole arrays are wanted, with the path of the first."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded_array):
        if is_sharded_array(x):
            raise ValueError(
                f"{function}: leaf {leaf_name(path)} is a ShardedArray, of which each rank has another part. Its gradients, "
                "by jaxmpi.unshard, are means over the ranks already: give them to a plain optax optimizer."
            )
