"""The manifest of a checkpoint: its leaves, and where in which file their numbers are.

It is a JSON text whose first line has the checksum of the rest:

    {"checksum": 3735928559,
     "format": "jaxmpi checkpoint", "version": 2, "step": 100, "ranks": 2,
     "files": {"rank-0.npz": {"rank": 0, "bytes": 1234, "arrays": {NAME: [START, LENGTH, CRC-32]}},
               "rank-1.npz": ...},
     "leaves": [[NAME, LAYOUT, DTYPE, SHAPE, VALUE, STACKED, AXIS, AXES], ...]}
"""

import json
import zlib
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import jax.numpy as jnp
import numpy as np

from jaxmpi._axis import AXIS
from jaxmpi._backends.groups import Groups, groups_along
from jaxmpi._optim.sharded_array import shard_shape

__all__ = [
    "HEADER_BYTES",
    "Leaf",
    "LeafValue",
    "Manifest",
    "Member",
    "dtype_of",
    "file_name",
    "format_manifest",
    "holds_numbers",
    "is_count",
    "is_plain",
    "parse_manifest",
]

FORMAT = "jaxmpi checkpoint"
VERSION = 2
HEADER_BYTES = 1 << 16  # at most, of the header that NumPy's format puts before the numbers

LeafValue: TypeAlias = Any  # an array, a `PerRank`, or a Python number or text: the `Leaf` tells
Layout: TypeAlias = Literal["replicated", "sharded", "per-rank"]

LAYOUTS: dict[str, Layout] = {"all": "replicated", "shard": "sharded", "own": "per-rank"}
SAVED_LAYOUTS = {layout: saved for saved, layout in LAYOUTS.items()}  # in a manifest

# Python numbers and text, which stand in the manifest itself
PLAIN_TYPES = {"bool": bool, "int": int, "float": float, "str": str}


class Leaf(NamedTuple):
    """One leaf of a saved tree.

    Attributes:
      name: its path, such as "['params']['w']".
      layout: "replicated", equal on all ranks; "sharded", of which each rank has one of equal
        shards; or "per-rank", with other values on each rank.
      dtype: of the array, such as "float32"; "key<fry>" for PRNG keys; "int", "str" and so on for
        Python numbers and text.
      shape: of the unsharded array; of the numbers that PRNG keys consist of.
      value: of a Python number or text; a list of all ranks' values where it is per rank.
      stacked: the number of leading axes that count arrays, each of which is sharded by itself.
      axis: the names of the axes of ranks that the leaf is sharded over, or along which a per-rank
        leaf is equal; () for all ranks.
      axes: the names and sizes of all axes of ranks, where `axis` names some.
    """

    name: str
    layout: Layout
    dtype: str
    shape: tuple[int, ...] = ()
    value: LeafValue = None
    stacked: int = 0
    axis: tuple[str, ...] = ()
    axes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        array = self.dtype if self.plain else f"{self.dtype}{list(self.shape)}"
        if self.axis:
            sizes = ", ".join(f"{name!r}: {size}" for name, size in self.axes)
            return f"{array} over axis {', '.join(self.axis)} of {{{sizes}}}"
        return array + (" of each rank" if self.layout == "per-rank" else "")

    @property
    def plain(self) -> bool:
        """Return whether it is a Python number or text, whose value stands in the manifest."""
        return self.value is not None

    @property
    def stored(self) -> bool:
        """Return whether its numbers stand in a file."""
        return not self.plain and prod(self.shape) > 0

    @property
    def stored_dtype(self) -> str:
        """Return the dtype of its numbers in a file."""
        return "uint32" if self.dtype.startswith("key") else self.dtype

    def groups(self, ranks: int) -> Groups:
        """Return the groups of ranks that have all shards, each in the order of the shards."""
        return groups_along({AXIS: ranks, **dict(self.axes)}, self.axis or (AXIS,))

    def shard_count(self, ranks: int) -> int:
        """Return the number of shards on `ranks` ranks."""
        sizes = dict(self.axes)
        return prod(sizes[name] for name in self.axis) if self.axis else ranks

    def stored_shape(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of what one of `ranks` ranks has of it."""
        if self.layout != "sharded":
            return self.shape
        stack, array = self.shape[: self.stacked], self.shape[self.stacked :]
        return (*stack, *shard_shape(array, self.shard_count(ranks)))

    def stored_bytes(self, ranks: int) -> int:
        """Return the bytes of what one of `ranks` ranks has of it."""
        return prod(self.stored_shape(ranks)) * dtype_of(self.stored_dtype).itemsize

    def in_file(self, rank: int) -> bool:
        """Return whether the file of a rank has its numbers; rank 0's alone has replicated ones."""
        return self.stored and (rank == 0 or self.layout != "replicated")


class Member(NamedTuple):
    """Place of a leaf in a file: the last of `length` bytes are its numbers, after NumPy's header.

    `checksum` is the CRC-32 of all these bytes.
    """

    start: int
    length: int
    checksum: int


class Manifest(NamedTuple):
    """Description of a checkpoint."""

    step: int
    ranks: int  # that have written a file
    file_bytes: list[int]  # of each rank's file
    members: list[dict[str, Member]]  # of each rank's file, by the names of leaves
    leaves: list[Leaf]


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank}.npz"


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of this name, which may be one that JAX has added to NumPy's."""
    return np.dtype(jnp.dtype(name))


def holds_numbers(dtype: str) -> bool:
    """Return whether a manifest can have an array of a dtype with this name."""
    try:
        found = dtype_of(dtype)
    except TypeError:  # no name of a dtype, such as the text of one with fields
        return False
    numbers = found.kind in "biufc" or jnp.issubdtype(found, jnp.number)
    return numbers and str(found) == dtype


def is_count(x: object) -> TypeGuard[int]:
    """Return whether x is an integer from 0 to 2^63 - 1, which a manifest can have."""
    return type(x) is int and 0 <= x < 2**63


def is_plain(x: object) -> bool:
    """Return whether x is a Python number or text; subclasses, such as `np.float64`, are not."""
    return PLAIN_TYPES.get(type(x).__name__) is type(x)


def format_manifest(manifest: Manifest) -> bytes:
    """Return the text of a manifest."""
    files = {}
    for rank, (size, members) in enumerate(zip(manifest.file_bytes, manifest.members, strict=True)):
        files[file_name(rank)] = {"rank": rank, "bytes": size, "arrays": members}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "ranks": manifest.ranks,
        "files": files,
        "leaves": [[leaf.name, SAVED_LAYOUTS[leaf.layout], *leaf[2:]] for leaf in manifest.leaves],
    }
    text = json.dumps(about, indent=1)
    return f'{{"checksum": {zlib.crc32(text.encode())},\n{text[1:]}'.encode()


def parse_manifest(text: bytes) -> Manifest:
    """Return the manifest in a text whose checksum was right.

    Raises:
      Exception: of any type, if the text is no manifest or contradicts itself.
    """
    about = json.loads(text)
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise ValueError("it is not of a checkpoint that this version of jaxmpi has written")
    files, ranks = about["files"], _count(about["ranks"])
    if ranks != len(files) or list(files) != [file_name(rank) for rank in range(ranks)]:
        raise ValueError(f"its {len(files)} files are not those of {ranks} ranks")
    leaves = [_parse_leaf(ranks, *row) for row in about["leaves"]]
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise ValueError("two leaves have the same name")
    sizes, members = [], []
    for rank, file in enumerate(files.values()):
        if file["rank"] != rank:
            raise ValueError(f"{file_name(rank)} is of rank {file['rank']}")
        size, arrays = _count(file["bytes"]), file["arrays"]
        found = {}
        for leaf in leaves:
            if leaf.in_file(rank):
                found[leaf.name] = _parse_member(arrays[leaf.name], leaf, ranks, size)
        sizes.append(size)
        members.append(found)
    return Manifest(_count(about["step"]), ranks, sizes, members, leaves)


def _parse_leaf(
    ranks: int,
    name: str,
    saved_layout: str,
    dtype: str,
    shape: list[int],
    value: LeafValue,
    stacked: int = 0,
    axis: Sequence[str] = (),
    axes: Sequence[tuple[str, int]] = (),
) -> Leaf:
    """Return a leaf with its row of a manifest checked.

    Rows that were written before the first release end where the rest has these defaults.
    """
    layout = LAYOUTS.get(saved_layout)
    if not isinstance(name, str) or layout is None:
        raise ValueError(f"leaf {name} is {saved_layout}")
    sizes = tuple(map(_count, shape))
    over = _parse_axis(ranks, layout, axis, axes)
    leaf = Leaf(name, layout, dtype, sizes, value, _count(stacked), *over)
    if leaf.stacked > (len(shape) if layout == "sharded" else 0):
        raise ValueError(f"leaf {name}, {layout}, has {stacked} axes of a stack")
    if leaf.plain:
        values = value if layout == "per-rank" else [value]
        count = ranks if layout == "per-rank" else 1
        right = type(values) is list and len(values) == count and not leaf.shape
        if not right or any(type(x) is not PLAIN_TYPES[dtype] for x in values):
            raise ValueError(f"leaf {name}, {dtype}, has the value {value}")
    elif not dtype.startswith("key<") and not holds_numbers(dtype):
        raise ValueError(f"leaf {name} has dtype {dtype}")
    return leaf


def _parse_axis(
    ranks: int, layout: Layout, axis: Sequence[str], axes: Sequence[tuple[str, int]]
) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """Return the names of an axis of ranks and the sizes of all axes, checked."""
    if bool(axis) != bool(axes) or (axis and layout == "replicated"):
        raise ValueError(f"a leaf that is {layout} has the axis {axis} of {axes}")
    sizes = {name: _count(size) for name, size in axes}
    if axis:
        unique = len(sizes) == len(axes) and len({*axis}) == len(axis)
        named = all(isinstance(name, str) and name != AXIS for name in sizes)
        if not (unique and named and {*axis} <= {*sizes} and prod(sizes.values()) == ranks):
            raise ValueError(f"axis {axis} of {axes} is none of {ranks} ranks")
    return tuple(axis), tuple(sizes.items())


def _parse_member(row: Sequence[int], leaf: Leaf, ranks: int, file_bytes: int) -> Member:
    """Return where a leaf is in a file of `file_bytes` bytes, checked."""
    start, length, checksum = map(_count, row)
    count = leaf.stored_bytes(ranks)
    if not count <= length <= count + HEADER_BYTES or start + length > file_bytes:
        raise ValueError(f"leaf {leaf.name} has {length} bytes at {start}")
    return Member(start, length, checksum)


def _count(x: object) -> int:
    """Return x if it is an integer from 0 to 2^63 - 1; raise a ValueError otherwise."""
    if not is_count(x):
        raise ValueError(f"{x} is no count")
    return x
