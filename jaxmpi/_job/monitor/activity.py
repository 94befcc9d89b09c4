"""Status of this rank while others wait: its CPU time, and callbacks that do not return.

Nobody sees the messages of a program of XLA or mpi4jax. What shows that a rank is stuck in one:

- a thread of it has been in the same call of a callback for long: the program cannot go on
  without it, as little as with a rank whose Python does something else between two programs;
- where a rank that waits for a message uses no CPU time (`MpiTransport.waits_asleep`), none of the
  ranks has used any: no rank computes, so no message will come.
"""

import enum
import os
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from jaxmpi import _jaxcompat
from jaxmpi._backends.mpi_ranks import MpiRanks
from jaxmpi._job.process import stacks

__all__ = ["Activity", "Stand", "Standing", "stack"]

# A clock of CPU time is looked at once in WINDOW_SECONDS. Below this share of one core, the rank or
# thread did nothing: JAX's own threads, which answer the other processes, use a thousandth.
WINDOW_SECONDS, ACTIVE_SHARE = 1.0, 0.05
BLOCKED_SECONDS = 2.0  # without CPU time: two windows, at least one of which is complete
CALLBACK_SECONDS = 1.0  # in a program, before its callbacks are looked for
STACK_LINES = 3  # of the user, in a report


class Stand(enum.StrEnum):
    """Where a rank stands."""

    PYTHON = "python"  # in no program
    CALLBACK = "callback"  # in a callback of a program
    COMPUTES = "computes"  # in a program, with CPU time, or compiling it
    BLOCKED = "blocked"  # in a program, without CPU time
    UNKNOWN = "unknown"  # in a program; CPU time says nothing about it


class Standing(NamedTuple):
    """Where a rank stands, and since when."""

    stand: Stand
    seconds: float = 0.0  # in the callback, without CPU time, or in the program
    usual_seconds: float | None = None  # the longest run of this program; None for the first one
    asleep: bool = False  # whether the thread that the stack is of uses no CPU time
    stack: tuple[str, ...] = ()  # of the callback or of the main thread, from the innermost call


class CpuTime:
    """A clock of CPU time, and when it last advanced by more than a little."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._looked_at = self._active_at = time.monotonic()
        self._used = read()

    def look(self, now: float) -> None:
        """Look at the clock, once in WINDOW_SECONDS however often this is called."""
        seconds = now - self._looked_at
        if seconds < WINDOW_SECONDS:
            return
        used = self._read()
        if used - self._used > ACTIVE_SHARE * seconds:
            self._active_at = now
        self._looked_at, self._used = now, used

    def idle_seconds(self) -> float:
        """Return the seconds since it last advanced."""
        return time.monotonic() - self._active_at


class Activity:
    """CPU time and callbacks of this rank; only the monitor's thread may use it."""

    def __init__(self, backend: MpiRanks) -> None:
        self._backend = backend
        self._main_thread = threading.main_thread().ident or 0
        main_clock = time.pthread_getcpuclockid(self._main_thread)
        # Without the monitor's own time: it looks ten times a second.
        self._process = CpuTime(lambda: time.process_time() - time.thread_time())
        self._main = CpuTime(lambda: time.clock_gettime(main_clock))
        # The frame in which a callback was called, and when it was first seen, by thread. A frame
        # that is kept stays what it is, so that the next call of the callback has another one.
        self._callbacks: dict[int, tuple[FrameType, float]] = {}

    def look(self) -> None:
        """Look what this rank does; ten times a second."""
        now = time.monotonic()
        self._process.look(now)
        self._main.look(now)
        # Frames keep their variables alive, so they are kept only while a program takes long.
        program = self._backend.programs.current()
        seen = self._callbacks
        self._callbacks = {}
        if program is None or program.seconds < CALLBACK_SECONDS:
            return
        for thread, frame in _jaxcompat.callbacks().items():
            before, since = seen.get(thread, (None, now))
            self._callbacks[thread] = frame, since if before is frame else now

    def standing(self) -> Standing:
        """Return where this rank stands."""
        program = self._backend.programs.current()
        asleep = self._main.idle_seconds() > WINDOW_SECONDS
        lines = tuple(stack(self._main_thread))
        if program is None:
            return Standing(Stand.PYTHON, asleep=asleep, stack=lines)
        usual = program.usual_seconds
        if self._callbacks:
            # the one that has lasted longest
            thread, (frame, since) = min(self._callbacks.items(), key=lambda item: item[1][1])
            asleep = self._process.idle_seconds() > WINDOW_SECONDS
            lines = tuple(stack(thread, until=frame))
            seconds = time.monotonic() - since
            return Standing(Stand.CALLBACK, seconds, usual, asleep, lines)
        if not self._backend.transport.waits_asleep:
            if _jaxcompat.compiling(self._backend.turn.thread):
                return Standing(Stand.COMPUTES, program.seconds, usual, asleep, lines)
            return Standing(Stand.UNKNOWN, program.seconds, usual, asleep, lines)
        idle_seconds = min(self._process.idle_seconds(), program.seconds)
        if idle_seconds < BLOCKED_SECONDS:
            return Standing(Stand.COMPUTES, program.seconds, usual, asleep, lines)
        return Standing(Stand.BLOCKED, idle_seconds, usual, asleep, lines)


def stack(thread: int, until: FrameType | None = None) -> list[str]:
    """Return the innermost call of a thread, and the user's innermost lines.

    Args:
      thread: the identifier of the thread.
      until: the frame whose callers are left out.
    """
    frames = stacks.frames(thread)
    if until is not None:
        frames = frames[: frames.index(until)] if until in frames else []
    calls = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    of_user = [call for call in calls if not _jaxcompat.in_library(call.filename)]
    shown = of_user[:STACK_LINES]
    if calls[:1] != of_user[:1]:
        shown = [*calls[:1], *shown]
    lines = ["(compiling)"] if _jaxcompat.compiling(thread) else []
    for call in shown:
        place = f"{os.path.basename(call.filename)}:{call.lineno} in {call.name}"
        lines.append(f"{place}: {call.line}" if call.line else place)
    return lines
