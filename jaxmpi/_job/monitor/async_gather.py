"""What all ranks say of one thing, whenever each of them comes to it; rank 0 looks at it once all have said it."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxmpi._job.monitor.watching import Watching

__all__ = ["Gathering"]

T = TypeVar("T")
TOPIC = "gather"
KEPT = 64  # keys with the messages of some ranks


class Gathering:
    """Collects messages by key, in the monitors' threads; no rank waits."""

    def __init__(self, monitor: Watching) -> None:
        self._monitor = monitor
        self._messages: dict[str, dict[int, object]] = {}  # by rank
        self._counts: Counter[str] = Counter()
        self._judges: dict[str, Callable[[Sequence[Any]], str]] = {}
        self._lock = threading.Lock()
        monitor.topics[TOPIC] = self._add

    def add(self, key: str, message: T, judge: Callable[[Sequence[T]], str]) -> None:
        """Add this rank's message: its n-th with this key is looked at with the others' n-th.

        Args:
          key: what the message is about.
          message: a picklable object.
          judge: on rank 0, takes all ranks' messages, and returns a line to say, or "".
        """
        rank = self._monitor.backend.place.rank
        with self._lock:
            self._counts[key] += 1
            key = f"{key} {self._counts[key]}"
            if not rank:
                self._judges[key] = judge
        if rank:
            self._monitor.send(0, TOPIC, (key, message))
        else:
            self._add(rank, (key, message))

    def _add(self, rank: int, said: tuple[str, object]) -> None:
        key, message = said
        with self._lock:
            of_ranks = self._messages.setdefault(key, {})
            of_ranks[rank] = message
            for old in list(self._messages)[:-KEPT]:  # of programs that some rank has not run
                del self._messages[old]
                self._judges.pop(old, None)
            complete = len(of_ranks) == self._monitor.backend.place.size  # rank 0's judge, too
            judge = self._judges.pop(key) if complete else None
            if complete:
                del self._messages[key]
        if judge and (text := judge([of_ranks[r] for r in sorted(of_ranks)])):
            self._monitor.say(text)
