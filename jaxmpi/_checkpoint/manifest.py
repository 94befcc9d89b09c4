"""The manifest of a checkpoint: its leaves, and where in which file their numbers are, with a checksum of each."""

from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxmpi._axis import AXIS
from jaxmpi._backends.groups import Groups, groups_along
from jaxmpi._optim.shards import shard_shape

__all__ = ["PLAIN", "Leaf", "LeafValue", "Manifest", "Member", "dtype_of", "file_name", "is_plain"]

PLAIN = {kind.__name__: kind for kind in (bool, int, float, str)}  # values of Python that stand in the manifest itself
HEADER_BYTES = 1 << 16  # at most, of the header that NumPy's format puts before the numbers

LeafValue: TypeAlias = Any  # an array, a `PerRank`, or a number or text of Python's own: the `Leaf` says which


class Leaf(NamedTuple):
    """What a checkpoint says about a leaf.

    Attributes:
      name: its path, such as "['params']['w']".
      part: "all", "shard" or "own".
      dtype: of the array, such as "float32"; "key<fry>" for PRNG keys; "int", "str" and so on for Python's own.
      shape: of the whole array; of the numbers that keys consist of.
      value: of a Python number or text; a list of all ranks' values where the part is "own".
      stacked: how many axes of a "shard" count arrays, each of which is cut by itself.
      axis: the names of the axes of ranks that a "shard" is cut over, or along which one of "own" is equal; () for all.
      axes: the names of all axes, and their sizes, where there is an axis.
    """

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...] = ()
    value: LeafValue = None
    stacked: int = 0
    axis: tuple[str, ...] = ()
    axes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        kind = self.dtype if self.plain else f"{self.dtype}{list(self.shape)}"
        if self.axis:
            sizes = ", ".join(f"{name!r}: {size}" for name, size in self.axes)
            return f"{kind} over axis {', '.join(self.axis)} of {{{sizes}}}"
        return kind + (" of each rank" if self.part == "own" else "")

    @property
    def plain(self) -> bool:
        """Whether it is a number or text of Python's own, which stands in the manifest."""
        return self.value is not None

    @property
    def stored(self) -> bool:
        """Whether its numbers stand in a file."""
        return not self.plain and prod(self.shape) > 0

    @property
    def stored_dtype(self) -> str:
        """That of the numbers in the file."""
        return "uint32" if self.dtype.startswith("key") else self.dtype

    def groups(self, ranks: int) -> Groups:
        """The ranks of each group that has it as a whole, in the order of the shards."""
        return groups_along({AXIS: ranks, **dict(self.axes)}, self.axis or (AXIS,))

    def shards(self, ranks: int) -> int:
        """The number of its shards, on so many ranks."""
        sizes = dict(self.axes)
        return prod(sizes[name] for name in self.axis) if self.axis else ranks

    def stored_shape(self, ranks: int) -> tuple[int, ...]:
        """The shape of what one of so many ranks has of it."""
        if self.part != "shard":
            return self.shape
        return (*self.shape[: self.stacked], *shard_shape(self.shape[self.stacked :], self.shards(ranks)))

    def stored_bytes(self, ranks: int) -> int:
        """How many bytes one of so many ranks has of it."""
        return prod(self.stored_shape(ranks)) * dtype_of(self.stored_dtype).itemsize

    def in_file(self, rank: int) -> bool:
        """Whether the file of this rank has it, or a part of it."""
        return self.stored and (rank == 0 or self.part != "all")


class Member(NamedTuple):
    """Where the numbers of a leaf are in a file: at the end of a member of `length` bytes, behind NumPy's header.

    `checksum` is the CRC-32 of the whole member.
    """

    start: int
    length: int
    checksum: int


class Manifest(NamedTuple):
    """What a checkpoint consists of."""

    step: int
    ranks: int  # that have written a file
    file_bytes: list[int]  # of each rank's file
    members: list[dict[str, Member]]  # of each rank's file, by the names of leaves
    leaves: list[Leaf]


def file_name(rank: int) -> str:
    """The file that a rank has written."""
    return f"rank-{rank}.npz"


def dtype_of(name: str) -> np.dtype:
    """Of its name, those that NumPy has from JAX included."""
    return np.dtype(jnp.dtype(name))


def is_plain(x: object) -> bool:
    """Whether this is a number or text of Python's own."""
    return PLAIN.get(type(x).__name__) is type(x)
