"""The record that `jaxmpi top` reads of this rank.

Twice a second the monitor writes it to memory that other processes of this user can read, as
`_job/process/live_record.py` describes.
"""

import contextlib
import os
import threading
import time
from collections import deque

from jaxmpi import _jaxcompat
from jaxmpi._job.monitor.monitor import Monitor, doing
from jaxmpi._job.process.busy import work
from jaxmpi._job.process.live_record import Writer

__all__ = ["Live"]

RECORD_EVERY_SECONDS = 0.5
SAMPLE_RATE_SECONDS = 5.0  # over which samples per second are counted
MAX_DOING_LETTERS = 200
MAX_HOSTS = 256  # in a record, which has a fixed size


class Live:
    """The writer of one rank's record."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor, self._backend = monitor, monitor.backend
        self._due, self._entered, self._since = 0.0, -1, time.monotonic()
        self._main_thread = threading.main_thread().ident or 0
        # When the last records were written, and how many samples had been counted.
        self._counts: deque[tuple[float, int]] = deque(
            maxlen=1 + round(SAMPLE_RATE_SECONDS / RECORD_EVERY_SECONDS)
        )
        # Without memory for the record, `jaxmpi top` does not show this rank; the job goes on.
        with contextlib.suppress(OSError):
            self._writer = Writer()
            self._backend.programs.share(self._writer.counts)
            monitor.watchers.append(self._look)
            monitor.at_end.append(lambda _: self._look())
            monitor.end_watchers.append(self._look)  # while this rank waits for the others
            monitor.at_common_end.append(self._close)

    def _look(self) -> None:
        now = time.monotonic()
        # At every look, ten times a second, so that "since_ns" is when this collective began.
        entered, _, inside, _ = self._backend.progress()
        if entered != self._entered:
            self._entered, self._since = entered, now
        if now < self._due:
            return
        self._due = now + RECORD_EVERY_SECONDS
        self._counts.append((now, self._monitor.samples))
        place, members = self._backend.place, self._monitor.members
        mine = work()
        called = [*_jaxcompat.callbacks()]
        at_work = self._backend.long_operation or (str(mine.block) if mine.counts else "")
        self._writer.write(
            {
                "rank": place.rank,
                "size": place.size,
                "pid": os.getpid(),
                "host": members[place.rank][1],
                "job": f"{members[0][0]}@{members[0][1]}",  # the process of its rank 0
                "hosts": sorted({host for _, host in members})[:MAX_HOSTS],
                "transport": self._backend.transport.name,
                "entered": entered,
                "inside": inside,
                "doing": at_work or str(doing(self._backend))[:MAX_DOING_LETTERS],
                "at": _jaxcompat.called_at(called[0] if called else self._main_thread),
                "in_callback": bool(called),
                "busy": bool(at_work),
                "since_ns": int(1e9 * self._since),
                "written_ns": time.monotonic_ns(),
                "samples": self._monitor.samples,
                "samples_per_second": self._samples_per_second(),
            }
        )

    def _close(self) -> str:
        """Show this rank no more: after `finalize` it is none."""
        self._backend.programs.share([0, 0])
        self._writer.close()
        return ""

    def _samples_per_second(self) -> float | None:
        """Return the rate that `Throughput.add` has counted; None where it has counted nothing."""
        (first, before), (last, after) = self._counts[0], self._counts[-1]
        return (after - before) / (last - first) if after and last > first else None
