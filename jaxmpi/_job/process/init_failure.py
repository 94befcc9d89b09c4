"""Before there is a monitor: nobody waits in `init` for ranks that do not come.

MPI starts once every rank has started it, and so `init` waits for the slowest. A thread says after
JAXMPI_STALL_SECONDS which ranks have not called `init`, and ends the job after
JAXMPI_STALL_END_SECONDS, or once one of them has ended. It goes on while all ranks that it sees
missing are in a `jaxmpi.busy` block. A rank that fails in `init` does not wait for the others in
MPI's own end, nor they for it.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeAlias

from jaxmpi._job.process import peers, run_dir, settings, stderr
from jaxmpi._job.process.at_exit import start_thread
from jaxmpi._job.process.failure import Cause, Failure
from jaxmpi._job.process.peers import Peer

__all__ = ["joining"]

GRACE_SECONDS = 0.5  # for the others to say what they have found, where all fail
LOOK_SECONDS = 0.5
Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@contextlib.contextmanager
def joining(launched: int) -> Iterator[None]:
    """Watch over `init` on one of several ranks.

    Where it fails and nobody handles it, the process ends without MPI_Finalize: MPI's launcher ends
    the rest.

    Args:
      launched: how many ranks the launcher's environment speaks of.
    """
    if launched == 1:
        yield
        return
    over = threading.Event()
    try:
        Wait(launched, over)
        yield
    except Exception as error:
        _add_rank(error)
        sys.excepthook = _ends(sys.excepthook)
        raise
    finally:
        over.set()


class Wait:
    """One rank's wait for the others, until `over` is set."""

    def __init__(self, size: int, over: threading.Event) -> None:
        self._size, self._over = size, over
        self._limit, self._last = _limits()
        self._seen: dict[int, Peer] = {}  # the ranks of this host
        start_thread(self._watch, peers.INIT, stop=over.set)

    def _watch(self) -> None:
        peers.mark_thread(peers.INIT)
        start, due, said = time.monotonic(), 1.0, False
        end = self._last
        while not self._over.wait(LOOK_SECONDS):
            waited = time.monotonic() - start
            if self._limit and waited > self._limit and not said:
                said = self._report(waited)
            elif self._limit and self._last and waited > end:
                # A rank that was at work has all of the time from the end of its work.
                idle = [self._seen[rank].work.idle_seconds for rank in self._look()]
                end = waited + self._last - min(waited, max(idle, default=waited))
                if end <= waited:
                    self._end(f"stalled for {waited:.0f} s in jaxmpi.init")
                else:
                    self._report(waited)
            elif waited > due:  # what is seen now may have ended later
                due *= 2
                self._look()

    def _look(self) -> list[int]:
        """See how far the ranks of this host are; returns those that have not called `init`."""
        now = peers.peers()
        if peers.all_are_here(self._size):
            self._seen = {rank: Peer(0, "ended", False) for rank in range(self._size)} | self._seen
        gone = {
            rank: peer._replace(state="ended")
            for rank, peer in self._seen.items()
            if not peer.called
        }
        self._seen = {**self._seen, **gone, **now}
        return [rank for rank, peer in sorted(self._seen.items()) if not peer.called]

    def _report(self, waited: float) -> bool:
        missing = self._look()
        lines = [f"stalled: has waited {waited:.0f} s in jaxmpi.init"]
        lines += [f"  missing: {self._absent(rank).describe()}" for rank in missing]
        if not missing:
            others = "; the ranks of other hosts are not seen from here" * (
                len(self._seen) < self._size
            )
            lines.append(f"  all ranks of this host have joined{others}")
        hopeless = any(self._seen[rank].state == "ended" for rank in missing)
        at_work = bool(missing) and all(self._seen[rank].work.counts for rank in missing)
        if not hopeless and not at_work and self._last > waited:
            lines.append(
                f"  the job ends in {self._last - waited:.0f} s if it does not go on "
                "(JAXMPI_STALL_END_SECONDS)"
            )
            if missing:
                lines.append(
                    "  a rank that works alone for long says so: with jaxmpi.busy('what it does')"
                )
        self._say("\n".join(lines))
        if hopeless:
            self._end("the job cannot start")
        return True

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
        """Say it on one rank of each host; returns whether this is the one."""
        called = [rank for rank, peer in self._seen.items() if peer.called]
        here = peers.rank_here()
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
        time.sleep(
            GRACE_SECONDS if self._say(f"{why}: {missing}. The job ends.") else 5 * GRACE_SECONDS
        )
        if self._over.is_set():  # they have come meanwhile
            return
        with contextlib.suppress(KeyError, OSError):
            run_dir.report_failures(os.environ["JAXMPI_RUN_DIR"], failures)
        stderr.end_process(1, _abort)


def _limits() -> tuple[float, float]:
    with contextlib.suppress(ValueError):  # `init` tells all ranks of it
        return settings.limits()
    return 60.0, 600.0


def _abort(code: int) -> None:
    """End all ranks where MPI has started; without that, MPI's launcher ends the rest once this one has ended."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)


def _add_rank(error: Exception) -> None:
    """Say on which rank it was, as far as MPI is up: not every launcher says who has ended the job."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        error.add_note(f"This is rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size}.")


def _ends(show: Hook) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            show(kind, error, trace)
            stderr.at_most(stderr.SAY_SECONDS, lambda: (sys.stdout.flush(), sys.stderr.flush()))
            time.sleep(GRACE_SECONDS)
        finally:
            os._exit(1)

    return hook
