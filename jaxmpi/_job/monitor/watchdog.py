"""Stall reports: which rank waits for which, in which call, and what the missing ranks do.

A rank that has been inside the same collective for JAXMPI_STALL_SECONDS (60; 0 for never) asks the
monitors of all other ranks where they are. The monitors are threads, and answer whatever their main
thread does. From the answers it makes a `StallReport`, which `describe` puts into words; the lowest
rank that waits writes it. After JAXMPI_STALL_END_SECONDS (ten times as long; 0 for never) the job
ends, unless all missing ranks are at work, in a `jaxmpi.busy` block or at a checkpoint. A wait of
many times the usual one is reported sooner.
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
from collections.abc import Iterator
from typing import NamedTuple

from jaxmpi import _jaxcompat
from jaxmpi._consistency.mismatch import in_words
from jaxmpi._job.monitor.flight_recorder import Recorder
from jaxmpi._job.monitor.monitor import Doing, Monitor, doing
from jaxmpi._job.process import run_dir, settings, stderr
from jaxmpi._job.process.busy import work, work_of
from jaxmpi._job.process.failure import MARK, Cause, Failure, to_json

__all__ = ["Answer", "MissingRank", "StallReport", "Watchdog", "describe"]

# For the monitors of the other ranks to answer. A rank whose C code holds the GIL, or that is
# stopped, never does.
ANSWER_SECONDS = 2.0
# For the other ranks to write their flight records before this rank ends the job.
OTHER_DUMPS_SECONDS = 0.5
# A wait is reported early after this many times the usual seconds between two collectives, but not
# before EARLY_SECONDS. The usual seconds are known after EARLY_COLLECTIVES: compilation takes most
# of the first ones.
EARLY_FACTOR, EARLY_SECONDS, EARLY_COLLECTIVES = 30, 10.0, 20
USUAL_COLLECTIVES = 64  # the last ones, from which the usual seconds are computed
# At least so long after a report that says when the job ends, it is repeated.
MIN_REPEAT_SECONDS = 60.0
STACK_LINES = 3  # of the user, in a report


class Answer(NamedTuple):
    """A rank's answer to "where are you?"."""

    entered: int  # collectives
    inside: bool  # whether it is inside the last one
    waited_seconds: float  # since its last collective began or ended
    doing: Doing
    at_work: str  # such as "busy: tokenizing, for 75 s"; "" if the others should not wait for it
    idle_seconds: float  # since it was last at work
    stack: list[str]  # of its main thread, from the innermost call
    in_program: bool  # in a program that is watched as a whole, and so may take long


class MissingRank(NamedTuple):
    """A rank that has not entered the collective in which others wait."""

    rank: int
    pid: int
    host: str
    at_work: str = ""  # as in `Answer`
    answer: Answer | None = None  # None if its monitor does not answer
    state: str = ""  # of its process, if that is on this host: "runs", "stopped" or "ended"


class StallReport(NamedTuple):
    """The collective that a rank waits in, and the ranks that have not come to it."""

    waited_seconds: float
    stalled: bool  # longer than JAXMPI_STALL_SECONDS; else only longer than usual
    doing: Doing  # this rank's collective and line
    arrived: list[int]  # ranks that have entered it
    missing: list[MissingRank]
    in_program: bool  # whether one that arrived is in a program that is watched as a whole
    ends_in_seconds: float | None  # None if the job does not end for it


class Watchdog:
    """The watchdog of one rank, which the monitor's thread calls."""

    def __init__(self, monitor: Monitor, recorder: Recorder) -> None:
        self._monitor, self._backend, self._recorder = monitor, monitor.backend, recorder
        self._stall_seconds, self._end_seconds = settings.limits()
        self._main_thread = threading.main_thread().ident or 0
        self._progress = (0, False)  # collectives entered, and whether inside the last one
        self._since = time.monotonic()  # of the last change of the number
        # Seconds between the looks at which the number had changed.
        self._usual_seconds: deque[float] = deque(maxlen=USUAL_COLLECTIVES)
        self._asked_at: float | None = None
        self._answers: dict[int, Answer] = {}
        self._deadlines = self._new_deadlines()  # of this wait
        self._due = next(self._deadlines)
        self._reported = False  # this wait
        monitor.topics["where"] = lambda rank, _: monitor.send(rank, "here", self._own_answer())
        monitor.topics["here"] = self._on_answer
        monitor.watchers.append(self._look)

    def _look(self) -> None:
        """Look whether this rank still waits in the same collective; ten times a second."""
        progress, now = self._backend.progress(), time.monotonic()

        # It goes on: this wait is over. Outside of collectives nothing is waited for.
        if progress != self._progress or not progress[1]:
            if self._reported:
                self._monitor.say(f"resumed after {now - self._since:.0f} s.")
            if progress[0] != self._progress[0]:
                self._usual_seconds.append(now - self._since)
                self._since = now
            self._progress, self._asked_at, self._reported = progress, None, False
            self._deadlines = self._new_deadlines()
            self._due = next(self._deadlines)
            return

        # It waits, and has asked the others: report once all have answered, or are given up.
        waited_seconds = now - self._since
        if self._asked_at is not None:
            complete = len(self._answers) == self._backend.place.size - 1
            if complete or now - self._asked_at > ANSWER_SECONDS:
                self._asked_at = None
                self._report(waited_seconds)

        # It has waited until the next deadline: ask the others. Old answers would be wrong.
        elif waited_seconds > self._due:
            self._due = next(self._deadlines)
            self._asked_at, self._answers = now, {}
            self._monitor.send_all("where", None)

    def _new_deadlines(self) -> Iterator[float]:
        """Yield the seconds of one wait after which to report it."""
        if self._stall_seconds:
            usual = math.inf
            if len(self._usual_seconds) >= EARLY_COLLECTIVES:
                usual = statistics.median(self._usual_seconds)
            early = max(EARLY_SECONDS, EARLY_FACTOR * usual)
            if early < self._stall_seconds:
                yield early
            yield self._stall_seconds
            # From then on the job can end. A missing rank may be at work now and idle later, so
            # look again often enough to end the job soon after.
            if self._end_seconds:
                repeat = min(self._end_seconds, max(self._stall_seconds, MIN_REPEAT_SECONDS))
                yield from itertools.count(self._end_seconds, repeat)
        yield math.inf

    def _on_answer(self, rank: int, answer: Answer) -> None:
        self._answers[rank] = answer

    def _own_answer(self) -> Answer:
        entered, inside = self._backend.progress()
        mine, stack = work(), _stack(self._main_thread)
        at_work = self._backend.long_operation or (str(mine.block) if mine.counts else "")
        if mine.block is not None and not mine.counts:  # past its limit
            stack = [str(mine.block), *stack]
        return Answer(
            entered=entered,
            inside=inside,
            waited_seconds=time.monotonic() - self._since,
            doing=doing(self._backend),
            at_work=at_work,
            idle_seconds=0.0 if at_work else mine.idle_seconds,
            stack=stack,
            in_program=self._backend.in_program(),
        )

    def _report(self, waited_seconds: float) -> None:
        """Report the wait, on the lowest rank that waits; end the job if its time is over."""
        place = self._backend.place
        answers = {**self._answers, place.rank: self._own_answer()}

        # Ranks that are in this collective, or beyond it.
        entered = answers[place.rank].entered
        arrived = []
        for rank, answer in sorted(answers.items()):
            if answer.entered > entered or (answer.entered == entered and answer.inside):
                arrived.append(rank)
        if not arrived:  # this rank has just gone on
            return

        # The others are missing. Without an answer, see what their processes show.
        missing, idle_seconds = [], []
        for rank in range(place.size):
            if rank not in arrived:
                found, seconds_since_work = self._missing_rank(rank, answers.get(rank))
                missing.append(found)
                idle_seconds.append(min(waited_seconds, seconds_since_work))

        # Waiting is of no use if a missing rank does nothing, or if all ranks are in a collective
        # that should take no time. A program that all have entered may take long, so it never ends
        # the job.
        in_program = any(answers[rank].in_program for rank in arrived)
        hopeless = any(not found.at_work for found in missing) or (not missing and not in_program)
        stalled = waited_seconds > self._stall_seconds
        # A rank that was at work during this wait has all of the time from the end of its work.
        left_seconds = math.inf
        if self._end_seconds:
            left_seconds = self._end_seconds - max(idle_seconds, default=waited_seconds)
        announced = stalled and hopeless and 0 < left_seconds < math.inf

        # All ranks that wait come here at about the same time. The lowest one writes, unless it has
        # just begun to wait, and will not report for some time.
        self._reported = True
        if place.rank != arrived[0] and answers[arrived[0]].waited_seconds > waited_seconds / 2:
            return
        report = StallReport(
            waited_seconds=waited_seconds,
            stalled=stalled,
            doing=answers[place.rank].doing,
            arrived=arrived,
            missing=missing,
            in_program=in_program,
            ends_in_seconds=left_seconds if announced else None,
        )
        self._monitor.say(describe(report))
        if stalled:
            self._monitor.send_all("dump", "stall")
            if path := self._recorder.dump("stall"):
                self._monitor.say(
                    f"the last collectives of each rank: jaxmpi timeline {path.parent}"
                )
        if hopeless and left_seconds < 0:
            time.sleep(OTHER_DUMPS_SECONDS)
            _report_to_launcher(missing)
            self._monitor.end(1, _why_ended(report))

    def _missing_rank(self, rank: int, answer: Answer | None) -> tuple[MissingRank, float]:
        """Return what a missing rank does, and the seconds since it was at work."""
        pid, host = self._monitor.members[rank]
        if answer is not None:
            return MissingRank(rank, pid, host, answer.at_work, answer), answer.idle_seconds
        # Only the processes of this host can be looked at.
        if host != os.uname().nodename:
            return MissingRank(rank, pid, host), math.inf
        # C code of a busy rank may hold the GIL, so that its monitor is silent. What it wrote
        # before can be read; but a stopped rank is not at work, whatever it wrote.
        state = run_dir.state(pid)
        if state != "runs":
            return MissingRank(rank, pid, host, state=state), math.inf
        theirs = work_of(pid)
        at_work = str(theirs.block) if theirs.counts else ""
        return MissingRank(rank, pid, host, at_work, state=state), theirs.idle_seconds


def _report_to_launcher(missing: list[MissingRank]) -> None:
    """Name the ranks that have failed to `jaxmpi run`, which else blames the one that aborts."""
    if missing and "JAXMPI_RUN_DIR" in os.environ:
        failures = [Failure(m.rank, m.pid, m.host, Cause.STALLED, joined=True) for m in missing]
        stderr.say(f"{MARK}{to_json(failures)}\n")


def _stack(thread: int) -> list[str]:
    """Return the innermost call of a thread, and the user's innermost lines."""
    frame = sys._current_frames().get(thread)
    calls = list(reversed(traceback.extract_stack(frame))) if frame else []
    of_user = [call for call in calls if not _jaxcompat.in_library(call.filename)]
    shown = of_user[:STACK_LINES]
    if calls[:1] != of_user[:1]:
        shown = [*calls[:1], *shown]
    lines = ["(compiling)"] if _jaxcompat.compiling(thread) else []
    for call in shown:
        place = f"{os.path.basename(call.filename)}:{call.lineno} in {call.name}"
        lines.append(f"{place}: {call.line}" if call.line else place)
    return lines


# from records to words


def describe(report: StallReport) -> str:
    """Return a stall report in words."""
    kind = "stalled" if report.stalled else "slow"
    lines = [f"{kind}: has waited {report.waited_seconds:.0f} s {report.doing}"]
    if report.missing:
        lines.append(f"  arrived: {in_words(report.arrived)}")
        for missing in report.missing:
            lines += _describe_missing(missing)
    elif report.in_program:
        lines.append("  all ranks are in the program: it takes long, or one of them is stuck in it")
    else:
        lines.append("  all ranks entered the collective; no progress")
    if report.ends_in_seconds is not None:
        lines.append(
            f"  the job ends in {report.ends_in_seconds:.0f} s if it does not go on "
            "(JAXMPI_STALL_END_SECONDS)"
        )
        if report.missing:
            lines.append(
                "  a rank that works alone for long says so: with jaxmpi.busy('what it does')"
            )
    return "\n".join(lines)


_SILENT = {
    "ended": "it has ended",
    "stopped": "it is stopped (SIGSTOP, or a debugger)",
    "runs": "it runs, but its Python does not: some code holds the GIL",
    "": "it is stopped, its host is down, or the network is",
}


def _describe_missing(missing: MissingRank) -> list[str]:
    name = f"  missing: rank {missing.rank} (pid {missing.pid} on {missing.host})"
    if missing.at_work:
        return [f"{name} is {missing.at_work}"]
    answer = missing.answer
    if answer is None:
        return [f"{name} does not answer: {_SILENT[missing.state]}"]
    return [
        f"{name}, {answer.doing}, {answer.waited_seconds:.0f} s ago; its main thread is at",
        *(f"      {line}" for line in answer.stack),
    ]


def _why_ended(report: StallReport) -> str:
    waited = f"stalled for {report.waited_seconds:.0f} s"
    if not report.missing:
        return f"{waited}: a collective that all ranks have entered does not end."
    hosts = ", ".join(sorted({missing.host for missing in report.missing}))
    ranks = [missing.rank for missing in report.missing]
    return f"{waited}: {in_words(ranks)} on {hosts} did not come."
