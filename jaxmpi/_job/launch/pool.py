"""Jobs of several ranks that wait for functions to run, seen from the process that starts them."""

import atexit
import contextlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path

from jaxmpi._job.launch.environment import socket_folder
from jaxmpi._job.launch.task import ADDRESS, Call, Result, Task

__all__ = ["Pool", "RankFailure", "pool"]

START_SECONDS = 60.0
NAME_BYTES = len("/jaxmpi-pool-12345678/socket")  # in the temporary folder
GONE = "the rank is gone: it exited, crashed or was killed"
GRACE_SECONDS = 3.0  # after one rank failed, the others may be waiting for it


class RankFailure(AssertionError):
    """A test failed on some rank; the text holds every failing rank's traceback and output."""


_pools: dict[tuple[int, str, str], "Pool"] = {}
_choosing = threading.Lock()


def pool(
    ranks: int,
    backend: str = "auto",
    idle_seconds: float = math.inf,
    axes: Mapping[str, int] | None = None,
) -> "Pool":
    """The job of so many ranks on a backend, started now if there is none alive; others end that were idle for so long."""
    key = ranks, backend, repr(axes)
    with _choosing:
        for other, idle in list(_pools.items()):
            if other != key and idle.alive() and time.monotonic() - idle.used > idle_seconds:
                _pools.pop(other).end()
        if key not in _pools or not _pools[key].alive():
            _pools[key] = Pool(ranks, backend, axes)
        return _pools[key]


class Pool:
    """A job of `ranks` ranks that waits for tasks."""

    def __init__(
        self, ranks: int, backend: str = "auto", axes: Mapping[str, int] | None = None
    ) -> None:
        self.ranks: dict[int, Connection] = {}
        self.used = time.monotonic()
        self._ended = False
        self._turn = threading.Lock()  # of the threads that call `run`
        self._printed = ""
        self._directory = tempfile.TemporaryDirectory(
            prefix="jaxmpi-pool-", dir=socket_folder(NAME_BYTES)
        )
        self._log = open(Path(self._directory.name, "log"), "a+b")
        address = str(Path(self._directory.name, "socket"))
        launch = ["-m", "jaxmpi", "run", "-n", str(ranks)] if ranks > 1 else []
        connections = Listener(address, "AF_UNIX")
        self._start(
            [sys.executable, *launch, "-m", "jaxmpi._job.launch.worker", json.dumps(axes)],
            address,
            backend,
        )
        try:
            with connections as listener:
                listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
                for _ in range(ranks):
                    rank, connection = self._accept(listener)
                    self.ranks[rank] = connection
        except (EOFError, OSError):
            self.end(0.0)
            raise RankFailure(f"the ranks did not start:\n{self._printed}") from None
        except BaseException:  # an interrupt
            self.end(0.0)
            raise

    def _start(self, command: Sequence[str], address: str, backend: str) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, ADDRESS: address}
            | ({"JAXMPI_BACKEND": backend} if backend != "auto" else {}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        atexit.register(self.end)

    def _accept(self, listener: Listener) -> tuple[int, Connection]:
        deadline = time.monotonic() + START_SECONDS
        while self.alive() and time.monotonic() < deadline:
            try:
                connection = listener.accept()
            except TimeoutError:
                continue
            return connection.recv(), connection
        raise TimeoutError

    def alive(self) -> bool:
        """Whether it can take a task."""
        return not self._ended and self._process.poll() is None

    def run(self, task: Task | Call) -> list[Result]:
        """Run one task on every rank; raise a RankFailure with every failing rank's words.

        Whoever interrupts it ends the ranks: their answers are still to come, and would be taken
        for those to the next task.
        """
        if isinstance(task, Task):
            task = task._replace(
                kwargs=pickle.dumps(task.kwargs), search=tuple(sys.path)
            )  # to be read once the test's module is there
        with self._turn:
            try:
                results, failed, waiting = self._answers(task)
            except BaseException:
                self.end(0.0)
                raise
        self.used = time.monotonic()
        if waiting or any(result.error == GONE for result in failed):
            self.end()  # the others may be inside of a collective, and would take nothing any more
        if waiting or failed:
            raise RankFailure(self._report(failed, sorted(waiting), task.timeout_seconds))
        return sorted(results)

    def _answers(
        self, task: Task | Call
    ) -> tuple[list[Result], list[Result], dict[int, Connection]]:
        """All results, those that failed, and the ranks that have not answered in time."""
        self._log.truncate(0)
        for connection in self.ranks.values():
            with contextlib.suppress(OSError):  # the rank is gone, and its connection says so below
                connection.send(task)
        waiting, failed, results = dict(self.ranks), list[Result](), list[Result]()
        deadline = time.monotonic() + task.timeout_seconds
        while waiting and time.monotonic() < deadline:
            left = deadline - time.monotonic()
            ready = wait(
                list(waiting.values()), timeout=max(0.0, left) if math.isfinite(left) else None
            )
            for rank in [r for r, c in waiting.items() if c in ready]:
                result = _receive(rank, waiting.pop(rank))
                results.append(result)
                if result.error:
                    failed.append(result)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return results, failed, waiting

    def _report(self, failed: list[Result], waiting: list[int], timeout_seconds: float) -> str:
        lines = [f"failed on {len(failed)} of {len(self.ranks)} ranks"]
        for result in sorted(failed):
            lines += [f"---- rank {result.rank}", result.error or "", result.output]
        if waiting and failed:
            lines.append(
                f"---- ranks {waiting} still ran {GRACE_SECONDS:g} s after that, as in a "
                "collective with the one that failed"
            )
        elif waiting:
            lines.append(f"---- ranks {waiting} did not end within {timeout_seconds:g} s")
        if self._ended:
            lines += [
                "---- the ranks were ended, and the next call starts new ones; the job has written",
                self._printed,
            ]
        return "\n".join(lines)

    def end(self, patience_seconds: float = GRACE_SECONDS) -> None:
        """End all ranks, and keep what they printed."""
        self._ended = True
        for connection in self.ranks.values():
            connection.close()  # ranks that wait for a task end by themselves
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if not self._log.closed:
            self._log.seek(0)
            self._printed = self._log.read().decode(errors="replace")
            self._log.close()
        self._directory.cleanup()
        atexit.unregister(self.end)


def _receive(rank: int, connection: Connection) -> Result:
    try:
        return Result(*connection.recv())
    except (EOFError, OSError):
        return Result(rank, GONE, "")
