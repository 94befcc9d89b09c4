"""The garbage collector, paused where it has nothing to collect, or must not run Python code."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

__all__ = ["collection_paused"]

_lock = threading.Lock()
_pauses = 0  # under way, of all threads
_was_on = False  # before the first of them
_process = os.getpid()  # whose pauses these are


def _forget_pauses() -> None:
    """Collect again in a forked child: the other threads that have paused it are not there."""
    global _lock, _pauses, _process
    _lock, _process = threading.Lock(), os.getpid()
    if _pauses and _was_on:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_forget_pauses)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause automatic garbage collection, for work that makes many objects and few cycles.

    A full collection looks at every object of the process, and tracing a program makes so many that
    one comes in the middle of it: a fifth of the time from a function to its lowered program.

    Around a trace, use it in a `with` block: as a decorator it would add a frame of contextlib,
    which would count as the user's line. A pause in which the process is forked ends in the child
    with the fork.
    """
    global _pauses, _was_on
    with _lock:
        # In this order, another thread may fork at any time: `_forget_pauses` sees the pause.
        if _pauses == 0:
            _was_on = gc.isenabled()
        _pauses += 1
        gc.disable()
        process = _process
    try:
        yield
    finally:
        with _lock:
            if process == _process:
                if _pauses == 1 and _was_on:
                    gc.enable()
                _pauses -= 1
