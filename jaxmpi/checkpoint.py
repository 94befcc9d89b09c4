"""Save a training run, and go on with it on any number of ranks."""

import atexit
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jax
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

TRIES = 3  # to read a checkpoint, where another job removes old ones

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
      step: the number of the checkpoint, 0 or more. One of the same number is replaced; those of higher numbers stay, and are
        the latest: remove them to go on from an older one.
      tree: any pytree of arrays, PRNG keys, Python numbers and text.
      keep: how many checkpoints to keep, this one included; None for all.
      background: whether to return before it is written.

    Raises:
      CheckpointError: on every rank, if this save cannot begin, or if the one before could not be written; this one is then
        being written nevertheless.
      RankMismatchError: on every rank, if their trees, or Python numbers in them, differ.
      TypeError: a leaf that cannot be saved, with its path; a step that is no integer.
      ValueError: a negative step; `keep` below 1.
      RuntimeError: called in traced code.
    """
    backend = untraced("save")
    step = operator.index(step)
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"save: step is {step} and keep is {keep}. A step is 0 or more, and keep 1 or more, or None.")
    described = parts.leaves_of(local(tree), backend.place.size)
    leaves = [leaf for leaf, _ in described]
    for leaf, x in described:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"save: leaf {leaf.name} is a ShapeDtypeStruct, which holds no numbers. Make the array first.")
    _meet(backend, "save", leaves, f"step {step}, keep {keep}", values=True)
    earlier = _Save.finished(backend)
    writers = range(1 if all(leaf.part == "all" for leaf in leaves) else backend.place.size)
    arrays = {rank: _arrays(described, rank) for rank in _ranks_here(backend) if rank in writers}
    folder = _begin(backend, Path(directory).absolute(), len(writers) > 1)
    _Save.last = _Save(backend, folder, step, arrays, writers, lambda files_: files.commit(folder, step, files_, leaves, keep))
    if not background:
        earlier = earlier or _Save.finished(backend)
    if earlier:
        raise CheckpointError(f"save: {earlier}")


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
    _raise(_Save.finished(backend))
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
        leaf of `like` has another shape or dtype or is not there, with its path; the save before could not be written.
      RankMismatchError: on every rank, if their trees differ.
      ValueError: a state of `sharded` in `like` that was made for another number of ranks.
      RuntimeError: called in traced code.
    """
    backend = untraced("restore")
    like = local(like)
    described = parts.leaves_of(like, backend.place.size)
    leaves = [leaf for leaf, _ in described]
    _meet(backend, "restore", leaves, f"step {step}", values=False)
    _raise(_Save.finished(backend))
    for tries in range(TRIES, 0, -1):
        folder, about = _newest(backend, Path(directory), step)
        if folder is None:
            which = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
            raise CheckpointError(f"restore: there is {which} in {directory}. " + (about or "Look where it was saved."))
        saved = {fields[0]: Leaf(*fields)._replace(shape=tuple(fields[3])) for fields in about["leaves"]}
        if wrong := parts.difference([*saved.values()], leaves):
            raise CheckpointError(f"restore: {folder}: {wrong}. Build the model and the optimizer as they were.")
        try:
            values = _read(backend, folder, [(leaf, saved[leaf.name]) for leaf in leaves], about["ranks"])
            break
        except CheckpointError:  # was it removed meanwhile, by a run that saves?
            if tries == 1 or backend.broadcast_object(folder.exists(), 0):
                raise
    new = [
        saved[leaf.name].value if leaf.value is not None else parts.like(x, v)
        for (leaf, x), v in zip(described, values, strict=True)
    ]
    return parts.put_back(like, new)


class _Save:
    """A save that is being written, by a thread."""

    last: "_Save | None" = None
    outcomes: ClassVar[dict[str, dict[int, Any]]] = {}  # of the other ranks' parts, by folder; for rank 0
    changed = threading.Condition()

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        step: int,
        arrays: dict[int, dict[str, np.ndarray]],
        writers: Sequence[int],
        commit: Callable[[list[files.Arrays]], None],
    ) -> None:
        self.error: str | None = None
        self._what, self._folder, self._rank = f"step {step}", folder, backend.place.rank
        self._arrays, self._writers, self._commit = arrays, writers, commit
        self._own_parts = len(arrays)
        self._guard = _guard.active()
        if self._guard:
            self._guard.topics["saved"] = self._on_saved
        self._thread = threading.Thread(target=self._run, name="jaxmpi-save")  # which Python waits for at its end
        if self._guard is None and len(arrays) < len(writers):  # MPI allows no threads: the ranks talk here
            outcomes = backend.allgather_object(self._written())
            self.outcomes[folder.name] = dict(enumerate(outcomes[1:], 1))
            self._finish(outcomes[0])
        self._thread.start()

    def _run(self) -> None:
        if self._arrays:
            self._finish(self._written())

    def _written(self) -> dict[int, files.Arrays] | str:
        """Write this process's parts; returns what is in them, or what has gone wrong."""
        try:
            for rank, of_rank in self._arrays.items():
                files.write(self._folder, rank, of_rank)
            return {rank: {name: (str(x.dtype), x.shape) for name, x in a.items()} for rank, a in self._arrays.items()}
        except Exception as error:  # is raised by the next call
            self.error = f"{self._what}: {error}"
            return self.error
        finally:
            self._arrays = {}  # the memory is needed

    def _finish(self, outcome: dict[int, files.Arrays] | str) -> None:
        """Tell rank 0; there, make it a checkpoint once all have written."""
        if self._rank:
            if self._guard:
                self._guard.send(0, "saved", (self._folder.name, outcome))
            return
        try:
            everyone = self._gathered(outcome)
            if self.error is None:
                self._commit([everyone[rank] for rank in self._writers])
        except Exception as error:
            self.error = f"{self._what}: {error}"

    def _gathered(self, mine: dict[int, files.Arrays] | str) -> dict[int, files.Arrays]:
        """What each rank has written, once all have."""
        others = len(self._writers) - self._own_parts
        theirs = self.outcomes.setdefault(self._folder.name, {})
        with self.changed:
            self.changed.wait_for(lambda: len(theirs) >= others)
        del self.outcomes[self._folder.name]
        written: dict[int, files.Arrays] = {}
        for outcome in (mine, *theirs.values()):
            if isinstance(outcome, str):
                self.error = self.error or outcome
            else:
                written |= outcome
        return written

    @classmethod
    def _on_saved(cls, rank: int, message: tuple[str, Any]) -> None:
        folder, outcome = message
        with cls.changed:
            cls.outcomes.setdefault(folder, {})[rank] = outcome
            cls.changed.notify_all()

    @classmethod
    def finished(cls, backend: Backend) -> str | None:
        """Wait for the last save; returns what has gone wrong on any rank, on all of them."""
        last, cls.last = cls.last, None
        if last is not None:
            with busy(backend, f"writing the checkpoint of {last._what}"):
                last._thread.join()
        errors = [error for error in backend.allgather_object(last.error if last else None) if error]
        return errors[0] if errors else None

    @classmethod
    def at_exit(cls) -> None:
        """After all other ends: a save that has failed, and that nobody has heard of, fails the script."""
        if cls.last is not None and cls.last.error is not None:
            sys.stdout.flush()
            sys.stderr.write(f"jaxmpi: CheckpointError: save: {cls.last.error}\n")
            sys.stderr.flush()
            os._exit(1)


atexit.register(_Save.at_exit)  # before MPI and the guard register theirs, which then run first


def _raise(error: str | None) -> None:
    if error:
        raise CheckpointError(f"save: {error}")


@contextmanager
def busy(backend: Any, what: str) -> Iterator[None]:
    """Tell those who watch for stalls that this rank does something that takes long, and is all right."""
    before, backend.busy = backend.busy, what
    try:
        yield
    finally:
        backend.busy = before


def _together(backend: Backend, function: Callable[[], T]) -> T:
    """Call a function on every rank; where it fails on one, all raise."""
    result: Any = None
    error = None
    try:
        result = function()
    except CheckpointError as caught:
        error = str(caught)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors = [e for e in backend.allgather_object(error) if e]
    if errors:
        raise CheckpointError(errors[0])
    return result


def _meet(backend: Backend, function: str, leaves: list[Leaf], options: str, *, values: bool) -> None:
    shown = [f" = {leaf.value!r}" if values and leaf.value is not None else "" for leaf in leaves]
    lines = [options, *(f"leaf {leaf.name}: {leaf}{value}" for leaf, value in zip(leaves, shown, strict=True))]
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
        with busy(backend, f"reading the checkpoints in {directory}"):
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
        with busy(backend, f"reading {folder}"), _reader(folder) as read:
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
