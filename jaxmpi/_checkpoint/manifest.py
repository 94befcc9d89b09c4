"""The manifest of a checkpoint: its leaves, and where in which file their numbers are, with a checksum of each."""

import json
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxmpi._axis import AXIS
from jaxmpi._backends.groups import Groups, groups_along
from jaxmpi._optim.shards import shard_shape

__all__ = [
    "PLAIN",
    "Leaf",
    "LeafValue",
    "Manifest",
    "Member",
    "dtype_of",
    "file_name",
    "format_manifest",
    "is_plain",
    "parse_manifest",
]

FORMAT = "jaxmpi checkpoint"
VERSION = 2  # version 1, of jaxmpi 0.1, has no checksums: those in the files' own headers count
PLAIN = {kind.__name__: kind for kind in (bool, int, float, str)}  # values of Python that stand in the manifest itself
PARTS = ("all", "shard", "own")
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

    `checksum` is the CRC-32 of the whole member; None in version 1, whose files are searched for the members.
    """

    start: int
    length: int
    checksum: int | None


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


def format_manifest(manifest: Manifest) -> bytes:
    """The text of a manifest. Its first line is the checksum of the rest."""
    files = {
        file_name(rank): {"rank": rank, "bytes": size, "arrays": members}
        for rank, (size, members) in enumerate(zip(manifest.file_bytes, manifest.members, strict=True))
    }
    plain = len(Leaf._fields) - 3  # fields, as jaxmpi 0.1 reads them
    leaves = [leaf if leaf.axis else leaf[: plain + 1] if leaf.stacked else leaf[:plain] for leaf in manifest.leaves]
    about = {"format": FORMAT, "version": VERSION, "step": manifest.step, "ranks": manifest.ranks}
    text = json.dumps(about | {"files": files, "leaves": leaves}, indent=1)
    return f'{{"checksum": {zlib.crc32(text.encode())},\n{text[1:]}'.encode()


def parse_manifest(text: bytes) -> Manifest:
    """The manifest in a text whose checksum was right; raises whatever it likes if it is none, or contradicts itself."""
    about = json.loads(text)
    version = about.get("version")
    if about.get("format") != FORMAT or version not in (1, VERSION):
        raise ValueError("it is not of a checkpoint that this version of jaxmpi has written")
    files, ranks = about["files"], _integer(about["ranks"])
    if ranks != len(files) or list(files) != [file_name(rank) for rank in range(ranks)]:
        raise ValueError(f"its {len(files)} files are not those of {ranks} ranks")
    leaves = [_leaf(*fields, ranks=ranks) for fields in about["leaves"]]
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise ValueError("two leaves have the same name")
    sizes = [_integer(file[0] if version == 1 else file["bytes"]) for file in files.values()]
    members: list[dict[str, Member]] = []
    for rank, (size, file) in enumerate(zip(sizes, files.values(), strict=True)):
        mine = [leaf for leaf in leaves if leaf.in_file(rank)]
        if version == 1:
            members.append({leaf.name: Member(0, 0, None) for leaf in mine if _is_like(leaf, ranks, *file[1][leaf.name])})
        elif file["rank"] != rank:
            raise ValueError(f"{file_name(rank)} is of rank {file['rank']}")
        else:
            members.append({leaf.name: _member(file["arrays"], leaf, ranks, size) for leaf in mine})
    return Manifest(_integer(about["step"]), ranks, sizes, members, leaves)


def _leaf(name: str, part: str, dtype: str, shape: list[int], value: LeafValue, stacked: int = 0, *of: Any, ranks: int) -> Leaf:
    if not isinstance(name, str) or part not in PARTS:
        raise ValueError(f"leaf {name} is {part}")
    leaf = Leaf(name, part, dtype, tuple(map(_integer, shape)), value, _integer(stacked), *_axis(part, *of, ranks=ranks))
    if leaf.stacked > (len(shape) if part == "shard" else 0):
        raise ValueError(f"leaf {name}, {part}, has {stacked} axes of a stack")
    if leaf.plain:
        values = value if part == "own" else [value]
        if type(values) is not list or len(values) != (ranks if part == "own" else 1):
            raise ValueError(f"leaf {name} has the value {value}")
        if leaf.shape or any(type(x) is not PLAIN[dtype] for x in values):
            raise ValueError(f"leaf {name}, {dtype}, has the value {value}")
    elif not dtype.startswith("key<"):
        found = dtype_of(dtype)
        if str(found) != dtype or not (found.kind in "biufc" or jnp.issubdtype(found, jnp.number)):
            raise ValueError(f"leaf {name} has dtype {dtype}")
    return leaf


def _axis(
    part: str, axis: Sequence[str] = (), axes: Sequence[tuple[str, int]] = (), *, ranks: int
) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """An axis of ranks, and the sizes of all."""
    sizes = {name: _integer(size) for name, size in axes}
    right = all(isinstance(name, str) and name != AXIS for name in sizes) and len(sizes) == len(axes)
    if axis and not (right and prod(sizes.values()) == ranks and {*axis} <= {*sizes} and len({*axis}) == len(axis)):
        raise ValueError(f"axis {axis} of {axes} is none of {ranks} ranks")
    if bool(axis) != bool(axes) or (axis and part == "all"):
        raise ValueError(f"a leaf of part {part} has the axis {axis} of {axes}")
    return tuple(axis), tuple(sizes.items())


def _member(arrays: Mapping[str, Sequence[int]], leaf: Leaf, ranks: int, file_bytes: int) -> Member:
    start, length, checksum = map(_integer, arrays[leaf.name])
    if not leaf.stored_bytes(ranks) <= length <= leaf.stored_bytes(ranks) + HEADER_BYTES or start + length > file_bytes:
        raise ValueError(f"leaf {leaf.name} has {length} bytes at {start}")
    return Member(start, length, checksum)


def _is_like(leaf: Leaf, ranks: int, dtype: str, shape: list[int]) -> bool:
    """Whether version 1 says the same of a leaf and of the array in a file."""
    if (dtype, tuple(shape)) != (leaf.stored_dtype, leaf.stored_shape(ranks)):
        raise ValueError(f"leaf {leaf.name}, {leaf}, is {dtype}{shape} in a file")
    return True


def _integer(x: object) -> int:
    if type(x) is not int or not 0 <= x < 2**63:
        raise ValueError(f"{x} is no count")
    return x
