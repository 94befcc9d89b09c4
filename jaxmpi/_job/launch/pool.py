"""`jaxmpi.launch`, and the ranks of tests: processes that wait for functions to run.

The process that calls is no rank: a notebook, an interactive session, pytest. A `Pool` starts
`jaxmpi run` with worker.py as its program. Each rank connects to a socket of the calling process,
receives what to run (a `Task` or a `Call`), and answers with a `Result`.
"""

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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi._job.launch.machine import socket_folder
from jaxmpi._world import session

__all__ = ["ADDRESS", "Call", "Pool", "RankFailure", "Result", "Task", "launch", "pool"]

ADDRESS = "JAXMPI_TESTING_ADDRESS"  # the variable that tells a rank where the caller listens
START_SECONDS = 60.0
NAME_BYTES = len("/jaxmpi-pool-12345678/socket")  # in the temporary folder
GONE = "the rank is gone: it exited, crashed or was killed"
GRACE_SECONDS = 3.0  # after one rank failed, the others may be waiting for it


class Task(NamedTuple):
    """A function by its file and qualified name, with its arguments; for tests."""

    path: str
    qualname: str
    kwargs: Any  # by their names; pickled while they travel
    timeout_seconds: float
    search: tuple[str, ...] = ()  # `sys.path` of the caller


class Call(NamedTuple):
    """A function with its arguments, pickled by cloudpickle; for `launch`."""

    pickled: bytes
    timeout_seconds: float


class Result(NamedTuple):
    """The outcome of a task on one rank: error, output, and the pickled value of a call."""

    rank: int
    error: str | None
    output: str
    value: bytes = b""


class RankFailure(AssertionError):
    """A function failed on some rank, or a test.

    The text holds every failing rank's traceback and output.
    """


_pools: dict[tuple[int, str, str], "Pool"] = {}
_choosing = threading.Lock()


def launch(
    function: Callable[..., object],
    ranks: int,
    *args: object,
    backend: str = "auto",
    timeout_seconds: float = math.inf,
    **kwargs: object,
) -> list[Any]:
    """Call a function on several ranks of this machine and return what each rank returned.

    For notebooks. Each rank has called `jaxmpi.init()` before. The ranks are processes that wait
    for the next call without using a core, so they keep what they have compiled and imported; they
    end with this process. What they print is shown when they are done: what goes through
    `sys.stdout` and `sys.stderr`, and not what C code writes, or a program that they start. If a
    rank exits, crashes or aborts the job, or the others still run after one has failed, all ranks
    are ended, and the next call starts new ones.

    Args:
      function: any function, also one of the notebook or a lambda; what it uses travels with it.
      ranks: the number of ranks; 1 needs no MPI.
      *args: arguments of the function: arrays, pytrees, anything that can be pickled.
      backend: as in `jaxmpi.init`.
      timeout_seconds: the ranks are ended after so many seconds.
      **kwargs: keyword arguments of the function.

    Returns:
      A list with the value of each rank, by rank; JAX arrays come as NumPy arrays.

    Raises:
      RankFailure: the function failed on a rank, or took too long; the text has every failing
        rank's traceback and output.
      ValueError: `ranks` is below 1.
      RuntimeError: this process is one of several ranks.
      ModuleNotFoundError: cloudpickle is not installed.
    """
    if ranks < 1:
        raise ValueError(f"launch: ranks is {ranks}. Give 1 or more.")
    here = session.current("launch") if session.initialized() else None
    if here is not None and len(here.ranks_here) < here.place.size:
        raise RuntimeError(
            f"launch: this is one of {session.size()} ranks. Call it from a process that is not a "
            "rank, such as a notebook."
        )
    try:
        import cloudpickle
    except ImportError as error:
        raise ModuleNotFoundError(
            "launch: functions travel by cloudpickle. Install it: pip install cloudpickle."
        ) from error
    results = pool(ranks, backend).run(
        Call(cloudpickle.dumps((function, args, kwargs)), timeout_seconds)
    )
    for result in results:
        for line in result.output.splitlines(keepends=True):
            sys.stdout.write(f"[{result.rank}] {line}")
    return [pickle.loads(result.value) for result in results]  # our own ranks wrote them


def pool(
    ranks: int,
    backend: str = "auto",
    idle_seconds: float = math.inf,
    axes: Mapping[str, int] | None = None,
) -> "Pool":
    """Return the running pool of so many ranks on a backend, or start one.

    Other pools that have been idle for `idle_seconds` are ended.
    """
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
        self._turn = threading.Lock()  # held by the thread that runs a task
        self._printed = ""
        self._directory = tempfile.TemporaryDirectory(
            prefix="jaxmpi-pool-", dir=socket_folder(NAME_BYTES)
        )
        self._log = open(Path(self._directory.name, "log"), "a+b")
        address = str(Path(self._directory.name, "socket"))
        run = ["-m", "jaxmpi", "run", "-n", str(ranks)] if ranks > 1 else []
        connections = Listener(address, "AF_UNIX")
        self._start(
            [sys.executable, *run, "-m", "jaxmpi._job.launch.worker", json.dumps(axes)],
            address,
            backend,
        )
        try:
            with connections as listener:
                # `accept` must return now and then, to see whether the job still runs
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
        chosen = {"JAXMPI_BACKEND": backend} if backend != "auto" else {}
        self._process = subprocess.Popen(
            command,
            env={**os.environ, ADDRESS: address, **chosen},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        atexit.register(self.end)

    def _accept(self, listener: Listener) -> tuple[int, Connection]:
        """Wait until the next rank connects; return its rank and the connection."""
        deadline = time.monotonic() + START_SECONDS
        while self.alive() and time.monotonic() < deadline:
            try:
                connection = listener.accept()
            except TimeoutError:
                continue
            return connection.recv(), connection
        raise TimeoutError

    def alive(self) -> bool:
        """Return whether the pool can run a task."""
        return not self._ended and self._process.poll() is None

    def run(self, task: Task | Call) -> list[Result]:
        """Run one task on every rank; raise a RankFailure with the output of each failing rank.

        An interrupt ends the ranks: their answers would be read as those to the next task.
        """
        if isinstance(task, Task):
            # pickled here, as the rank can read the arguments only after it has imported the test
            task = task._replace(kwargs=pickle.dumps(task.kwargs), search=tuple(sys.path))
        with self._turn:
            try:
                results, failed, waiting = self._answers(task)
            except BaseException:
                self.end(0.0)
                raise
        self.used = time.monotonic()
        if waiting or any(result.error == GONE for result in failed):
            self.end()  # the others may be inside a collective, and would read no further task
        if waiting or failed:
            raise RankFailure(self._report(failed, sorted(waiting), task.timeout_seconds))
        return sorted(results)

    def _answers(
        self, task: Task | Call
    ) -> tuple[list[Result], list[Result], dict[int, Connection]]:
        """Return all results, those that failed, and the ranks that did not answer in time."""
        self._log.truncate(0)
        for connection in self.ranks.values():
            with contextlib.suppress(OSError):  # the rank is gone; reading its answer says so below
                connection.send(task)
        waiting, failed, results = dict(self.ranks), list[Result](), list[Result]()
        deadline = time.monotonic() + task.timeout_seconds
        while waiting and time.monotonic() < deadline:
            remaining_seconds = deadline - time.monotonic()
            ready = wait(
                list(waiting.values()),
                timeout=max(0.0, remaining_seconds) if math.isfinite(remaining_seconds) else None,
            )
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                result = _receive(rank, waiting.pop(rank))
                results.append(result)
                if result.error:
                    # the others may wait for this rank in a collective, for ever
                    failed.append(result)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return results, failed, waiting

    def _report(self, failed: list[Result], waiting: list[int], timeout_seconds: float) -> str:
        """Return the text of a RankFailure."""
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
        # Ranks that wait for a task end by themselves once their connection is closed. Then
        # `jaxmpi run` is asked to end the job, and at last its process group is killed.
        for connection in self.ranks.values():
            connection.close()
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
    """Read the answer of a rank."""
    try:
        return Result(*connection.recv())
    except (EOFError, OSError):
        return Result(rank, GONE, "")
