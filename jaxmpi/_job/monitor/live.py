"""What `jaxmpi top` shows of this rank: its monitor says twice a second where it is, in memory that others can read."""

import contextlib
import os
import time
from collections import deque

from jaxmpi._job.monitor.flight_recorder import where
from jaxmpi._job.monitor.watching import Watching
from jaxmpi._job.process.busy import work
from jaxmpi._job.process.live_record import Writer

__all__ = ["Live"]

EVERY_SECONDS = 0.5
RATE_SECONDS = 5.0  # over which samples per second are counted


class Live:
    """One rank's."""

    def __init__(self, monitor: Watching) -> None:
        self._monitor, self._backend = monitor, monitor.backend
        self._next, self._entered, self._since = 0.0, -1, time.monotonic()
        self._counts: deque[tuple[float, int]] = deque(
            maxlen=1 + round(RATE_SECONDS / EVERY_SECONDS)
        )
        # without memory for it there is nothing to see, and nothing else is lost
        with contextlib.suppress(OSError):
            self._writer = Writer()
            monitor.watchers.append(self._look)
            monitor.at_end.append(lambda _: self._look())

    def _look(self) -> None:
        now = time.monotonic()
        entered, inside = self._backend.progress()
        if entered != self._entered:
            self._entered, self._since = entered, now
        if now < self._next:
            return
        self._next = now + EVERY_SECONDS
        self._counts.append((now, self._monitor.samples))
        place, members = self._backend.place, self._monitor.members
        mine = work()
        at_work = self._backend.long_operation or (str(mine.block) if mine.counts else "")
        self._writer.write(
            {
                "rank": place.rank,
                "size": place.size,
                "pid": os.getpid(),
                "host": members[place.rank][1],
                "job": f"{members[0][0]}@{members[0][1]}",  # the process of its rank 0
                "hosts": sorted({host for _, host in members})[:256],
                "transport": getattr(self._backend, "transport", self._backend.name),
                "entered": entered,
                "inside": inside,
                "doing": at_work or where(self._backend)[:200],
                "busy": bool(at_work),
                "since_ns": int(1e9 * self._since),
                "written_ns": time.monotonic_ns(),
                "samples": self._monitor.samples,
                "samples_per_second": self._rate(),
            }
        )

    def _rate(self) -> float | None:
        """Samples per second that `Throughput.add` has counted; None where it has counted none."""
        (first, before), (last, after) = self._counts[0], self._counts[-1]
        return (after - before) / (last - first) if after and last > first else None
