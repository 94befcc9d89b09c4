"""The diagnosis of a job that failed: from the launcher's output, and the ends of ranks seen here.

What the launchers print about a failure is in their table (process/launchers.py), as patterns.
"""

import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxmpi._job.launch.placement import same_host
from jaxmpi._job.process import launchers
from jaxmpi._job.process.failure import Cause, Failure, find_marked
from jaxmpi._job.process.run_dir import Member

__all__ = ["End", "find_failure"]


class End(NamedTuple):
    """The end of a rank that was seen."""

    member: Member
    status: int | None  # as `os.wait` has it, where the kernel tells (Linux 6.15 or later)


def find_failure(text: str, joined: Sequence[Member], ended: Sequence[End]) -> Failure:
    """Find the rank that ended the job.

    Args:
      text: the last of what the launcher and the ranks wrote.
      joined: the ranks that joined on this host.
      ended: those of them that were seen to end, in that order.
    """
    flat = " ".join(text.split())
    failure = _find_rank(text, flat, joined, ended)
    host = failure.host or _first_host(flat, launchers.names(lambda row: row.rank_hosts))
    lost = _first_host(flat, launchers.names(lambda row: row.lost_hosts))
    return replace(failure, host=host, lost_host=lost)


def _find_rank(text: str, flat: str, joined: Sequence[Member], ended: Sequence[End]) -> Failure:
    """Find the rank that ended the job, by name or by the order of the ends.

    `flat` is `text` with white space collapsed.
    """
    missing = {member.pid: member for member in joined if not member.left}
    first = next((end for end in ended if end.member.pid in missing), None)

    # What the launcher says: a line for each rank that a signal has killed, or one verdict.
    killed: list[dict[str, Any]] = []
    for row in launchers.LAUNCHERS:
        if row.killed_list:
            killed += [_fields(match) for match in re.finditer(row.killed_list, flat)]
    if killed:
        # The launcher kills with SIGKILL: another signal is that of the rank that was first.
        # Otherwise it is the rank that was seen to end first, unless a rank of another host may
        # have been.
        crashed = [each for each in killed if each["signal"] != signal.SIGKILL]
        seen = [each for each in killed if first and each.get("pid") == first.member.pid]
        hosts = {each["host"] for each in killed}
        away = joined and not all(same_host(host, joined[0].host) for host in hosts)
        if away and not crashed:
            return _failure({}, missing.values())
        fields = next(iter(crashed or seen), {})
    else:
        patterns = launchers.names(lambda row: row.verdicts)
        matches = (re.search(pattern, flat) for pattern in patterns)
        fields = next((_fields(match) for match in matches if match), {}) or _told_by_rank(text)
    host, rank, pid = fields.pop("host", ""), fields.get("rank"), fields.get("pid")

    # MPICH names the host on which a rank ended first, maybe by its address, but not the rank. On
    # another host than this one a death reporter has written which rank it was. Its pid may be that
    # of a rank of this host, too.
    reported = [
        failure
        for failure in find_marked(text)
        if failure.pid == pid and joined and not same_host(failure.host, joined[0].host)
    ]
    is_away = host and joined and not same_host(host, joined[0].host)
    if is_away and (reported or pid not in missing):
        if reported:
            fields["rank"] = reported[-1].rank
        return _failure({**fields, "host": host, "joined": True})

    # On this host the order in which the ranks ended is known. If the launcher names another pid,
    # it has killed that one itself. A rank that has called MPI_Abort is killed with the others, in
    # any order: so the order counts only where the rank that the launcher names was also the first.
    named = "rank" in fields or "abort" not in fields
    if first and named and fields.get("rank", first.member.rank) == first.member.rank:
        confirmed = fields if fields.get("pid", first.member.pid) == first.member.pid else {}
        if "abort" in confirmed:  # its wait status is that of the launcher's signal
            fields = confirmed
        else:
            fields = {**confirmed, **_status_fields(first.status)}
        rank, pid = first.member.rank, first.member.pid

    # processes of two hosts may have the same pid
    member = next((m for m in joined if (m.pid == pid if rank is None else m.rank == rank)), None)
    if member:
        known = {"rank": member.rank, "pid": member.pid, "host": member.host, "joined": True}
        return _failure({**fields, **known})
    if rank is not None:
        fields.pop("pid", None)
    return _failure({**fields, "host": host}, missing.values())


def _told_by_rank(text: str) -> dict[str, Any]:
    """Return what the first rank that ended the job wrote of itself, as fields.

    It counts where the launcher says nothing: Open MPI 4 sends its message about MPI_Abort to
    itself, and now and then cannot read it (ORTE_ERROR_LOG: Out of resource in show_help.c).
    """
    for told in find_marked(text):
        if told.cause is Cause.ABORT:
            return {"rank": told.rank, "pid": told.pid, "host": told.host, "abort": told.code}
    return {}


def _failure(fields: Mapping[str, Any], others: Iterable[Member] = ()) -> Failure:
    """Make a record of the fields that are known, of which `abort` is the code of MPI_Abort."""
    known = dict(fields)
    if "abort" in known:
        known |= {"cause": Cause.ABORT, "code": known.pop("abort")}
    elif "signal" in known:
        known["cause"] = Cause.SIGNAL
    elif "code" in known:
        known["cause"] = Cause.EXIT
    elif known.get("joined"):
        known["cause"] = Cause.ENDED
    elif "rank" in known or "pid" in known:
        known["cause"] = Cause.ABSENT
    else:
        known["others"] = tuple(
            Failure(member.rank, member.pid, member.host, Cause.ENDED, joined=True)
            for member in others
        )
    return Failure(**known)


def _fields(match: re.Match[str]) -> dict[str, Any]:
    """Return what the launcher says of a rank, as fields."""
    fields: dict[str, Any] = {}
    for name, value in match.groupdict().items():
        # Open MPI 4 writes 0 for a process whose number it does not know
        if value is not None and (name, value) != ("pid", "0"):
            fields[name] = value if name == "host" else int(value)
    return fields


def _status_fields(status: int | None) -> dict[str, int]:
    """Return a wait status as fields."""
    if status is None:
        return {}
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return {"code": os.WEXITSTATUS(status)}


def _first_host(flat: str, patterns: Iterable[str]) -> str:
    """Return the host in the first pattern that matches; "" if none does."""
    for pattern in patterns:
        if found := re.search(pattern, flat):
            return found["host"].strip(".,;:")
    return ""
