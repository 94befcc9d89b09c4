"""The ranks agree on a call to stop at, once one of them has got a signal to end.

The rank with the signal tells rank 0, which asks all ranks how many calls have returned. From then
on the next call of each waits until rank 0 has told which one is true: the one after the highest of
these numbers, which has returned nowhere yet. The monitors' threads do the talking, whatever the
main threads do, so that wait is short.
"""

import contextlib
import os
import signal
import threading
from typing import Any

from jaxmpi._job.monitor.watching import Watching
from jaxmpi._job.process import run_dir

__all__ = ["Preemption"]


class Preemption:
    """One rank's part in it."""

    def __init__(self, monitor: Watching | None, size: int, rank: int) -> None:
        """Listen to the other ranks, where there are any to listen to: `monitor` may be None."""
        self.signalled = False
        self._size, self._rank = size, rank
        self._monitor: Any = monitor  # which is there where it is used
        self._who = rank
        self._changed = threading.Condition()
        self._calls, self._asked = 0, False
        self._at: int | None = None  # the first call that is true
        self._counts: dict[int, int] = {}
        self._watching = False
        if monitor:
            monitor.topics["stop"] = self._on_stop
            monitor.topics["stop: ask"] = self._on_ask
            monitor.topics["stop: calls"] = self._on_calls
            monitor.topics["stop: at"] = self._on_at

    def watch(self) -> None:
        """Take over SIGTERM, unless the script has a handler of its own."""
        if self._watching:
            return
        if self._monitor:
            self._watching = self._monitor.signals.take(
                signal.SIGTERM, lambda: self._send(0, "stop", self._rank)
            )
            if self._watching:
                with contextlib.suppress(KeyError, OSError):  # tells `jaxmpi run` whom to tell
                    run_dir.takes_sigterm(os.environ["JAXMPI_RUN_DIR"], self._rank)
        elif (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            self._watching = True
            signal.signal(signal.SIGTERM, self._on_signal)

    def now(self) -> bool:
        """Whether to stop at this call."""
        # both in one: a call that is asked about between them would count for one rank and not for
        # the others
        with self._changed:
            if self._asked and self._at is None:
                with self._monitor.backend.waiting("jaxmpi.preempted, after a SIGTERM"):
                    self._changed.wait_for(lambda: self._at is not None)
            self._calls += 1
            if self._at is None or self._calls < self._at:
                return False
        if self._calls == self._at and self._rank == 0:
            self._monitor.say(
                f"rank {self._who} was told to end (SIGTERM): all ranks stop at the same point."
            )
        return True

    def _on_signal(self, *_: object) -> None:
        self.signalled = True

    def _send(self, rank: int, topic: str, message: object) -> None:
        if rank == self._rank:
            self._monitor.topics[topic](rank, message)
        else:
            self._monitor.send(rank, topic, message)

    # on rank 0

    def _on_stop(self, rank: int, who: int) -> None:
        if not self._asked:
            self._who = who
            for other in range(self._size):
                self._send(other, "stop: ask", None)

    def _on_calls(self, rank: int, calls: int) -> None:
        self._counts[rank] = calls
        if len(self._counts) == self._size:
            for other in range(self._size):
                self._send(other, "stop: at", max(self._counts.values()) + 1)

    # on all

    def _on_ask(self, rank: int, _: None) -> None:
        with self._changed:
            self._asked = True
            calls = self._calls
        self._send(0, "stop: calls", calls)

    def _on_at(self, rank: int, at: int) -> None:
        with self._changed:
            self._at = at
            self._changed.notify_all()
