"""The monitor of one rank: a thread that ends the job when another rank is gone.

MPI does not end a job when one rank raises or exits: the other ranks wait in their next collective
forever. Therefore each rank of a job of several has a Monitor, which ensures that

- an unhandled exception is printed with its rank and ends the whole job;
- a rank that exits while others wait for it ends the job; a rank that exits at the end of its
  script waits for the others;
- an interrupt (Ctrl-C) ends a rank that is inside MPI, where Python cannot react to it;
- a killed rank is named: by MPI's launcher, by `jaxmpi run`, or else by `death_reporter.py`.

The monitors send each other picklable objects by topic. Nobody has to be waiting for such a
message, and none is sent while nothing happens. The watchdog, the flight recorder, the live view,
preemption and `jaxmpi.print` use the same thread and the same messages.
"""

import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Progress
from jaxmpi._backends.mpi_ranks import Letter, MpiRanks
from jaxmpi._consistency import compare
from jaxmpi._job.monitor import death_reporter
from jaxmpi._job.monitor.ordered_output import Key, OrderedOutput
from jaxmpi._job.process import at_exit, jax_collectives, joining, run_dir, stderr
from jaxmpi._job.process.failure import Cause, Failure, marked
from jaxmpi._job.process.signals import Signals

__all__ = ["Doing", "Gathering", "Monitor", "RankEnd", "doing"]

T = TypeVar("T")

POLL_SECONDS = 0.1  # between two looks of the thread
# A communicating program may run this long after a rank that took part in it has left.
LEFT_RANK_GRACE_SECONDS = 4.0
RELAY_SECONDS = 0.1  # for MPI's launcher to pass on our last lines
# For MPI's launcher to notice a killed rank, to name it and to end the others.
LAUNCHER_NOTICE_SECONDS = 2.0
# For records and lines before the end, where a disk or a stream does not answer.
LAST_RECORDS_SECONDS = 15.0
MONITOR_THREAD_END_SECONDS = 30.0  # for the thread to end when the rank leaves
LEAVING_NOTICE_SECONDS = 1.0  # a rank waits this long at its end before it tells the next rank
# Later than a monitor ends the job for a rank that has left: it can say more than the library.
PLAIN_NOTICE_SECONDS = LEAVING_NOTICE_SECONDS + LEFT_RANK_GRACE_SECONDS + 2.0
MAX_GREETED_RANKS = 256  # on other hosts: a connection takes a file descriptor and some memory
MAX_GATHERINGS = 64  # incomplete gatherings that rank 0 keeps


class RankEnd(NamedTuple):
    """The end of this rank, before it comes."""

    in_order: bool  # at the end of its script; else it ends the job
    why: str  # for people


class Doing(NamedTuple):
    """The collective that a rank is in, or the last one that it was in."""

    phase: str  # "before" the first collective, "in" one, or "after" one
    call: str = ""  # such as "allreduce mean of float32[100] at train.py:12 of train_step"
    line: str = ""  # of the user's script, where `call` does not name it

    def __str__(self) -> str:
        if self.phase == "before":
            return "before its first collective"
        return f"{self.phase} {self.call}" + (f" at {self.line}" if self.line else "")


def doing(backend: MpiRanks) -> Doing:
    """Return which collective this rank is in or was in last; for any thread."""
    title, thread = backend.waits_for()
    if title:
        return Doing("in", title, _jaxcompat.called_at(thread))
    entered, _, inside, _ = backend.progress()
    if not entered:
        return Doing("before")
    fingerprint = backend.last_fingerprint()
    call = compare.describe(backend, fingerprint)
    if not inside:
        return Doing("after", call)
    # The description of a program has its source line. Any other collective has not returned yet,
    # so the line is the one at which its thread stands.
    if compare.is_program(backend, fingerprint):
        return Doing("in", call)
    return Doing("in", call, _jaxcompat.called_at(backend.turn.thread))


class Monitor:
    """The thread of one rank that watches the others, and the messages between such threads.

    Attributes:
      backend: the ranks.
      listening: whether monitors exchange messages; not without MPI_THREAD_MULTIPLE.
      members: process id and host of each rank.
      topics: the function that handles a message, by topic: called with the sender and the object.
      watchers: functions that the thread calls ten times a second.
      end_watchers: functions that `leave` calls ten times a second while it waits.
      at_end: functions called before this rank ends, in order or with the whole job.
      at_common_end: functions called once every rank has come to its end; a text that one returns
        ends the job as a failure.
      signals: the signals of this process, for the thread.
      gathering: objects of all ranks by key, compared on rank 0.
      rounds: text of all ranks that rank 0 prints.
      samples: the number of samples that `Throughput` has counted on this rank.
    """

    def __init__(self, backend: MpiRanks) -> None:
        self.backend = backend
        self.listening = backend.concurrent
        self.rounds = OrderedOutput(backend.place.size)
        self.topics: dict[str, Callable[[int, Any], object]] = {
            "print": self._on_print,
            "left": self._on_left,
        }
        self.watchers: list[Callable[[], None]] = []
        self.end_watchers: list[Callable[[], None]] = []
        self.at_end: list[Callable[[RankEnd], object]] = []
        self.at_common_end: list[Callable[[], str]] = []
        self.gathering = Gathering(self)
        self.signals = Signals()
        self.samples = 0
        self._prints: Counter[tuple[str, int, str]] = Counter()  # calls, by place and thread
        self._sending = threading.Lock()
        self._arrived: list[tuple[int, Letter]] = []  # messages that no thread has handled
        self._failed: list[Callable[..., object]] = []  # whose defect has been reported
        self._leaving = threading.Event()
        self._exits = False  # the script has ended; `leave` may also be called by `finalize`
        self._left: tuple[int, Progress] | None = None  # a rank that left, and how far it was
        self._waiting_since: float | None = None
        self._communicates = _jaxcompat.watch_communication()
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self.members = backend.allgather_object((os.getpid(), os.uname().nodename))
        self._dismiss_reporter = death_reporter.start_on_nodes(backend)
        self._remain_at_exit = at_exit.at_exit(at_exit.Step.RANKS, self._at_exit)
        # A daemon: Python's shutdown does not wait for it, `leave` does.
        self._thread = threading.Thread(target=self._run, name=joining.MONITOR, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def connect_hosts(self) -> None:
        """Open the connections to ranks of other hosts while the network works.

        MPI opens a connection at the first message. A connection that is opened while the network
        is down ends the job, whereas an open one survives.
        """
        _, this_host = self.members[self.backend.place.rank]
        remote = [rank for rank, (_, host) in enumerate(self.members) if host != this_host]
        if len(remote) <= MAX_GREETED_RANKS:
            for rank in remote:
                self.send(rank, "hello", None)  # a topic that nobody handles

    # messages

    def send(self, rank: int, topic: str, message: object) -> None:
        """Send a picklable object to another rank's monitor; returns at once."""
        with self._sending:
            self.backend.send(rank, Letter(topic, message))

    def send_all(self, topic: str, message: object) -> None:
        """Send an object to the monitors of all other ranks."""
        for rank in range(self.backend.place.size):
            if rank != self.backend.place.rank:
                self.send(rank, topic, message)

    def poll(self, topics: Collection[str] = ()) -> None:
        """Handle the messages that have arrived.

        Another thread than the monitor's names the topics that it handles. What handles the others
        may rely on the monitor's thread, which calls it later.
        """
        with self._sending:
            self._arrived += self.backend.receive()
            chosen: list[tuple[int, Letter]] = []
            left: list[tuple[int, Letter]] = []
            for arrived in self._arrived:
                _, (topic, _) = arrived
                (chosen if not topics or topic in topics else left).append(arrived)
            self._arrived = left
        for rank, (topic, message) in chosen:
            if topic in self.topics:
                self._call(self.topics[topic], rank, message)

    def print(self, file: str, line: int, stream: str, text: str) -> None:
        """Print this rank's text on rank 0, with the other ranks' text of the same call.

        The n-th call of a thread at a line of the source is the same call on every rank.

        Args:
          file: the file that calls `jaxmpi.print`.
          line: the line in this file.
          stream: "stdout" or "stderr" of rank 0.
          text: the text of this rank.
        """
        place = (file, line, threading.current_thread().name)
        self._prints[place] += 1  # no other thread has this key
        key = Key(*place, self._prints[place], stream)
        if self.backend.place.rank != 0:
            self.send(0, "print", (key, text))
            return
        self.rounds.add(0, key, text)
        while self.rounds.pending(key):
            self.poll(("print",))
            time.sleep(0.001)
        self.rounds.flush()

    def _on_print(self, rank: int, message: tuple[Key, str]) -> None:
        self.rounds.add(rank, *message)

    def say(self, text: str) -> None:
        """Write text to stderr, after the rank and the host of this process."""
        place = self.backend.place
        stderr.say(f"jaxmpi: [rank {place.rank}/{place.size} on {os.uname().nodename}] {text}\n")

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function, and report its exception once: one defect must not stop the monitor."""
        try:
            function(*args)
        except Exception:
            if function not in self._failed:
                self._failed.append(function)
                self.say(f"a defect in jaxmpi's monitor, which goes on:\n{traceback.format_exc()}")

    # the thread

    def _run(self) -> None:
        """Watch until this rank leaves.

        Whatever else ends the thread ends the job: without it nobody would notice that other ranks
        are gone.
        """
        why = "the thread that watches this rank has ended"
        try:
            joining.mark_thread(joining.MONITOR)
            self._watch()
        except BaseException as error:
            why = f"the thread that watches this rank has failed ({stderr.one_line(error)})"
            stderr.say(traceback.format_exc())
        finally:
            if not self._leaving.is_set():
                self.end(1, f"{why}.")

    def _watch(self) -> None:
        while not self._leaving.is_set():
            # Signals end this sleep early.
            for call in self.signals.wait(POLL_SECONDS):
                self._call(call)
            self.poll()
            self.rounds.flush()
            for watcher in self.watchers:
                self._call(watcher)
            # The rank before this one waits in `leave`, and this rank waits for it.
            if self._left is not None and self._waits_forever(*self._left):
                self._end_for_left(self._left[0])
            # Python cannot raise KeyboardInterrupt while the main thread is inside MPI. Any other
            # call of C code returns, and the script may handle the interrupt then.
            inside = self.backend.progress().inside or self._communicates()
            if inside and self.signals.interrupt_is_stuck(POLL_SECONDS):
                self.end(130, "interrupted while it waited inside a collective.")

    def _on_left(self, rank: int, progress: Progress) -> None:
        self._left = rank, progress

    def _waits_forever(self, rank: int, theirs: Progress) -> bool:
        """Return whether this rank waits for `rank`, which left when it was so far."""
        # A collective that is outside of programs: the rank that left will never enter it.
        mine = self.backend.progress()
        if mine.in_vote:
            return mine.votes > theirs.votes
        if mine.inside and mine.entered > theirs.entered:
            return True
        # Only the native transport counts the collectives of a compiled program. On another one,
        # both ranks may have started it before the other one left, and this rank's may still be
        # running. So only a program that communicates for longer than the grace time waits for the
        # rank that left.
        if not self._communicates():
            self._waiting_since = None
            return False
        self._waiting_since = self._waiting_since or time.monotonic()
        return time.monotonic() - self._waiting_since > LEFT_RANK_GRACE_SECONDS

    def _end_for_left(self, rank: int) -> None:
        """End the job because `rank` has left while this rank waits for it."""
        pid, host = self.members[rank]
        # `jaxmpi run` names it, and a restart counts the failure for its host
        stderr.say(marked([Failure(rank, pid, host, Cause.LEFT, joined=True)]))
        inside = self.backend.progress().inside
        call = doing(self.backend) if inside else "in a collective"
        why = f"rank {rank} has exited while this rank waits for it {call}."
        advice = "Every rank must make the same calls."
        self.end(1, " ".join(filter(None, [why, advice, compare.uneven_shard(self.backend)])))

    # the end of the job

    def end(self, code: int, why: str) -> None:
        """End the whole job, after a line with this rank and the reason."""
        try:
            stderr.at_most(LAST_RECORDS_SECONDS, lambda: self._prepare_end(code, why))
        finally:
            stderr.end_process(code, self.backend.abort)

    def _prepare_end(self, code: int, why: str) -> None:
        stderr.at_most(stderr.SAY_SECONDS, lambda: sys.stdout.flush())
        for call in self.at_end:
            self._call(call, RankEnd(in_order=False, why=why))
        self.say(f"{why} The job ends.")
        # A rank that was killed may be why this one failed. If this rank aborts before the launcher
        # notices the killed one, the launcher names this rank instead.
        may_follow_killed = self._left is None and self._has_lost_rank()
        if not may_follow_killed:
            pid, host = self.members[self.backend.place.rank]
            own = Failure(self.backend.place.rank, pid, host, Cause.ABORT, code=code, joined=True)
            stderr.say(marked([own]))
        # MPI's launcher drops what it has not passed on when a rank aborts.
        time.sleep(LAUNCHER_NOTICE_SECONDS if may_follow_killed else RELAY_SECONDS)
        self._dismiss_reporter()

    def _has_lost_rank(self) -> bool:
        """Return whether a rank of this host has ended."""
        _, this_host = self.members[self.backend.place.rank]
        for pid, host in self.members:
            if host == this_host and run_dir.state(pid) == "ended":
                return True
        return False

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        try:
            text = "".join(traceback.format_exception(kind, error, trace))
            label = f"[{self.backend.place.rank}] "
            run_dir.note_count_refusal(error)
            stderr.say("".join(label + line for line in text.splitlines(keepends=True)))
        finally:
            self.end(code, f"{stderr.one_line(error)}.")

    # the end of this rank

    @property
    def leaving(self) -> bool:
        """Whether this rank has come to its end."""
        return self._leaving.is_set()

    def _at_exit(self) -> None:
        self._exits = True
        try:
            self.leave()
        except BaseException as error:  # or else it would wait for the others in MPI_Finalize
            self.end(1, f"the end of this rank has failed ({stderr.one_line(error)}).")

    def leave(self) -> None:
        """Wait until every rank has come to its end; tell the next rank when that takes long."""
        if self._leaving.is_set():
            return
        # Meanwhile the monitor's thread runs: it ends the job if a message waits for a rank that
        # has left. Then all messages are counted in what this rank tells the next one.
        self.backend.finish_all()
        for call in self.at_end:
            self._call(call, RankEnd(in_order=True, why="the end"))
        # This thread polls from here on, so the monitor's thread has to end first.
        self._leaving.set()
        if self.listening:
            self._thread.join(MONITOR_THREAD_END_SECONDS)
            if self._thread.is_alive():
                raise RuntimeError("the thread that watches this rank does not end")
        # The others have received what this rank sent, and every rank is here: only then may the
        # communicators, and MPI, end.
        self._wait(self.backend.all_received)
        self._wait(self.backend.everyone_leaves())
        self._dismiss_reporter()
        # What the others sent before they came here.
        self.poll()
        self.rounds.flush(all_rounds=True)
        for call_last in self.at_common_end:
            if why := call_last():
                self.end(1, why)
        sys.excepthook = self._excepthook
        self.signals.release()
        self._remain_at_exit()
        if directory := os.environ.get("JAXMPI_RUN_DIR"):
            run_dir.leave(directory, self.backend.place.rank)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Sleep until `done`; tell the next rank when that takes long.

        One message is enough: if the next rank waits for this one, it ends the job. If it has left,
        too, it tells the rank after it. Some seconds later, the library for collectives of plain
        JAX tells others, too: monitors know nothing of these.
        """
        place = self.backend.place
        start, pause = time.monotonic(), 0.0005
        look_at = start + POLL_SECONDS
        told_next = told_library = False
        while not done():
            self.poll()
            waited = time.monotonic() - start
            if not told_next and waited > LEAVING_NOTICE_SECONDS:
                told_next = True
                self.send((place.rank + 1) % place.size, "left", self.backend.progress())
            if time.monotonic() > look_at:
                look_at = time.monotonic() + POLL_SECONDS
                for watcher in self.end_watchers:
                    self._call(watcher)
            if self._exits and not told_library and waited > PLAIN_NOTICE_SECONDS:
                told_library = True
                jax_collectives.begin_to_leave()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def abandon(self) -> None:
        """Remove the monitor from a forked child, and what the rank does at its end.

        JAX and MPI would hang there: their threads are in the parent only.
        """
        sys.excepthook = self._excepthook
        self.signals.release(wake_others=False)
        at_exit.forget()
        _jaxcompat.leave_as_it_is()
        self.signals.unblock()


class Gathering:
    """Objects of all ranks by key, which rank 0 compares once every rank has sent its own.

    No rank waits: the monitors' threads carry the objects, whenever each rank comes to the call.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._messages: dict[str, dict[int, object]] = {}  # by key and rank
        self._counts: Counter[str] = Counter()  # calls of `add` on this rank, by key
        self._judges: dict[str, Callable[[Sequence[Any]], str]] = {}
        self._lock = threading.Lock()
        monitor.topics["gather"] = self._on_message

    def add(self, key: str, message: T, judge: Callable[[Sequence[T]], str]) -> None:
        """Add this rank's object: the n-th with a key is compared with the others' n-th.

        Args:
          key: the subject of the object.
          message: a picklable object.
          judge: called on rank 0 with all ranks' objects; returns a line to print, or "".
        """
        rank = self._monitor.backend.place.rank
        with self._lock:
            self._counts[key] += 1
            key = f"{key} {self._counts[key]}"
            if rank == 0:
                self._judges[key] = judge
        if rank == 0:
            self._on_message(rank, (key, message))
        else:
            self._monitor.send(0, "gather", (key, message))

    def _on_message(self, rank: int, keyed_message: tuple[str, object]) -> None:
        key, message = keyed_message
        with self._lock:
            by_rank = self._messages.setdefault(key, {})
            by_rank[rank] = message
            # Some rank may never run a program that others have run: its key stays incomplete.
            for old in list(self._messages)[:-MAX_GATHERINGS]:
                del self._messages[old]
                self._judges.pop(old, None)
            # Rank 0 adds its judge before its message, so a complete key has its judge.
            if len(by_rank) < self._monitor.backend.place.size:
                return
            judge = self._judges.pop(key)
            del self._messages[key]
        if text := judge([by_rank[rank] for rank in sorted(by_rank)]):
            self._monitor.say(text)
