"""A checkpoint as arrays of the ranks that there are now."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi._backends import Backend
from jaxmpi._checkpoint import files, parts
from jaxmpi._checkpoint.parts import Leaf
from jaxmpi._checkpoint.together import busy, ranks_here, together
from jaxmpi._optim.sharded import shard_shape

__all__ = ["newest", "read"]


def newest(backend: Backend, directory: Path, step: int | None) -> tuple[Path | None, Any]:
    """The folder of a checkpoint that is whole with its manifest, or None and what is wrong."""

    def look() -> tuple[Path | None, Any]:
        if backend.place.rank:
            return None, None
        with busy(backend, f"reading the checkpoints in {directory}"):
            folder, wrong = files.newest(directory.absolute(), step)
        for line in wrong:
            warnings.warn(f"a checkpoint is passed over: {line}", stacklevel=4)
        return folder, files.read_manifest(folder) if folder else " ".join(wrong)

    return backend.broadcast_object(together(backend, look), 0)


def read(backend: Backend, folder: Path, pairs: list[tuple[Leaf, Leaf]], ranks: int) -> list[Any]:
    """What this process has of each leaf, given as it is wanted and as it was saved by `ranks` ranks."""
    place = backend.place
    common = [leaf.part == saved.part == "all" for leaf, saved in pairs]

    def mine() -> list[Any]:
        with busy(backend, f"reading {folder}"), _reader(folder) as array:
            values: list[Any] = []
            for everyone, (leaf, saved) in zip(common, pairs, strict=True):
                if not leaf.stored or (everyone and place.rank):
                    values.append(_empty(leaf, place.size))
                elif everyone or backend.name != "simulate" or leaf.part == "all":
                    values.append(parts.part_of(leaf, place.rank, place.size, saved, ranks, array))
                else:
                    rows = [parts.part_of(leaf, rank, place.size, saved, ranks, array) for rank in ranks_here(backend)]
                    values.append(rows[0] if all(row.tobytes() == rows[0].tobytes() for row in rows) else np.stack(rows))
            return values

    values = together(backend, mine)
    for everyone, x in zip(common, values, strict=True):
        if everyone and x.size:
            backend.broadcast_buffer(x.reshape(-1).view(np.uint8), 0)
    return values


def _empty(leaf: Leaf, size: int) -> np.ndarray:
    shape = shard_shape(leaf.shape, size) if leaf.part == "shard" else leaf.shape
    return np.empty(shape, files.dtype_of(leaf.stored_dtype))


@contextmanager
def _reader(folder: Path) -> Iterator[parts.Reader]:
    """A function that reads what a rank has saved; each file is opened once."""
    with ExitStack() as stack:
        opened: dict[int, Any] = {}

        def read(leaf: Leaf, rank: int) -> np.ndarray:
            if rank not in opened:
                opened[rank] = stack.enter_context(files.read(folder, rank))
            return opened[rank](leaf.name, leaf.stored_dtype)

        yield read
