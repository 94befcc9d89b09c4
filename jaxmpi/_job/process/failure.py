"""The record of a failure: which rank ended the job, where and how; and the sentence about it.

A rank that waits in `init` or that ends the job, the watchdog, the death reporter and MPI's
launcher all report a failure. Each report becomes a `Failure` once. Restarts read the record, users
read `describe`.
"""

import contextlib
import enum
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jaxmpi._job.process import launchers

__all__ = [
    "MARK",
    "Cause",
    "Failure",
    "find_marked",
    "find_stalled",
    "from_json",
    "marked",
    "to_json",
]

# Begins a line of output that is a record in JSON, for `jaxmpi run`: on hosts other than its own,
# a process has no other way to it than the output of the job.
MARK = "jaxmpi-failure: "


class Cause(enum.StrEnum):
    """The kinds of failure of a rank or its host."""

    SIGNAL = "signal"  # a signal killed the rank
    EXIT = "exit"  # the rank exited
    ABORT = "abort"  # the rank called MPI_Abort
    ENDED = "ended"  # the rank ended after `init`; how is not known
    ABSENT = "absent"  # the rank has not called `init`
    STALLED = "stalled"  # the rank did not enter a collective in which others waited
    CALLBACK = "callback"  # a callback of the program that the rank is in does not return
    LEFT = "left"  # the script of the rank has ended, and others wait for it in a collective
    STOPPED = "stopped"  # the process of the rank is stopped, and the others wait at their end
    DAEMON = "daemon"  # MPI's daemon on the host ended
    UNKNOWN = "unknown"


_WAITED_FOR = (Cause.STALLED, Cause.CALLBACK, Cause.LEFT, Cause.STOPPED)


@dataclass(frozen=True)
class Failure:
    """The facts about a rank that failed; None and "" where something is not known."""

    rank: int | None = None
    pid: int | None = None
    host: str = ""
    cause: Cause = Cause.UNKNOWN
    signal: int | None = None
    code: int | None = None  # of the exit, or of MPI_Abort
    joined: bool = False  # whether the rank has called `init`
    state: str = "ended"  # of an absent rank's process, as `run_dir.state` names it
    work: str = ""  # of an absent rank: the block of `jaxmpi.busy` that it is in
    lost_host: str = ""  # with which the launcher has lost its connection
    others: tuple["Failure", ...] = ()  # of an unknown cause: ranks that did not end in order

    @property
    def failed_host(self) -> str:
        """Host that a restart counts the failure for.

        A launcher that has lost a host kills the ranks of the others.
        """
        return self.lost_host or self.host

    def exit_code(self, launcher_code: int) -> int:
        """Return the exit code of the job, the same whichever MPI runs.

        It is 128 + n if signal n has killed the rank, and otherwise the code that the rank has
        exited with, or the launcher's.
        """
        if self.signal:
            # Where the launcher ends with another code, a rank has ended the job with that code,
            # and the launcher has sent this rank the signal.
            reported = {0}
            for row in launchers.LAUNCHERS:
                if row.killed_code is not None:
                    reported.add(row.killed_code(self.signal))
            if launcher_code in reported:
                return 128 + self.signal
        exit_code = None if self.cause is Cause.ABORT else self.code
        return exit_code or launcher_code or 1

    def describe(self, launcher_code: int | None = None) -> str:
        """Return the sentence about the failure, without its full stop.

        Args:
          launcher_code: the exit code of the launcher, where it has ended.
        """
        if self.cause is Cause.DAEMON:
            return f"MPI's daemon on {self.host} ended first: it was killed, or the host failed"
        if self.cause is Cause.UNKNOWN:
            text = f"the launcher ended with code {launcher_code}"
            listed = ", ".join(f"{o.rank} (pid {o.pid} on {o.host})" for o in self.others)
            return text + (f"; these ranks did not end in order: {listed}" if listed else "")
        if self.cause is Cause.ABSENT and self.rank is None and self.pid is None:
            return "a rank of another host has not joined the others"
        success = ", though the launcher reported success" if launcher_code == 0 else ""
        return f"{self._who()} {self._how()}{success}"

    def _who(self) -> str:
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        if self.cause is Cause.ABSENT and self.host:
            where = f"pid {self.pid} on" if self.pid else "on"
            return f"{who} ({where} {self.host})"
        if self.pid is None:
            return who
        if not self.joined:
            return f"the rank with pid {self.pid}"
        return f"{who} (pid {self.pid} on {self.host})"

    def _how(self) -> str:
        if self.cause is Cause.ABORT:
            return f"called MPI_Abort with code {self.code}"
        if self.cause is Cause.SIGNAL:
            names = {int(number): number.name for number in signal.Signals}
            return f"was killed by signal {self.signal} ({names.get(self.signal or 0, 'unnamed')})"
        if self.cause is Cause.EXIT:
            return f"exited with code {self.code}" + ("" if self.code else ", and not in order")
        if self.cause is Cause.ENDED:
            return "ended first, and not in order"
        if self.cause is Cause.STALLED:
            return "did not enter a collective in which others waited"
        if self.cause is Cause.CALLBACK:
            return "did not return from a callback of a program in which others waited"
        if self.cause is Cause.LEFT:
            return "exited while others waited for it in a collective"
        if self.cause is Cause.STOPPED:
            return "is stopped (SIGSTOP, or a debugger), and did not come to its end"
        if self.work:
            return f"is {self.work}"
        state = {
            "ended": "has ended",
            "stopped": "is stopped (SIGSTOP, or a debugger)",
            "runs": "runs",
        }[self.state]
        return f"{state}, and has not joined the others in jaxmpi.init"


def to_json(failures: Sequence[Failure]) -> str:
    """Return the text of several records."""
    return json.dumps([asdict(failure) for failure in failures])


def from_json(text: str) -> list[Failure]:
    """Read several records; a ValueError if the text holds something else."""
    failures = []
    try:
        for record in json.loads(text):
            record |= {"cause": Cause(record["cause"]), "others": ()}
            failures.append(Failure(**record))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record of a failure: {text[:200]}") from error
    return failures


def find_stalled(text: str) -> list[Failure]:
    """Return the ranks for which others have waited in vain, by the records in lines of output.

    One that has ended the job in a long wait itself is none of them, unless all have.
    """
    found = find_marked(text)
    # Several ranks may have reported the same one.
    stalled = dict.fromkeys(failure for failure in found if failure.cause in _WAITED_FOR)
    waited = {failure.rank for failure in found if failure.cause is Cause.ABORT}
    return [failure for failure in stalled if failure.rank not in waited] or [*stalled]


def marked(failures: Sequence[Failure]) -> str:
    """Return the line of output that tells `jaxmpi run` of failures; "" where it did not start us.

    Native code writes such a line, too (native/plain_rank.cc).
    """
    return f"{MARK}{to_json(failures)}\n" if "JAXMPI_RUN_DIR" in os.environ else ""


def find_marked(text: str) -> list[Failure]:
    """Read the records that follow `MARK` in the output; ranks may write into the same line."""
    found: list[Failure] = []
    for after in text.split(MARK)[1:]:
        with contextlib.suppress(ValueError):  # another rank has written into the record
            _, end = json.JSONDecoder().raw_decode(after)
            found += from_json(after[:end])
    return found
