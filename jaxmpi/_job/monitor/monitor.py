"""No rank waits for one that is gone.

MPI does not end a job when one rank raises or exits: the others wait in their next collective for
ever. On every rank of more than one, a Monitor therefore sees to it that
- an exception that nobody handles is printed with its rank and ends the whole job;
- a rank that exits while others still wait for it ends the job, too; one that exits at the end
  waits for the others;
- an interrupt ends a rank that stands inside MPI and cannot react to it;
- a rank that is killed is named: by MPI's launcher, by `jaxmpi run`, or else by a death reporter
  (death_reporter.py).
A thread does the watching, by messages that cost nothing while nothing happens. Others use it, too:
`Monitor.print`, the stall watch, the flight recorder, and the agreement on a call to stop at.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from jaxmpi import _jaxcompat
from jaxmpi._backends.process_group import MpiProcessGroup
from jaxmpi._consistency import compare
from jaxmpi._job.monitor import death_reporter
from jaxmpi._job.monitor.async_gather import Gathering
from jaxmpi._job.monitor.flight_recorder import Recorder, where
from jaxmpi._job.monitor.live import Live
from jaxmpi._job.monitor.messages import Messages
from jaxmpi._job.monitor.preemption import Preemption
from jaxmpi._job.monitor.watchdog import Watchdog
from jaxmpi._job.process import at_exit, joining, run_dir, stderr
from jaxmpi._job.process.signals import Signals

__all__ = ["Monitor"]

POLL_SECONDS = 0.1
# a communicating program may run on for so long after a rank that took part in it has left
GRACE_SECONDS = 4.0
# for MPI's launcher to miss a rank that was killed, to say so and to end the others
KILLED_SECONDS = 2.0
END_SECONDS = 15.0  # for records and words before the end, where a disk or a stream does not answer
LEAVE_SECONDS = 30.0  # for the monitor's thread to end
GREETED = 256  # ranks of other hosts, at most: a connection takes a file and some memory


class Monitor(Messages):
    """One rank's watch over the others."""

    def __init__(self, backend: MpiProcessGroup) -> None:
        super().__init__(backend)
        self.listening = backend.concurrent  # without MPI_THREAD_MULTIPLE there is nobody to watch
        self.watchers: list[Callable[[], None]] = []  # called by the thread, ten times a second
        self.topics["left"] = self._on_left
        self.at_end: list[Callable[[str], object]] = []  # called with the reason
        self.stop = Preemption(self, backend.place.size, backend.place.rank)
        self.gathering = Gathering(self)
        self.signals = Signals()
        self.samples = 0  # that `Throughput` has counted on this rank
        self._stop = threading.Event()
        # the rank before this one, and the object collectives it took part in
        self._left: tuple[int, int] | None = None
        self._waiting_since: float | None = None
        self._waits = _jaxcompat.watch_communication()
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self.members = backend.allgather_object((os.getpid(), os.uname().nodename))  # of each rank
        self._dismiss_reporter = death_reporter.call(backend)
        self._stay = at_exit.at_exit(at_exit.Step.RANKS, self._at_exit)
        # `leave` ends it
        self._thread = threading.Thread(target=self._run, name=joining.MONITOR, daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        if self.listening:
            self._thread.start()
            Watchdog(self, Recorder(self))
            Live(self)
            self._greet()

    def _greet(self) -> None:
        """Open the connections to other hosts while the network works: one that is opened when it does not ends the job."""
        _, here = self.members[self.backend.place.rank]
        away = [rank for rank, (_, host) in enumerate(self.members) if host != here]
        if len(away) <= GREETED:
            for rank in away:
                self.send(rank, "hello", None)

    def _on_left(self, rank: int, entered: int) -> None:
        self._left = rank, entered

    # the thread

    def _run(self) -> None:
        """Watch until this rank leaves; whatever ends it sooner ends the job, as nobody would notice that others are gone."""
        why = "the thread that watches this rank has ended"
        try:
            joining.mark_thread(joining.MONITOR)
            self._watch()
        except BaseException as error:
            why = f"the thread that watches this rank has failed ({stderr.one_line(error)})"
            stderr.say(traceback.format_exc())
        finally:
            if not self._stop.is_set():
                self.end(1, f"{why}.")

    def _watch(self) -> None:
        while not self._stop.is_set():
            for call in self.signals.wait(POLL_SECONDS):
                self._call(call)
            self.poll()
            self.rounds.flush()
            for watch in self.watchers:
                self._call(watch)
            if self._left is not None and self._waits_for_ever(*self._left):
                self.end(1, self._why_left(self._left[0]))
            if self.signals.interrupt_is_stuck(POLL_SECONDS):
                self.end(130, "interrupted while it waited inside a collective.")

    def _why_left(self, rank: int) -> str:
        _, inside = self.backend.progress()
        place = where(self.backend) if inside else "in a collective"
        why = f"rank {rank} has exited while this rank waits for it {place}. Every rank must make the same calls."
        return " ".join(filter(None, [why, compare.uneven_shard(self.backend)]))

    def _waits_for_ever(self, rank: int, entered: int) -> bool:
        mine, inside = self.backend.progress()
        if inside and mine > entered:
            return True
        if not self._waits():
            self._waiting_since = None
            return False
        self._waiting_since = self._waiting_since or time.monotonic()
        return time.monotonic() - self._waiting_since > GRACE_SECONDS

    # the ends

    def end(self, code: int, why: str) -> None:
        """End the whole job with a line that says which rank and why."""
        try:
            stderr.at_most(END_SECONDS, lambda: self._prepare_end(why))
        finally:
            stderr.end_process(code, self.backend.abort)

    def _prepare_end(self, why: str) -> None:
        stderr.at_most(stderr.SAY_SECONDS, lambda: sys.stdout.flush())
        for call in self.at_end:
            self._call(call, why)
        self.say(f"{why} The job ends.")
        time.sleep(0.1)  # let the launcher pass the lines on
        if self._left is None and self._has_lost_one():
            # who aborts before the launcher knows would be named instead
            time.sleep(KILLED_SECONDS)
        self._dismiss_reporter()

    def _has_lost_one(self) -> bool:
        """Whether a rank of this host has ended."""
        _, here = self.members[self.backend.place.rank]
        return any(run_dir.state(pid) == "ended" for pid, host in self.members if host == here)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        try:
            lines = "".join(traceback.format_exception(kind, error, trace)).splitlines(
                keepends=True
            )
            label = f"[{self.backend.place.rank}] "
            run_dir.note_refused_count(error)
            stderr.say("".join(label + line for line in lines))
        finally:
            self.end(code, f"{stderr.one_line(error)}.")

    def _at_exit(self) -> None:
        try:
            self.leave()
        except BaseException as error:  # or else it would wait for the others in MPI_Finalize
            self.end(1, f"the end of this rank has failed ({stderr.one_line(error)}).")

    def leave(self) -> None:
        """Wait until every rank has come to its end; tell the next rank when that takes long."""
        if self._stop.is_set():
            return
        self.backend.finish()
        for call in self.at_end:
            self._call(call, "the end")
        self._stop.set()
        if self.listening:
            self._thread.join(LEAVE_SECONDS)
            if self._thread.is_alive():
                raise RuntimeError("the thread that watches this rank does not end")
        self._wait(self.backend.sent, self.backend.place.size)
        self._wait(self.backend.everyone_leaves(), self.backend.place.size)
        self._dismiss_reporter()
        self.poll()
        self.rounds.flush(all_rounds=True)
        sys.excepthook = self._excepthook
        self.signals.release()
        self._stay()
        if directory := os.environ.get("JAXMPI_RUN_DIR"):
            run_dir.leave(directory, self.backend.place.rank)

    def abandon(self) -> None:
        """Leave nothing of it in a forked child, nor what the rank does at its end: JAX and MPI would hang there."""
        sys.excepthook = self._excepthook
        self.signals.release(wake_others=False)
        at_exit.forget()
        _jaxcompat.leave_as_it_is()
        self.signals.go_on()

    def _wait(self, done: Callable[[], bool], size: int) -> None:
        """Sleep until `done`; after a second tell the next rank that this one has left."""
        start, told, pause = time.monotonic(), False, 0.0005
        while not done():
            self.poll()
            if not told and time.monotonic() - start > 1.0:
                told = True
                self.send((self.backend.place.rank + 1) % size, "left", self.backend.progress()[0])
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
