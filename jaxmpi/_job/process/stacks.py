"""The frames of a thread, for other threads that look at it."""

import contextlib
import operator
import sys
from itertools import accumulate, chain, repeat
from types import FrameType

from jaxmpi._job.process.garbage import collection_paused

__all__ = ["frames", "frames_of_all"]


def frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; none if it runs no Python.

    They stay what they are, and may be looked at later, but for `f_back`: of a frame whose function
    has returned meanwhile, CPython 3.11 may find memory that is no frame any more, and the process
    crashes. (A look at a thread that traces a program, ten thousand times a second, crashes within
    seconds.) So all of them are taken before another thread can run: the walk is one call of a
    function in C, and nothing in it runs Python code, as it makes no garbage collection.

    Args:
      thread: its identifier.
    """
    with collection_paused():
        found: list[FrameType | None] = []
        innermost = map(operator.methodcaller("get", thread), map(operator.call, _CURRENT_FRAMES))
        # accumulate(x, "f_back", "f_back", ...) by getattr: x, x.f_back, x.f_back.f_back, ...
        walk = accumulate(chain(innermost, repeat("f_back")), getattr)
        with contextlib.suppress(AttributeError):  # of None, after the outermost frame
            found.extend(walk)
    return [frame for frame in found if frame is not None]


def frames_of_all() -> dict[int, list[FrameType]]:
    """Return the frames of each thread that runs Python, as in `frames`, by identifier."""
    with collection_paused():
        threads = list(sys._current_frames())
    return {thread: frames(thread) for thread in threads}


_CURRENT_FRAMES = [sys._current_frames]
