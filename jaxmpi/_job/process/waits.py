"""The sleeps of a rank that waits for what it must look at again and again."""

import time
from collections.abc import Iterator

__all__ = ["waits"]

SHARE = 1 / 16  # of the wait so far that a sleep takes, and so makes the wait longer at most


def waits(shortest_seconds: float, longest_seconds: float) -> Iterator[float]:
    """Yield the seconds to sleep after each look, which grow with the time of the wait.

    Args:
      shortest_seconds: of a sleep, for what comes at once.
      longest_seconds: of a sleep, for what comes late.
    """
    began = time.monotonic()
    while True:
        waited_seconds = time.monotonic() - began
        yield min(max(SHARE * waited_seconds, shortest_seconds), longest_seconds)
