"""A save that is being written by threads, one on each rank that has something to write."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from io import BufferedWriter
from pathlib import Path

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

__all__ = ["Parts", "Save", "Saves", "arrays_of", "begin"]


def arrays_of(described: list[tuple[Leaf, LeafValue]], rank: int) -> dict[str, np.ndarray]:
    """Copies of what a rank writes."""
    mine = [(leaf, x) for leaf, x in described if leaf.in_file(rank)]
    return {leaf.name: to_host(x[rank] if isinstance(x, PerRank) else x, copy=True) for leaf, x in mine}


def begin(backend: Backend, directory: Path, shared: bool, in_memory: bool) -> tuple[Path, BufferedWriter | None]:
    """The folder that is written, of rank 0's making, and on rank 0 its lock."""

    def make() -> tuple[Path | None, BufferedWriter | None]:
        return commit.begin(directory, in_memory) if backend.place.rank == 0 else (None, None)

    if watch := session.monitor():  # before any rank can have written its part
        watch.topics["saved"] = session.state(Saves).on_saved
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


class Saves:
    """The saves of a session."""

    def __init__(self, began: float) -> None:
        self.lineage = commit.Lineage(began)
        self._last: Save | None = None
        self._outcomes: dict[str, dict[int, Parts | str]] = {}  # of the other ranks' parts, by folder; for rank 0
        self._changed = threading.Condition()
        self._take_back = at_exit(Step.OUTCOME, self._fail_if_unheard)

    def start(self, save: "Save") -> None:
        """Write a save in the background."""
        self._last = save
        save.start(self)

    def finished(self, backend: Backend) -> str | None:
        """Wait for the last save; return what has gone wrong on any rank, on all of them."""
        last, self._last = self._last, None
        if last is not None:
            with long_operation(backend, f"writing the checkpoint of {last.what}"):
                last.wait()
        errors = [error for error in backend.allgather_object(last.error if last else None) if error]
        return errors[0] if errors else None

    def close(self) -> None:
        """Wait for the last save; if it has failed, the script does at its end."""
        if self._last is not None:
            self._last.wait()
        if self._last is None or self._last.error is None:
            self._take_back()

    def on_saved(self, rank: int, message: tuple[str, Parts | str]) -> None:
        """Note what another rank says of its part."""
        folder, outcome = message
        with self._changed:
            self._outcomes.setdefault(folder, {})[rank] = outcome
            self._changed.notify_all()

    def gathered(self, folder: str, others: int, poll: Callable[[], object] | None) -> list[Parts | str]:
        """Return the outcomes of `others` other ranks, once all have written; `poll` looks for their messages."""
        theirs = self._outcomes.setdefault(folder, {})
        pause = 0.001
        while len(theirs) < others:  # the monitor's thread would look ten times a second
            if poll:
                poll()
            with self._changed:
                self._changed.wait_for(lambda: len(theirs) >= others, pause)
            pause = min(2 * pause, 0.1)
        del self._outcomes[folder]
        return [*theirs.values()]

    def _fail_if_unheard(self) -> None:
        """Fail the script if the last save has failed and nobody has heard of it; called after all other ends."""
        if self._last is not None and self._last.error is not None:
            sys.stdout.flush()
            sys.stderr.write(f"jaxmpi: CheckpointError: save: {self._last.error}\n")
            sys.stderr.flush()
            os._exit(1)


class Save:
    """A save that is being written, by a thread."""

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
        self.what = f"step {step}"
        self._backend = backend
        self._folder, self._lock = folder
        self._arrays, self._writers, self._commit = arrays, writers, commit
        self._own_parts = len(arrays)
        self._monitor = session.monitor()
        self._thread: threading.Thread | None = None

    def start(self, saves: Saves) -> None:
        """Start the thread."""
        rank = self._backend.place.rank
        if self._monitor is None and len(self._arrays) < len(self._writers):  # MPI allows no threads: the ranks talk here
            outcomes = self._backend.allgather_object(self._written())
            if rank == 0:
                for other, outcome in enumerate(outcomes[1:], 1):
                    saves.on_saved(other, (self._folder.name, outcome))
            self._finish(saves, outcomes[0])

        def run() -> None:
            if self._arrays:
                self._finish(saves, self._written())

        try:
            self._thread = start_thread(run, "jaxmpi-save")
        except RuntimeError:  # Python shuts down, as in a save that `atexit` calls
            run()

    def wait(self) -> None:
        """Return once it is written, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def _written(self) -> Parts | str:
        """Write this process's parts; returns what is in them, or what has gone wrong."""
        try:
            return {rank: files.write(self._folder, rank, arrays) for rank, arrays in self._arrays.items()}
        except Exception as error:  # is raised by the next call
            self.error = f"{self.what}: {error}"
            return self.error
        finally:
            self._arrays = {}  # the memory is needed

    def _finish(self, saves: Saves, outcome: Parts | str) -> None:
        """Tell rank 0; there, make it a checkpoint once all have written."""
        if self._backend.place.rank:
            if self._monitor:
                self._monitor.send(0, "saved", (self._folder.name, outcome))
            return
        try:
            others = len(self._writers) - self._own_parts
            poll = self._monitor.poll if self._monitor else None
            written: Parts = {}
            for one in (outcome, *saves.gathered(self._folder.name, others, poll)):
                if isinstance(one, str):
                    self.error = self.error or one
                else:
                    written |= one
            if self.error is None:
                self._commit(written)
        except Exception as error:
            self.error = f"{self.what}: {error}"
        finally:
            if self._lock:
                self._lock.close()
