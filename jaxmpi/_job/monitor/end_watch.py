"""The wait at the end of a rank: which ranks are late, and which never come.

A rank that has come to its end waits for the others (`Monitor.leave`). A slow rank is waited for as
long as it takes: it may evaluate, or write files. But it is named: after JAXMPI_STALL_SECONDS the
ranks that wait ask all others whether they have come to their end, and the lowest of them writes
what the missing ones do. A rank whose process is stopped may never come: a rank that waits on its
host sees it, says so, and ends the job if it is still stopped JAXMPI_STALL_END_SECONDS later. Where
all ranks of a host are stopped, or the lowest of those that wait is, nobody sees that: the ranks of
other hosts name them as silent, and wait for them.
"""

import math
import time

from jaxmpi._consistency.mismatch import in_words
from jaxmpi._job.monitor.monitor import Monitor
from jaxmpi._job.monitor.watchdog import (
    ANSWER_SECONDS,
    LOOK_AGAIN_SECONDS,
    MIN_REPEAT_SECONDS,
    Answer,
    MissingRank,
    Watchdog,
    describe_missing,
)
from jaxmpi._job.process import run_dir, settings, stderr
from jaxmpi._job.process.failure import Cause, Failure, marked

__all__ = ["EndWatch", "describe"]


class EndWatch:
    """The watch of one rank over its wait at the end, which `Monitor.leave` calls."""

    def __init__(self, monitor: Monitor, watchdog: Watchdog) -> None:
        self._monitor, self._watchdog = monitor, watchdog
        self._place = monitor.backend.place
        self._stall_seconds, self._end_seconds = settings.limits()
        self._began: float | None = None  # the wait
        self._due = self._stall_seconds or math.inf  # seconds of the wait, for the next question
        self._asked_at: float | None = None
        # What the others have answered to the last question; a silent rank is in neither.
        self._at_end: set[int] = set()
        self._answers: dict[int, Answer] = {}  # of ranks that have not come to their end
        # By stopped rank of this host, the seconds of the wait when it was first seen to be so.
        self._stopped_at: dict[int, float] = {}
        self._reported: list[int] | None = None  # stopped ranks in the last report
        monitor.topics["end: where"] = self._on_question
        monitor.topics["end: here"] = self._on_answer
        monitor.end_watchers.append(self._look)

    def _on_question(self, rank: int, _: None) -> None:
        answer = None if self._monitor.leaving else self._watchdog.own_answer()
        self._monitor.send(rank, "end: here", answer)

    def _on_answer(self, rank: int, answer: Answer | None) -> None:
        if answer is None:
            self._at_end.add(rank)
            self._answers.pop(rank, None)  # late, to the question before
        else:
            self._answers[rank] = answer

    def _look(self) -> None:
        """Ask the others at the times that are due, and report once they have answered."""
        # Between two questions a rank may go on, and be stopped again just before the second one.
        for rank in list(self._stopped_at):
            pid, _ = self._monitor.members[rank]
            if run_dir.state(pid) != "stopped":
                del self._stopped_at[rank]
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        waited_seconds = now - self._began
        if self._asked_at is not None:
            complete = len(self._at_end) + len(self._answers) == self._place.size - 1
            if complete or now - self._asked_at > ANSWER_SECONDS:
                self._asked_at = None
                self._report(waited_seconds)
        elif waited_seconds > self._due:
            self._asked_at, self._at_end, self._answers = now, set(), {}
            self._monitor.send_all("end: where", None)

    def _report(self, waited_seconds: float) -> None:
        """Report the missing ranks, on one rank; end the job for a stopped one of this host."""
        leaving, missing = {self._place.rank, *self._at_end}, list[MissingRank]()
        for rank in range(self._place.size):
            if rank not in leaving:
                answer = self._answers.get(rank)
                missing.append(self._watchdog.missing_rank(rank, answer, waited_seconds)[0])

        # Every rank that waits comes here. From now on one of each host asks, which sees whether
        # a process of this host is stopped. The lowest of those that wait writes about the others,
        # once; so does a lower one that comes later.
        _, host = self._monitor.members[self._place.rank]
        if self._place.rank != min(r for r in leaving if self._monitor.members[r][1] == host):
            self._due = math.inf
            return
        self._due = waited_seconds + max(self._stall_seconds, MIN_REPEAT_SECONDS)

        # A stopped rank has all of the time since it was first seen to be stopped. Since when it is
        # nobody knows: it may have run until just before that look.
        stopped = [found for found in missing if found.state == "stopped"]
        seen_anew = False
        remaining_seconds, out_of_time = math.inf, list[MissingRank]()
        for found in stopped:
            seen_anew = seen_anew or found.rank not in self._stopped_at
            since = self._stopped_at.setdefault(found.rank, waited_seconds)
            if self._end_seconds:
                rank_remaining_seconds = self._end_seconds - (waited_seconds - since)
                remaining_seconds = min(remaining_seconds, rank_remaining_seconds)
                if rank_remaining_seconds <= 0:
                    out_of_time.append(found)
        if 0 < remaining_seconds < math.inf:
            self._due = min(self._due, waited_seconds + remaining_seconds + LOOK_AGAIN_SECONDS)

        known = [found.rank for found in stopped]
        first = self._reported is None and self._place.rank == min(leaving)
        changed = seen_anew or known != (self._reported or [])
        if missing and (first or changed or out_of_time):
            self._reported = known
            announced = remaining_seconds if 0 < remaining_seconds < math.inf else None
            self._monitor.say(describe(waited_seconds, missing, announced))
        if out_of_time:
            failures = []
            for x in out_of_time:
                failures.append(Failure(x.rank, x.pid, x.host, Cause.STOPPED, joined=True))
            stderr.say(marked(failures))
            who = f"{in_words([x.rank for x in out_of_time])} on {host}"
            are = "are" if len(out_of_time) > 1 else "is"
            self._monitor.end(1, f"waited {waited_seconds:.0f} s at the end: {who} {are} stopped.")


def describe(
    waited_seconds: float, missing: list[MissingRank], ends_in_seconds: float | None
) -> str:
    """Return in words which ranks have not come to their end.

    Args:
      waited_seconds: how long this rank has waited.
      missing: the others.
      ends_in_seconds: until the job ends for one that is stopped; None if it does not.
    """
    lines = [f"slow: has waited {waited_seconds:.0f} s at its end for the others"]
    for found in missing:
        lines += describe_missing(found)
    if ends_in_seconds is not None:
        lines.append(
            f"  the job ends in {ends_in_seconds:.0f} s if the stopped process does not go on "
            "(JAXMPI_STALL_END_SECONDS)"
        )
    return "\n".join(lines)
