"""The frames of a thread, for other threads that look at it."""

import contextlib
import operator
import sys
import threading
from itertools import accumulate, chain, repeat
from types import FrameType

from jaxmpi._job.process.garbage import collection_paused

__all__ = ["frames", "frames_of_others"]

_CURRENT_FRAMES = [sys._current_frames]  # for `map`, which calls it within the walk


def frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; none if it runs no Python.

    Nobody may ask a frame of the result for its `f_back`: when its function has returned meanwhile,
    CPython 3.11 may find memory there that is no frame any more, and the process crashes. (A look
    at a thread that traces a program, ten thousand times a second, crashes within seconds.) So all
    frames are taken before another thread can run: the walk is one call of a function in C, and
    nothing in it runs Python code.

    Args:
      thread: its identifier.
    """
    found: list[FrameType | None] = []
    with _without_python_code():
        innermost = map(operator.methodcaller("get", thread), map(operator.call, _CURRENT_FRAMES))
        # accumulate(x, "f_back", "f_back", ...) by getattr: x, x.f_back, x.f_back.f_back, ...
        walk = accumulate(chain(innermost, repeat("f_back")), getattr)
        with contextlib.suppress(AttributeError):  # of None, after the outermost frame
            found.extend(walk)
    try:
        return [frame for frame in found if frame is not None]
    finally:
        found.clear()  # of the calling thread, it has this function's own frame: a cycle


def frames_of_others() -> dict[int, list[FrameType]]:
    """Return the frames of the other threads that run Python, as in `frames`, by identifier."""
    with _without_python_code():
        threads = set(sys._current_frames()) - {threading.get_ident()}
    return {thread: frames(thread) for thread in threads}


def _without_python_code() -> contextlib.AbstractContextManager[None]:
    """Let objects be made without a garbage collection, which may run Python code.

    That would let another thread run: in the middle of a walk, or of `sys._current_frames`.

    From Python 3.12 on, no collection runs inside of a function in C.
    """
    return collection_paused() if sys.version_info < (3, 12) else contextlib.nullcontext()
