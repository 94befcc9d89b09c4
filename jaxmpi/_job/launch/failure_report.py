"""Which rank of a job failed, and how: from what MPI's launcher said, and what was seen of the ranks' ends."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmpi._job.launch.placement import same_host
from jaxmpi._job.process.run_dir import Member

__all__ = ["End", "Failure", "find_failure"]

# What the launchers say of the rank that ended the job, white space collapsed; the first that
# matches counts.
_VERDICTS = (
    r"MPI_ABORT was invoked on rank .{1,200}? Proc: \[\[\d+,\d+\],(?P<rank>\d+)\] Errorcode: "
    r"(?P<abort>-?\d+)",
    # Open MPI 4; in another communicator the rank has another number
    r"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator MPI_COMM_WORLD"
    r" with errorcode (?P<abort>-?\d+)",
    r"MPI_ABORT was invoked on rank \d+ in communicator .{1,200}?"
    r" with errorcode (?P<abort>-?\d+)",
    r"Abort\((?P<abort>-?\d+)\) on node (?P<rank>\d+)",
    r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exited on signal "
    r"(?P<signal>\d+)",
    r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exiting improperly",
    r"Process name: \[\S+,(?P<rank>\d+)\] Exit code: (?P<code>\d+)",
    r"PID (?P<pid>\d+) RUNNING AT (?P<host>\S+) = EXIT CODE: (?P<code>\d+)(?:.{1,2000}? \(signal "
    r"(?P<signal>\d+)\))?",
)
# Intel MPI lists all ranks that a signal has ended, in the order of the ranks: also those that it
# has killed itself, because of another.
_KILLED = (
    r"RANK (?P<rank>\d+) PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)"
    r" = KILLED BY SIGNAL: (?P<signal>\d+)"
)


class End(NamedTuple):
    """The end of a rank that was seen: its wait status, where the kernel tells (Linux 6.15 or later)."""

    member: Member
    status: int | None


class Failure(NamedTuple):
    """What is known of the rank that ended the job; None and "" where something is not known."""

    rank: int | None = None
    pid: int | None = None
    host: str = ""
    signal: int | None = None  # that has killed it
    code: int | None = None  # that it has exited with
    abort: int | None = None  # that it has called MPI_Abort with
    joined: bool = False  # whether it has come as far as `init`
    others: tuple[Member, ...] = ()  # if nothing is known: the ranks that did not end in order

    def exit_code(self, code: int) -> int:
        """Return the exit code of the job; `code` is that of the launcher.

        It is the same whichever MPI runs: 128 + n where signal n has killed the rank, and else the
        code that the rank has exited with. Open MPI's launcher says the same, MPICH's n in the
        place of 128 + n, and Intel's 255 for both. Another code is that of a rank that has ended
        the job: the signal is the launcher's own.
        """
        if self.signal and code in (0, self.signal, 255):
            return 128 + self.signal
        return self.code or code or 1

    def describe(self, code: int) -> str:
        """Say which rank failed, and how; `code` is the exit code of the launcher."""
        if self.rank is None and self.pid is None and self.abort is None:
            said = f"the launcher ended with code {code}"
            listed = ", ".join(f"{m.rank} (pid {m.pid} on {m.host})" for m in self.others)
            return said + (f"; these ranks did not end in order: {listed}" if listed else "")
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        if self.pid is not None:
            where = f"(pid {self.pid} on {self.host})"
            who = f"{who} {where}" if self.host else f"the rank with pid {self.pid}"
        success = "" if code else ", though the launcher reported success"
        return f"{who} {self._how()}{success}"

    def _how(self) -> str:
        if self.abort is not None:
            return f"called MPI_Abort with code {self.abort}"
        if self.signal is not None:
            names = {int(number): number.name for number in signal.Signals}
            return f"was killed by signal {self.signal} ({names.get(self.signal, 'unnamed')})"
        if self.code is not None:
            return f"exited with code {self.code}" + ("" if self.code else ", and not in order")
        if self.joined:
            return "ended first, and not in order"
        return "has ended, and has not joined the others in jaxmpi.init"


def find_failure(text: str, joined: Sequence[Member], ended: Sequence[End]) -> Failure:
    """Find the rank that ended the job.

    Args:
        text: The last of what the launcher and the ranks wrote.
        joined: The ranks that joined on this host.
        ended: Those of them that were seen to end, in that order.
    """
    flat = " ".join(text.split())
    missing = {member.pid: member for member in joined if not member.left}
    others = tuple(missing.values())
    first = next((end for end in ended if end.member.pid in missing), None)
    killed = [match.groupdict() for match in re.finditer(_KILLED, flat)]
    if killed:
        # Intel MPI kills with SIGKILL: another signal is that of the rank that was first. Otherwise
        # it is the rank that was seen to end first, unless a rank of another host may have been.
        crashed = [groups for groups in killed if int(groups["signal"]) != signal.SIGKILL]
        away = [
            groups for groups in killed if joined and not same_host(groups["host"], joined[0].host)
        ]
        if away and not crashed:
            return Failure(others=others)
        seen = [groups for groups in killed if first and int(groups["pid"]) == first.member.pid]
        said = _fields(next(iter(crashed or seen), {}))
    else:
        matches = (re.search(pattern, flat) for pattern in _VERDICTS)
        said = _fields(next((match.groupdict() for match in matches if match), {}))
    host, rank, pid = str(said.pop("host", "")), said.get("rank"), said.get("pid")

    # MPICH says on which host a rank ended first, if not which rank it is.
    if host and joined and pid not in missing and not same_host(host, joined[0].host):
        by_reporter = rf"\[rank (\d+)/\d+ on \S+\] was the first to end \(pid {pid}\)"
        if reported := re.search(by_reporter, text):
            said["rank"] = int(reported[1])
        return Failure(**said, host=host, joined=True)

    # On this host the order in which the ranks ended is known. What the launcher says of another
    # pid is about one that it has killed itself. A rank that has called MPI_Abort is killed with
    # the others, in any order: the first to end is not meant where the launcher names no rank.
    named = "rank" in said or "abort" not in said
    if first and named and said.get("rank", first.member.rank) == first.member.rank:
        confirmed = said if said.get("pid", first.member.pid) == first.member.pid else {}
        # the launcher has killed a rank that has called MPI_Abort
        said = confirmed if "abort" in confirmed else {**confirmed, **_outcome(first.status)}
        rank, pid = first.member.rank, first.member.pid

    member = next((m for m in joined if m.rank == rank or m.pid == pid), None)
    if member:
        said.update(rank=member.rank, pid=member.pid)
    elif rank is not None:
        said.pop("pid", None)
    return Failure(**said, host=member.host if member else "", joined=bool(member), others=others)


def _fields(groups: Mapping[str, str | None]) -> dict[str, Any]:
    """Return what the launcher says of a rank as fields of `Failure`."""
    said: dict[str, Any] = {}
    for name, value in groups.items():
        # Open MPI 4 writes 0 for a process whose number it does not know
        if value is not None and (name, value) != ("pid", "0"):
            said[name] = value if name == "host" else int(value)
    return said


def _outcome(status: int | None) -> dict[str, int]:
    """Return a wait status as fields of `Failure`."""
    if status is None:
        return {}
    return (
        {"signal": os.WTERMSIG(status)}
        if os.WIFSIGNALED(status)
        else {"code": os.WEXITSTATUS(status)}
    )
