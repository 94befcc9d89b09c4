"""Save a training run, and go on with it on any number of ranks."""

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxmpi import _agreement, _guard
from jaxmpi._backends import Backend
from jaxmpi._backends.simulate import PerRank
from jaxmpi._checkpoint import files, parts
from jaxmpi._checkpoint.parts import Leaf
from jaxmpi._errors import CheckpointError
from jaxmpi._jit import local
from jaxmpi._objects import untraced
from jaxmpi._optim.sharded import shard_shape

__all__ = ["latest", "restore", "save"]

T = TypeVar("T")


def save(directory: str | os.PathLike, step: int, tree: Any, *, keep: int | None = 3, background: bool = True) -> None:
    """Save everything that a run goes on from: parameters, optimizer state, model state, keys, where it is in the data.

    The arrays are copied, and written while the training goes on. The checkpoint is there as a whole or not at all, however
    the job ends; it is there for certain when the next call of `save`, `restore` or `latest` returns, when the script ends in
    order, or on return with `background=False`.

    What is equal on all ranks is written by rank 0. Of the state of `sharded`, and of what else each rank has of its own, each
    rank writes its part, so that `directory` must be one that all ranks share.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** a comparison of them, and of how the last save has ended.

    Args:
      directory: holds the checkpoints of one run; made if it is not there.
      step: the number of the checkpoint, 0 or more. One of the same number is replaced.
      tree: any pytree of arrays, PRNG keys, Python numbers and text.
      keep: how many checkpoints to keep, this one included; None for all.
      background: whether to return before it is written.

    Raises:
      CheckpointError: on every rank, if this save, or the one before, could not be written.
      RankMismatchError: on every rank, if their trees differ.
      TypeError: a leaf that cannot be saved, with its path.
      ValueError: a negative step; `keep` below 1.
      RuntimeError: called in traced code.
    """
    backend = untraced("save")
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"save: step is {step} and keep is {keep}. A step is 0 or more, and keep 1 or more, or None.")
    described = parts.leaves_of(local(tree), backend.place.size)
    _meet(backend, "save", [leaf for leaf, _ in described], f"step {step}, keep {keep}")
    _Save.finish(backend)
    leaves = [leaf for leaf, _ in described]
    writers = range(1 if all(leaf.part == "all" for leaf in leaves) else backend.place.size)
    arrays = {rank: _arrays(described, rank) for rank in _ranks_here(backend) if rank in writers}
    folder = _begin(backend, Path(directory).absolute(), len(writers) > 1)

    def write() -> None:
        for rank, of_rank in arrays.items():
            files.write(folder, rank, of_rank)
        if backend.place.rank == 0:
            files.commit(folder, step, writers, leaves, keep)

    _Save.last = _Save(write, backend, f"step {step}")
    if not background:
        _Save.finish(backend)


def latest(directory: str | os.PathLike) -> int | None:
    """The step of the newest checkpoint that is whole; None if there is none.

    Every file is read and its checksums compared; those that are damaged are warned of and passed over.

    **Collective:** every rank calls it.
    **Communication:** the number.

    Raises:
      CheckpointError: on every rank, if the save before could not be written.
      RuntimeError: called in traced code.

    >>> latest("a folder that is not there")
    """
    backend = untraced("latest")
    _agreement.meet(backend, _agreement.Statement.of("latest"))
    _Save.finish(backend)
    folder, about = _newest(backend, Path(directory), None)
    return None if folder is None else int(about["step"])


def restore(directory: str | os.PathLike, like: Any, step: int | None = None) -> Any:
    """What `save` has saved, on as many ranks as there are now, and on any backend.

    The states of `distributed` and `sharded` come back bit by bit on any number of ranks. What each rank has of its own
    otherwise (gradients that `accumulate` has not sent, steps of `local_sgd`, the errors of a codec) needs as many ranks as
    have saved it, unless it was equal on all of them.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** what is equal on all ranks, from rank 0, which alone reads it.

    Args:
      directory: that of `save`.
      like: a tree of the same structure, shapes and dtypes, such as the one that a new run begins with; its values don't
        matter, and `jax.ShapeDtypeStruct` will do. Arrays come back on its devices.
      step: which checkpoint; the newest that is whole by default.

    Raises:
      CheckpointError: on every rank: there is none; a file is missing, truncated, damaged or not one of ours, with its name; a
        leaf of `like` has another shape or dtype or is not there, with its path.
      RankMismatchError: on every rank, if their trees differ.
      RuntimeError: called in traced code.
    """
    backend = untraced("restore")
    like = local(like)
    size = backend.place.size
    described = parts.leaves_of(like, size)
    _meet(backend, "restore", [leaf for leaf, _ in described], f"step {step}")
    _Save.finish(backend)
    folder, about = _newest(backend, Path(directory), step)
    if folder is None:
        which = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
        raise CheckpointError(f"restore: there is {which} in {directory}. " + (about or "Look where it was saved."))
    saved = [Leaf(*fields)._replace(shape=tuple(fields[3])) for fields in about["leaves"]]
    if wrong := parts.difference(saved, [leaf for leaf, _ in described]):
        raise CheckpointError(f"restore: {folder}: {wrong}. Build the model and the optimizer as they were.")
    found = {leaf.name: leaf for leaf in saved}
    pairs = [(leaf, found[leaf.name]) for leaf, _ in described]
    values = _read(backend, folder, pairs, about["ranks"])
    new = [x if leaf.value is None else found[leaf.name].value for (leaf, _), x in zip(described, values, strict=True)]
    return parts.put_back(
        like, [v if leaf.value is not None else parts.like(x, v) for (leaf, x), v in zip(described, new, strict=True)]
    )


class _Save:
    """A save that is being written, by a thread."""

    last: "_Save | None" = None

    def __init__(self, write: Callable[[], None], backend: Backend, what: str) -> None:
        self.error: str | None = None
        self._place, self._write, self._what = backend.place, write, what
        atexit.unregister(_Save.at_exit)
        atexit.register(_Save.at_exit)
        self._thread = threading.Thread(target=self._run, name="jaxmpi-save")  # which Python waits for at its end
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # is raised by the next call
            self.error = f"{self._what}: {error}"

    @classmethod
    def finish(cls, backend: Backend) -> None:
        """Wait for the last save; raise on all ranks if any of them has failed."""
        last, cls.last = cls.last, None
        if last is not None:
            last._thread.join()
        _raise_any(backend, last.error if last else None)

    @classmethod
    def at_exit(cls) -> None:
        if cls.last is None or (error := cls.last.error) is None:
            return
        if guard := _guard.active():
            guard.end(1, f"CheckpointError: {error}")
        sys.stderr.write(f"jaxmpi: CheckpointError: {error}\n")
        sys.stderr.flush()
        os._exit(1)


def _raise_any(backend: Backend, error: str | None) -> None:
    """Raise the error of the lowest rank that has one, on all."""
    errors = [e for e in backend.allgather_object(error) if e]
    if errors:
        raise CheckpointError(errors[0])


def _together(backend: Backend, function: Callable[[], T]) -> T:
    """Call a function on every rank; where it fails on one, all raise."""
    result: Any = None
    error = None
    try:
        result = function()
    except (CheckpointError, OSError) as caught:
        error = str(caught)
    _raise_any(backend, error)
    return result


def _meet(backend: Backend, function: str, leaves: list[Leaf], options: str) -> None:
    lines = [options, *(f"leaf {leaf.name}: {leaf}" for leaf in leaves)]
    _agreement.meet(backend, _agreement.Statement.of(function, "\n".join([function, *lines])), lambda: (lines, []))


def _ranks_here(backend: Backend) -> Iterator[int]:
    """Those of this process."""
    yield from range(backend.place.size) if backend.name == "simulate" else (backend.place.rank,)


def _arrays(described: list[tuple[Leaf, Any]], rank: int) -> dict[str, np.ndarray]:
    """Copies of what a rank writes."""
    mine = [(leaf, x) for leaf, x in described if leaf.stored and (rank == 0 or leaf.part != "all")]
    return {leaf.name: parts.to_host(x[rank] if isinstance(x, PerRank) else x) for leaf, x in mine}


def _begin(backend: Backend, directory: Path, shared: bool) -> Path:
    """The folder that is written, of rank 0's making."""
    made = _together(backend, lambda: files.begin(directory) if backend.place.rank == 0 else None)
    folder = backend.broadcast_object(made, 0)

    def look() -> None:
        if shared and not folder.exists():
            raise CheckpointError(
                f"save: rank {backend.place.rank} on {os.uname().nodename} does not see {folder}, which rank 0 has made. Save "
                "to a file system that all hosts share, or gather the state with jaxmpi.unshard first."
            )

    _together(backend, look)
    return folder


def _newest(backend: Backend, directory: Path, step: int | None) -> tuple[Path | None, Any]:
    """The folder of a checkpoint that is whole with its manifest, or None and what is wrong."""

    def look() -> tuple[Path | None, Any]:
        if backend.place.rank:
            return None, None
        folder, wrong = files.newest(directory.absolute(), step)
        for line in wrong:
            warnings.warn(f"a checkpoint is passed over: {line}", stacklevel=4)
        return folder, files.read_manifest(folder) if folder else " ".join(wrong)

    return backend.broadcast_object(_together(backend, look), 0)


def _read(backend: Backend, folder: Path, pairs: list[tuple[Leaf, Leaf]], ranks: int) -> list[Any]:
    """What this process has of each leaf, given as it is wanted and as it was saved by `ranks` ranks."""
    place = backend.place
    common = [leaf.part == saved.part == "all" for leaf, saved in pairs]

    def mine() -> list[Any]:
        with _reader(folder) as read:
            values: list[Any] = []
            for everyone, (leaf, saved) in zip(common, pairs, strict=True):
                if not leaf.stored or (everyone and place.rank):
                    values.append(_empty(leaf, place.size))
                elif everyone or backend.name != "simulate" or leaf.part == "all":
                    values.append(parts.part_of(leaf, place.rank, place.size, saved, ranks, read))
                else:
                    rows = [parts.part_of(leaf, rank, place.size, saved, ranks, read) for rank in _ranks_here(backend)]
                    values.append(rows[0] if all(row.tobytes() == rows[0].tobytes() for row in rows) else np.stack(rows))
            return values

    values = _together(backend, mine)
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
