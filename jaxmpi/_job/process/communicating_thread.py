"""Collectives belong to one thread at a time: those of two threads would have another order on each rank."""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable

__all__ = ["Turn"]

PATIENCE_SECONDS = 2.0

# Where a thread waits for another, or for work: modules of Python's own library.
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_WAITING = tuple(
    _LIBRARY + name
    for name in (
        "threading.py",
        "queue.py",
        "selectors.py",
        "concurrent/futures/",
        "multiprocessing/pool.py",
        "asyncio/",
    )
)
# Where it communicates: our own modules.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_COMMUNICATING = tuple(
    _PACKAGE + name for name in ("_jit", "_collectives", "_consistency", "_backends", "_checkpoint")
)


class Turn:
    """Which thread's turn it is. `thread` is its identifier, for a comparison before each collective; 0 for none so far."""

    def __init__(self, finish: Callable[[], None], last: Callable[[int], object]) -> None:
        """Give the turn to nobody yet.

        Args:
          finish: waits until what was started has ended.
          last: of a thread's identifier, something that changes with each of its collectives.
        """
        self.thread = 0
        self._finish, self._last, self._lock = finish, last, threading.Lock()
        self._forked = False

    def take(self) -> None:
        """Take the turn for the calling thread.

        The thread that had it must have ended, or wait in Python's own `threading`, `queue`,
        `concurrent.futures` or `asyncio`.

        Raises:
          RuntimeError: that thread still runs; or this is a forked child of the rank.
        """
        with self._lock:
            if self._forked:
                raise RuntimeError(
                    "jaxmpi: a collective or a step was called in a forked child of a rank, which "
                    "cannot talk to the other "
                    "ranks. Call it in the rank itself, and hand the child what it needs."
                )
            if self.thread and not self._is_given_up():
                raise RuntimeError(
                    "jaxmpi: a collective was called in thread "
                    f"{threading.current_thread().name!r}, while thread "
                    f"{_name(self.thread)!r}, which called the last one, runs: the order may "
                    "differ between the ranks. "
                    "Call them in one thread, or have the other wait for this one (Thread.join, "
                    "Future.result)."
                )
            before, self.thread = self.thread, threading.get_ident()
            if before:
                self._finish()

    def _is_given_up(self) -> bool:
        """Whether the thread that has the turn waits, or soon does: it may have just started this one."""
        last, deadline = self._last(self.thread), time.monotonic() + PATIENCE_SECONDS
        while not _waits(self.thread):
            if (
                _communicates(self.thread)
                or time.monotonic() > deadline
                or self._last(self.thread) != last
            ):
                return False
            time.sleep(0.001)
        return True

    def release(self) -> None:
        """Leave the turn to whoever comes next."""
        self.thread = 0

    def forbid(self) -> None:
        """In a forked child: no thread has the turn, or gets it."""
        self.thread, self._forked, self._lock = 0, True, threading.Lock()


def _waits(thread: int) -> bool:
    """Whether a thread has ended, or stands in a function of Python's library that waits, and not for a thread to start."""
    frame = sys._current_frames().get(thread)
    waits = frame is None
    while frame and frame.f_code.co_filename.startswith(_WAITING):
        waits = frame.f_code is not threading.Thread.start.__code__
        frame = frame.f_back if waits else None
    return waits


def _communicates(thread: int) -> bool:
    """Whether a thread stands in a collective."""
    frame = sys._current_frames().get(thread)
    while frame and not frame.f_code.co_filename.startswith(_COMMUNICATING):
        frame = frame.f_back
    return frame is not None


def _name(thread: int) -> str:
    return next((other.name for other in threading.enumerate() if other.ident == thread), "another")
