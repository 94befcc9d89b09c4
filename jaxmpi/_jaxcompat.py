"""The one file that touches `jax._src`. Tested with jax 0.10.2, 0.11.2 and 0.12.0.1."""

import sys
from collections.abc import Callable
from types import FrameType

from jax._src import core, dispatch

__all__ = ["tracing", "watch_communication"]


def tracing() -> bool:
    """Whether the caller stands inside a traced function (`jit`, `grad`, `vmap`, ...)."""
    return not core.trace_state_clean()


def watch_communication() -> Callable[[], bool]:
    """Return a function that any thread may call: does this process wait for a program with ordered effects?

    Such a program is either being dispatched by some thread (small ones run on it), or it runs and its token, which the
    runtime token set of the thread that called `watch_communication` holds, is not ready yet.
    """
    token_set = dispatch.runtime_tokens.__dict__  # a `threading.local`: this thread's own dictionary

    def waits() -> bool:
        if any(_dispatches(frame) for frame in sys._current_frames().values()):
            return True
        return any(not token._buf.is_ready() for token in list(token_set.get("current_tokens", {}).values()))

    return waits


def _dispatches(frame: FrameType | None) -> bool:
    while frame is not None:
        executable = frame.f_locals.get("self") if frame.f_code.co_filename.endswith("pxla.py") else None
        if getattr(executable, "ordered_effects", None):
            return True
        frame = frame.f_back
    return False
