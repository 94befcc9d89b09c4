"""A save that is being written by threads, one on each rank that has something to write."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxmpi._backends.base import Backend, long_operation
from jaxmpi._backends.simulate import PerRank
from jaxmpi._checkpoint import commit, files
from jaxmpi._checkpoint.leaf_values import to_host
from jaxmpi._checkpoint.manifest import Leaf, LeafValue, Member
from jaxmpi._checkpoint.rank_checks import run_on_all_or_raise
from jaxmpi._errors import CheckpointError
from jaxmpi._process.at_exit import Step, at_exit, start_thread
from jaxmpi._world import session

__all__ = ["Parts", "Save", "arrays_of", "begin"]


def arrays_of(described: list[tuple[Leaf, LeafValue]], rank: int) -> dict[str, np.ndarray]:
    """Copies of what a rank writes."""
    mine = [(leaf, x) for leaf, x in described if leaf.in_file(rank)]
    return {leaf.name: to_host(x[rank] if isinstance(x, PerRank) else x, copy=True) for leaf, x in mine}


def begin(backend: Backend, directory: Path, shared: bool, in_memory: bool) -> tuple[Path, BufferedWriter | None]:
    """The folder that is written, of rank 0's making, and on rank 0 its lock."""

    def make() -> tuple[Path | None, BufferedWriter | None]:
        return commit.begin(directory, in_memory) if backend.place.rank == 0 else (None, None)

    if watch := session.monitor():  # before any rank can have written its part
        watch.topics["saved"] = Save.on_saved
    made, lock = run_on_all_or_raise(backend, make)
    folder = backend.broadcast_object(made, 0)

    def look() -> None:
        if in_memory and not folder.exists():
            raise CheckpointError(
                f"save: rank {backend.place.rank} on {os.uname().nodename} does not see {folder}, which rank 0 has made in the "
                "memory of its host. With ranks on several hosts, save without in_memory=True."
            )
        if shared and not folder.exists():
            raise CheckpointError(
                f"save: rank {backend.place.rank} on {os.uname().nodename} does not see {folder}, which rank 0 has made. Save "
                "to a file system that all hosts share, or gather the state with jaxmpi.unshard first."
            )

    try:
        run_on_all_or_raise(backend, look)
    except CheckpointError:
        if lock:
            lock.close()
        raise
    return folder, lock


Parts = dict[int, tuple[int, dict[str, Member]]]  # what ranks have written, as `files.write` returns it


class Save:
    """A save that is being written, by a thread."""

    last: "Save | None" = None
    outcomes: ClassVar[dict[str, dict[int, "Parts | str"]]] = {}  # of the other ranks' parts, by folder; for rank 0
    changed = threading.Condition()
    restored: ClassVar[dict[Path, int]] = {}  # the step that was restored from a directory since its last save

    def __init__(
        self,
        backend: Backend,
        folder: tuple[Path, BufferedWriter | None],
        step: int,
        arrays: dict[int, dict[str, np.ndarray]],
        writers: Sequence[int],
        commit: Callable[[Parts], None],
    ) -> None:
        self.error: str | None = None
        self._what, self._rank = f"step {step}", backend.place.rank
        self._folder, self._lock = folder
        self._arrays, self._writers, self._commit = arrays, writers, commit
        self._own_parts = len(arrays)
        self._monitor = session.monitor()
        self._thread: threading.Thread | None = None
        if self._monitor is None and len(arrays) < len(writers):  # MPI allows no threads: the ranks talk here
            outcomes = backend.allgather_object(self._written())
            if self._rank == 0:
                self.outcomes[self._folder.name] = dict(enumerate(outcomes[1:], 1))
            self._finish(outcomes[0])
        try:
            self._thread = start_thread(self._run, "jaxmpi-save")
        except RuntimeError:  # Python shuts down, as in a save that `atexit` calls
            self._run()

    def _run(self) -> None:
        if self._arrays:
            self._finish(self._written())

    def _written(self) -> Parts | str:
        """Write this process's parts; returns what is in them, or what has gone wrong."""
        try:
            return {rank: files.write(self._folder, rank, arrays) for rank, arrays in self._arrays.items()}
        except Exception as error:  # is raised by the next call
            self.error = f"{self._what}: {error}"
            return self.error
        finally:
            self._arrays = {}  # the memory is needed

    def _finish(self, outcome: Parts | str) -> None:
        """Tell rank 0; there, make it a checkpoint once all have written."""
        if self._rank:
            if self._monitor:
                self._monitor.send(0, "saved", (self._folder.name, outcome))
            return
        try:
            everyone = self._gathered(outcome)
            if self.error is None:
                self._commit(everyone)
        except Exception as error:
            self.error = f"{self._what}: {error}"
        finally:
            if self._lock:
                self._lock.close()

    def _gathered(self, mine: Parts | str) -> Parts:
        """What each rank has written, once all have."""
        others = len(self._writers) - self._own_parts
        theirs = self.outcomes.setdefault(self._folder.name, {})
        pause = 0.001
        while len(theirs) < others:  # the monitor's thread would look ten times a second
            if self._monitor:
                self._monitor.poll()
            with self.changed:
                self.changed.wait_for(lambda: len(theirs) >= others, pause)
            pause = min(2 * pause, 0.1)
        del self.outcomes[self._folder.name]
        written: Parts = {}
        for outcome in (mine, *theirs.values()):
            if isinstance(outcome, str):
                self.error = self.error or outcome
            else:
                written |= outcome
        return written

    @classmethod
    def on_saved(cls, rank: int, message: tuple[str, Parts | str]) -> None:
        """Note what another rank says of its part."""
        folder, outcome = message
        with cls.changed:
            cls.outcomes.setdefault(folder, {})[rank] = outcome
            cls.changed.notify_all()

    @classmethod
    def finished(cls, backend: Backend) -> str | None:
        """Wait for the last save; returns what has gone wrong on any rank, on all of them."""
        last, cls.last = cls.last, None
        if last is not None and last._thread is not None:
            with long_operation(backend, f"writing the checkpoint of {last._what}"):
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


at_exit(Step.OUTCOME, Save.at_exit)
