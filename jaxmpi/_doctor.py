"""`jaxmpi doctor`: is everything there, does it fit together, and how fast is it?

What may not work is tried in processes of its own. The ranks of the measurement run this file, too.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi import _devices, _jaxcompat, _launch, _mpiexec

__all__ = ["Finding", "run"]

MEASURED = "jaxmpi doctor has measured "
START_SECONDS = 120.0
BYTES = 1 << 25
LATENCY_US = {"native": 50.0, "mpi4jax": 400.0, "XLA": 10_000.0}  # on cores of their own; beyond is slow
BANDWIDTH_RATIO = 4.0  # to memcpy
SHARED_BYTES = 1 << 23  # in /dev/shm, for a rank


class Finding(NamedTuple):
    """One line of the answer: "ok", "slow" or "broken", what it is about, what was found, and what to do."""

    verdict: str
    topic: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        lines = [_wrapped(f"  {self.verdict:6}  ", f"{self.topic}: {self.text}")]
        return "\n".join(lines + ([_wrapped("          -> ", self.advice)] if self.advice else []))


def _wrapped(mark: str, text: str) -> str:
    return textwrap.fill(text, 118, initial_indent=mark, subsequent_indent=" " * 10)


def run(arguments: Sequence[str]) -> int:
    """Print what was found; the exit code is 1 if something is broken."""
    parser = argparse.ArgumentParser(
        prog="jaxmpi doctor", description="Look at this environment: is everything there, does it fit together, is it fast?"
    )
    parser.add_argument("-n", type=int, default=0, metavar="N", help="ranks to measure with; default: 2, or 1 on one core")
    options = parser.parse_args(arguments)
    machine = _launch.survey()
    ranks = options.n or min(2, machine.cores)
    sys.stdout.write(f"jaxmpi doctor, on {os.uname().nodename}:\n")
    broken = False
    for finding in look(ranks, machine):
        broken = broken or finding.verdict == "broken"
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
    sys.stdout.write("Something is broken: see above.\n" if broken else "jaxmpi works here.\n")
    return int(broken)


def look(ranks: int, machine: _launch.Machine) -> Iterator[Finding]:
    """Everything, from what the rest needs to what needs the rest."""
    yield Finding("ok", "Python", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")
    yield _jax()
    yield from _cores(ranks, machine)
    yield _devices_of(ranks)
    mpi = [*_mpi()]
    yield from mpi
    yield _native()
    if not any(finding.verdict == "broken" for finding in mpi):
        yield from _speed(ranks, machine)


def _jax() -> Finding:
    from jaxlib import version

    text = f"{jax.__version__}, jaxlib {version.__version__}"
    if jax.__version__ in _jaxcompat.TESTED:
        return Finding("ok", "jax", text)
    if not _jaxcompat.can_hide_effects():
        return Finding("slow", "jax", text, f"Not one of {', '.join(_jaxcompat.TESTED)}: steps are dispatched more slowly.")
    return Finding("ok", "jax", f"{text}; tested are {', '.join(_jaxcompat.TESTED)}")


def _cores(ranks: int, machine: _launch.Machine) -> Iterator[Finding]:
    text = f"{machine.cores} that this process may use, of {os.cpu_count()} processors"
    if (quota := _quota()) is not None and quota < min(ranks, machine.cores):
        yield Finding("slow", "cores", f"{text}, but a quota of {quota:g}", "Ask the container or the job for more CPU time.")
    elif ranks > machine.cores:
        yield Finding("slow", "cores", f"{text}, for {ranks} ranks", "Ranks take turns: start as many as there are cores.")
    elif not machine.bindable:
        advice = "An affinity mask is set (taskset, a scheduler): ranks are not bound to cores, and may disturb each other."
        yield Finding("ok", "cores", text, advice)
    else:
        yield Finding("ok", "cores", f"{text}; ranks are bound to them")
    try:
        space = os.statvfs("/dev/shm")
        free = space.f_bavail * space.f_frsize
    except OSError:
        yield Finding("slow", "shared memory", "there is no /dev/shm", "Mount it: without it, mpi4jax carries everything.")
        return
    if free < SHARED_BYTES * ranks:
        advice = f"Give the container more (docker run --shm-size), {SHARED_BYTES >> 20} MB for each rank and what MPI needs."
        yield Finding("slow", "shared memory", f"{free / 1e6:.0f} MB free in /dev/shm", advice)
    else:
        yield Finding("ok", "shared memory", f"{free / 1e9:.1f} GB free in /dev/shm")


def _quota() -> float | None:
    """Of processor time, in processors; None for no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _devices_of(ranks: int, dev: Path = Path("/dev")) -> Finding:
    there = len([*dev.glob("nvidia[0-9]*")])
    gpus = _devices.visible(dev=dev)
    if there and not gpus:
        return Finding(
            "slow", "GPUs", f"{there} NVIDIA devices, which JAX does not use", "Install its plugin: pip install 'jax[cuda13]'."
        )
    ok, said = _ask("import jax; d = jax.local_devices(); print(len(d), d[0].device_kind, d[0].platform)")
    if not ok:
        return Finding("broken", "devices", f"JAX does not start: {said}", "Fix JAX first: see its installation guide.")
    if gpus and len(gpus) < ranks:
        advice = f"Start {len(gpus)} ranks on this node; or share it, with XLA_PYTHON_CLIENT_PREALLOCATE=false and no NCCL."
        return Finding("slow", "GPUs", f"{len(gpus)} for {ranks} ranks, which would take turns and share the memory", advice)
    backend = "xla (NCCL)" if gpus else "mpi"
    return Finding("ok", "devices", f"{said}; several ranks use backend {backend}")


def _mpi() -> Iterator[Finding]:
    """mpi4py, the launcher, mpi4jax: each with what to do."""
    try:
        vendor, version, path = _mpiexec.library()
        yield Finding("ok", "mpi4py", f"{vendor} {version} ({path})")
    except _mpiexec.LaunchError as error:
        yield Finding("broken", "mpi4py", *_two(str(error)))
    try:
        launcher = _mpiexec.identify(_mpiexec.find_launcher(None, os.environ))
        _mpiexec.check_library(launcher)
        yield Finding("ok", "launcher", f"{launcher.vendor} {launcher.version} ({launcher.path})")
    except _mpiexec.LaunchError as error:
        yield Finding("broken", "launcher", *_two(str(error)))
    code = "from jaxmpi._backends.mpi import mpi4jax_version; print(mpi4jax_version())"
    ok, said = _ask(code)
    if ok:
        yield Finding("ok", "mpi4jax", said)
    else:
        yield Finding("broken", "mpi4jax", *_two(re.sub(r"^\S*MPIError: ", "", said)))


def _native() -> Finding:
    ok, said = _ask("from jaxmpi._backends.native import why_not; print(why_not())")
    if os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax":
        return Finding("slow", "transport", "mpi4jax, as JAXMPI_TRANSPORT says", "Unset it for the native one.")
    if ok and not said:
        return Finding("ok", "transport", "native")
    advice = "Install a C++ compiler, and jaxmpi again: pip install --force-reinstall --no-deps jaxmpi."
    return Finding("slow", "transport", f"mpi4jax, as the native one cannot be used: {said}", advice)


def _speed(ranks: int, machine: _launch.Machine) -> Iterator[Finding]:
    """How long a job of some ranks takes to start, and how fast a mean is."""
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), "-m", "jaxmpi._doctor"]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("broken", "a job", f"{ranks} ranks did not end within {START_SECONDS:.0f} s", "Try: " + " ".join(command))
        return
    found = re.search(f"{MEASURED}(.*)", done.stdout)
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        yield Finding(
            "broken", "a job", f"{ranks} ranks ended with code {done.returncode}: {last}", "Try: " + " ".join(command)
        )
        return
    said: dict[str, Any] = json.loads(found[1])
    text = f"{ranks} ranks on {said['transport']} started and ended in {time.monotonic() - start:.1f} s"
    yield Finding("ok", "a job", text)
    if ranks == 1:
        return
    crowded = ranks > machine.cores
    advice = (
        "More ranks than cores take turns." if crowded else "Look for other work on these cores, and at the transport above."
    )
    slow = said["latency_us"] > LATENCY_US.get(said["transport"], np.inf)
    text = f"{said['latency_us']:.0f} µs for the mean of 1 KB in a jitted step"
    yield Finding("slow" if slow else "ok", "latency", text, advice if slow else "")
    ratio = said["mean_ms"] / said["memcpy_ms"]
    text = f"the mean of {BYTES >> 20} MB takes {said['mean_ms']:.1f} ms, {ratio:.1f} times a memcpy of it"
    slow = ratio > BANDWIDTH_RATIO
    yield Finding("slow" if slow else "ok", "bandwidth", text, advice if slow else "")


def _ask(code: str) -> tuple[bool, str]:
    """Run Python code; returns whether it worked, and what it printed, or its error."""
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {START_SECONDS:.0f} s"
    if not done.returncode:
        return True, done.stdout.strip()
    lines = done.stderr.strip().splitlines()
    first = next((i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt)", line)), len(lines) - 1)
    return False, " ".join(lines[first:]) if lines else f"exit code {done.returncode}"


def _two(error: str) -> tuple[str, str]:
    """What happened, and what to do: the last sentence of our errors."""
    first, dot, last = error.rpartition(". ")
    return (first + dot.strip(), last) if dot else (error, "")


def _measure() -> None:
    """What the ranks do."""
    import jaxmpi
    from jaxmpi import _world

    world = jaxmpi.init()
    mean = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))
    small, large = (jax.numpy.zeros(size // 4) for size in (1024, BYTES))
    there, here = np.ones(BYTES // 4, np.float32), np.ones(BYTES // 4, np.float32)
    numbers = {
        "latency_us": 1e6 * _median(lambda: mean(small), 200),
        "mean_ms": 1e3 * _median(lambda: mean(large), 15),
        "memcpy_ms": 1e3 * _median(lambda: np.copyto(there, here), 15),
        "transport": getattr(_world.current("doctor"), "transport", "XLA"),
    }
    if world.rank == 0:
        sys.stdout.write(MEASURED + json.dumps(numbers) + "\n")


def _median(call: Callable[[], Any], times: int) -> float:
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
