"""Save: the leaves that are written, their checks, and the threads that write them.

Each rank that has something to write does so in a thread of its own, while the training goes on.
The others' threads tell rank 0's through the monitor what they have written, and it makes the
folder a checkpoint once all have.
"""

import os
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxmpi._backends.interface import Ranks, long_operation
from jaxmpi._backends.one_process import PerRank
from jaxmpi._checkpoint import array_files, folders
from jaxmpi._checkpoint.agreement import RaisedError, Side
from jaxmpi._checkpoint.manifest import Leaf, LeafValue, Manifest, Member, is_count, is_plain
from jaxmpi._checkpoint.tree_leaves import leaves_of, to_host
from jaxmpi._consistency.mismatch import outliers, ranks_have
from jaxmpi._errors import CheckpointError, RankMismatchError
from jaxmpi._jit.api import local
from jaxmpi._job.process.at_exit import Step, at_exit, start_thread
from jaxmpi._leaves import PyTree
from jaxmpi._world import session

__all__ = [
    "Plan",
    "Saves",
    "begin",
    "check_sides",
    "leaves_to_save",
    "prepare",
    "writers_of",
]

# The files that ranks have written, as `array_files.write` returns them
Written = dict[int, tuple[int, dict[str, Member]]]


# what is saved


def leaves_to_save(
    tree: PyTree, step: int, keep: int | None, axes: Mapping[str, int]
) -> list[tuple[Leaf, LeafValue]]:
    """Return each leaf with its value, once the arguments of `save` are checked."""
    if not is_count(step) or (keep is not None and keep < 1):
        raise ValueError(
            f"save: step is {step} and keep is {keep}. A step is from 0 to 2^63 - 1, and keep 1 or "
            "more, or None."
        )
    leaves = leaves_of(local(tree), axes)
    for leaf, x in leaves:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"save: leaf {leaf.name} is a ShapeDtypeStruct, which holds no numbers. Make the "
                "array first."
            )
    return leaves


class Prepared(NamedTuple):
    """Leaves of this process, as they are compared and written.

    Attributes:
      replicated: the leaves that are to be equal on all ranks.
      digests: of these leaves, on each rank that lives in this process.
      arrays: copies of what each rank of this process writes, by rank and name.
      error: why there are none; None if there are.
    """

    replicated: list[Leaf]
    digests: list[list[str]]
    arrays: dict[int, dict[str, np.ndarray]]
    error: RaisedError | None = None


def prepare(backend: Ranks, leaves: Sequence[tuple[Leaf, LeafValue]], writers: range) -> Prepared:
    """Compute digests and copy arrays; from then on, the training may overwrite them."""
    ranks = backend.ranks_here
    replicated: list[Leaf] = []
    digests: list[list[str]] = [[] for _ in ranks]
    arrays: dict[int, dict[str, np.ndarray]] = {rank: {} for rank in ranks if rank in writers}
    # of what is no `PerRank`
    one_value = len(backend.ranks_here) == backend.place.size
    try:
        for leaf, x in leaves:
            may_differ = isinstance(x, PerRank) or not one_value
            if leaf.layout == "replicated" and (leaf.stored or leaf.plain) and may_differ:
                replicated.append(leaf)
                for of_rank, rank in zip(digests, ranks, strict=True):
                    of_rank.append(_digest(x[rank] if isinstance(x, PerRank) else x))
        for rank, copies in arrays.items():
            for leaf, x in leaves:
                if leaf.in_file(rank):
                    value = x[rank] if isinstance(x, PerRank) else x
                    copies[leaf.name] = to_host(value, copy=True)
    except Exception as error:  # such as a MemoryError: all ranks raise it
        return Prepared([], [[]], {}, RaisedError.of(error))
    return Prepared(replicated, digests, arrays)


def check_sides(prepared: Prepared, sides: Sequence[Side]) -> None:
    """Raise, on every rank, unless all ranks can save, and replicated leaves are equal.

    Args:
      prepared: by this process.
      sides: of the ranks, as `agree` returns them.

    Raises:
      CheckpointError: with the first rank's error.
      RankMismatchError: with the first leaf that differs.
    """
    for side in sides:
        if side.error is not None:
            raise side.error.to_raise()
    # the sides of processes, or the digests of ranks that are simulated in this one
    several = len(prepared.digests) > 1
    digests = prepared.digests if several else [side.digests for side in sides]
    differ = []
    for leaf, *of_ranks in zip(prepared.replicated, *digests, strict=False):
        if len(set(of_ranks)) > 1:
            differ.append((leaf, of_ranks))
    if not differ:
        return
    leaf, of_ranks = differ[0]
    others = outliers(of_ranks)
    usual = next(one for rank, one in enumerate(of_ranks) if rank not in others)
    values = f" ({of_ranks[others[0]]}, and {usual} elsewhere)" if leaf.plain else ""
    more = f", and {len(differ) - 1} more leaves" if len(differ) > 1 else ""
    raise RankMismatchError(
        f"save: leaf {leaf.name} is not equal on all ranks: {ranks_have(others)} other "
        f"values{values}{more}.",
        advice="If each rank has its own (a key, an environment, BatchNorm statistics), wrap it "
        "in a jaxmpi.PerRankState, or in nnx make it an nnx.BatchStat; if not, make it equal with "
        "jaxmpi.synchronize.",
        function="save",
        leaf=leaf.name,
        ranks=others,
    )


def _digest(x: LeafValue) -> str:
    """Return the CRC-32 of an array, or the text of a Python number or text."""
    if is_plain(x):
        text = repr(x)
        return text if len(text) <= 80 else f"{text[:80]}... {zlib.crc32(text.encode())}"
    numbers = np.ascontiguousarray(to_host(x, copy=False))
    return str(zlib.crc32(numbers.reshape(-1).view(np.uint8).data))


def writers_of(leaves: Sequence[Leaf], size: int) -> range:
    """Return the ranks that write a file: rank 0, or all if some leaf is not replicated."""
    return range(1 if all(leaf.layout == "replicated" for leaf in leaves) else size)


class Begun(NamedTuple):
    """Facts about a save that all ranks know before they write.

    Attributes:
      directory: of the checkpoints of the run; an absolute path on rank 0, which alone uses it.
      folder: the unfinished folder, which rank 0 has made.
      lock: of the folder, on rank 0.
      leaves: of the tree, with all ranks' values of per-rank Python numbers.
    """

    directory: Path
    folder: Path
    lock: BufferedWriter | None
    leaves: list[Leaf]


def begin(
    backend: Ranks, saves: "Saves", directory: Path, leaves: Sequence[Leaf], in_memory: bool
) -> Begun:
    """Make the folder that is written into, on rank 0.

    **Communication:** one round, an allgather of the path or the error from rank 0, and of per-rank
    Python numbers. One more where ranks write into a directory for the first time in a session:
    whether all see what rank 0 has made there.

    Args:
      backend: the ranks.
      saves: of the session.
      directory: of the checkpoints of a run; a relative path is one of rank 0's.
      leaves: of the tree.
      in_memory: whether the folder is in the host's memory.

    Raises:
      CheckpointError: on every rank, if rank 0 cannot make it or some rank does not see it.
    """
    saves.listen()  # a rank that returns from the allgather may write at once
    rank, made, lock = backend.place.rank, None, None
    error: RaisedError | None = None
    if rank == 0:
        try:
            directory = directory.absolute()
            made, lock = folders.begin(directory, in_memory)
        except Exception as caught:
            error = RaisedError.of(caught)
    numbers = {}
    for leaf in leaves:
        if leaf.layout != "replicated" and leaf.plain:
            numbers[leaf.name] = leaf.value
    everyone = backend.allgather_object((made, error, numbers))
    folder, failed, _ = everyone[0]
    if failed is not None:
        raise failed.to_raise()
    assert folder is not None
    complete = []
    for leaf in leaves:
        if leaf.name in numbers:
            leaf = leaf._replace(value=[its[leaf.name] for _, _, its in everyone])
        complete.append(leaf)
    # Ranks on other hosts may have another disk, or memory, under the same path.
    several = len(writers_of(leaves, backend.place.size)) > 1
    if (several or in_memory) and folder.parent not in saves.seen:
        seen = os.path.exists(folder)  # `Path.exists` raises, where this user may not look
        errors = backend.allgather_object(None if seen else _not_seen(rank, folder, in_memory))
        for not_seen in errors:
            if not_seen is not None:
                if lock:
                    lock.close()
                raise not_seen.to_raise()
        saves.seen.add(folder.parent)
    return Begun(directory, folder, lock, complete)


def _not_seen(rank: int, folder: Path, in_memory: bool) -> RaisedError:
    """Return the error of a rank that does not see the folder that rank 0 has made."""
    who = f"save: rank {rank} on {os.uname().nodename} does not see {folder}, which rank 0 has made"
    if in_memory:
        return RaisedError(
            f"{who} in the memory of its host.",
            "With ranks on several hosts, save without in_memory=True.",
            str(folder),
        )
    return RaisedError(
        f"{who}.",
        "Save to a file system that all hosts share, or gather the state with jaxmpi.unshard "
        "first.",
        str(folder),
    )


# the threads that write


class Plan(NamedTuple):
    """A save that is about to be written.

    Attributes:
      begun: the folder and the leaves.
      step: the number of the checkpoint.
      keep: how many checkpoints to keep; None for all.
      writers: the ranks that write a file.
      arrays: that this process writes, by rank and name.
    """

    begun: Begun
    step: int
    keep: int | None
    writers: range
    arrays: dict[int, dict[str, np.ndarray]]


class Saves:
    """Saves of a session: the last one, and the reports of other ranks about it."""

    def __init__(self, began: float) -> None:
        self.lineage = folders.Lineage(began)
        self.seen: set[Path] = set()  # directories in which all ranks see what rank 0 makes
        self._last: _Save | None = None
        # by folder and rank, what the other ranks have written, or an error; on rank 0
        self._outcomes: dict[str, dict[int, Written | RaisedError]] = {}
        self._changed = threading.Condition()
        self._take_back = at_exit(Step.OUTCOME, self._fail_if_unheard)

    def start(self, backend: Ranks, plan: Plan) -> None:
        """Write a save in the background; `wait` the one before first.

        **Communication:** through the monitor, from each writing rank to rank 0, the places and
        checksums of its arrays. Without a monitor, an allgather of these, once all have written.
        """
        self._last = _Save(self, backend, plan)
        self._last.start()

    def wait(self, backend: Ranks) -> RaisedError | None:
        """Wait for this rank's part of the last save; return its error, or None."""
        if self._last is None:
            return None
        with long_operation(backend, f"writing the checkpoint of {self._last.name}"):
            self._last.wait()
        return self._last.error

    def forget(self) -> None:
        """Forget the last save, once all ranks know how it has ended."""
        self._last = None

    def close(self) -> None:
        """Wait for the last save; if it has failed, the script fails at its end."""
        if self._last is not None:
            self._last.wait()
        if self._last is None or self._last.error is None:
            self._take_back()

    def listen(self) -> None:
        """Have the monitor note what other ranks write; called before any of them can begin."""
        if monitor := session.monitor():
            monitor.topics["saved"] = self.note_written

    def note_written(self, rank: int, message: tuple[str, Written | RaisedError]) -> None:
        """Note the (folder, outcome) of another rank; called by the monitor on rank 0."""
        folder, outcome = message
        with self._changed:
            self._outcomes.setdefault(folder, {})[rank] = outcome
            self._changed.notify_all()

    def outcomes(
        self, folder: str, count: int, poll: Callable[[], object] | None
    ) -> list[Written | RaisedError]:
        """Return the outcomes of `count` other ranks, once all of them have written.

        Args:
          folder: that they have written into.
          count: how many there are.
          poll: looks for their messages. The monitor's thread looks ten times a second only.
        """
        outcomes = self._outcomes.setdefault(folder, {})
        pause = 0.001
        while len(outcomes) < count:
            if poll:
                poll()
            with self._changed:
                self._changed.wait_for(lambda: len(outcomes) >= count, pause)
            pause = min(2 * pause, 0.1)
        del self._outcomes[folder]
        return [*outcomes.values()]

    def _fail_if_unheard(self) -> None:
        """Fail the script if the last save has failed and no call has raised it.

        This is the last step of the process: all threads have ended, and MPI is finalized.
        """
        if self._last is not None and self._last.error is not None:
            sys.stdout.flush()
            sys.stderr.write(f"jaxmpi: CheckpointError: {self._last.error.to_raise()}\n")
            sys.stderr.flush()
            os._exit(1)


class _Save:
    """One save, and the thread that writes this process's files."""

    def __init__(self, saves: Saves, backend: Ranks, plan: Plan) -> None:
        self.error: RaisedError | None = None
        self.name = f"step {plan.step}"
        self._saves, self._backend, self._plan = saves, backend, plan
        self._arrays = plan.arrays
        self._monitor = session.monitor()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write in a thread, or here where MPI allows no threads and several ranks write."""
        writers = len(self._plan.writers)
        if self._monitor is None and writers > 1 and len(self._arrays) < writers:
            # MPI allows no threads, so the ranks write, and tell each other, here. A single writer
            # needs no answer from the others, and simulated ranks write in one process.
            outcomes = self._backend.allgather_object(self._write())
            if self._backend.place.rank == 0:
                for rank, outcome in enumerate(outcomes[1:], 1):
                    self._saves.note_written(rank, (self._plan.begun.folder.name, outcome))
                self._finish(outcomes[0])
            return
        try:
            self._thread = start_thread(self._run, "jaxmpi-save")
        except RuntimeError:  # Python shuts down, as in a save that `atexit` calls
            self._run()

    def wait(self) -> None:
        """Return once it is written, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if not self._arrays:
            return
        outcome = self._write()
        if self._backend.place.rank == 0:
            self._finish(outcome)
        elif self._monitor:
            self._monitor.send(0, "saved", (self._plan.begun.folder.name, outcome))

    def _write(self) -> Written | RaisedError:
        """Write this process's files; return what is in them, or the error."""
        try:
            written = {}
            for rank, arrays in self._arrays.items():
                written[rank] = array_files.write(self._plan.begun.folder, rank, arrays)
            return written
        except Exception as error:  # the next call raises it
            self.error = self._failed(error)
            return self.error
        finally:
            # the plan holds the same dict: its memory is needed
            for arrays in self._arrays.values():
                arrays.clear()

    def _failed(self, error: Exception) -> RaisedError:
        """Return an error of this save, which says the step."""
        raised = RaisedError.of(error)
        what = raised.what if isinstance(error, CheckpointError) else str(error)
        return raised._replace(what=f"save: {self.name}: {what}")

    def _finish(self, outcome: Written | RaisedError) -> None:
        """On rank 0, make the folder a checkpoint once all ranks have written."""
        plan = self._plan
        try:
            others = len(plan.writers) - len(plan.arrays)
            # what handles another topic may rely on the monitor's thread
            poll = partial(self._monitor.poll, ("saved",)) if self._monitor else None
            written: Written = {}
            for one in (outcome, *self._saves.outcomes(plan.begun.folder.name, others, poll)):
                if isinstance(one, RaisedError):
                    self.error = self.error or one
                else:
                    written |= one
            if self.error is None:
                sizes = [written[rank][0] for rank in plan.writers]
                members = [written[rank][1] for rank in plan.writers]
                manifest = Manifest(plan.step, len(plan.writers), sizes, members, plan.begun.leaves)
                folders.commit(
                    self._saves.lineage,
                    plan.begun.directory,
                    plan.begun.folder,
                    manifest,
                    plan.keep,
                )
        except Exception as error:
            self.error = self._failed(error)
        finally:
            if plan.begun.lock:
                plan.begun.lock.close()
