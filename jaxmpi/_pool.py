"""Jobs of several ranks that wait for functions to run: the outer process, and the ranks (`python -m jaxmpi._pool`)."""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import inspect
import io
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Call", "Pool", "RankFailure", "Result", "Task", "pool"]

ADDRESS = "JAXMPI_TESTING_ADDRESS"
START_SECONDS = 60.0
GONE = "the rank is gone: it exited, crashed or was killed"
MEMORY_BYTES = 1 << 30  # of a rank
GRACE_SECONDS = 3.0  # after one rank failed, the others may be waiting for it


class RankFailure(AssertionError):
    """A test failed on some rank; the text holds every failing rank's traceback and output."""


class Task(NamedTuple):
    """A function by its file and qualified name, its pickled arguments, and how long it may take."""

    path: str
    qualname: str
    kwargs: Any
    timeout_seconds: float


class Call(NamedTuple):
    """A function with its arguments, as cloudpickle has pickled them, and how long it may take."""

    pickled: bytes
    timeout_seconds: float


class Result(NamedTuple):
    """What a rank says when it has run a task: its error, what it has printed, and what a call has returned, pickled."""

    rank: int
    error: str | None
    output: str
    value: bytes = b""


# the outer process

_pools: dict[tuple[int, str], "Pool"] = {}


def pool(ranks: int, backend: str = "auto") -> "Pool":
    """The job of so many ranks on a backend, started now if there is none alive."""
    key = ranks, backend
    if key not in _pools or not _pools[key].alive():
        _pools[key] = Pool(ranks, backend)
    return _pools[key]


class Pool:
    """A job of `ranks` ranks that waits for tasks."""

    def __init__(self, ranks: int, backend: str = "auto") -> None:
        self.ranks: dict[int, Connection] = {}
        self._printed = ""
        self._directory = tempfile.TemporaryDirectory(prefix="jaxmpi-pool-")
        self._log = open(Path(self._directory.name, "log"), "a+b")
        address = str(Path(self._directory.name, "socket"))
        launch = ["-m", "jaxmpi", "run", "-n", str(ranks)] if ranks > 1 else []
        with Listener(address, "AF_UNIX") as listener:
            self._process = subprocess.Popen(
                [sys.executable, *launch, "-m", "jaxmpi._pool"],
                env={**os.environ, ADDRESS: address} | ({"JAXMPI_BACKEND": backend} if backend != "auto" else {}),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            atexit.register(self.end)
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            for _ in range(ranks):
                rank, connection = self._accept(listener)
                self.ranks[rank] = connection

    def _accept(self, listener: Listener) -> tuple[int, Connection]:
        deadline = time.monotonic() + START_SECONDS
        while self.alive() and time.monotonic() < deadline:
            try:
                connection = listener.accept()
            except TimeoutError:
                continue
            return connection.recv(), connection
        self.end()
        raise RankFailure(f"the ranks did not start:\n{self._printed}")

    def alive(self) -> bool:
        """Whether it can take a task."""
        return self._process.poll() is None

    def run(self, task: Task | Call) -> list[Result]:
        """Run one task on every rank; raise a RankFailure with every failing rank's words."""
        self._log.truncate(0)
        if isinstance(task, Task):
            task = task._replace(kwargs=pickle.dumps(task.kwargs))  # to be read once the test's module is there
        for connection in self.ranks.values():
            connection.send(task)
        waiting, failed, results = dict(self.ranks), [], []
        deadline = time.monotonic() + task.timeout_seconds
        while waiting and time.monotonic() < deadline:
            left = deadline - time.monotonic()
            ready = wait(list(waiting.values()), timeout=max(0.0, left) if math.isfinite(left) else None)
            for rank in [r for r, c in waiting.items() if c in ready]:
                result = _receive(rank, waiting.pop(rank))
                results.append(result)
                if result.error:
                    failed.append(result)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting or any(result.error == GONE for result in failed):
            self.end()
        if waiting or failed:
            raise RankFailure(self._report(failed, sorted(waiting), task.timeout_seconds))
        return sorted(results)

    def _report(self, failed: list[Result], waiting: list[int], timeout_seconds: float) -> str:
        lines = [f"failed on {len(failed)} of {len(self.ranks)} ranks"]
        for result in sorted(failed):
            lines += [f"---- rank {result.rank}", result.error or "", result.output]
        if waiting:
            lines += [
                f"---- ranks {waiting} did not end within {timeout_seconds} s, or wait for one that failed",
                self._printed,
            ]
        return "\n".join(lines)

    def end(self) -> None:
        """End all ranks, and keep what they printed."""
        for connection in self.ranks.values():
            connection.close()  # ranks that wait for a task end by themselves
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
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


# a rank


def _work() -> None:
    """Take tasks until the outer process is gone."""
    import jaxmpi

    world, limit = jaxmpi.init(), MEMORY_BYTES
    with Client(os.environ[ADDRESS], "AF_UNIX") as outer:
        outer.send(world.rank)
        while True:
            try:
                task = outer.recv()
            except EOFError:
                return
            if math.isfinite(task.timeout_seconds):
                faulthandler.dump_traceback_later(max(1.0, task.timeout_seconds - 2.0))  # where it hangs
            outer.send(tuple(_run(task, world.rank)))
            limit = _shrink(limit)
            faulthandler.cancel_dump_traceback_later()


def _shrink(limit: int) -> int:
    """Give back the memory of what was compiled, where it is beyond a limit: hundreds of tests run in one process.

    Returns the next limit, so that what cannot be given back is not tried for at every test.
    """
    import jax

    if _memory_bytes() <= limit:
        return limit
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(AttributeError):  # a C library that is not GNU's
        ctypes.CDLL(None).malloc_trim(0)
    return max(MEMORY_BYTES, _memory_bytes() + MEMORY_BYTES // 2)


def _memory_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _run(task: Task | Call, rank: int) -> Result:
    output, error, value = io.StringIO(), None, b""
    with redirect_stdout(output), redirect_stderr(output):
        try:
            if isinstance(task, Call):
                value = _called(task)
            else:
                _find(task)(**pickle.loads(task.kwargs))  # what our own outer process has written
        except BaseException:  # pytest's own failures are no Exceptions; the rank lives on for the next task
            error = traceback.format_exc()
    return Result(rank, error, output.getvalue(), value)


def _called(call: Call) -> bytes:
    import cloudpickle
    import jax

    function, args, kwargs = pickle.loads(call.pickled)  # what our own outer process has written
    return bytes(cloudpickle.dumps(jax.device_get(function(*args, **kwargs))))


def _find(task: Task) -> Callable[..., None]:
    name = Path(task.path).stem
    if name not in sys.modules:
        sys.path.insert(0, str(Path(task.path).parent))
        spec = importlib.util.spec_from_file_location(name, task.path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    function: Any = sys.modules[name]
    for part in task.qualname.split("."):
        function = getattr(function, part)
    return inspect.unwrap(function)


if __name__ == "__main__":
    from jaxmpi import _pool  # whose classes are those of the outer process

    _pool._work()
