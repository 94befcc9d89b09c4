"""The end of the process: jaxmpi's threads, the other ranks, MPI and failed saves, one after the other.

Until Python 3.13, a daemon thread that asks for the GIL while the interpreter shuts down is ended
by `pthread_exit`, which unwinds its stack. C++ frames such as jaxlib's catch that unwinding, and
glibc then aborts the process (SIGABRT, exit code 134), whatever the script has done. So each thread
of a rank is started here, or ended by a step below, and none of them runs when the interpreter
shuts down.
"""

import atexit
import ctypes
import enum
import threading
import time
import traceback
from collections.abc import Callable

__all__ = ["Step", "at_exit", "forget", "start_thread"]

STOP_SECONDS = 2.0  # for a thread that was told to stop; it may be inside of one copy to a device
RAISE_SECONDS = 1.0  # for a thread in which SystemExit was raised


class Step(enum.Enum):
    """What happens at the end of the process, in this order."""

    THREADS = "threads that were started here end"
    RANKS = "the monitor waits until every rank has come to its end"
    MPI = "MPI_Finalize"
    OUTCOME = "a save that has failed fails the script"


_calls: dict[Step, list[Callable[[], object]]] = {}
_threads: dict[threading.Thread, Callable[[], object] | None] = {}  # and what tells each to stop


def at_exit(step: Step, call: Callable[[], object]) -> Callable[[], None]:
    """Make a call in one of the steps.

    `atexit` runs last what was registered first. All steps are registered together by the first
    call, so their order does not depend on which modules were imported before `init`; and JAX,
    which is imported before, shuts down after them.

    Args:
      step: when to make the call.
      call: what to call; an exception is printed, and the other calls and steps follow.

    Returns:
      A function that takes the call back.
    """
    _register()
    _calls[step].append(call)
    return lambda: _calls[step].remove(call) if call in _calls.get(step, ()) else None


def start_thread(
    run: Callable[[], object], name: str, stop: Callable[[], object] | None = None
) -> threading.Thread:
    """Start a thread that has ended before the interpreter shuts down.

    Args:
      run: what the thread does.
      name: of the thread.
      stop: tells the thread to end soon, from the main thread. Without it, the exit waits until the
        thread has ended, however long that takes.

    Returns:
      The thread, which runs.

    Raises:
      RuntimeError: there are too many threads, or Python shuts down (Python 3.12 and later).
    """
    _register()
    for ended in [thread for thread in [*_threads] if not thread.is_alive()]:
        _threads.pop(ended, None)
    # Python itself waits for threads that are no daemons, before any call of `atexit`.
    thread = threading.Thread(target=run, name=name, daemon=stop is not None)
    thread.start()
    _threads[thread] = stop
    return thread


def forget() -> None:
    """Do nothing at the end of this process, a forked child; nor does anything else that `atexit` knows."""
    atexit._clear()
    _calls.clear()
    _threads.clear()


def _register() -> None:
    if not _calls:
        for step in reversed(Step):
            _calls[step] = []
            atexit.register(_run, step)
        _calls[Step.THREADS].append(_end_threads)


def _run(step: Step) -> None:
    for call in [*_calls.get(step, ())]:
        _try(call)


def _try(call: Callable[[], object]) -> None:
    """Make a call; an exception is printed, as `atexit` would, and does not keep the rest from being done."""
    try:
        call()
    except Exception:
        traceback.print_exc()


def _end_threads() -> None:
    """Wait for the threads; for those that can be told to stop, some seconds at most."""
    for stop in [*_threads.values()]:
        if stop is not None:
            _try(stop)
    for thread, stop in [*_threads.items()]:
        if stop is None:
            thread.join()
    running = _join([*_threads], STOP_SECONDS)
    # Such a thread stands in code of the user, an iterator that waits or computes. An exception
    # ends it at its next instruction of Python.
    for thread in running:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
    # What still runs stands in one call of C. It is left behind: a script whose data does not come
    # must end, too, and a call that waits holds no frame of jaxlib.
    _join(running, RAISE_SECONDS)


def _join(threads: list[threading.Thread], seconds: float) -> list[threading.Thread]:
    """Wait for threads, for so long altogether; returns those that still run."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
