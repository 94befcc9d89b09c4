"""How fast a job works, and how much of its time goes into communication."""

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmpi._collectives.objects import agreed
from jaxmpi._process import run_dir
from jaxmpi._world import session

__all__ = ["Rate", "Throughput"]


class Rate(NamedTuple):
    """What `Throughput.read` returns, equal on all ranks."""

    per_second: float  # samples of all ranks together
    per_second_per_rank: float
    communication: float | None  # share of the time, 0 to 1, mean over the ranks; None where the backend does not record it

    def __str__(self) -> str:
        share = "" if self.communication is None else f", {self.communication:.0%} of the time in collectives"
        return f"{self.per_second:.4g} per second, {self.per_second_per_rank:.4g} per rank{share}"


class Throughput:
    """Samples per second, and the share of the time that the ranks spend in collectives, waiting for each other included.

    The native transport of `mpi` records when each collective begins and ends; on `xla` and mpi4jax the share is not known.

    >>> meter = Throughput()
    >>> meter.add(32)
    >>> meter.read().communication
    0.0
    """

    def __init__(self) -> None:
        self._samples, self._since_ns = 0, time.monotonic_ns()

    def add(self, samples: int) -> None:
        """Count samples that this rank has worked through."""
        self._samples += samples
        if (watching := session.monitor()) is not None:  # for `jaxmpi top`
            watching.samples += samples

    def read(self) -> Rate:
        """The rates since the last `read`, or since the beginning.

        A step is counted when it has run, not when it was started: look at its result first, as by printing its loss.

        **Collective:** every rank calls it.
        **Communication:** three numbers from each rank.

        Raises:
          RankMismatchError: on every rank, if one of them calls something else.
          RuntimeError: called in traced code.
        """
        backend: Any = agreed("Throughput.read")
        now_ns = time.monotonic_ns()
        share: float | None = None
        if backend.place.size == 1 or backend.simulates:
            share = 0.0
        elif backend.compares_inline:
            share = _share(backend.events(), self._since_ns, now_ns)
        ranks = backend.allgather_object((self._samples, (now_ns - self._since_ns) / 1e9, share))
        self._samples, self._since_ns = 0, now_ns
        samples, seconds, shares = zip(*ranks, strict=True)
        size = session.size()
        total = sum(samples) / max(seconds) * (size if backend.simulates else 1)
        if (directory := os.environ.get("JAXMPI_RUN_DIR")) and backend.place.rank == 0:
            run_dir.note_rate(directory, total)
        return Rate(total, total / size, None if None in shares else sum(shares) / len(shares))


def _share(events: Sequence[Sequence[int | None]], since_ns: int, now_ns: int) -> float:
    """Of the time since `since_ns`; since the oldest event that is known, where there were older ones."""
    if not events:
        return 0.0
    number, *_, oldest, _, _ = events[0]
    if number:
        since_ns = max(since_ns, oldest or 0)
    spans = [(max(start or now_ns, since_ns), end or now_ns) for *_, start, _, end in events]
    return min(1.0, sum(max(0, end - start) for start, end in spans) / max(1, now_ns - since_ns))
