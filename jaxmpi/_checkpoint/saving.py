"""A save: the leaves that are written, their checks, and the threads that write them.

Each rank that has something to write does so in a thread of its own, while the training goes on.
The others' threads tell rank 0's through the monitor what they have written, and it makes the
folder a checkpoint once all have.
"""

import os
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxmpi._backends.base import Backend, fingerprint_of, long_operation
from jaxmpi._backends.simulate import PerRank
from jaxmpi._checkpoint import array_files, folders
from jaxmpi._checkpoint.agreement import ranks_here, run_on_all_or_raise
from jaxmpi._checkpoint.manifest import Leaf, LeafValue, Manifest, Member, is_plain
from jaxmpi._checkpoint.tree_leaves import leaves_of, to_host
from jaxmpi._consistency import compare
from jaxmpi._errors import CheckpointError, RankMismatchError
from jaxmpi._jit.api import local
from jaxmpi._leaves import PyTree
from jaxmpi._process.at_exit import Step, at_exit, start_thread
from jaxmpi._world import session

__all__ = [
    "Plan",
    "Saves",
    "check_replicated",
    "copies",
    "leaves_to_save",
    "make_folder",
    "with_all_ranks_values",
    "writers_of",
]

# The files that ranks have written, as `array_files.write` returns them
Written = dict[int, tuple[int, dict[str, Member]]]


# what is saved


def leaves_to_save(
    tree: PyTree, step: int, keep: int | None, axes: Mapping[str, int]
) -> list[tuple[Leaf, LeafValue]]:
    """Return each leaf with its value, once the arguments of `save` are checked."""
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(
            f"save: step is {step} and keep is {keep}. A step is 0 or more, and keep 1 or more, or "
            "None."
        )
    leaves = leaves_of(local(tree), axes)
    for leaf, x in leaves:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"save: leaf {leaf.name} is a ShapeDtypeStruct, which holds no numbers. Make the "
                "array first."
            )
    return leaves


def check_replicated(backend: Backend, leaves: Sequence[tuple[Leaf, LeafValue]]) -> None:
    """Compare the values of replicated leaves.

    **Communication:** 16 bytes; where the ranks differ, a checksum for each leaf.

    Raises:
      RankMismatchError: on every rank, with the first leaf that differs.
    """
    if backend.place.size == 1:
        return
    replicated = []
    for leaf, x in leaves:
        may_differ = isinstance(x, PerRank) or not backend.simulates
        if leaf.layout == "replicated" and (leaf.stored or leaf.plain) and may_differ:
            replicated.append((leaf, x))
    if backend.simulates:
        digests = [[_digest(x[rank]) for _, x in replicated] for rank in range(backend.place.size)]
    else:
        mine = [_digest(x) for _, x in replicated]
        smallest, largest = backend.extremes(fingerprint_of(repr(mine)), "save")
        if smallest == largest:
            return
        digests = backend.allgather_object(mine)
    if error := _unequal([leaf for leaf, _ in replicated], digests):
        raise RankMismatchError(error)


def _unequal(leaves: Sequence[Leaf], digests: Sequence[Sequence[int | str]]) -> str:
    """Return the error about the first leaf whose digests differ; "" if there is none.

    Args:
      leaves: that are to be equal.
      digests: of each rank, in the order of the leaves.
    """
    differ = []
    for leaf, *of_ranks in zip(leaves, *digests, strict=False):
        if len(set(of_ranks)) > 1:
            differ.append((leaf, of_ranks))
    if not differ:
        return ""
    leaf, of_ranks = differ[0]
    others, who_have = compare.outliers(of_ranks)
    usual = next(one for rank, one in enumerate(of_ranks) if rank not in others)
    values = f" ({of_ranks[others[0]]}, and {usual} elsewhere)" if leaf.plain else ""
    more = f", and {len(differ) - 1} more leaves" if len(differ) > 1 else ""
    return (
        f"save: leaf {leaf.name} is not equal on all ranks: {who_have} other values{values}{more}. "
        "If each rank has its own (a key, an environment, BatchNorm statistics), wrap it in a "
        "jaxmpi.PerRankState, or in nnx make it an nnx.BatchStat; if not, make it equal with "
        "jaxmpi.synchronize."
    )


def _digest(x: LeafValue) -> int | str:
    """Return the CRC-32 of an array, or the text of a Python number or text."""
    if is_plain(x):
        text = repr(x)
        return text if len(text) <= 80 else f"{text[:80]}... {zlib.crc32(text.encode())}"
    numbers = np.ascontiguousarray(to_host(x, copy=False))
    return zlib.crc32(numbers.reshape(-1).view(np.uint8).data)


def with_all_ranks_values(backend: Backend, leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves with the values of all ranks for per-rank Python numbers.

    **Communication:** an allgather of these numbers, if there are any.
    """
    mine = {}
    for leaf in leaves:
        if leaf.layout != "replicated" and leaf.plain:
            mine[leaf.name] = leaf.value
    if not mine:
        return list(leaves)
    everyone = backend.allgather_object(mine)
    complete = []
    for leaf in leaves:
        if leaf.name in mine:
            leaf = leaf._replace(value=[values[leaf.name] for values in everyone])
        complete.append(leaf)
    return complete


def writers_of(leaves: Sequence[Leaf], size: int) -> range:
    """Return the ranks that write a file: rank 0, or all if some leaf is not replicated."""
    return range(1 if all(leaf.layout == "replicated" for leaf in leaves) else size)


def copies(
    backend: Backend, leaves: Sequence[tuple[Leaf, LeafValue]], writers: range
) -> dict[int, dict[str, np.ndarray]]:
    """Return copies of the arrays that each rank of this process writes, by rank and name."""
    arrays: dict[int, dict[str, np.ndarray]] = {}
    for rank in ranks_here(backend):
        if rank in writers:
            arrays[rank] = {}
            for leaf, x in leaves:
                if leaf.in_file(rank):
                    of_rank = x[rank] if isinstance(x, PerRank) else x
                    arrays[rank][leaf.name] = to_host(of_rank, copy=True)
    return arrays


def make_folder(
    backend: Backend, directory: Path, shared: bool, in_memory: bool
) -> tuple[Path, BufferedWriter | None]:
    """Have rank 0 make the folder that is written into.

    **Communication:** the path, and whether rank 0 could make it and all ranks see it.

    Args:
      backend: the ranks.
      directory: of the checkpoints of a run.
      shared: whether all ranks write.
      in_memory: whether it is in the host's memory.

    Returns:
      The folder, and on rank 0 its lock.
    """

    def make() -> tuple[Path | None, BufferedWriter | None]:
        return folders.begin(directory, in_memory) if backend.place.rank == 0 else (None, None)

    made, lock = run_on_all_or_raise(backend, make)
    folder = backend.broadcast_object(made, 0)

    def look() -> None:
        if (shared or in_memory) and not folder.exists():
            raise CheckpointError(_not_seen(backend.place.rank, folder, in_memory))

    try:
        run_on_all_or_raise(backend, look)
    except CheckpointError:
        if lock:
            lock.close()
        raise
    return folder, lock


def _not_seen(rank: int, folder: Path, in_memory: bool) -> str:
    """Return the error of a rank that does not see the folder that rank 0 has made."""
    who = f"save: rank {rank} on {os.uname().nodename} does not see {folder}, which rank 0 has made"
    if in_memory:
        return (
            f"{who} in the memory of its host. With ranks on several hosts, save without "
            "in_memory=True."
        )
    return (
        f"{who}. Save to a file system that all hosts share, or gather the state with "
        "jaxmpi.unshard first."
    )


# the threads that write


class Plan(NamedTuple):
    """A save that is about to be written.

    Attributes:
      directory: of the checkpoints of the run.
      folder: the unfinished folder.
      lock: of the folder, on rank 0.
      step: the number of the checkpoint.
      keep: how many checkpoints to keep; None for all.
      base: the step that was restored from `directory` since its last save, if any.
      leaves: of the tree.
      writers: the ranks that write a file.
      arrays: that this process writes, by rank and name.
    """

    directory: Path
    folder: Path
    lock: BufferedWriter | None
    step: int
    keep: int | None
    base: int | None
    leaves: list[Leaf]
    writers: range
    arrays: dict[int, dict[str, np.ndarray]]


class Saves:
    """The saves of a session: the last one, and what other ranks have written for it."""

    def __init__(self, began: float) -> None:
        self.lineage = folders.Lineage(began)
        self._last: _Save | None = None
        # by folder and rank, what the other ranks have written, or an error; on rank 0
        self._outcomes: dict[str, dict[int, Written | str]] = {}
        self._changed = threading.Condition()
        self._take_back = at_exit(Step.OUTCOME, self._fail_if_unheard)

    def start(self, backend: Backend, plan: Plan) -> None:
        """Write a save in the background; `wait` the one before first.

        **Communication:** through the monitor, from each writing rank to rank 0, the places and
        checksums of its arrays. Without a monitor, an allgather of these, once all have written.
        """
        self._last = _Save(self, backend, plan)
        self._last.start()

    def wait(self, backend: Backend) -> str | None:
        """Wait for the last save; return the first rank's error, if there is one, on all ranks.

        **Communication:** an allgather of the error texts, if any.
        """
        error = self.wait_here(backend)
        self.forget()
        return next(filter(None, backend.allgather_object(error)), None)

    def wait_here(self, backend: Backend) -> str | None:
        """Wait for this rank's part of the last save; return its error, if there is one."""
        if self._last is None:
            return None
        with long_operation(backend, f"writing the checkpoint of {self._last.name}"):
            self._last.wait()
        return self._last.error

    def forget(self) -> None:
        """Forget the last save: its outcome is known to the caller."""
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

    def note_written(self, rank: int, message: tuple[str, Written | str]) -> None:
        """Note the (folder, outcome) of another rank; called by the monitor on rank 0."""
        folder, outcome = message
        with self._changed:
            self._outcomes.setdefault(folder, {})[rank] = outcome
            self._changed.notify_all()

    def outcomes(
        self, folder: str, count: int, poll: Callable[[], object] | None
    ) -> list[Written | str]:
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
            sys.stderr.write(f"jaxmpi: CheckpointError: save: {self._last.error}\n")
            sys.stderr.flush()
            os._exit(1)


class _Save:
    """One save, and the thread that writes this process's files."""

    def __init__(self, saves: Saves, backend: Backend, plan: Plan) -> None:
        self.error: str | None = None
        self.name = f"step {plan.step}"
        self._saves, self._backend, self._plan = saves, backend, plan
        self._arrays = plan.arrays
        self._monitor = session.monitor()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        if self._monitor is None and len(self._arrays) < len(self._plan.writers):
            # MPI allows no threads: the ranks write, and tell each other, here
            outcomes = self._backend.allgather_object(self._write())
            if self._backend.place.rank == 0:
                for rank, outcome in enumerate(outcomes[1:], 1):
                    self._saves.note_written(rank, (self._plan.folder.name, outcome))
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
            self._monitor.send(0, "saved", (self._plan.folder.name, outcome))

    def _write(self) -> Written | str:
        """Write this process's files; return what is in them, or the error."""
        try:
            written = {}
            for rank, arrays in self._arrays.items():
                written[rank] = array_files.write(self._plan.folder, rank, arrays)
            return written
        except Exception as error:  # the next call raises it
            self.error = f"{self.name}: {error}"
            return self.error
        finally:
            # the plan holds the same dict: its memory is needed
            for arrays in self._arrays.values():
                arrays.clear()

    def _finish(self, outcome: Written | str) -> None:
        """On rank 0, make the folder a checkpoint once all ranks have written."""
        plan = self._plan
        try:
            others = len(plan.writers) - len(plan.arrays)
            poll = self._monitor.poll if self._monitor else None
            written: Written = {}
            for one in (outcome, *self._saves.outcomes(plan.folder.name, others, poll)):
                if isinstance(one, str):
                    self.error = self.error or one
                else:
                    written |= one
            if self.error is None:
                sizes = [written[rank][0] for rank in plan.writers]
                members = [written[rank][1] for rank in plan.writers]
                manifest = Manifest(plan.step, len(plan.writers), sizes, members, plan.leaves)
                lineage = self._saves.lineage
                folders.commit(lineage, plan.directory, plan.folder, manifest, plan.keep, plan.base)
        except Exception as error:
            self.error = f"{self.name}: {error}"
        finally:
            if plan.lock:
                plan.lock.close()
