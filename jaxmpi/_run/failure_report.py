"""Which rank of a job failed, and how: from what MPI's launcher said, and what was seen of the ranks' ends."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmpi._process.run_dir import Member
from jaxmpi._run.hosts import same_host

__all__ = ["End", "describe_failure"]

# What the launchers say when a job fails, white space collapsed; the first pattern that matches counts.
_VERDICTS = (
    r"MPI_ABORT was invoked on rank .{1,200}? Proc: \[\[\d+,\d+\],(?P<rank>\d+)\] Errorcode: (?P<abort>-?\d+)",
    r"Abort\((?P<abort>-?\d+)\) on node (?P<rank>\d+)",
    r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exited on signal (?P<signal>\d+)",
    r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exiting improperly",
    r"Process name: \[\S+,(?P<rank>\d+)\] Exit code: (?P<code>\d+)",
    r"PID (?P<pid>\d+) RUNNING AT (?P<host>\S+) = EXIT CODE: (?P<code>\d+)(?:.{1,2000}? \(signal (?P<signal>\d+)\))?",
)


class End(NamedTuple):
    """The end of a rank that was seen: its wait status, where the kernel tells (Linux 6.15 or later)."""

    member: Member
    status: int | None


def describe_failure(text: str, joined: Sequence[Member], ended: Sequence[End], code: int) -> str:
    """Say which rank failed, and how.

    Args:
        text: The last of what the launcher and the ranks wrote.
        joined: The ranks that joined on this host.
        ended: Those of them that were seen to end, in that order.
        code: The exit code of the launcher.
    """
    matches = (re.search(pattern, " ".join(text.split())) for pattern in _VERDICTS)
    groups = next((m.groupdict() for m in matches if m), {})
    host = groups.pop("host", None)  # MPICH says on which host one ended first, if not which rank it is
    said = {key: int(value) for key, value in groups.items() if value is not None}
    missing = {m.pid: m for m in joined if not m.left}
    first = next((end for end in ended if end.member.pid in missing), None)
    elsewhere = bool(host and joined and said["pid"] not in missing and not same_host(host, joined[0].host))
    if elsewhere:
        if reported := re.search(rf"\[rank (\d+)/\d+ on \S+\] was the first to end \(pid {said['pid']}\)", text):
            said["rank"] = int(reported[1])
    elif first and said.get("rank", first.member.rank) == first.member.rank:
        # MPICH names no rank, and the pid of any of the dead: what it says counts when that is this one's.
        confirmed = said if said.get("pid", first.member.pid) == first.member.pid else {}
        said = {**confirmed, **_outcome(first.status), "rank": first.member.rank}
    if not said:
        listed = ", ".join(f"{m.rank} (pid {m.pid} on {m.host})" for m in missing.values())
        return f"the launcher ended with code {code}" + (f"; these ranks did not end in order: {listed}" if listed else "")

    rank, pid = said.get("rank"), said.get("pid")
    member = next((m for m in joined if m.rank == rank or m.pid == pid), None)
    if elsewhere:
        who = f"a rank (pid {pid} on {host})" if rank is None else f"rank {rank} (pid {pid} on {host})"
    elif member:
        who = f"rank {member.rank} (pid {member.pid} on {member.host})"
    else:
        who = f"the rank with pid {pid}" if rank is None else f"rank {rank}"
    how = _how(said) if member or said.keys() != {"rank", "pid"} else "has ended, and has not joined the others in jaxmpi.init"
    return f"{who} {how}" + ("" if code else ", though the launcher reported success")


def _how(said: Mapping[str, int]) -> str:
    if "abort" in said:
        return f"called MPI_Abort with code {said['abort']}"
    if "signal" in said:
        names = {int(number): number.name for number in signal.Signals}
        return f"was killed by signal {said['signal']} ({names.get(said['signal'], 'unnamed')})"
    if "code" in said:
        return f"exited with code {said['code']}" + ("" if said["code"] else ", and not in order")
    return "ended first, and not in order"


def _outcome(status: int | None) -> dict[str, int]:
    if status is None:
        return {}
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}
