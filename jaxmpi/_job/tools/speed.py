"""A job of some ranks, started and measured for `jaxmpi doctor`; the ranks run this file, too."""

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmpi._job.launch.machine import Machine
from jaxmpi._job.tools.finding import START_SECONDS, Finding, environment
from jaxmpi._leaves import PyTree

__all__ = ["speed"]

MEASURED = "jaxmpi doctor has measured "
BYTES = 1 << 25
# on cores of their own; beyond is slow
LATENCY_US = {"native": 50.0, "mpi4jax": 400.0, "XLA": 10_000.0}
BANDWIDTH_RATIO = 4.0  # to memcpy


def speed(ranks: int, machine: Machine) -> Iterator[Finding]:
    """How long a job of some ranks takes to start, and how fast a mean is."""
    command = [
        sys.executable,
        "-m",
        "jaxmpi",
        "run",
        "-n",
        str(ranks),
        "-m",
        "jaxmpi._job.tools.speed",
    ]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=START_SECONDS, env=environment()
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            "broken",
            "a job",
            f"{ranks} ranks did not end within {START_SECONDS:.0f} s",
            "Try: " + " ".join(command),
        )
        return
    found = re.search(f"{MEASURED}(.*)", done.stdout)
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        yield Finding(
            "broken",
            "a job",
            f"{ranks} ranks ended with code {done.returncode}: {last}",
            "Try: " + " ".join(command),
        )
        return
    said: dict[str, Any] = json.loads(found[1])
    text = f"{ranks} ranks on {said['transport']} started and ended in {time.monotonic() - start:.1f} s"
    yield Finding("ok", "a job", text)
    if ranks == 1:
        return
    crowded = ranks > machine.cores
    advice = (
        "More ranks than cores take turns."
        if crowded
        else "Look for other work on these cores, and at the transport above."
    )
    slow = said["latency_us"] > LATENCY_US.get(said["transport"], np.inf)
    text = f"{said['latency_us']:.0f} µs for the mean of 1 KB in a jitted step"
    yield Finding("slow" if slow else "ok", "latency", text, advice if slow else "")
    ratio = said["mean_ms"] / said["memcpy_ms"]
    text = f"the mean of {BYTES >> 20} MB takes {said['mean_ms']:.1f} ms, {ratio:.1f} times a memcpy of it"
    slow = ratio > BANDWIDTH_RATIO
    yield Finding("slow" if slow else "ok", "bandwidth", text, advice if slow else "")


def _measure() -> None:
    """What the ranks do."""
    import jaxmpi
    from jaxmpi._world import session

    world = jaxmpi.init()
    mean = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))
    small, large = (jax.numpy.zeros(size // 4) for size in (1024, BYTES))
    there, here = np.ones(BYTES // 4, np.float32), np.ones(BYTES // 4, np.float32)
    numbers = {
        "latency_us": 1e6 * _median(lambda: mean(small), 200),
        "mean_ms": 1e3 * _median(lambda: mean(large), 15),
        "memcpy_ms": 1e3 * _median(lambda: np.copyto(there, here), 15),
        "transport": getattr(session.current("doctor"), "transport", "XLA"),
    }
    if world.rank == 0:
        sys.stdout.write(MEASURED + json.dumps(numbers) + "\n")


def _median(call: Callable[[], PyTree], times: int) -> float:
    import jaxmpi

    jax.block_until_ready(call())
    jaxmpi.barrier()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    _measure()
