"""Stall reports: which rank waits for which, in which call, and what the missing ranks do.

A rank that has been inside the same collective for JAXMPI_STALL_SECONDS (60; 0 for never) asks the
monitors of all other ranks where they are. The monitors are threads, and answer whatever their main
thread does. From the answers it makes a `StallReport`, which `describe` puts into words; the lowest
rank that waits writes it. After JAXMPI_STALL_END_SECONDS (ten times as long; 0 for never) the job
ends, unless all missing ranks are at work, in a `jaxmpi.busy` block or at a checkpoint. A wait of
many times the usual one is reported sooner.

Where the messages of programs are not seen (XLA, mpi4jax), a program is watched as a whole, and one
that takes long must not end the job. Of a program that all ranks have entered, it ends the job if

- a rank has been in one call of a callback for so long, and another rank is in none;
- no rank has used CPU time for so long, where a rank that waits uses none;
- CPU time says nothing, and the program takes USUAL_FACTOR times as long as it ever has.
"""

import contextlib
import itertools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from jaxmpi._backends.base import Progress
from jaxmpi._backends.program_log import ENTERED, LEFT
from jaxmpi._consistency.mismatch import in_words
from jaxmpi._job.monitor.activity import Activity, Stand, Standing
from jaxmpi._job.monitor.flight_recorder import Recorder
from jaxmpi._job.monitor.monitor import Doing, Monitor, doing
from jaxmpi._job.process import live_record, run_dir, settings, stderr
from jaxmpi._job.process.busy import work, work_of
from jaxmpi._job.process.failure import Cause, Failure, marked

__all__ = [
    "Answer",
    "InProgram",
    "LastSeen",
    "MissingRank",
    "StallReport",
    "Watchdog",
    "describe",
    "describe_missing",
]

# For the monitors of the other ranks to answer. A rank whose C code holds the GIL, or that is
# stopped, never does.
ANSWER_SECONDS = 2.0
# A wait is reported early after this many times the usual seconds between two collectives, but not
# before EARLY_SECONDS. The usual seconds are known after EARLY_COLLECTIVES: compilation takes most
# of the first ones.
EARLY_FACTOR, EARLY_SECONDS, EARLY_COLLECTIVES = 30, 10.0, 20
USUAL_COLLECTIVES = 64  # the last ones, from which the usual seconds are computed
# After the time is over, so that it is over for whatever is measured at intervals.
LOOK_AGAIN_SECONDS = 0.1
# At least so long after a report that says when the job ends, it is repeated.
MIN_REPEAT_SECONDS = 60.0
# A program may take so many times as long as it ever has, where nothing but the time tells a slow
# one from a stuck one.
USUAL_FACTOR = 100
DESCRIBED_RANKS = 4  # of those that are stuck in a program, in a report


class Answer(NamedTuple):
    """A rank's answer to "where are you?"."""

    progress: Progress
    waited_seconds: float  # since its last collective began or ended
    doing: Doing
    at_work: str  # such as "busy: tokenizing, for 75 s"; "" if the others should not wait for it
    idle_seconds: float  # since it was last at work
    standing: Standing
    programs: int = 0  # that it has entered, and that are watched as a whole


class LastSeen(NamedTuple):
    """A silent rank, as it last wrote of itself in its live record."""

    doing: str
    at: str  # the line of its callback or its main thread
    in_callback: bool
    program: int  # the number of the program that it is in, or was in last; 0 for none
    in_program: bool


class MissingRank(NamedTuple):
    """A rank that has not entered the collective in which others wait."""

    rank: int
    pid: int
    host: str
    at_work: str = ""  # as in `Answer`
    answer: Answer | None = None  # None if its monitor does not answer
    state: str = ""  # of its process, if that is on this host: "runs", "stopped" or "ended"
    seen: LastSeen | None = None  # of a silent rank on this host


class InProgram(NamedTuple):
    """A rank in a program that all ranks have entered, or at the comparison after it."""

    rank: int
    pid: int
    host: str
    at_work: str  # as in `Answer`
    standing: Standing


class StallReport(NamedTuple):
    """The collective that a rank waits in, and the ranks that have not come to it."""

    waited_seconds: float
    stalled: bool  # longer than JAXMPI_STALL_SECONDS; else only longer than usual
    doing: Doing  # this rank's collective and line
    arrived: list[int]  # ranks that have entered it
    missing: list[MissingRank]
    program: list[InProgram]  # if none is missing from a program that is one whole: who waits
    ends_in_seconds: float | None  # None if the job does not end for it


class Watchdog:
    """The watchdog of one rank, which the monitor's thread calls."""

    def __init__(self, monitor: Monitor, recorder: Recorder) -> None:
        self._monitor, self._backend, self._recorder = monitor, monitor.backend, recorder
        self._stall_seconds, self._end_seconds = settings.limits()
        self._activity = Activity(monitor.backend)
        # how many steps this rank has gone on, and whether it is inside a collective
        self._progress = (0, False)
        self._since = time.monotonic()  # of the last change of the number
        # Seconds between the looks at which the number had changed.
        self._usual_seconds: deque[float] = deque(maxlen=USUAL_COLLECTIVES)
        self._asked_at: float | None = None
        self._answers: dict[int, Answer] = {}
        self._deadlines = self._new_deadlines()  # of this wait
        self._due = next(self._deadlines)
        self._reported = False  # this wait
        monitor.topics["where"] = lambda rank, _: monitor.send(rank, "here", self.own_answer())
        monitor.topics["here"] = self._on_answer
        monitor.watchers.append(self._look)

    def _look(self) -> None:
        """Look whether this rank still waits in the same collective; ten times a second."""
        self._backend.programs.look()
        self._activity.look()
        self._backend.transport.monitored(self._backend.programs.inside)
        mine, now = self._backend.progress(), time.monotonic()
        # A rank that waits for the last of many programs gets on while these end.
        steps = mine.entered + mine.votes + self._backend.programs.counts[LEFT]
        progress = steps, mine.inside

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
            self._due = next(due for due in self._deadlines if due > waited_seconds)
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

    def own_answer(self) -> Answer:
        """Return where this rank is."""
        mine, standing = work(), self._activity.standing()
        at_work = self._backend.long_operation or (str(mine.block) if mine.counts else "")
        if mine.block is not None and not mine.counts:  # past its limit
            standing = standing._replace(stack=(str(mine.block), *standing.stack))
        return Answer(
            progress=self._backend.progress(),
            waited_seconds=time.monotonic() - self._since,
            doing=doing(self._backend),
            at_work=at_work,
            idle_seconds=0.0 if at_work else mine.idle_seconds,
            standing=standing,
            programs=self._backend.programs.counts[ENTERED],
        )

    def _report(self, waited_seconds: float) -> None:
        """Report the wait, on the lowest rank that waits; end the job if its time is over."""
        place = self._backend.place
        answers = {**self._answers, place.rank: self.own_answer()}

        # Ranks that are in this collective, or beyond it. A rank that has left the program in which
        # this one still is does not count as missing.
        mine = answers[place.rank]
        arrived = [rank for rank, answer in sorted(answers.items()) if _has_come(answer, mine)]
        if not mine.progress.inside:  # this rank has just gone on
            return

        # The others are missing. Without missing ranks, all are in a collective that should take no
        # time, or in a program.
        missing, remaining_seconds = self._find_missing(answers, arrived, waited_seconds)
        program = [] if missing else self._in_program(answers)
        if program:
            remaining_seconds = self._remaining_seconds_in_program(answers)
        elif not missing:
            remaining_seconds = self._remaining_seconds(waited_seconds)
        stalled = waited_seconds > self._stall_seconds
        announced = stalled and 0 < remaining_seconds < math.inf
        if announced:  # look again when the time is over
            self._due = waited_seconds + remaining_seconds + LOOK_AGAIN_SECONDS

        # All ranks that wait come here at about the same time. The lowest one writes, unless it has
        # just begun to wait, and will not report for some time.
        first = next(rank for rank in arrived if answers[rank].progress.inside)
        if place.rank != first and answers[first].waited_seconds > waited_seconds / 2:
            return
        self._reported = True
        report = StallReport(
            waited_seconds=waited_seconds,
            stalled=stalled,
            doing=answers[place.rank].doing,
            arrived=arrived,
            missing=missing,
            program=program,
            ends_in_seconds=remaining_seconds if announced else None,
        )
        self._monitor.say(describe(report))
        if stalled and (path := self._recorder.dump_all("stall", last=remaining_seconds <= 0)):
            self._monitor.say(f"the last collectives of each rank: jaxmpi timeline {path.parent}")
        if remaining_seconds <= 0:
            self._recorder.wait_for_others()
            _report_to_launcher(missing, _in_callbacks(program))
            self._monitor.end(1, _why_ended(report))

    def _find_missing(
        self, answers: dict[int, Answer], arrived: list[int], waited_seconds: float
    ) -> tuple[list[MissingRank], float]:
        """Return the ranks that have not arrived, and the seconds until the job ends for one."""
        missing, remaining_seconds = list[MissingRank](), math.inf
        for rank in range(self._backend.place.size):
            if rank not in arrived:
                found, rank_remaining_seconds = self.missing_rank(
                    rank, answers.get(rank), waited_seconds
                )
                missing.append(found)
                remaining_seconds = min(remaining_seconds, rank_remaining_seconds)
        return missing, remaining_seconds

    def _in_program(self, answers: dict[int, Answer]) -> list[InProgram]:
        """Return the ranks that are inside, if one of them is in a program; else none."""
        inside = []
        for rank, answer in sorted(answers.items()):
            if answer.progress.inside:
                pid, host = self._monitor.members[rank]
                inside.append(InProgram(rank, pid, host, answer.at_work, answer.standing))
        if any(found.standing.stand is not Stand.PYTHON for found in inside):
            return inside
        return []

    def _remaining_seconds(self, idle_seconds: float) -> float:
        """Return the seconds until the job ends for a rank that has done nothing for so long."""
        return self._end_seconds - idle_seconds if self._end_seconds else math.inf

    def _remaining_seconds_of(self, answer: Answer, waited_seconds: float) -> float:
        """Return the seconds until the job ends for a rank that others wait for; maybe infinite."""
        standing = answer.standing
        if answer.at_work or standing.stand is Stand.COMPUTES:
            return math.inf
        # A rank that was at work during this wait has all of the time from the end of its work.
        if standing.stand is Stand.PYTHON:
            return self._remaining_seconds(min(waited_seconds, answer.idle_seconds))
        if standing.stand in (Stand.CALLBACK, Stand.BLOCKED):
            return self._remaining_seconds(min(standing.seconds, answer.idle_seconds))
        if standing.usual_seconds is None or not self._end_seconds:
            return math.inf
        limit = max(self._end_seconds, USUAL_FACTOR * standing.usual_seconds)
        return limit - min(standing.seconds, answer.idle_seconds)

    def _remaining_seconds_in_program(self, answers: dict[int, Answer]) -> float:
        """Return the seconds until the job ends for a program that all ranks have entered."""
        inside = [answer for answer in answers.values() if answer.progress.inside]
        if any(answer.at_work for answer in inside):
            return math.inf
        called, others = [], []
        for answer in inside:
            remaining_seconds = self._remaining_seconds_of(answer, math.inf)
            if answer.standing.stand is Stand.CALLBACK:
                called.append(remaining_seconds)
            elif answer.standing.stand is not Stand.PYTHON:
                others.append(remaining_seconds)
        # Waiting is of no use if one rank does not come out of a callback. Where all are in one,
        # none waits for another.
        if called:
            return min(called) if len(called) < len(inside) else math.inf
        # Else as long as one rank computes, or may do so, the others wait for it.
        return max(others)

    def missing_rank(
        self, rank: int, answer: Answer | None, waited_seconds: float
    ) -> tuple[MissingRank, float]:
        """Return what a missing rank does, and the seconds until the job ends for it."""
        pid, host = self._monitor.members[rank]
        if answer is not None:
            remaining_seconds = self._remaining_seconds_of(answer, waited_seconds)
            return MissingRank(rank, pid, host, answer.at_work, answer), remaining_seconds
        remaining_seconds = self._remaining_seconds(waited_seconds)
        # Only the processes of this host can be looked at.
        if host != os.uname().nodename:
            return MissingRank(rank, pid, host), remaining_seconds
        # C code of a busy rank may hold the GIL, so that its monitor is silent. What it wrote
        # before can be read; but a stopped rank is not at work, whatever it wrote.
        state = run_dir.state(pid)
        if state == "ended":
            return MissingRank(rank, pid, host, state=state), remaining_seconds
        seen = _last_seen(pid)
        if state == "stopped":
            return MissingRank(rank, pid, host, state=state, seen=seen), remaining_seconds
        theirs = work_of(pid)
        at_work = str(theirs.block) if theirs.counts else ""
        remaining_seconds = self._remaining_seconds(min(waited_seconds, theirs.idle_seconds))
        found = MissingRank(rank, pid, host, at_work, state=state, seen=seen)
        return found, math.inf if at_work else remaining_seconds


def _has_come(answer: Answer, mine: Answer) -> bool:
    """Return whether a rank has done its part of what this rank waits for."""
    theirs, here = answer.progress, mine.progress
    if here.in_vote:
        return theirs.votes >= here.votes
    in_program = mine.standing.stand is not Stand.PYTHON
    if in_program and answer.programs >= mine.programs:  # it is in the program, or has left it
        return True
    came = theirs.entered == here.entered and theirs.inside and not theirs.in_vote
    return theirs.entered > here.entered or came


def _last_seen(pid: int) -> LastSeen | None:
    """Return what a process of this host last wrote of itself; None if it cannot be read."""
    with contextlib.suppress(OSError):
        reader = live_record.Reader(pid)
        try:
            about, programs = reader.about(), reader.programs()
        finally:
            reader.close()
        if about and programs:
            entered, left = programs
            return LastSeen(
                doing=about.get("doing", ""),
                at=about.get("at", ""),
                in_callback=about.get("in_callback", False),
                program=entered,
                in_program=entered > left,
            )
    return None


def _in_callbacks(program: list[InProgram]) -> list[InProgram]:
    return [found for found in program if found.standing.stand is Stand.CALLBACK]


def _report_to_launcher(missing: list[MissingRank], called: list[InProgram]) -> None:
    """Name the ranks that have failed to `jaxmpi run`, which else blames the one that aborts.

    Args:
      missing: ranks that have not come.
      called: ranks in callbacks that do not return.
    """
    failures = [Failure(x.rank, x.pid, x.host, Cause.STALLED, joined=True) for x in missing]
    failures += [Failure(x.rank, x.pid, x.host, Cause.CALLBACK, joined=True) for x in called]
    if failures:
        stderr.say(marked(failures))


# from records to words


def describe(report: StallReport) -> str:
    """Return a stall report in words."""
    kind = "stalled" if report.stalled else "slow"
    lines = [f"{kind}: has waited {report.waited_seconds:.0f} s {report.doing}"]
    if report.missing:
        lines.append(f"  arrived: {in_words(report.arrived)}")
        for missing in report.missing:
            lines += describe_missing(missing)
    elif report.program:
        lines += _describe_program(report.program)
    else:
        lines.append("  all ranks entered the collective; no progress")
    if report.ends_in_seconds is not None:
        lines.append(
            f"  the job ends in {report.ends_in_seconds:.0f} s if it does not go on "
            "(JAXMPI_STALL_END_SECONDS)"
        )
        if report.missing or _in_callbacks(report.program):
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


def describe_missing(missing: MissingRank) -> list[str]:
    """Return the lines of a report about one missing rank."""
    name = f"  missing: {_name(missing)}"
    if missing.at_work:
        return [f"{name} is {missing.at_work}"]
    answer = missing.answer
    if answer is None:
        silent = f"{name} does not answer: {_SILENT[missing.state]}"
        return [silent, *([_describe_seen(missing.seen)] if missing.seen else [])]
    standing = answer.standing
    about = f"{name}, {answer.doing}"
    if standing.stand is Stand.CALLBACK:
        about += f": in a callback of the program for {standing.seconds:.0f} s, which"
    elif standing.stand is Stand.PYTHON:
        python = "" if answer.doing.phase == "in" else ", in Python"
        about += f", {answer.waited_seconds:.0f} s ago{python}; its main thread"
    elif standing.stand is Stand.COMPUTES:
        about += f", which computes, for {standing.seconds:.0f} s; its main thread"
    elif standing.stand is Stand.BLOCKED:
        about += f", without CPU time for {standing.seconds:.0f} s; its main thread"
    else:
        about += f", for {standing.seconds:.0f} s; its main thread"
    return [f"{about} {_state_of(standing)} at", *(f"      {line}" for line in standing.stack)]


def _name(found: MissingRank | InProgram) -> str:
    return f"rank {found.rank} (pid {found.pid} on {found.host})"


def _state_of(standing: Standing) -> str:
    return "is asleep" if standing.asleep else "runs"


def _describe_seen(seen: LastSeen) -> str:
    inside = "in a callback of" if seen.in_callback else "in"
    if not seen.program:
        stand = ""
    elif seen.in_program:
        stand = f" {inside} its program {seen.program}"
    else:
        stand = f" in Python after its program {seen.program}"
    at = f" at {seen.at}" if seen.at else ""
    return f"      last seen{stand}{at}, {seen.doing}"


def _describe_program(program: list[InProgram]) -> list[str]:
    """Describe the ranks of a program that all have entered."""
    lines = []
    by_stand: dict[Stand, list[InProgram]] = {}
    for found in program:
        by_stand.setdefault(found.standing.stand, []).append(found)
        if found.at_work:
            lines.append(f"  {_name(found)} is {found.at_work}")

    if called := by_stand.get(Stand.CALLBACK):
        if waiting := [found.rank for found in program if found not in called]:
            lines.append(f"  waiting in the program: {in_words(waiting)}")
        else:
            lines.append("  all ranks in it are in callbacks of it: none waits for another")
        return lines + _describe_ranks(called)

    if computing := by_stand.get(Stand.COMPUTES):
        ranks = in_words([found.rank for found in computing])
        return [*lines, f"  all ranks are in the program, which takes long: CPU time of {ranks}"]

    if Stand.UNKNOWN not in by_stand:
        blocked = by_stand[Stand.BLOCKED]
        seconds = min(found.standing.seconds for found in blocked)
        lines.append(
            f"  all ranks are in the program, and none has used CPU time for {seconds:.0f} s"
        )
        return lines + _describe_ranks(blocked)

    unknown = by_stand[Stand.UNKNOWN]
    known = [x.standing.usual_seconds for x in unknown if x.standing.usual_seconds is not None]
    if len(known) == len(unknown):
        # Runs are looked at ten times a second.
        usual = f"its longest run until now took {max(*known, 0.1):.1f} s"
    else:
        usual = "it runs for the first time, and the job does not end for it"
    lines += [
        "  all ranks are in the program: it takes long, or one of them is stuck in it",
        f"  nothing but the time tells which: {usual}",
    ]
    return lines + _describe_ranks(unknown)


def _describe_ranks(program: list[InProgram]) -> list[str]:
    lines = []
    for found in program[:DESCRIBED_RANKS]:
        standing = found.standing
        if standing.stand is Stand.CALLBACK:
            seconds = f"{standing.seconds:.0f} s"
            where = f"  late: {_name(found)}, in a callback of the program for {seconds}, which"
        else:
            where = f"  {_name(found)}: its main thread"
        lines += [f"{where} {_state_of(standing)} at", *(f"      {x}" for x in standing.stack)]
    if len(program) > DESCRIBED_RANKS:
        lines.append(f"  and {len(program) - DESCRIBED_RANKS} more ranks")
    return lines


def _why_ended(report: StallReport) -> str:
    waited = f"stalled for {report.waited_seconds:.0f} s"
    if called := _in_callbacks(report.program):
        first = called[0]
        at = f", at {first.standing.stack[0]}" if first.standing.stack else ""
        stuck = f"{in_words([found.rank for found in called])} on {first.host}"
        return f"{waited}: a callback of the program does not return on {stuck}{at}."
    if report.program:
        return f"{waited}: a program that all ranks have entered does not end."
    if not report.missing:
        return f"{waited}: a collective that all ranks have entered does not end."
    hosts = ", ".join(sorted({missing.host for missing in report.missing}))
    ranks = [missing.rank for missing in report.missing]
    return f"{waited}: {in_words(ranks)} on {hosts} did not come."
