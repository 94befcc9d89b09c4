"""The text of a manifest: written with its checksum, and parsed with a check of each field."""

import json
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp

from jaxmpi._axis import AXIS
from jaxmpi._checkpoint.manifest import HEADER_BYTES, PLAIN, Leaf, LeafValue, Manifest, Member, dtype_of, file_name

__all__ = ["format_manifest", "parse_manifest"]

FORMAT = "jaxmpi checkpoint"
VERSION = 2
PARTS = ("all", "shard", "own")


def format_manifest(manifest: Manifest) -> bytes:
    """The text of a manifest. Its first line is the checksum of the rest."""
    files = {
        file_name(rank): {"rank": rank, "bytes": size, "arrays": members}
        for rank, (size, members) in enumerate(zip(manifest.file_bytes, manifest.members, strict=True))
    }
    plain = len(Leaf._fields) - 3  # fields of a leaf that is equal on all ranks, or each rank's own
    leaves = [leaf if leaf.axis else leaf[: plain + 1] if leaf.stacked else leaf[:plain] for leaf in manifest.leaves]
    about = {"format": FORMAT, "version": VERSION, "step": manifest.step, "ranks": manifest.ranks}
    text = json.dumps(about | {"files": files, "leaves": leaves}, indent=1)
    return f'{{"checksum": {zlib.crc32(text.encode())},\n{text[1:]}'.encode()


def parse_manifest(text: bytes) -> Manifest:
    """The manifest in a text whose checksum was right; raises whatever it likes if it is none, or contradicts itself."""
    about = json.loads(text)
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise ValueError("it is not of a checkpoint that this version of jaxmpi has written")
    files, ranks = about["files"], _integer(about["ranks"])
    if ranks != len(files) or list(files) != [file_name(rank) for rank in range(ranks)]:
        raise ValueError(f"its {len(files)} files are not those of {ranks} ranks")
    leaves = [_leaf(*fields, ranks=ranks) for fields in about["leaves"]]
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise ValueError("two leaves have the same name")
    sizes = [_integer(file["bytes"]) for file in files.values()]
    members: list[dict[str, Member]] = []
    for rank, (size, file) in enumerate(zip(sizes, files.values(), strict=True)):
        if file["rank"] != rank:
            raise ValueError(f"{file_name(rank)} is of rank {file['rank']}")
        mine = [leaf for leaf in leaves if leaf.in_file(rank)]
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


def _integer(x: object) -> int:
    if type(x) is not int or not 0 <= x < 2**63:
        raise ValueError(f"{x} is no count")
    return x
