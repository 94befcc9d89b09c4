"""A rank's file of a checkpoint: an archive in NumPy's own format, which `np.load` reads.

Reading trusts nothing in the file: the manifest tells where the numbers of a leaf are, and their
checksum. No header is interpreted, nothing is decompressed or unpickled, and only regular files are
opened. Both ways go through pieces of 1 MiB, so that other Python threads get their turn.
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

PIECE_BYTES = 1 << 20
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
    """Return what to do about a file that could not be written, in a sentence."""
    return ADVICE.get(getattr(error, "errno", None) or 0, "Look at the disk, or save elsewhere.")


# writing


def create(path: Path) -> BufferedWriter:
    """Open a new file for writing; raise a FileExistsError if the path is taken, even by a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def write(
    folder: Path, rank: int, arrays: Mapping[str, np.ndarray]
) -> tuple[int, dict[str, Member]]:
    """Write a rank's arrays into a new file.

    Args:
      folder: where to write.
      rank: gives the name of the file.
      arrays: by the names of leaves.

    Returns:
      The size of the file in bytes, and where the arrays are in it.

    Raises:
      CheckpointError: the file cannot be written, with the reason and what to do.
    """
    # The file gets its name once it is on the disk, so that one with the name is whole.
    unnamed = folder / f"rank-{rank}.part"
    try:
        with create(unnamed) as file:
            members = {}
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, x in arrays.items():
                    members[name] = _add(archive, file, f"{name}.npy", x)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        unnamed.rename(folder / file_name(rank))
    except Exception as error:
        unnamed.unlink(missing_ok=True)
        raise CheckpointError(
            f"{unnamed} could not be written: {error}.", advice=advice(error), path=unnamed
        ) from error
    return size, members


def _add(archive: zipfile.ZipFile, file: BufferedWriter, name: str, x: np.ndarray) -> Member:
    """Append an array to the archive that is being written to `file`."""
    raw = np.asarray(x, order="C")
    if raw.dtype.kind not in "biufc" or raw.dtype.isbuiltin != 1:
        # NumPy's format does not know JAX's dtypes, such as bfloat16: store the same bytes
        raw = raw.view(np.dtype(f"V{raw.dtype.itemsize}"))
    info = zipfile.ZipInfo(name)
    with archive.open(info, "w", force_zip64=True) as member:
        start = file.tell()
        header = np.lib.format.header_data_from_array_1_0(raw)
        np.lib.format.write_array_header_2_0(member, header)
        data = raw.reshape(-1).view(np.uint8).data
        for at in range(0, len(data), PIECE_BYTES):
            member.write(data[at : at + PIECE_BYTES])
    return Member(start, info.file_size, info.CRC)


# reading


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading.

    Raises:
      CheckpointError: it is missing, or no regular file. A FIFO or a device is not waited for.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.fdopen(os.open(path, flags), "rb", buffering=0)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.", path=path) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened: {error}.",
            advice="It must be a regular file, and no link.",
            path=path,
        ) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(
            f"{path} is no regular file.",
            advice="A checkpoint has only regular files: restore from a copy without links or "
            "pipes.",
            path=path,
        )
    return file


class Archive:
    """The file of a rank, open for reading."""

    def __init__(
        self, folder: Path, rank: int, file_bytes: int, members: Mapping[str, Member]
    ) -> None:
        self._path = folder / file_name(rank)
        self._members = members
        self._file = open_regular(self._path)
        size = os.fstat(self._file.fileno()).st_size
        if size != file_bytes:
            self._file.close()
            raise CheckpointError(
                f"{self._path} has {size} bytes, and was written with {file_bytes}.",
                path=self._path,
            )

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, leaf: Leaf, ranks: int) -> np.ndarray:
        """Return what this rank of `ranks` has written of a leaf.

        Raises:
          CheckpointError: the file has something else.
        """
        buffer = np.empty(leaf.stored_bytes(ranks), np.uint8)
        self._read(leaf, buffer.size, buffer.data)
        return buffer.view(dtype_of(leaf.stored_dtype)).reshape(leaf.stored_shape(ranks))

    def check(self, leaf: Leaf, ranks: int) -> None:
        """Verify a leaf without keeping it; raises as `read` does."""
        self._read(leaf, leaf.stored_bytes(ranks), None)

    def _read(self, leaf: Leaf, count: int, buffer: memoryview | None) -> None:
        """Read the `count` bytes of a leaf into the buffer, if there is one, and verify them."""
        member = self._members.get(leaf.name)
        if member is None or not 0 <= member.length - count <= HEADER_BYTES:
            raise CheckpointError(
                f"{self._path}: leaf {leaf.name} is missing, or has another length than the "
                "manifest says.",
                advice="Restore an earlier checkpoint.",
                path=self._path,
                leaf=leaf.name,
            )
        # NumPy's header comes first; it counts for the checksum, and for nothing else
        header_bytes = member.length - count
        scratch = memoryview(bytearray(min(max(count, header_bytes), PIECE_BYTES)))
        checksum = zlib.crc32(self._fill(scratch[:header_bytes], member.start))
        for at in range(0, count, PIECE_BYTES):
            end = min(at + PIECE_BYTES, count)
            piece = scratch[: end - at] if buffer is None else buffer[at:end]
            checksum = zlib.crc32(self._fill(piece, None), checksum)
        if checksum != member.checksum:
            raise CheckpointError(
                f"{self._path}: {leaf.name} is corrupted: its checksum does not match.",
                path=self._path,
                leaf=leaf.name,
            )

    def _fill(self, piece: memoryview, start: int | None) -> memoryview:
        """Fill the piece with the bytes from `start`, or with those after the last ones read."""
        try:
            if start is not None:
                self._file.seek(start)
            at = 0
            while at < len(piece) and (count := self._file.readinto(piece[at:])):
                at += count
        except (OSError, OverflowError) as error:
            raise CheckpointError(
                f"{self._path} cannot be read: {error}.", path=self._path
            ) from error
        if at < len(piece):
            raise CheckpointError(
                f"{self._path} has become shorter while it was read.", path=self._path
            )
        return piece
