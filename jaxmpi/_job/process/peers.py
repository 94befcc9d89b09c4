"""The processes of a job's ranks on this host, as /proc shows them: also of those that have not called `init`."""

import contextlib
import ctypes
import os
from pathlib import Path
from typing import NamedTuple

from jaxmpi._job.process import launchers, run_dir
from jaxmpi._job.process.busy import Work, work_of

__all__ = ["INIT", "MONITOR", "Peer", "all_are_here", "mark_thread", "peers", "rank_here"]

INIT, MONITOR = (
    "jaxmpi-init",
    "jaxmpi-monitor",
)  # names of threads, by which other processes see how far a rank is; 15 letters at most
_PR_SET_NAME = 15


class Peer(NamedTuple):
    """A rank's process."""

    pid: int
    state: str  # as in `run_dir.state`
    called: bool  # whether the rank has called `init`
    work: Work = Work()  # of a rank that has not


def rank_here() -> int | None:
    """This process's rank, as the launcher's environment has it; None without one."""
    return launchers.launched(os.environ).rank


def all_are_here(size: int) -> bool:
    """Whether all ranks are on this host and /proc shows what their launcher has started: a rank that is not seen has ended."""
    daemon = _read("/proc", str(os.getppid()), "comm")
    return launchers.launched(os.environ).local_size == size and daemon.startswith(
        launchers.names(lambda launcher: launcher.daemons)
    )


def mark_thread(name: str) -> None:
    """Give the calling thread a name that other processes see, too."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def peers() -> dict[int, Peer]:
    """Return the ranks of this process's job on this host.

    A rank may have several processes. It is the one that has called `init`, or else one that is
    busy.
    """
    found: dict[int, Peer] = {}
    job = _job("self")
    for path in Path("/proc").glob("[0-9]*"):
        if job is None or _job(path.name) != job:
            continue
        rank = launchers.launched(_environ(path.name)).rank
        if rank is None or (rank in found and found[rank].called):
            continue
        pid, called = int(path.name), _has_called(path)
        state = run_dir.state(pid)
        work = Work() if called or state != "runs" else work_of(pid)
        if rank not in found or called or work.counts:
            found[rank] = Peer(pid, state, called, work)
    return found


def _job(pid: str) -> str | None:
    environ = _environ(pid)
    # equal in all processes of a job; without them the launcher's daemon is their parent
    variables = (*launchers.names(lambda launcher: launcher.job), "JAXMPI_RUN_DIR")
    named = next((environ[name] for name in variables if name in environ), None)
    return named or (_parent(pid) if environ else None)


def _environ(pid: str) -> dict[str, str]:
    return dict(
        line.split("=", 1) for line in _read("/proc", pid, "environ").split("\0") if "=" in line
    )


def _parent(pid: str) -> str | None:
    return next(iter(_read("/proc", pid, "stat").rpartition(")")[2].split()[1:]), None)


def _has_called(process: Path) -> bool:
    return any(_read(str(path)).strip() in (INIT, MONITOR) for path in process.glob("task/*/comm"))


def _read(*path: str) -> str:
    try:
        return Path(*path).read_text(errors="replace")
    except OSError:
        return ""
