"""Values that must be equal on all ranks, compared between neighbors by their monitors.

At the same call each rank sends its values, such as the learning rate of a step, to the rank before
it, which compares them with its own. If any rank differs from another one, then so do two
neighbors, and one of these tells all ranks.

No rank waits for another one. The ranks are not at the same call when they are told, so each raises
the error at its next call (`_jit.numbers`), or ends the job at the end of its script.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from jaxmpi._consistency.findings import Finding
from jaxmpi._job.monitor.monitor import Monitor, RankEnd

__all__ = ["At", "NeighborExchange", "Stream"]

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

MAX_KEPT = 256  # calls whose values only one side has, and streams whose last call is compared


class At(NamedTuple):
    """A call of a program with collectives, which all ranks make in one order.

    Attributes:
      errors: the number of mismatches that all ranks have raised so far.
      call: the number of calls since the last of them.
      subject: the values of the call.
    """

    errors: int
    call: int
    subject: str = "numbers"


class Stream(Protocol):
    """The calls of one step on this rank."""

    def difference(self, mine: Any, theirs: Any, rank: int) -> Finding | None:
        """Return the finding for values of this rank and of rank `rank`; None if they agree."""

    def send_last(self) -> None:
        """Add the numbers of the last call to the exchange."""


class NeighborExchange:
    """This rank's part in the comparison.

    A rank that leaves only records a finding; `_unraised` ends the job once all ranks have come to
    their ends.

    Attributes:
      calls, errors: as in `At`.
      found: what was found and not yet raised on this rank, with the `errors` of its call.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.calls = self.errors = 0
        self.found: list[tuple[int, Finding]] = []
        self.poll = partial(monitor.poll, ("neighbor", "neighbors differ"))
        self._monitor, self._registry = monitor, monitor.backend.registry
        self._rank, self._size = monitor.backend.place.rank, monitor.backend.place.size
        self._lock = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._mine: dict[At, tuple[object, Stream]] = {}
        self._theirs: dict[At, object] = {}  # of the next rank
        self._leaving = False
        monitor.topics["neighbor"] = self._on_values
        monitor.topics["neighbors differ"] = self._on_finding
        monitor.at_end.append(self._at_end)
        monitor.at_common_end.append(self._unraised)

    def watch(self, stream: Stream) -> None:
        """Compare the last call of a stream, too, at the end of the script."""
        with self._lock:
            _keep(self._streams, id(stream), stream)

    def add(self, stream: Stream, at: At, values: object) -> None:
        """Compare the values of a call with those of the neighbors, once they have theirs."""
        if self._rank > 0:
            self._monitor.send(self._rank - 1, "neighbor", (at, values))
        if self._rank < self._size - 1:
            with self._lock:
                _keep(self._mine, at, (values, stream))
            self._compare(at)

    def _on_values(self, rank: int, message: tuple[At, object]) -> None:
        at, values = message
        with self._lock:
            _keep(self._theirs, at, values)
        self._compare(at)

    def _compare(self, at: At) -> None:
        """Compare the values of a call if both ranks' are here, and tell all ranks."""
        with self._lock:
            if at not in self._mine or at not in self._theirs:
                return
            (mine, stream), theirs = self._mine.pop(at), self._theirs.pop(at)
        finding = None if mine == theirs else stream.difference(mine, theirs, self._rank + 1)
        if finding is None:
            return
        # A rank that leaves sends no more; then the others leave, too, and this one ends the job.
        if not self._leaving:
            self._monitor.send_all("neighbors differ", (at, finding))
        self._on_finding(self._rank, (at, finding))

    def _on_finding(self, rank: int, message: tuple[At, Finding]) -> None:
        at, finding = message
        with self._lock:
            # Several ranks may tell the same; what was raised already is no news.
            found = at.errors, finding
            if at.errors == self._registry.mismatches and found not in self.found:
                self.found.append(found)

    def count(self, has_failed: Callable[[T], bool], output: T) -> bool:
        """Count a call of a program with collectives, and return whether it counts.

        After a mismatch all ranks restart the count. A rank with programs under way may see further
        calls fail by the same mismatch; those do not count.

        Args:
          has_failed: waits for an output of a call, and returns whether its program has failed.
          output: an output of this call.
        """
        if self.errors != self._registry.mismatches:
            if has_failed(output):
                return False
            self.errors, self.calls = self._registry.mismatches, 0
        self.calls += 1
        return True

    def next_call(self, subject: str) -> At:
        """Return the place in time of what is compared before the next call."""
        mismatches = self._registry.mismatches
        return At(mismatches, self.calls if self.errors == mismatches else 0, subject)

    def take(self) -> Finding | None:
        """Return a finding for this rank to raise, once."""
        with self._lock:
            while self.found:
                errors, finding = self.found.pop(0)
                # Another rank may have told the same while this one raised it.
                if errors == self._registry.mismatches:
                    return finding
            return None

    def note_error(self) -> None:
        """Note that a call raises a mismatch, as on all ranks.

        It counts on some of them, and not on others, so they begin to count again. What was found
        until now is dropped: it is this error.
        """
        with self._lock:
            self.errors, self.calls = self._registry.mismatches, 0
            self.found.clear()

    def forget(self) -> None:
        """Forget what was compared: these ranks run another program from now on."""
        with self._lock:
            for kept in (self._streams, self._mine, self._theirs, self.found):
                kept.clear()

    def _at_end(self, end: RankEnd) -> None:
        """Compare the last calls, where the script ends in order."""
        if not end.in_order:
            return
        self._leaving = True
        for stream in list(self._streams.values()):
            stream.send_last()

    def _unraised(self) -> str:
        """Return why the job ends at the end of the script; "" for no reason."""
        finding = self.take()
        return str(finding.error()) if finding else ""


def _keep(kept: dict[K, V], key: K, value: V) -> None:
    """Add an entry, and drop the oldest ones: those of another rank may never come."""
    kept[key] = value
    for old in list(kept)[:-MAX_KEPT]:
        del kept[old]
