"""The call of `jaxmpi.preempted` at which all ranks stop, once one of them has got SIGTERM.

The ranks call `preempted` once a step, but they are not at the same step at the same moment. So
they agree on a call, by messages between the monitors' threads:

1. The rank that got the signal tells rank 0 (topic "stop").
2. Rank 0 asks all ranks how many calls have returned ("stop: ask"). From its answer on
   ("stop: calls"), a rank's next call waits for step 3.
3. Rank 0 tells all ranks the call to stop at: one more than the highest count ("stop: at"). That
   call has returned on no rank yet, so it can return True on all of them.

The threads answer whatever the main threads do, so the wait is short (`AgreedPreemption`). Without
a monitor that can talk, each rank notes the signal alone (`LocalPreemption`): it is the only rank,
or `preempted` gathers these notes.
"""

import contextlib
import os
import signal
import threading
from typing import Protocol

from jaxmpi._job.monitor.monitor import Monitor
from jaxmpi._job.process import joining, run_dir

__all__ = ["AgreedPreemption", "LocalPreemption", "Preemption"]


class Preemption(Protocol):
    """A listener for SIGTERM in this process."""

    def listen(self) -> None:
        """Handle SIGTERM from now on, unless the script has a handler of its own."""

    def requested(self) -> bool:
        """Return whether to stop at this call."""

    def release(self) -> None:
        """Let SIGTERM end this process again: at the end of the session, and in a forked child."""


def _tell_run(rank: int, *, alone: bool) -> None:
    """Tell `jaxmpi run` that it may pass SIGTERM on to this rank, which stops in order at it.

    A process that a rank has started is none of the ranks, and tells nothing.

    Args:
      rank: the rank.
      alone: whether it has not joined the run yet.
    """
    if joining.parent() is None:
        with contextlib.suppress(KeyError, OSError):
            directory = os.environ["JAXMPI_RUN_DIR"]
            if alone:
                run_dir.join_alone(directory)
            run_dir.note_preemptible(directory, rank)


class LocalPreemption:
    """A rank that notes the signal alone."""

    def __init__(self, rank: int, *, alone: bool) -> None:
        """Note nothing yet.

        Args:
          rank: the rank.
          alone: whether it is the only one of the job, which has not joined the run in `init`.
        """
        self._rank, self._alone = rank, alone
        self._signalled = self._listens = False

    def listen(self) -> None:
        """Note SIGTERM from now on, unless the script has a handler of its own."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._listens or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._listens = True
        signal.signal(signal.SIGTERM, self._on_signal)
        _tell_run(self._rank, alone=self._alone)

    def requested(self) -> bool:
        """Return whether this process has got a SIGTERM."""
        return self._signalled

    def release(self) -> None:
        """Restore the handler, unless the script has set one since."""
        listened, self._listens = self._listens, False
        # another thread may not set handlers: then `_on_signal` does at the first signal
        is_main = threading.current_thread() is threading.main_thread()
        if listened and is_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, *_: object) -> None:
        self._signalled = True
        if not self._listens:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


class AgreedPreemption:
    """This rank's part in the agreement of the monitors."""

    def __init__(self, monitor: Monitor, size: int, rank: int) -> None:
        self._size, self._rank = size, rank
        self._monitor = monitor
        self._preempted_rank = rank  # on rank 0: the one that got the SIGTERM
        self._changed = threading.Condition()
        self._calls, self._asked = 0, False
        self._stop_at: int | None = None  # the first call that returns True
        self._counts: dict[int, int] = {}  # on rank 0: the calls of each rank
        self._listens = False
        monitor.topics["stop"] = self._on_stop
        monitor.topics["stop: ask"] = self._on_ask
        monitor.topics["stop: calls"] = self._on_calls
        monitor.topics["stop: at"] = self._on_stop_at

    def listen(self) -> None:
        """Tell rank 0 of a SIGTERM from now on, unless the script has a handler of its own."""
        if self._listens:
            return
        self._listens = self._monitor.signals.register(
            signal.SIGTERM, lambda: self._send(0, "stop", self._rank)
        )
        if self._listens:
            _tell_run(self._rank, alone=False)

    def requested(self) -> bool:
        """Return whether to stop at this call: the same on all ranks at their n-th call."""
        # The wait and the count are one step. If rank 0's question came between them, this rank
        # would have answered with one call less than it then returns from.
        with self._changed:
            if self._asked and self._stop_at is None:
                with self._monitor.backend.waiting("jaxmpi.preempted, after a SIGTERM"):
                    self._changed.wait_for(lambda: self._stop_at is not None)
            self._calls += 1
            if self._stop_at is None or self._calls < self._stop_at:
                return False
        if self._calls == self._stop_at and self._rank == 0:
            self._monitor.say(
                f"rank {self._preempted_rank} was told to end (SIGTERM): all ranks stop at the "
                "same point."
            )
        return True

    def release(self) -> None:
        """Do nothing: the monitor restores the handlers that it has replaced."""

    def _send(self, rank: int, topic: str, message: object) -> None:
        if rank == self._rank:
            self._monitor.topics[topic](rank, message)
        else:
            self._monitor.send(rank, topic, message)

    # messages to rank 0

    def _on_stop(self, rank: int, preempted_rank: int) -> None:
        if not self._asked:
            self._preempted_rank = preempted_rank
            for other in range(self._size):
                self._send(other, "stop: ask", None)

    def _on_calls(self, rank: int, calls: int) -> None:
        self._counts[rank] = calls
        if len(self._counts) == self._size:
            for other in range(self._size):
                self._send(other, "stop: at", max(self._counts.values()) + 1)

    # messages to all ranks

    def _on_ask(self, rank: int, _: None) -> None:
        with self._changed:
            self._asked = True
            calls = self._calls
        self._send(0, "stop: calls", calls)

    def _on_stop_at(self, rank: int, call: int) -> None:
        with self._changed:
            self._stop_at = call
            self._changed.notify_all()
