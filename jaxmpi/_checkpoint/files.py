"""A rank's file of a checkpoint: an archive of NumPy's own format (`np.load` reads it), written and read in pieces.

Reading trusts nothing in the file: the manifest says where the numbers of a leaf are and what their checksum is. No header is
interpreted, nothing is decompressed or unpickled, and only regular files are opened.
"""

import errno
import os
import stat
import zipfile
import zlib
from collections.abc import Mapping
from io import BufferedWriter, FileIO
from pathlib import Path

import numpy as np

from jaxmpi._checkpoint.manifest import HEADER_BYTES, Leaf, Member, dtype_of, file_name
from jaxmpi._errors import CheckpointError

__all__ = ["Archive", "advice", "create", "open_regular", "write"]

PIECE_BYTES = 1 << 20  # at once, so that other threads of Python need not wait
ADVICE = {
    errno.ENOSPC: "Free some space, or save elsewhere.",
    errno.EDQUOT: "Free some space, or save elsewhere.",
    errno.EFBIG: "Raise the limit of the size of files (ulimit -f), or save elsewhere.",
    errno.EACCES: "Save to a folder that this user may write to.",
    errno.EPERM: "Save to a folder that this user may write to.",
    errno.EROFS: "Save to a folder that this user may write to.",
    errno.ENOENT: "Something has removed it meanwhile: look for what cleans this folder.",
    errno.ESTALE: "Something has removed it meanwhile: look for what cleans this folder.",
}


def advice(error: Exception) -> str:
    """What to do where a file cannot be written."""
    return ADVICE.get(getattr(error, "errno", None) or 0, "Look at the disk, or save elsewhere.")


# writing


def create(path: Path) -> BufferedWriter:
    """A new file, open for writing: neither one that is there already nor what a link points to."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb")


def write(folder: Path, rank: int, arrays: Mapping[str, np.ndarray]) -> tuple[int, dict[str, Member]]:
    """Write a rank's arrays; the file has its name once it is on the disk.

    Returns:
      The size of the file, and where the arrays are in it.
    """
    part = folder / f"rank-{rank}.part"
    try:
        with create(part) as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                members = {name: _add(archive, file, f"{name}.npy", x) for name, x in arrays.items()}
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        part.rename(folder / file_name(rank))
    except Exception as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"{part} could not be written: {error}. {advice(error)}") from error
    return size, members


def _add(archive: zipfile.ZipFile, file: BufferedWriter, name: str, x: np.ndarray) -> Member:
    info = zipfile.ZipInfo(name)
    with archive.open(info, "w", force_zip64=True) as member:
        start = file.tell()
        raw = _plain(np.asarray(x, order="C"))
        np.lib.format.write_array_header_2_0(member, np.lib.format.header_data_from_array_1_0(raw))
        data = raw.reshape(-1).view(np.uint8).data
        for at in range(0, len(data), PIECE_BYTES):
            member.write(data[at : at + PIECE_BYTES])
    return Member(start, info.file_size, info.CRC)


def _plain(x: np.ndarray) -> np.ndarray:
    """The same bytes in a dtype that NumPy's format knows."""
    return x if x.dtype.kind in "biufc" and x.dtype.isbuiltin == 1 else x.view(np.dtype(f"V{x.dtype.itemsize}"))


# reading


def open_regular(path: Path) -> FileIO:
    """A file, open for reading; raises a CheckpointError unless it is a regular file, without waiting for one that is not."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error}. It must be a regular file, and no link.") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(
            f"{path} is no regular file. A checkpoint has only regular files: restore from a copy without links or pipes."
        )
    return file


class Archive:
    """The file of a rank, open for reading."""

    def __init__(self, folder: Path, rank: int, file_bytes: int, members: Mapping[str, Member]) -> None:
        self._path = folder / file_name(rank)
        self._file = open_regular(self._path)
        self._members = members
        try:
            self._check_size(file_bytes)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, leaf: Leaf, ranks: int) -> np.ndarray:
        """What this rank, of so many, has of a leaf; raises a CheckpointError unless it is what was written."""
        buffer = np.empty(leaf.stored_bytes(ranks), np.uint8)
        self._read(leaf, buffer.size, buffer.data)
        return buffer.view(dtype_of(leaf.stored_dtype)).reshape(leaf.stored_shape(ranks))

    def check(self, leaf: Leaf, ranks: int) -> None:
        """Read a leaf without keeping it; raises as `read` does."""
        self._read(leaf, leaf.stored_bytes(ranks), None)

    def _read(self, leaf: Leaf, count: int, buffer: memoryview | None) -> None:
        if (member := self._members.get(leaf.name)) is None or not 0 <= member.length - count <= HEADER_BYTES:
            raise CheckpointError(
                f"{self._path}: leaf {leaf.name} is missing, or has another length than the manifest says. Restore an "
                "earlier checkpoint."
            )
        scratch = memoryview(bytearray(min(max(count, member.length - count), PIECE_BYTES)))
        header = scratch[: member.length - count]
        found = zlib.crc32(self._fill(header, member.start))
        for at in range(0, count, PIECE_BYTES):
            end = min(at + PIECE_BYTES, count)
            piece = scratch[: end - at] if buffer is None else buffer[at:end]
            found = zlib.crc32(self._fill(piece, None), found)
        if found != member.checksum:
            raise CheckpointError(f"{self._path}: {leaf.name} is corrupted: its checksum does not match.")

    def _fill(self, piece: memoryview, start: int | None) -> memoryview:
        """Read on, or from a place, as many bytes as the piece has."""
        try:
            if start is not None:
                self._file.seek(start)
            at = 0
            while at < len(piece) and (count := self._file.readinto(piece[at:])):
                at += count
        except (OSError, OverflowError) as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}.") from error
        if at < len(piece):
            raise CheckpointError(f"{self._path} has become shorter while it was read.")
        return piece

    def _check_size(self, file_bytes: int) -> None:
        if (there := os.fstat(self._file.fileno()).st_size) != file_bytes:
            raise CheckpointError(f"{self._path} has {there} bytes, and was written with {file_bytes}.")
