"""The one file that touches `jax._src`. Tested with jax 0.10.2, 0.11.2 and 0.12.0.1."""

import sys
import threading
from collections.abc import Callable

from jax._src import core, dispatch

__all__ = ["tracing", "watch_communication"]


def tracing() -> bool:
    """Whether the caller stands inside a traced function (`jit`, `grad`, `vmap`, ...)."""
    return not core.trace_state_clean()


def watch_communication() -> Callable[[], bool]:
    """Return a function that any thread may call: does the calling thread of now wait for a program with ordered effects?

    Such a program is either being dispatched (small ones run on the dispatching thread), or it runs and its token, which
    the thread's runtime token set holds, is not ready yet.
    """
    thread = threading.get_ident()
    token_set = dispatch.runtime_tokens.__dict__  # a `threading.local`: this thread's own dictionary

    def waits() -> bool:
        frame = sys._current_frames().get(thread)
        while frame is not None:
            executable = frame.f_locals.get("self") if frame.f_code.co_filename.endswith("pxla.py") else None
            if getattr(executable, "ordered_effects", None):
                return True
            frame = frame.f_back
        return any(not token._buf.is_ready() for token in list(token_set.get("current_tokens", {}).values()))

    return waits
