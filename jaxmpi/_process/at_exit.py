"""Calls at the very end of the process."""

import atexit
from collections.abc import Callable

__all__ = ["at_the_very_end"]

_calls: list[Callable[[], object]] = []
atexit.register(lambda: [call() for call in _calls])  # what is registered later, such as MPI's end, runs before it


def at_the_very_end(call: Callable[[], object]) -> None:
    """Call this after all that `atexit` knows, MPI's end among it; whoever registers it imports this module before `init`."""
    _calls.append(call)
