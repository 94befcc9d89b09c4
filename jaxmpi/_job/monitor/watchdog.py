"""Says why a job hangs: who waits for whom, where, and what the missing ranks are doing.

A rank that has been inside the same collective for JAXMPI_STALL_SECONDS (60; 0 for never) asks the
monitors of all others where they are: these are threads, and answer whatever their main thread
does. The lowest rank that waits writes the report. After JAXMPI_STALL_END_SECONDS (ten times as
long; 0 for never) the job ends, unless all ranks that are missing are at work, in a `jaxmpi.busy`
block or at a checkpoint. A wait of many times the usual is announced sooner.
"""

import itertools
import math
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxmpi import _jaxcompat
from jaxmpi._consistency.mismatch import in_words
from jaxmpi._job.monitor.flight_recorder import Recorder, where
from jaxmpi._job.monitor.watching import Watching
from jaxmpi._job.process import run_dir, settings
from jaxmpi._job.process.busy import work, work_of

__all__ = ["Watchdog"]

ANSWER_SECONDS = 2.0  # for the monitors of the others
# times the usual, at least, after so many collectives
EARLY_FACTOR, EARLY_SECONDS, EARLY_STEPS = 30, 10.0, 20
FRAMES = 3


class Answer(NamedTuple):
    """Where a rank is."""

    entered: int  # collectives
    inside: bool
    waited: float  # seconds since its last collective began or ended
    doing: str
    at_work: str  # with what takes long, and is all right
    idle: float  # seconds since it was at work
    stack: list[str]  # of its main thread, from the innermost call
    in_program: bool  # which is watched as a whole, and may take long


class Watchdog:
    """One rank's."""

    def __init__(self, monitor: Watching, recorder: Recorder) -> None:
        self._monitor, self._backend, self._recorder = monitor, monitor.backend, recorder
        self._limit, self._last = settings.limits()
        self._main = threading.main_thread().ident or 0
        self._state = (0, False)
        self._since = time.monotonic()
        # seconds from one look at which something had happened to the next
        self._usual: deque[float] = deque(maxlen=64)
        self._asked: float | None = None
        self._answers: dict[int, Answer] = {}
        self._due = self._deadlines()  # of this wait
        self._next = next(self._due)
        self._said = False
        monitor.topics["where"] = lambda rank, _: monitor.send(rank, "here", self._here())
        monitor.topics["here"] = self._on_answer
        monitor.watchers.append(self._look)

    def _look(self) -> None:
        state, now = self._backend.progress(), time.monotonic()
        if state != self._state or not state[1]:
            if self._said:
                self._monitor.say(f"goes on after {now - self._since:.0f} s.")
            if state[0] != self._state[0]:
                self._usual.append(now - self._since)
                self._since = now
            self._state, self._asked, self._said = state, None, False
            self._due = self._deadlines()
            self._next = next(self._due)
            return
        waited = now - self._since
        if self._asked is not None:
            everyone = len(self._answers) == self._backend.place.size - 1
            if everyone or now - self._asked > ANSWER_SECONDS:
                self._asked = None
                self._report(waited)
        elif waited > self._next:
            self._next = next(self._due)
            self._asked, self._answers = now, {}
            self._monitor.send_all("where", None)

    def _deadlines(self) -> Iterator[float]:
        """After how many seconds of one wait to say something."""
        usual = statistics.median(self._usual) if len(self._usual) >= EARLY_STEPS else math.inf
        if self._limit:
            if (early := max(EARLY_SECONDS, EARLY_FACTOR * usual)) < self._limit:
                yield early
            yield self._limit
            if self._last:
                # Soon enough after a rank that was at work does nothing any more.
                yield from itertools.count(self._last, min(self._last, max(self._limit, 60.0)))
        yield math.inf

    def _on_answer(self, rank: int, answer: Answer) -> None:
        self._answers[rank] = Answer(*answer)

    def _here(self) -> Answer:
        entered, inside = self._backend.progress()
        waited, mine = time.monotonic() - self._since, work()
        at_work, stack = (
            self._backend.long_operation or (str(mine.block) if mine.counts else ""),
            _stack(self._main),
        )
        if mine.block is not None and not mine.counts:
            stack = [str(mine.block), *stack]
        idle = 0.0 if at_work else mine.idle_seconds
        return Answer(
            entered,
            inside,
            waited,
            where(self._backend),
            at_work,
            idle,
            stack,
            self._backend.in_program(),
        )

    def _report(self, waited: float) -> None:
        place = self._backend.place
        everyone = {**self._answers, place.rank: self._here()}
        entered = everyone[place.rank].entered
        arrived = [
            r
            for r, a in sorted(everyone.items())
            if a.entered > entered or (a.entered == entered and a.inside)
        ]
        if not arrived:  # it has just gone on
            return
        missing = [rank for rank in range(place.size) if rank not in arrived]
        stalled = waited > self._limit
        works = {rank: self._work_of(rank, everyone.get(rank)) for rank in missing}
        at_work = {rank: what for rank, (what, _) in works.items() if what}
        long = any(everyone[rank].in_program for rank in arrived)
        hopeless = len(at_work) < len(missing) or (not missing and not long)
        self._said = True
        # that one says it
        if place.rank != arrived[0] and everyone[arrived[0]].waited > waited / 2:
            return
        lines = [
            f"{'stalled' if stalled else 'slow'}: has waited {waited:.0f} s {where(self._backend)}"
        ]
        if missing:
            lines.append(f"  arrived: {in_words(arrived)}")
            for rank in missing:
                lines += self._missing(rank, everyone.get(rank), at_work.get(rank, ""))
        elif not long:
            lines.append("  all ranks have arrived: it does not get on")
        else:
            lines.append(
                "  all ranks are inside of it: it takes long, or one of them is stuck in it"
            )
        # A rank that was at work when the wait began has all of the time from the end of its work.
        idle = max((min(waited, seconds) for _, seconds in works.values()), default=waited)
        left = self._last - idle if self._last else math.inf
        if stalled and hopeless and 0 < left < math.inf:
            lines.append(
                f"  the job ends in {left:.0f} s if it does not go on (JAXMPI_STALL_END_SECONDS)"
            )
            if missing:
                lines.append(
                    "  a rank that works alone for long says so: with jaxmpi.busy('what it does')"
                )
        self._monitor.say("\n".join(lines))
        if stalled:
            self._monitor.send_all("dump", "stall")
            if path := self._recorder.dump("stall"):
                self._monitor.say(
                    f"the last collectives of each rank: jaxmpi timeline {path.parent}"
                )
        if hopeless and left < 0:
            time.sleep(0.5)  # for the others' dumps
            self._monitor.end(1, f"stalled for {waited:.0f} s: {self._blame(missing)}.")

    def _work_of(self, rank: int, answer: Answer | None) -> tuple[str, float]:
        """Return what a rank is at work with, "" for nothing, and the seconds since it was."""
        if answer is not None:
            return answer.at_work, answer.idle
        # C code of a busy rank may hold the GIL, so that its monitor is silent. What the rank has
        # said before can be read on its host; a rank that is stopped is not at work, whatever it
        # has said.
        pid, host = self._monitor.members[rank]
        if host != os.uname().nodename or run_dir.state(pid) != "runs":
            return "", math.inf
        its = work_of(pid)
        return (str(its.block) if its.counts else ""), its.idle_seconds

    def _missing(self, rank: int, answer: Answer | None, at_work: str) -> list[str]:
        pid, host = self._monitor.members[rank]
        name = f"  missing: rank {rank} (pid {pid} on {host})"
        if at_work:
            return [f"{name} is {at_work}"]
        if answer is None:
            return [f"{name} does not answer: {_why_silent(pid, host)}"]
        return [
            f"{name}, {answer.doing}, {answer.waited:.0f} s ago; its main thread is at",
            *(f"      {line}" for line in answer.stack),
        ]

    def _blame(self, missing: Sequence[int]) -> str:
        if not missing:
            return "a collective that all ranks have entered does not end"
        return f"{in_words(missing)} on {', '.join(sorted({self._monitor.members[r][1] for r in missing}))} did not come"


def _stack(thread: int) -> list[str]:
    """Where a thread is: the innermost call, and the user's innermost lines."""
    frame = sys._current_frames().get(thread)
    calls = list(reversed(traceback.extract_stack(frame))) if frame else []
    of_user = [call for call in calls if not _jaxcompat.in_library(call.filename)]
    shown = [*(calls[:1] if calls[:1] != of_user[:1] else []), *of_user[:FRAMES]]
    lines = [
        f"{os.path.basename(c.filename)}:{c.lineno} in {c.name}" + (f": {c.line}" if c.line else "")
        for c in shown
    ]
    return (["(compiling)"] if _jaxcompat.compiling(thread) else []) + lines


def _why_silent(pid: int, host: str) -> str:
    if host == os.uname().nodename:
        return {
            "ended": "it has ended",
            "stopped": "it is stopped (SIGSTOP, or a debugger)",
            "runs": "it runs, but its Python does not: some code holds the GIL",
        }[run_dir.state(pid)]
    return "it is stopped, its host is down, or the network is"
