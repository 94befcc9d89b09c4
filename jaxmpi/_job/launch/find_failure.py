"""The diagnosis of a job that failed: from the launcher's output, and the ends of ranks seen here.

What the launchers print about a failure is in their table (process/launchers.py), as patterns.
"""

import os
import re
import signal
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

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
    others = tuple(
        Failure(member.rank, member.pid, member.host, Cause.ENDED, joined=True)
        for member in missing.values()
    )
    named = _named_by_launcher(text, flat, joined, first)
    if named is None:
        return Failure(others=others)
    if away := _on_another_host(named, text, joined, missing):
        return away
    named = _first_to_end(named, first) if first else named

    # processes of two hosts may have the same pid
    for member in joined:
        is_it = member.pid == named.pid if named.rank is None else member.rank == named.rank
        if is_it:
            cause = Cause.ENDED if named.cause is Cause.UNKNOWN else named.cause
            return replace(
                named, rank=member.rank, pid=member.pid, host=member.host, cause=cause, joined=True
            )
    if named.cause is not Cause.UNKNOWN:
        return named if named.rank is None else replace(named, pid=None)
    if named.rank is None and named.pid is None:
        return replace(named, others=others)
    return replace(named, cause=Cause.ABSENT, pid=None if named.rank is not None else named.pid)


def _named_by_launcher(
    text: str, flat: str, joined: Sequence[Member], first: End | None
) -> Failure | None:
    """Return what the launcher says of the rank that ended the job, or else the rank itself.

    It is a `Failure` without facts if they say nothing, and None if the launcher has killed ranks
    of several hosts, of which any may have been the first to end.
    """
    # The launcher has a line for each rank that a signal has killed, or one verdict.
    killed = list[Failure]()
    for row in launchers.LAUNCHERS:
        if row.killed_list:
            killed += [_read_match(match) for match in re.finditer(row.killed_list, flat)]
    if killed:
        # The launcher kills with SIGKILL: another signal is that of the rank that was first.
        # Otherwise it is the rank that was seen to end first, unless a rank of another host may
        # have been.
        crashed = [each for each in killed if each.signal != signal.SIGKILL]
        seen = [each for each in killed if first and each.pid == first.member.pid]
        away = joined and not all(same_host(each.host, joined[0].host) for each in killed)
        if away and not crashed:
            return None
        return next(iter(crashed or seen), Failure())
    for pattern in launchers.names(lambda row: row.verdicts):
        match = re.search(pattern, flat)
        if match and (said := _read_match(match)) != Failure():
            return said
    return _told_by_rank(text)


def _on_another_host(
    named: Failure, text: str, joined: Sequence[Member], missing: Container[int]
) -> Failure | None:
    """Return the failure if it is that of a rank of another host; None otherwise.

    MPICH names the host on which a rank ended first, maybe by its address, but not the rank. On
    another host than this one a death reporter has written which rank it was. Its pid may be that
    of a rank of this host, too.
    """
    if not named.host or not joined or same_host(named.host, joined[0].host):
        return None
    reported = [
        failure
        for failure in find_marked(text)
        if failure.pid == named.pid and not same_host(failure.host, joined[0].host)
    ]
    if not reported and named.pid in missing:
        return None
    return replace(
        named,
        rank=reported[-1].rank if reported else named.rank,
        cause=Cause.ENDED if named.cause is Cause.UNKNOWN else named.cause,
        joined=True,
    )


def _first_to_end(named: Failure, first: End) -> Failure:
    """Return the failure of the rank of this host that was seen to end first, if it is that one.

    On this host the order in which the ranks ended is known. A rank that has called MPI_Abort is
    killed with the others, in any order: so the order counts only where the rank that the launcher
    names was also the first.
    """
    if named.rank is None and named.cause is Cause.ABORT:
        return named
    if named.rank not in (None, first.member.rank):
        return named
    # If the launcher names another pid, it has killed that one itself.
    confirmed = named if named.pid in (None, first.member.pid) else Failure()
    confirmed = replace(confirmed, rank=first.member.rank, pid=first.member.pid)
    # after MPI_Abort, its wait status is that of the launcher's signal
    if first.status is None or confirmed.cause is Cause.ABORT:
        return confirmed
    if os.WIFSIGNALED(first.status):
        return replace(confirmed, cause=Cause.SIGNAL, signal=os.WTERMSIG(first.status))
    return replace(confirmed, cause=Cause.EXIT, signal=None, code=os.WEXITSTATUS(first.status))


def _told_by_rank(text: str) -> Failure:
    """Return what the first rank that ended the job wrote of itself; without facts if none did.

    It counts where the launcher says nothing: Open MPI 4 sends its message about MPI_Abort to
    itself, and now and then cannot read it (ORTE_ERROR_LOG: Out of resource in show_help.c).
    """
    for told in find_marked(text):
        if told.cause is Cause.ABORT:
            return Failure(told.rank, told.pid, told.host, Cause.ABORT, code=told.code)
    return Failure()


def _read_match(match: re.Match[str]) -> Failure:
    """Return what the launcher says of a rank, from the groups of a pattern of the table."""
    groups = match.groupdict()
    number: dict[str, int] = {}
    for name, value in groups.items():
        # Open MPI 4 writes 0 for a process whose number it does not know
        if value is not None and name != "host" and (name, value) != ("pid", "0"):
            number[name] = int(value)
    if "abort" in number:
        cause = Cause.ABORT
    elif "signal" in number:
        cause = Cause.SIGNAL
    else:
        cause = Cause.EXIT if "code" in number else Cause.UNKNOWN
    return Failure(
        rank=number.get("rank"),
        pid=number.get("pid"),
        host=groups.get("host") or "",
        cause=cause,
        signal=number.get("signal"),
        code=number.get("abort", number.get("code")),
    )


def _first_host(flat: str, patterns: Iterable[str]) -> str:
    """Return the host in the first pattern that matches; "" if none does."""
    for pattern in patterns:
        if found := re.search(pattern, flat):
            return found["host"].strip(".,;:")
    return ""
