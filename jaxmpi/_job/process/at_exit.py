"""The end of the process: jaxmpi's threads, the other ranks, MPI and failed saves, in this order.

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

STOP_SECONDS = 2.0  # for a thread that was told to stop: it may be inside one copy to a device
RAISE_SECONDS = 1.0  # for a thread in which SystemExit was raised


class Step(enum.Enum):
    """The steps of the end of the process, in their order."""

    THREADS = "threads that were started here end"
    RANKS = "the monitor waits until every rank has come to its end"
    MPI = "MPI_Finalize"
    OUTCOME = "a save that has failed fails the script"


_calls: dict[Step, list[Callable[[], object]]] = {}
_threads: dict[threading.Thread, Callable[[], object] | None] = {}  # each with what stops it


def at_exit(step: Step, call: Callable[[], object]) -> Callable[[], None]:
    """Register a call for one of the steps.

    `atexit` runs last what was registered first. The first call registers all steps together, so
    their order does not depend on which modules were imported before `init`. JAX was imported
    before, and so shuts down after them.

    Args:
      step: when to make the call.
      call: what to call; an exception is printed, and the other calls and steps follow.

    Returns:
      A function that removes the call.
    """
    _register()
    _calls[step].append(call)
    return lambda: _calls[step].remove(call) if call in _calls.get(step, ()) else None


def start_thread(
    run: Callable[[], object], name: str, stop: Callable[[], object] | None = None
) -> threading.Thread:
    """Start a thread that ends before the interpreter shuts down.

    Args:
      run: what the thread does.
      name: the name of the thread.
      stop: called on the main thread, it tells this thread to end soon. Without it, the exit waits
        until the thread has ended, however long that takes.

    Returns:
      The running thread.

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
    """Remove all calls, and all others that `atexit` knows, in a forked child."""
    atexit._clear()
    _calls.clear()
    _threads.clear()


def _register() -> None:
    """Register the steps with `atexit`, once."""
    if not _calls:
        for step in reversed(Step):
            _calls[step] = []
            atexit.register(_run, step)
        _calls[Step.THREADS].append(_end_threads)


def _run(step: Step) -> None:
    for call in [*_calls.get(step, ())]:
        _try(call)


def _try(call: Callable[[], object]) -> None:
    """Make a call, and print its exception: it must not keep the other calls from being made."""
    try:
        call()
    except Exception:
        traceback.print_exc()


def _end_threads() -> None:
    """Wait for the threads, and some seconds at most for those that can be told to stop."""
    for stop in [*_threads.values()]:
        if stop is not None:
            _try(stop)
    for thread, stop in [*_threads.items()]:
        if stop is None:
            thread.join()
    running = _join([*_threads], STOP_SECONDS)
    # A thread that still runs stands in code of the user: an iterator that waits or computes. An
    # exception ends it at its next Python instruction.
    for thread in running:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
    # A thread that still runs now stands in one call of C. It is left behind: a script whose data
    # does not come must end, too, and a call that waits holds no frame of jaxlib.
    _join(running, RAISE_SECONDS)


def _join(threads: list[threading.Thread], seconds: float) -> list[threading.Thread]:
    """Wait for threads, for so many seconds together; return those that still run."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
