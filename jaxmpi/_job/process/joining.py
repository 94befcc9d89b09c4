"""The ranks of a host before and in `init`, as processes that see each other in /proc.

MPI starts once every rank has started it, and so `init` waits for the slowest, before there is a
monitor that could send messages. A thread looks at the processes of this host meanwhile. It reports
after JAXMPI_STALL_SECONDS which ranks have not called `init`, and ends the job after
JAXMPI_STALL_END_SECONDS, or once one of them has ended. It waits on while all ranks that it sees
missing are in a `jaxmpi.busy` block. A rank that fails in `init` does not wait for the others in
MPI's own end, nor they for it.

A process that a rank starts, such as a data loader, inherits the launcher's variables, and is no
rank: it finds its `Parent`.
"""

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeAlias

from jaxmpi._job.process import launchers, run_dir, settings, stderr
from jaxmpi._job.process.at_exit import start_thread
from jaxmpi._job.process.busy import Work, work_of
from jaxmpi._job.process.failure import Cause, Failure

__all__ = [
    "INIT",
    "MONITOR",
    "Parent",
    "Peer",
    "joining",
    "mark_thread",
    "note_rank",
    "parent",
    "peers",
    "rank_here",
]

# Names of threads, by which other processes see how far a rank is; 15 letters at most.
INIT, MONITOR = "jaxmpi-init", "jaxmpi-monitor"
# Where all ranks fail at once, each gives the others this time to write what they have found.
GRACE_SECONDS = 0.5
LOOK_SECONDS = 0.5  # between two looks at the clock while `init` waits
_PR_SET_NAME = 15
_RANK_VARIABLE = "JAXMPI_RANK_PROCESS"  # by which a rank tells its children that it is one
Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


# The wait in `init`


@contextlib.contextmanager
def joining(launched: int) -> Iterator[None]:
    """Watch over `init` on one of several ranks.

    If `init` fails and nothing handles the error, the process ends without MPI_Finalize: MPI's
    launcher ends the rest.

    Args:
      launched: the number of ranks in the launcher's environment.
    """
    if launched == 1:
        yield
        return
    # The script has handled the error of an earlier `init`, and tries again.
    sys.excepthook = getattr(sys.excepthook, "shows", sys.excepthook)
    over = threading.Event()
    try:
        Wait(launched, over)
        yield
    except Exception as error:
        _add_rank(error)
        sys.excepthook = _ending_hook(sys.excepthook)
        raise
    finally:
        over.set()


class Wait:
    """One rank's wait for the others, until `over` is set."""

    def __init__(self, size: int, over: threading.Event) -> None:
        self._size, self._over = size, over
        self._stall_seconds, self._end_seconds = _limits()
        self._seen: dict[int, Peer] = {}  # the ranks of this host
        start_thread(self._watch, INIT, stop=over.set)

    def _watch(self) -> None:
        mark_thread(INIT)
        start, due, reported = time.monotonic(), 1.0, False
        end = self._end_seconds
        while not self._over.wait(LOOK_SECONDS):
            waited = time.monotonic() - start
            if self._stall_seconds and waited > self._stall_seconds and not reported:
                self._report(waited)
                reported = True
            elif self._stall_seconds and self._end_seconds and waited > end:
                # A rank that was at work has all of the time from the end of its work.
                idle = [self._seen[rank].work.idle_seconds for rank in self._look()]
                end = waited + self._end_seconds - min(waited, max(idle, default=waited))
                if end <= waited:
                    self._end(f"stalled for {waited:.0f} s in jaxmpi.init")
                else:
                    self._report(waited)
            elif waited > due:
                # A rank that is seen now may be gone when the report is due, and would then be
                # missing without a process id. Looking costs time: so less and less often.
                due *= 2
                self._look()

    def _look(self) -> list[int]:
        """Update the ranks of this host; return those that have not called `init`."""
        now = peers()
        if all_are_here(self._size):  # those that are not seen have ended
            self._seen = {rank: Peer(0, "ended", False) for rank in range(self._size)} | self._seen
        for rank, peer in self._seen.items():
            if not peer.called:  # unless it is seen now
                self._seen[rank] = peer._replace(state="ended")
        self._seen = {**self._seen, **now}
        return [rank for rank, peer in sorted(self._seen.items()) if not peer.called]

    def _report(self, waited: float) -> None:
        """Write which ranks are missing; end the job if one of them has ended."""
        missing = self._look()
        lines = [f"stalled: has waited {waited:.0f} s in jaxmpi.init"]
        lines += [f"  missing: {self._absent(rank).describe()}" for rank in missing]
        if not missing:
            others = ""
            if len(self._seen) < self._size:
                others = "; the ranks of other hosts are not seen from here"
            lines.append(f"  all ranks of this host have joined{others}")
        hopeless = any(self._seen[rank].state == "ended" for rank in missing)
        at_work = bool(missing) and all(self._seen[rank].work.counts for rank in missing)
        if not hopeless and not at_work and self._end_seconds > waited:
            lines.append(
                f"  the job ends in {self._end_seconds - waited:.0f} s if it does not go on "
                "(JAXMPI_STALL_END_SECONDS)"
            )
            if missing:
                lines.append(
                    "  a rank that works alone for long says so: with jaxmpi.busy('what it does')"
                )
        self._say("\n".join(lines))
        if hopeless:
            self._end("the job cannot start")

    def _absent(self, rank: int) -> Failure:
        """Return the record about a rank that has not called `init`."""
        peer = self._seen[rank]
        return Failure(
            rank=rank,
            pid=peer.pid or None,
            host=os.uname().nodename,
            cause=Cause.ABSENT,
            state=peer.state,
            work=str(peer.work.block) if peer.work.counts else "",
        )

    def _say(self, text: str) -> bool:
        """Write it on one rank of each host; return whether this is the one."""
        called = [rank for rank, peer in self._seen.items() if peer.called]
        here = rank_here()
        if here is not None and here != min(called, default=here):
            return False
        who = "a rank" if here is None else f"rank {here}/{self._size}"
        stderr.say(f"jaxmpi: [{who} on {os.uname().nodename}] {text}\n")
        return True

    def _end(self, why: str) -> None:
        """End the job, unless `init` has just returned."""
        failures = [self._absent(rank) for rank in self._look()] or [Failure(cause=Cause.ABSENT)]
        missing = "; ".join(failure.describe() for failure in failures)
        if self._over.is_set():
            return
        # The rank that writes the report ends the job. The others do so later, if it does not.
        writes = self._say(f"{why}: {missing}. The job ends.")
        time.sleep(GRACE_SECONDS if writes else 5 * GRACE_SECONDS)
        if self._over.is_set():  # the missing ranks have come meanwhile
            return
        with contextlib.suppress(KeyError, OSError):
            run_dir.report_failures(os.environ["JAXMPI_RUN_DIR"], failures)
        stderr.end_process(1, _abort)


def _limits() -> tuple[float, float]:
    """Return the two limits of a stall; the defaults if they are not valid."""
    with contextlib.suppress(ValueError):  # `init` raises it on all ranks
        return settings.limits()
    return settings.limits({})


def _abort(code: int) -> None:
    """End all ranks if MPI has started.

    If it has not, MPI's launcher ends the others once this process has ended.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)


def _add_rank(error: Exception) -> None:
    """Add the rank to an error, if MPI has started: not every launcher names the rank."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        error.add_note(f"This is rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size}.")


def _ending_hook(show: Hook) -> Hook:
    """Return an exception hook that shows the error and ends the process at once."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            show(kind, error, trace)
            stderr.at_most(stderr.SAY_SECONDS, lambda: (sys.stdout.flush(), sys.stderr.flush()))
            # The launcher kills the others as soon as this process ends.
            time.sleep(GRACE_SECONDS)
        finally:
            os._exit(1)

    hook.shows = show  # type: ignore[attr-defined]
    # `run_dir.note_at_exceptions` need not wrap it again
    hook.notes_count_refusal = getattr(  # type: ignore[attr-defined]
        show, "notes_count_refusal", False
    )
    return hook


# The ranks of this host


class Peer(NamedTuple):
    """The process of a rank."""

    pid: int
    state: str  # as in `run_dir.state`
    called: bool  # whether the rank has called `init`
    work: Work = Work()  # of a rank that has not


def rank_here() -> int | None:
    """Return this process's rank in the launcher's environment; None without one."""
    return launchers.launched(os.environ).rank


def all_are_here(size: int) -> bool:
    """Return whether all ranks are on this host, and /proc shows all that the launcher started.

    Then a rank that is not seen has ended.
    """
    daemon = _read("/proc", str(os.getppid()), "comm")
    daemons = launchers.names(lambda launcher: launcher.daemons)
    return launchers.launched(os.environ).local_size == size and daemon.startswith(daemons)


def mark_thread(name: str) -> None:
    """Give the calling thread a name that other processes see, too."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def peers() -> dict[int, Peer]:
    """Return the ranks of this process's job on this host.

    A rank may have several processes. Its process is the one that has called `init`, or else one
    that is busy.
    """
    found: dict[int, Peer] = {}
    job = _job("self")
    for path in Path("/proc").glob("[0-9]*"):
        if job is None or _job(path.name) != job:
            continue
        rank = launchers.launched(_environ(path.name)).rank
        if rank is None or (rank in found and found[rank].called):
            continue
        pid = int(path.name)
        threads = (_read(str(comm)).strip() for comm in path.glob("task/*/comm"))
        called = any(name in (INIT, MONITOR) for name in threads)
        state = run_dir.state(pid)
        work = Work() if called or state != "runs" else work_of(pid)
        if rank not in found or called or work.counts:
            found[rank] = Peer(pid, state, called, work)
    return found


def _job(pid: str) -> str | None:
    """Return a text that is equal for all processes of a job, and differs between jobs.

    Without a variable that tells, it is the process id of the parent, the launcher's daemon.
    """
    environ = _environ(pid)
    for name in (*launchers.names(lambda launcher: launcher.job), "JAXMPI_RUN_DIR"):
        if environ.get(name):
            return environ[name]
    if not environ:
        return None
    # the second field after the name of the program, which may contain spaces
    fields = _read("/proc", pid, "stat").rpartition(")")[2].split()
    return fields[1] if len(fields) > 1 else None


def _environ(pid: str) -> Mapping[str, str]:
    """Return the environment with which a process was started."""
    lines = _read("/proc", pid, "environ").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _read(*path: str) -> str:
    try:
        return Path(*path).read_text(errors="replace")
    except OSError:
        return ""


# Processes that a rank starts


class Parent(NamedTuple):
    """The rank whose child this process is."""

    pid: int
    local_rank: int
    size: int


def note_rank(local_rank: int, size: int) -> None:
    """Tell the processes that this one starts from now on that it is a rank."""
    record = {"rank": Parent(os.getpid(), local_rank, size), "identity": _identity()}
    os.environ[_RANK_VARIABLE] = json.dumps(record)


def parent() -> Parent | None:
    """Return the rank that has started this process, or its parent; None in a rank."""
    text = os.environ.get(_RANK_VARIABLE)
    if not text:
        return None
    record = json.loads(text)
    rank = Parent(*record["rank"])
    # Where the identity differs, another launcher has started this process within the rank.
    return rank if rank.pid != os.getpid() and record["identity"] == _identity() else None


def _identity() -> dict[str, str]:
    """Return the variables by which launchers tell two ranks apart."""
    names = ("JAXMPI_RUN_DIR", *launchers.names(lambda launcher: launcher.identity))
    return {name: os.environ[name] for name in names if name in os.environ}
