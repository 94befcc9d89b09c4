"""The thread that communicates: one at a time, as two would call in another order on each rank."""

import os
import sysconfig
import threading
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from jaxmpi._job.process import stacks

__all__ = ["ForkedError", "Turn"]

PATIENCE_SECONDS = 2.0  # for the last thread to wait or end: it may have just started this one
WAKE_SECONDS = 0.001  # for a thread that has got its work, and still seems to wait for it

# Modules of Python's own library in which a thread waits for another one, or for work.
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
# Modules of jaxmpi in which a thread communicates.
_PACKAGE = Path(__file__).parents[2]
_COMMUNICATING = tuple(
    f"{_PACKAGE / name}{os.sep}"
    for name in ("_jit", "_collectives", "_consistency", "_backends", "_checkpoint")
)


class ForkedError(RuntimeError):
    """A collective was called in a forked child of a rank."""


class Turn:
    """The thread that may call collectives.

    Two threads' collectives have the same order on all ranks if one thread waits for the other.
    Python does not tell whether it does, so it is judged by where the threads stand. When another
    thread calls a collective,

    1. the last one must have ended, or wait (`_waits`);
    2. if neither is the main thread, the new one must not have run when the last one called its
       last collective: it might have been the faster one, as it may be on another rank.

    The second rule leaves out the main thread, so that this has to look at no other thread before
    each of its collectives. A thread that runs beside it is found by the first rule, on the rank
    where that thread is the faster one.

    Attributes:
      thread: the identifier of the last thread that called one; 0 if there is none. Python may have
        given it to another one since that thread has ended.
      unchecked: that of the thread that need not `take` before each collective; 0 if none.
    """

    def __init__(self, finish: Callable[[], None], last: Callable[[int], object]) -> None:
        """Begin with no thread.

        Args:
          finish: waits until all collectives that were started have ended.
          last: returns for a thread's identifier a value that changes with each of its collectives.
        """
        self.thread = self.unchecked = 0
        self._caller: threading.Thread | None = None  # the last thread that called one
        self._ran_beside: list[threading.Thread] = []  # threads, when it called its last one
        self._finish, self._last, self._lock = finish, last, threading.Lock()
        self._forked = False

    def ensure(self) -> None:
        """Make this thread the one that communicates, unless it is."""
        if threading.get_ident() != self.unchecked:
            self.take()

    def take(self) -> None:
        """Make the calling thread the one that communicates.

        Raises:
          ForkedError: this is a forked child of the rank.
          RuntimeError: that thread still runs, or this one ran beside it.
        """
        with self._lock:
            self.check_process()
            # Threads, and not their identifiers, which Python uses again.
            before, current = self._caller, threading.current_thread()
            is_main = current is threading.main_thread()
            if before is not None and before is not current:
                if not self._has_given_up(before):
                    raise _error(f"while thread {before.name!r}, which called the last one, runs")
                if current in self._ran_beside and not is_main:
                    raise _error(f"which ran while thread {before.name!r} called the last one")
                self.unchecked = 0
                self._finish()
            self._caller, self.thread = current, threading.get_ident()
            if is_main:
                self.unchecked, self._ran_beside = self.thread, []
                return
            self.unchecked = 0
            if before is not current:
                time.sleep(WAKE_SECONDS)
            self._ran_beside = [
                thread
                for thread in threading.enumerate()
                if thread is not current and thread.ident and not _waits(thread.ident)
            ]

    def _has_given_up(self, caller: threading.Thread) -> bool:
        """Return whether the last thread that called one has ended, or waits, or soon does."""
        last, deadline = self._last(self.thread), time.monotonic() + PATIENCE_SECONDS
        while caller.is_alive() and not _waits(self.thread):
            if (
                _communicates(self.thread)
                or time.monotonic() > deadline
                or self._last(self.thread) != last
            ):
                return False
            time.sleep(0.001)
        return True

    def check_process(self) -> None:
        """Raise a ForkedError in a forked child of the rank."""
        if self._forked:
            raise ForkedError(
                "jaxmpi: a collective or a step was called in a forked child of a rank, which "
                "cannot talk to the other ranks. Call it in the rank itself, and hand the child "
                "what it needs."
            )

    def release(self) -> None:
        """Allow any thread to be the next one."""
        self.thread = self.unchecked = 0
        self._caller = None

    def forbid(self) -> None:
        """Allow no thread any more, in a forked child."""
        self.release()
        self._forked, self._lock = True, threading.Lock()


def _waits(thread: int) -> bool:
    """Return whether a thread has ended, or waits in a function of Python's library.

    A thread that waits for another one to start runs on at once, and so does not count.
    """
    frames = stacks.frames(thread)
    inside = list(takewhile(lambda f: f.f_code.co_filename.startswith(_WAITING), frames))
    starts = any(frame.f_code is threading.Thread.start.__code__ for frame in inside)
    return not frames or (bool(inside) and not starts)


def _communicates(thread: int) -> bool:
    """Return whether a thread stands in a collective."""
    files = (frame.f_code.co_filename for frame in stacks.frames(thread))
    return any(file.startswith(_COMMUNICATING) for file in files)


def _error(how: str) -> RuntimeError:
    """Return the error of the calling thread; `how` says why it may not call a collective."""
    name = threading.current_thread().name
    return RuntimeError(
        f"jaxmpi: a collective was called in thread {name!r}, {how}: the order may differ between "
        "the ranks. Call them in one thread, or have the other wait for this one (Thread.join, "
        "Future.result)."
    )
