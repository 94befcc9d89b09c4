"""A checkpoint as arrays of the ranks that there are now."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from jaxmpi._backends.base import Backend, long_operation
from jaxmpi._checkpoint import folders, memory
from jaxmpi._checkpoint.compatibility import fitted
from jaxmpi._checkpoint.files import Archive
from jaxmpi._checkpoint.manifest import Leaf, LeafValue, Manifest, dtype_of
from jaxmpi._checkpoint.rank_checks import ranks_here, run_on_all_or_raise
from jaxmpi._checkpoint.resharding import Reader, bits, part_of

__all__ = ["newest", "read"]


def newest(backend: Backend, directory: Path, step: int | None) -> tuple[tuple[Path, Manifest] | None, str]:
    """The folder of a checkpoint that is whole with its manifest, or None; and what is wrong with others.

    It may be in memory, if all ranks are on the host that has it there.
    """
    in_memory = backend.allgather_object(memory.existing(directory))
    directories = [directory.absolute()]
    if in_memory[0] is not None and len(set(in_memory)) == 1:
        directories.append(in_memory[0])

    def look() -> tuple[tuple[Path, Manifest] | None, str] | None:
        if backend.place.rank:
            return None
        with long_operation(backend, f"reading the checkpoints in {directory}"):
            whole, wrong = folders.newest(directories, step)
        for line in wrong:
            warnings.warn(f"a checkpoint is passed over: {line}", stacklevel=4)
        return whole, " ".join(wrong)

    return backend.broadcast_object(run_on_all_or_raise(backend, look), 0)


def read(backend: Backend, folder: Path, manifest: Manifest, pairs: list[tuple[Leaf, Leaf]]) -> list[LeafValue]:
    """What this process has of each leaf, given as it is wanted and as it was saved."""
    place = backend.place
    common = [leaf.part == saved.part == "all" and saved.stored for leaf, saved in pairs]

    def mine() -> list[LeafValue]:
        with long_operation(backend, f"reading {folder}"), _reader(folder, manifest) as stored:
            return [
                _empty(saved, place.size) if one and place.rank else _value(backend, leaf, saved, manifest.ranks, stored)
                for one, (leaf, saved) in zip(common, pairs, strict=True)
            ]

    values = run_on_all_or_raise(backend, mine)
    for one, x in zip(common, values, strict=True):
        if one:
            backend.broadcast_buffer(x.reshape(-1).view(np.uint8), 0)
    return values


def _value(backend: Backend, leaf: Leaf, saved: Leaf, ranks: int, stored: Reader) -> LeafValue:
    """An array, or a value of Python's own; a stack of arrays where simulated ranks differ."""
    size = backend.place.size
    if not saved.plain and not saved.stored:
        return _empty(leaf, size)
    here = ranks_here(backend) if leaf.part != "all" else [backend.place.rank]
    rows = [fitted(saved, leaf, part_of(leaf, rank, size, saved, ranks, stored)) for rank in here]
    return rows[0] if all(bits(row) == bits(rows[0]) for row in rows) else np.stack(rows)


def _empty(leaf: Leaf, size: int) -> np.ndarray:
    return np.empty(leaf.stored_shape(size), dtype_of(leaf.stored_dtype))


@contextmanager
def _reader(folder: Path, manifest: Manifest) -> Iterator[Reader]:
    """A function that reads what a rank has saved; each file is opened once."""
    with ExitStack() as stack:
        opened: dict[int, Archive] = {}

        def read(leaf: Leaf, rank: int) -> LeafValue:
            if leaf.plain:
                return leaf.value[rank] if leaf.part == "own" else leaf.value
            if rank not in opened:
                archive = Archive(folder, rank, manifest.file_bytes[rank], manifest.members[rank])
                opened[rank] = stack.enter_context(archive)
            return opened[rank].read(leaf, manifest.ranks)

        yield read
