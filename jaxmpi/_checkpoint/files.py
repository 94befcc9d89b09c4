"""Checkpoints as folders: there as a whole or not at all, and checked when they are read.

    directory/step-000000000100/manifest.json   what the arrays are, and how many bytes each file has
                                rank-0.npz      arrays by name, each with a checksum (CRC-32); NumPy's own format
                                rank-1.npz      there where ranks have parts of their own

A folder that is being written has another name, and is renamed when everything in it is on the disk. Nothing is ever unpickled.
"""

import contextlib
import json
import os
import re
import shutil
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmpi._errors import CheckpointError

__all__ = ["begin", "check", "commit", "dtype_of", "found", "newest", "read", "read_manifest", "write"]

MANIFEST = "manifest.json"
FORMAT = "jaxmpi checkpoint"
PIECE_BYTES = 1 << 20  # at once, so that other threads of Python need not wait

Arrays = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name

_NAME = re.compile(r"step-(\d{12,})(?:\.(\d+))?")  # the second number where a step was saved again
_UNFINISHED = "unfinished-"


# writing


def begin(directory: Path) -> Path:
    """A new folder to write into; what was left of saves that never ended is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
    folder.mkdir()
    return folder


def write(folder: Path, rank: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a rank's arrays; the file has its name once it is on the disk."""
    part = folder / f"rank-{rank}.part"
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            for name, x in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    raw = _plain(np.asarray(x, order="C"))
                    np.lib.format.write_array_header_2_0(member, np.lib.format.header_data_from_array_1_0(raw))
                    data = raw.reshape(-1).view(np.uint8).data
                    for start in range(0, len(data), PIECE_BYTES):
                        member.write(data[start : start + PIECE_BYTES])
        _to_disk(part)
        part.rename(_file(folder, rank))
    except Exception as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"{part} could not be written: {error}. Free some space, or save elsewhere.") from error


def commit(folder: Path, step: int, arrays: Sequence[Arrays], leaves: Any, keep: int | None) -> None:
    """Give a folder its name, and remove the checkpoints beyond `keep`.

    Args:
      folder: in which all ranks have written.
      step: the number of the checkpoint.
      arrays: of each rank's file.
      leaves: what the arrays are, for `read_manifest`.
      keep: as in `jaxmpi.save`.
    """
    written = {_file(folder, rank).name: [_file(folder, rank).stat().st_size, of_rank] for rank, of_rank in enumerate(arrays)}
    about = {"format": FORMAT, "version": 1, "step": step, "ranks": len(arrays), "files": written, "leaves": leaves}
    text = json.dumps(about, indent=1)
    (folder / MANIFEST).write_text(json.dumps({"checksum": zlib.crc32(text.encode())})[:-1] + ",\n" + text[1:])
    _to_disk(folder / MANIFEST)
    _to_disk(folder)
    name = folder.parent / f"step-{step:012}"
    again = 0
    while (there := name.with_suffix(f".{again}") if again else name).exists():
        again += 1
    folder.rename(there)
    _to_disk(folder.parent)
    twice = [old for old in found(folder.parent) if _step(old) == step and old != there]
    older = [old for old in found(folder.parent) if _step(old) < step]  # newer ones may be another run's
    for old in {*twice, *(older[keep - 1 :] if keep is not None else ())}:
        gone = old.rename(old.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}"))
        shutil.rmtree(gone, ignore_errors=True)


# reading


def found(directory: Path) -> list[Path]:
    """The folders of checkpoints, whatever is in them, from the newest to the oldest."""
    if not directory.is_dir():
        return []
    names = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for match, path in sorted(names, key=lambda one: (int(one[0][1]), int(one[0][2] or 0)), reverse=True)]


def newest(directory: Path, step: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, of a step or of any, and why newer ones are not."""
    wrong = []
    for folder in found(directory):
        if step is not None and _step(folder) != step:
            continue
        try:
            check(folder)
        except CheckpointError as error:
            wrong.append(str(error))
        else:
            return folder, wrong
    return None, wrong


def check(folder: Path) -> None:
    """Raise a CheckpointError that names a file, and an array in it, unless everything is as it was written."""
    about = read_manifest(folder)
    for rank, (_, arrays) in enumerate(about["files"].values()):
        with read(folder, rank) as array:
            for name, (dtype, shape) in arrays.items():
                if list(array(name, dtype).shape) != shape:
                    raise CheckpointError(f"{_file(folder, rank)}: {name} is not what was written.")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the arrays are; raises a CheckpointError if a file is missing, truncated or not ours."""
    path = folder / MANIFEST
    try:
        about: dict[str, Any] = json.loads(path.read_text())
        checksum = about.pop("checksum", None)
        same = checksum == zlib.crc32(json.dumps(about, indent=1).encode())
        ours = about.get("format") == FORMAT and about.get("version") == 1
    except Exception as error:  # whatever is in it
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}.") from error
    if not ours:
        raise CheckpointError(f"{path} is not of a checkpoint that this version of jaxmpi has written.")
    if not same:
        raise CheckpointError(f"{path} is not what was written.")
    for name, (size, _) in about["files"].items():
        there = (folder / name).stat().st_size if (folder / name).exists() else None
        if there != size:
            has = "is missing" if there is None else f"has {there} bytes"
            raise CheckpointError(f"{folder / name} {has}, and was written with {size}.")
    return about


@contextlib.contextmanager
def read(folder: Path, rank: int) -> Iterator[Callable[[str, str], np.ndarray]]:
    """Gives a function from a name and a dtype to the array of a rank."""
    file = _file(folder, rank)
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # a damaged file raises what it likes
        raise CheckpointError(f"{file} cannot be read: {error}.") from error

    def array(name: str, dtype: str) -> np.ndarray:
        try:
            with archive.open(f"{name}.npy") as member:
                raw = np.lib.format.read_array(member, allow_pickle=False)
                member.read(1)  # to the end, where the checksum is compared
            return raw.view(dtype_of(dtype))
        except Exception as error:
            raise CheckpointError(f"{file}: {name} cannot be read: {error}.") from error

    with archive:
        yield array


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.npz"


def _step(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match
    return int(match[1])


def dtype_of(name: str) -> np.dtype:
    """Of its name, those that NumPy has from JAX included."""
    return np.dtype(jnp.dtype(name))


def _plain(x: np.ndarray) -> np.ndarray:
    """The same bytes in a dtype that NumPy's format knows."""
    return x if x.dtype.kind in "biufc" and x.dtype.isbuiltin == 1 else x.view(np.dtype(f"V{x.dtype.itemsize}"))


def _to_disk(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
