"""Messages on stderr and the last steps of a process: they neither raise nor wait for ever.

The stream may be full, closed or gone; the monitor must end the job all the same.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from jaxmpi._job.process.at_exit import start_thread

__all__ = ["SAY_SECONDS", "at_most", "end_process", "one_line", "say"]

ABORT_SECONDS = 10  # for MPI_Abort to end this process
SAY_SECONDS = 2.0  # for a stream that nobody reads at the moment, such as a paused terminal
# If it was closed when Python started, its number may belong to another file by now.
_HAS_STDERR = sys.__stderr__ is not None


def say(text: str) -> None:
    """Write to `sys.stderr`.

    If that fails, as it is gone, closed or full, write to the file descriptor of stderr.
    """
    at_most(SAY_SECONDS, lambda: _write(text))


def at_most(seconds: float, call: Callable[[], object]) -> None:
    """Make a call in a thread, and wait for so many seconds at most; its exception is dropped."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            call()

    try:
        thread = start_thread(quietly, "jaxmpi-words", stop=lambda: None)
    except RuntimeError:  # Python shuts down, or there are too many threads
        quietly()
    else:
        thread.join(seconds)


def end_process(code: int, abort: Callable[[int], object]) -> NoReturn:
    """End the job by `abort`, and this process even if `abort` fails.

    Args:
      code: the exit code.
      abort: ends all ranks, by MPI_Abort.
    """
    # `abort` may hold the GIL and never return: the kernel ends the process then.
    signal.alarm(ABORT_SECONDS)
    try:
        abort(code)
    finally:
        os._exit(code)


def one_line(error: BaseException) -> str:
    """Return an exception in one line; its own `__str__` may fail."""
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
