"""Checkpoints as folders: there as a whole or not at all, and checked when they are read.

    directory/step-000000000100/manifest.json   what the leaves are, and where their numbers are, with checksums
                                rank-0.npz      arrays by name
                                rank-1.npz      there where ranks have parts of their own

A folder that is being written has another name: see commit.py.
"""

import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from jaxmpi._checkpoint.files import PIECE_BYTES, Archive, open_regular
from jaxmpi._checkpoint.manifest import Manifest
from jaxmpi._checkpoint.manifest_format import parse_manifest
from jaxmpi._errors import CheckpointError

__all__ = ["MANIFEST", "MANIFEST_BYTES", "check", "found", "newest", "read_manifest", "step_of"]

MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 28  # at most; about 100 for each array

_NAME = re.compile(r"step-(\d{12,})(?:\.(\d+))?")  # the second number where a step was saved again
_FIRST_LINE = re.compile(rb'\{"checksum": (\d{1,10}),\n')


def found(directory: Path) -> list[Path]:
    """The folders of checkpoints, whatever is in them, from the newest to the oldest."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_order, reverse=True)


def _order(folder: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(folder.name)
    assert match
    return int(match[1]), int(match[2] or 0)


def step_of(folder: Path) -> int:
    """The step that the name of a checkpoint's folder says."""
    return _order(folder)[0]


def newest(directories: Sequence[Path], step: int | None = None) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    """The newest checkpoint that is whole, of a step or of any, with its manifest; and why newer ones are not.

    Of the same step, it is the one in the last directory.
    """
    wrong: list[str] = []
    everywhere = [folder for directory in reversed(directories) for folder in found(directory)]
    for folder in sorted(everywhere, key=step_of, reverse=True):
        if step is not None and step_of(folder) != step:
            continue
        try:
            return (folder, check(folder)), wrong
        except CheckpointError as error:
            wrong.append(str(error))
    return None, wrong


def check(folder: Path) -> Manifest:
    """The manifest; raises a CheckpointError that names a file, and a leaf in it, unless everything is as it was written."""
    manifest = read_manifest(folder)
    for rank, (size, members) in enumerate(zip(manifest.file_bytes, manifest.members, strict=True)):
        with Archive(folder, rank, size, members) as archive:
            for leaf in manifest.leaves:
                if leaf.in_file(rank):
                    archive.check(leaf, manifest.ranks)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint consists of; raises a CheckpointError if its manifest is missing, damaged or not of this step."""
    path = folder / MANIFEST
    with open_regular(path) as file:
        try:
            first = _FIRST_LINE.fullmatch(file.readline(64))
            if first is None or os.fstat(file.fileno()).st_size > MANIFEST_BYTES:
                raise ValueError("it does not begin or end as one")
            start, checksum = file.tell(), zlib.crc32(b"{")
            while piece := file.read(PIECE_BYTES):
                checksum = zlib.crc32(piece, checksum)
            if same := checksum == int(first[1]):  # nothing else is interpreted
                file.seek(start)
                manifest = parse_manifest(b"{" + file.read())
        except Exception as error:  # whatever is in it
            raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}.") from error
    if not same:
        raise CheckpointError(f"{path} is corrupted: its checksum does not match.")
    if _NAME.fullmatch(folder.name) and manifest.step != step_of(folder):
        raise CheckpointError(f"{path} is of step {manifest.step}, and not of this folder.")
    return manifest
