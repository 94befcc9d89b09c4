"""A rank that waits for functions to run: `python -m jaxmpi._job.launch.worker`.

pool.py starts it, and holds the other end of its connection.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import inspect
import io
import json
import math
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from jaxmpi._job.launch.pool import ADDRESS, Call, Result, Task

__all__ = ["work"]

MEMORY_BYTES = 640 << 20  # of a rank that runs tests


def work() -> None:
    """Run tasks until the calling process is gone."""
    import jaxmpi

    world = jaxmpi.init(axes=json.loads(sys.argv[1]) if sys.argv[1:] else None)
    limit_bytes = MEMORY_BYTES
    with Client(os.environ[ADDRESS], "AF_UNIX") as caller:
        caller.send(world.rank)
        while True:
            try:
                task = caller.recv()
            except EOFError:
                return
            if math.isfinite(task.timeout_seconds):
                # show where the task hangs, shortly before the caller ends this rank
                faulthandler.dump_traceback_later(max(1.0, task.timeout_seconds - 2.0))
            caller.send(tuple(_run(task, world.rank)))
            if isinstance(task, Task):  # the calls of `launch` keep what they have compiled
                limit_bytes = _shrink(limit_bytes)
            faulthandler.cancel_dump_traceback_later()


def _shrink(limit_bytes: int) -> int:
    """Drop JAX's compiled programs if this process uses more memory than the limit.

    Hundreds of tests run in one process. Returns the next limit: memory that could not be freed
    raises it, so that not every test tries again.
    """
    import jax

    if _memory_bytes() <= limit_bytes:
        return limit_bytes
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(AttributeError):  # a C library that is not GNU's
        ctypes.CDLL(None).malloc_trim(0)
    return max(MEMORY_BYTES, _memory_bytes() + MEMORY_BYTES // 2)


def _memory_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _run(task: Task | Call, rank: int) -> Result:
    """Run one task, with its output captured."""
    output, error, value = io.StringIO(), None, b""
    with redirect_stdout(output), redirect_stderr(output):
        try:
            if isinstance(task, Call):
                value = _called(task)
            else:
                _find(task)(**pickle.loads(task.kwargs))  # pickled by the process that started us
        except BaseException:
            # pytest's failures are not Exceptions; the rank lives on for the next task
            error = traceback.format_exc()
    if isinstance(task, Task):
        _forget_comparisons()
    return Result(rank, error, output.getvalue(), value)


def _forget_comparisons() -> None:
    """Forget what a task has compared between the ranks: the next one is another program."""
    from jaxmpi._world import session

    exchange = session.neighbors()
    if exchange is not None:
        exchange.forget()


def _called(call: Call) -> bytes:
    """Call a pickled function, and pickle its value."""
    import cloudpickle
    import jax

    function, args, kwargs = pickle.loads(call.pickled)  # by the process that started us
    return bytes(cloudpickle.dumps(jax.device_get(function(*args, **kwargs))))


def _find(task: Task) -> Callable[..., None]:
    """Import the file of a task and return the function.

    Two files may have one name in different folders. So a module also stands in `sys.modules` by
    its path; by its name, where pickle looks for classes, it is the one that was used last.
    """
    path = Path(task.path)
    before = sys.modules.get(path.stem)
    if task.path not in sys.modules and getattr(before, "__file__", None) == task.path:
        sys.modules[task.path] = sys.modules[path.stem]  # another file has imported it
    if task.path not in sys.modules:
        sys.path.insert(0, str(path.parent))
        sys.path += [folder for folder in task.search if folder not in sys.path]
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:  # as `import` does; the next task tries again
            del sys.modules[path.stem]
            raise
        sys.modules[task.path] = module
    sys.modules[path.stem] = sys.modules[task.path]
    function: Any = sys.modules[task.path]
    for part in task.qualname.split("."):
        function = getattr(function, part)
    return inspect.unwrap(function)


if __name__ == "__main__":
    work()
