"""What the watch says on stderr, and what it does before a job ends: neither may raise, nor wait for ever."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from jaxmpi._job.process.at_exit import start_thread

__all__ = ["SAY_SECONDS", "at_most", "end_process", "one_line", "say"]

ABORT_SECONDS = 10  # for MPI to end this process
SAY_SECONDS = 2.0  # for a stream that nobody reads at the moment
# if it was closed when Python started, its number may be another file's by now
_HAS_STDERR = sys.__stderr__ is not None


def say(text: str) -> None:
    """Write to stderr; where `sys.stderr` is gone, closed or full, to the file descriptor that Python started with."""
    at_most(SAY_SECONDS, lambda: _write(text))


def at_most(seconds: float, call: Callable[[], object]) -> None:
    """Make a call in a thread of its own, and wait for it for so long; what it raises is dropped."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            call()

    try:
        thread = start_thread(quietly, "jaxmpi-words", stop=lambda: None)
    except RuntimeError:  # Python ends, or there are too many threads
        quietly()
    else:
        thread.join(seconds)


def end_process(code: int, abort: Callable[[int], object]) -> NoReturn:
    """End this process by `abort`, which ends the whole job; and where that does not, all the same."""
    signal.alarm(ABORT_SECONDS)  # `abort` may hold the GIL
    try:
        abort(code)
    finally:
        os._exit(code)


def one_line(error: BaseException) -> str:
    """An exception in one line; its own `__str__` may fail, too."""
    try:
        text = next((line for line in str(error).splitlines() if line.strip()), "no message")
    except Exception:
        text = "no message"
    return f"{type(error).__name__}: {text.rstrip('.')}"


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:
        if _HAS_STDERR:
            os.write(2, text.encode(errors="backslashreplace"))
