"""Speed of a job: samples per second, its share of communication, and the time of a mean."""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi._backends.interface import Ranks
from jaxmpi._collectives.objects import agreed, barrier
from jaxmpi._collectives.trees import Caller
from jaxmpi._jit.api import jit
from jaxmpi._job.process import run_dir
from jaxmpi._lowering.explain import Speed
from jaxmpi._world import session

__all__ = ["Rate", "Throughput", "measured_speed"]

# `measured_speed`
PROBED_BYTES = 1 << 10, 1 << 18, 1 << 20, 25 << 20  # of a mean of one array
MANY = 256  # arrays of 1 KB in one mean, as many bytes as PROBED_BYTES[1]
LOOPS = 3  # the median counts
LOOP_SECONDS = 0.02  # of a loop, about
MOST_MEANS = 1000  # in a loop


class Rate(NamedTuple):
    """Result of `Throughput.read`, equal on all ranks."""

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
    """Samples per second, and the share of the time for which ranks wait for collectives.

    Computation beside a message on its way counts as computation. The native transport of `mpi`
    counts this share; on `xla` and mpi4jax it is not known.

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
        if (monitor := session.monitor()) is not None:  # for `jaxmpi top`
            monitor.samples += samples

    def read(self) -> Rate:
        """Return the rates since the last `read`, or since the beginning.

        A step is counted when it has run, not when it was started: look at its result first, as by
        printing its loss.

        **Collective:** every rank calls it.
        **Communication:** three numbers from each rank, after a comparison of 16 bytes.

        Raises:
          RankMismatchError: on every rank, if one of them calls something else.
          RuntimeError: called in traced code.
        """
        backend = agreed("Throughput.read")
        now_ns, exposed_ns = time.monotonic_ns(), _exposed_ns()
        share = 0.0 if len(backend.ranks_here) == backend.place.size else None
        if exposed_ns is not None:
            share = min(1.0, (exposed_ns - self._exposed_ns) / max(1, now_ns - self._since_ns))
        ranks = backend.allgather_object((self._samples, (now_ns - self._since_ns) / 1e9, share))
        self._samples, self._since_ns, self._exposed_ns = 0, now_ns, exposed_ns or 0
        samples, seconds, shares = zip(*ranks, strict=True)
        size = session.size()
        total = sum(samples) / max(seconds)
        if (directory := os.environ.get("JAXMPI_RUN_DIR")) and backend.place.rank == 0:
            run_dir.note_rate(directory, total)
        return Rate(total, total / size, None if None in shares else sum(shares) / len(shares))


def _exposed_ns() -> int | None:
    """Return for how long this rank has waited for messages; None if nobody counts it."""
    monitor = session.monitor()
    return monitor.backend.exposed_ns() if monitor is not None else None


def measured_speed(backend: Ranks) -> Speed | None:
    """Return the speed of a mean over these ranks, measured once; None on one process.

    The mean runs in a loop of a compiled step and overwrites its input, as in training.

    **Collective:** every rank calls it.
    """
    size = backend.place.size
    if len(backend.ranks_here) == size:
        return None
    if (known := session.speed()) is None:
        seconds = [_seconds_of_mean([(count // 4,)]) for count in PROBED_BYTES]
        sent_bytes = [2 * (size - 1) / size * count for count in PROBED_BYTES]
        # MANY arrays instead of one of as many bytes: the difference is the cost of an array.
        many_seconds = _seconds_of_mean([(PROBED_BYTES[1] // MANY // 4,)] * MANY)
        array_seconds = max(0.0, many_seconds - seconds[1]) / (MANY - 1)
        known = Speed(sent_bytes, seconds, array_seconds)
        session.set_speed(known)
    return known


def _seconds_of_mean(shapes: Sequence[tuple[int, ...]]) -> float:
    """Return the seconds of a mean of arrays of these shapes, equal on every rank."""
    step = jit(
        lambda tree, times: lax.fori_loop(
            0, times, lambda _, tree: Caller("explain").allreduce(tree), tree
        ),
        donate_argnums=0,
        replicated_argnums=1,
    )
    tree = [jnp.zeros(shape) for shape in shapes]

    def loop(times: int) -> float:
        nonlocal tree
        barrier()
        start = time.perf_counter()
        tree = jax.block_until_ready(step(tree, times))
        return (time.perf_counter() - start) / times

    def agreed_mean(seconds: float) -> float:
        return float(Caller("explain").allreduce(np.float64(seconds)))

    loop(1)  # compiles
    times = int(np.clip(LOOP_SECONDS / agreed_mean(loop(3)), 1, MOST_MEANS))
    return agreed_mean(sorted(loop(times) for _ in range(LOOPS))[LOOPS // 2])
