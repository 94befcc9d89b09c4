"""How fast a job works, and how much of its time goes into communication."""

import os
import time
from typing import NamedTuple

from jaxmpi._collectives.objects import agreed
from jaxmpi._job.process import run_dir
from jaxmpi._world import session

__all__ = ["Rate", "Throughput"]


class Rate(NamedTuple):
    """What `Throughput.read` returns, equal on all ranks."""

    per_second: float  # samples of all ranks together
    per_second_per_rank: float
    # share of the time, 0 to 1, mean over the ranks; None where the backend does not record it
    communication: float | None

    def __str__(self) -> str:
        share = (
            ""
            if self.communication is None
            else f", {self.communication:.0%} of the time in collectives"
        )
        return f"{self.per_second:.4g} per second, {self.per_second_per_rank:.4g} per rank{share}"


class Throughput:
    """Samples per second, and the share of the time for which the ranks wait for collectives, and so for each other.

    What a step computes while its messages are on their way counts as computing. The native
    transport of `mpi` counts this; on `xla` and mpi4jax the share is not known.

    >>> meter = Throughput()
    >>> meter.add(32)
    >>> meter.read().communication
    0.0
    """

    def __init__(self) -> None:
        self._samples, self._since_ns, self._exposed_ns = 0, time.monotonic_ns(), _exposed_ns() or 0

    def add(self, samples: int) -> None:
        """Count samples that this rank has worked through."""
        self._samples += samples
        if (watching := session.monitor()) is not None:  # for `jaxmpi top`
            watching.samples += samples

    def read(self) -> Rate:
        """The rates since the last `read`, or since the beginning.

        A step is counted when it has run, not when it was started: look at its result first, as by
        printing its loss.

        **Collective:** every rank calls it.
        **Communication:** three numbers from each rank.

        Raises:
          RankMismatchError: on every rank, if one of them calls something else.
          RuntimeError: called in traced code.
        """
        backend = agreed("Throughput.read")
        now_ns, exposed_ns = time.monotonic_ns(), _exposed_ns()
        share = 0.0 if backend.place.size == 1 or backend.simulates else None
        if exposed_ns is not None:
            share = min(1.0, (exposed_ns - self._exposed_ns) / max(1, now_ns - self._since_ns))
        ranks = backend.allgather_object((self._samples, (now_ns - self._since_ns) / 1e9, share))
        self._samples, self._since_ns, self._exposed_ns = 0, now_ns, exposed_ns or 0
        samples, seconds, shares = zip(*ranks, strict=True)
        size = session.size()
        total = sum(samples) / max(seconds) * (size if backend.simulates else 1)
        if (directory := os.environ.get("JAXMPI_RUN_DIR")) and backend.place.rank == 0:
            run_dir.note_rate(directory, total)
        return Rate(total, total / size, None if None in shares else sum(shares) / len(shares))


def _exposed_ns() -> int | None:
    """For how long this rank has waited for messages; None where nobody counts it."""
    watching = session.monitor()
    return watching.backend.exposed_ns() if watching is not None else None
