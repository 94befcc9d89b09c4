"""`jaxmpi doctor`: is everything there, does it fit together, and how fast is it?

Each check yields a `Finding`: a record, which `__str__` lays out as lines of the report. What may
crash or hang is tried in a process of its own (`probes`).
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax

from jaxmpi import _devices, _jaxcompat
from jaxmpi._job.launch import mpiexec
from jaxmpi._job.launch.machine import Machine, prepare, survey
from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.process import compiled_files, jax_collectives, processor, settings
from jaxmpi._job.tools import probes

__all__ = ["Finding", "compiled", "cores", "devices", "mpi", "plain_jax", "run"]

SHARED_BYTES = 1 << 23  # in /dev/shm for each rank: enough for the native transport and MPI
REPORT_COLUMNS = 118
NO_BREAK = "\N{NO-BREAK SPACE}"
# Where each rank has a core; a slower mean is reported.
MAX_LATENCY_US = {"native": 50.0, "mpi4jax": 400.0, "xla": 10_000.0}
MAX_MEMCPY_RATIO = 4.0  # of the seconds of a mean to those of a memcpy


class Finding(NamedTuple):
    """The result of one check."""

    name: str  # of what was checked
    verdict: str  # "ok", "slow" or "broken"
    facts: str  # what was found
    advice: str = ""  # what to do about it

    def __str__(self) -> str:
        lines = [_wrapped(f"  {self.verdict:6}  ", f"{self.name}: {self.facts}")]
        if self.advice:
            lines.append(_wrapped("          -> ", self.advice))
        return "\n".join(lines)


def _wrapped(first_indent: str, text: str) -> str:
    """Fill lines with a text; a no-break space stays within a line, and becomes a space."""
    return textwrap.fill(
        text,
        REPORT_COLUMNS,
        initial_indent=first_indent,
        subsequent_indent=" " * 10,
        break_long_words=False,  # paths
        break_on_hyphens=False,
    ).replace(NO_BREAK, " ")


def run(arguments: Sequence[str]) -> int:
    """Print all findings; the exit code is 1 if something is broken."""
    parser = argparse.ArgumentParser(
        prog="jaxmpi doctor",
        description="Look at this environment: is everything there, does it fit together, is it "
        "fast?",
    )
    parser.add_argument(
        "-n",
        type=int,
        default=0,
        metavar="N",
        help="ranks to measure with; default: 2, or 1 on one core",
    )
    parser.add_argument(
        "--report", action="store_true", help="as a block to be pasted into an issue"
    )
    options = parser.parse_args(arguments)
    try:
        prepare(os.environ)
    except LaunchError as error:
        sys.stderr.write(f"jaxmpi doctor: {error}\n")
        return 2
    machine = survey()
    ranks = options.n or min(2, machine.cores)
    if options.report:
        sys.stdout.write("<details><summary>jaxmpi doctor</summary><pre>\n")
    sys.stdout.write(f"jaxmpi doctor, on {os.uname().nodename}:\n")
    broken = False
    for finding in _findings(ranks, machine):
        broken = broken or finding.verdict == "broken"
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
    sys.stdout.write("Something is broken: see above.\n" if broken else "jaxmpi works here.\n")
    if options.report:
        sys.stdout.write("</pre></details>\n")
    return 1 if broken else 0


def _findings(ranks: int, machine: Machine) -> Iterator[Finding]:
    """Make all checks; those that others depend on come first."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", "ok", f"{version} ({sys.executable})")
    yield Finding(
        "system",
        "ok",
        f"{os.uname().machine}, Linux {os.uname().release}, {' '.join(platform.libc_ver())}",
    )
    yield _package()
    yield _jax_version()
    yield _dtypes()
    yield cores(ranks, machine)
    yield _shared_memory(ranks)
    yield compiled()
    yield plain_jax()
    yield devices(ranks)
    needed = [*mpi()]
    yield from needed
    # Each of the two can carry the messages, so each is judged by what the other one can do.
    native = probes.ask("native")
    if needed[0].verdict == "broken":
        mpi4jax = probes.Answer(what="not tried, as mpi4py does not work")
        needed.append(Finding("mpi4jax", "ok", mpi4jax.what))
    else:
        mpi4jax = probes.ask("mpi4jax")
        needed.append(_mpi4jax(native, mpi4jax))
    yield needed[-1]
    yield _cuda_in_mpi()
    needed.append(_transport(native, mpi4jax))
    yield needed[-1]
    if not any(finding.verdict == "broken" for finding in needed):
        yield from _job(ranks, machine)


# the installation


def _package() -> Finding:
    """Find where jaxmpi was installed from, and what compiled its extension."""
    package = metadata.distribution("jaxmpi")
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    tags = re.findall(r"^Tag: (.*)$", package.read_text("WHEEL") or "", re.MULTILINE)
    if origin.get("dir_info", {}).get("editable"):
        source = "editable"
    elif any("manylinux" in tag for tag in tags):
        source = "a binary wheel"
    else:
        source = "built here from source"
    facts = f"{package.version}, {source} ({', '.join(tags) or 'no tags'})"
    extension = probes.ask("extension")
    if extension.ok:
        compiler, ffi = extension.found["compiler"], extension.found["ffi"]
        return Finding("jaxmpi", "ok", f"{facts}; the extension by {compiler}, XLA FFI {ffi}")
    return Finding("jaxmpi", "ok", f"{facts}; without the extension")


def _jax_version() -> Finding:
    """Look up jax and jaxlib, and whether steps are dispatched the fast way on them."""
    from jaxlib import version

    facts = f"{jax.__version__}, jaxlib {version.__version__}"
    tested = ", ".join(_jaxcompat.TESTED)
    if jax.__version__ in _jaxcompat.TESTED:
        return Finding("jax", "ok", facts)
    if _jaxcompat.can_hide_effects():
        return Finding("jax", "ok", f"{facts}; tested are {tested}")
    return Finding("jax", "slow", facts, f"Not one of {tested}: steps are dispatched more slowly.")


def _dtypes() -> Finding:
    """Check sums of all dtypes on the device that JAX computes on."""
    sums = probes.ask("dtypes")
    if sums.ok and not sums.found["wrong"]:
        return Finding("dtypes", "ok", f"{sums.found['count']} dtypes, float64 among them")
    facts = f"wrong sums of {', '.join(sums.found['wrong'])}" if sums.ok else sums.what
    advice = "This is a defect of JAX or of its device: report it, with this text."
    return Finding("dtypes", "broken", facts, advice)


# the machine


def cores(ranks: int, machine: Machine) -> Finding:
    """Check that each rank has a core."""
    facts = f"{machine.cores} that this process may use, of {os.cpu_count()} processors"
    quota = processor.quota()
    if quota is not None and quota < min(ranks, machine.cores):
        advice = "Ask the container or the job for more CPU time."
        return Finding("cores", "slow", f"{facts}, but a quota of {quota:g}", advice)
    elif ranks > machine.cores:
        advice = "Ranks take turns: start as many as there are cores."
        return Finding("cores", "slow", f"{facts}, for {ranks} ranks", advice)
    elif not machine.bindable:
        advice = (
            "An affinity mask is set (taskset, a scheduler): ranks are not bound to cores, and may "
            "disturb each other."
        )
        return Finding("cores", "ok", facts, advice)
    else:
        return Finding("cores", "ok", f"{facts}; ranks are bound to them")


def _shared_memory(ranks: int) -> Finding:
    """Check that /dev/shm has room for the memory that the native transport shares."""
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        advice = "Mount it: the native transport needs it, and only mpi4jax does without."
        return Finding("shared memory", "slow", "there is no /dev/shm", advice)
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes >= SHARED_BYTES * ranks:
        return Finding("shared memory", "ok", f"{free_bytes / 1e9:.1f} GB free in /dev/shm")
    advice = (
        f"Give the container more (docker run --shm-size), {SHARED_BYTES >> 20} MB for each rank "
        "and what MPI needs."
    )
    return Finding("shared memory", "slow", f"{free_bytes / 1e6:.0f} MB free in /dev/shm", advice)


def compiled() -> Finding:
    """Find where `jaxmpi run` keeps compiled programs, and how many bytes they take."""
    name = "compiled programs"
    # A folder that the user has named to JAX comes first, and is JAX's to fill.
    if given := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        path = Path(given).absolute()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        if "://" in given or os.access(existing, os.W_OK | os.X_OK):
            return Finding(name, "ok", f"kept in {given}, as JAX_COMPILATION_CACHE_DIR says")
        advice = "Set JAX_COMPILATION_CACHE_DIR to a folder of yours."
        return Finding(name, "slow", f"not kept, as {given} cannot be written", advice)
    limit_bytes = settings.get("JAXMPI_CACHE_BYTES")
    folder = compiled_files.folder_of(os.environ, limit_bytes)
    if not folder:
        return Finding(name, "ok", "not kept, as JAXMPI_CACHE_BYTES is 0, or there is no HOME")
    try:
        compiled_files.CompiledFiles(folder, limit_bytes, lambda why: None)
    except OSError as error:
        advice = (
            "Make it a folder that is yours alone, or set XDG_CACHE_HOME to one; "
            "JAXMPI_CACHE_BYTES=0 does without."
        )
        return Finding(name, "slow", f"not kept in {folder}: {error.strerror or error}", advice)
    count, used_bytes = compiled_files.usage(folder)
    return Finding(
        name,
        "ok",
        f"{count} in {folder}, {used_bytes / 1e6:.0f} MB of at most {limit_bytes / 1e6:.0f}",
    )


def plain_jax() -> Finding:
    """Say by which variables JAX's own collectives use the native transport."""
    name = "plain JAX programs"
    if not jax_collectives.only_cpus(os.environ):
        return Finding(name, "ok", "JAX uses GPUs here, and its own collectives on them")
    if why := jax_collectives.why_not():
        return Finding(name, "ok", why)
    pairs = {
        jax_collectives.IMPLEMENTATION: "mpi",
        jax_collectives.LIBRARY_VARIABLE: jax_collectives.find_library(),
    }
    # Each is a command of one line: a shell reads what is pasted line by line.
    exports = [f"export{NO_BREAK}{variable}={value};" for variable, value in pairs.items()]
    facts = f"`jaxmpi run` sets their variables; for mpirun and srun: {' '.join(exports)}"
    return Finding(name, "ok", facts)


def devices(ranks: int, dev: Path = Path("/dev")) -> Finding:
    """Look up what JAX computes on; check for GPUs that it does not see, or too few of them."""
    present = len([*dev.glob("nvidia[0-9]*")])
    gpus = _devices.visible(dev=dev)
    hidden = ""
    if present and not gpus:
        hiding = []
        for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
            if name in os.environ:
                hiding.append(f"{name}={os.environ[name]}")
        if not hiding or not _devices.has_plugin():
            facts = f"{present} NVIDIA devices, which JAX does not use"
            return Finding("GPUs", "slow", facts, "Install its plugin: pip install 'jax[cuda13]'.")
        hidden = f"; {present} NVIDIA devices, hidden by {' and '.join(hiding)}"
    used = probes.ask("devices")
    if not used.ok:
        advice = "Fix JAX first: see its installation guide."
        return Finding("devices", "broken", f"JAX does not start: {used.what}", advice)
    platform_name = used.found["platform"]
    facts = f"{used.found['count']} {used.found['kind']} {platform_name}"
    if gpus and len(gpus) < ranks:
        return Finding(
            "GPUs",
            "slow",
            f"{len(gpus)} for {ranks} ranks, which take turns without MPS (`jaxmpi run --mps`), "
            "each with a part of the memory; "
            f"{_shared_gpu()}",
            f"Start {len(gpus)} ranks on this node.",
        )
    backend = settings.get("JAXMPI_BACKEND")
    if backend != "auto":
        backend = f"{backend}, as JAXMPI_BACKEND says"
    elif gpus:
        backend = "xla (RCCL)" if platform_name == "rocm" else "xla (NCCL)"
    else:
        backend = "mpi"
    return Finding("devices", "ok", f"{facts}; several ranks use backend {backend}{hidden}")


def _shared_gpu() -> str:
    """Say how ranks that share a GPU communicate, and why not otherwise."""
    staged = "arrays go through memory of the host (backend mpi)"
    if not _devices.uses_nccl():
        return f"{staged}, as JAX's plugin for NVIDIA's GPUs is not installed"
    nccl = probes.ask("nccl")
    if not nccl.ok:
        return f"{staged}, as NCCL was not found: {nccl.what}"
    name, why = nccl.found["name"], nccl.found["why_not"]
    asks_for_xla = settings.get("JAXMPI_BACKEND") == "xla"
    if why and asks_for_xla:
        return f"JAXMPI_BACKEND is xla, which is refused, as {why}; unset it"
    if why:
        return f"{staged}, as {why}"
    if asks_for_xla:
        return f"they use {name}, as JAXMPI_BACKEND is xla"
    return (
        f"{staged}; {name} could carry them (JAXMPI_BACKEND=xla under `jaxmpi run --mps`), which "
        "was not measured yet"
    )


# MPI and the transports


def mpi() -> Iterator[Finding]:
    """Check mpi4py and its library, and that the launcher belongs to that library."""
    try:
        vendor, version, path = mpiexec.library()
        loaded = probes.ask("mpi_libraries")
        if not loaded.ok:
            yield Finding("mpi4py", "broken", loaded.what, loaded.advice)
        elif loaded.found:
            yield Finding("mpi4py", "broken", loaded.found["what"], loaded.found["advice"])
        else:
            yield Finding("mpi4py", "ok", f"{vendor} {version} ({path})")
    except LaunchError as error:
        yield Finding("mpi4py", "broken", error.what, error.advice)
    try:
        launcher = mpiexec.identify(mpiexec.find_launcher(None, os.environ))
        mpiexec.check_library(launcher)
        facts = f"{launcher.vendor} {launcher.version} ({launcher.path})"
        yield Finding("launcher", "ok", facts)
    except LaunchError as error:
        yield Finding("launcher", "broken", error.what, error.advice)


def _mpi4jax(native: probes.Answer, mpi4jax: probes.Answer) -> Finding:
    """Check mpi4jax; if it does not work, that counts where it has to carry the messages."""
    if mpi4jax.ok and mpi4jax.found["version"]:
        return Finding("mpi4jax", "ok", mpi4jax.found["version"])
    missing = mpi4jax.ok
    what, advice = (
        (mpi4jax.found["what"], mpi4jax.found["advice"])
        if missing
        else (mpi4jax.what, mpi4jax.advice)
    )
    asked = settings.get("JAXMPI_TRANSPORT")
    if asked == "mpi4jax":
        return Finding("mpi4jax", "broken", what, advice)
    if asked == "auto" and native.ok and native.found:
        if native.found["advice"]:
            advice = "Best mend the native transport, which does without it: see below. " + advice
        return Finding("mpi4jax", "broken", what, advice)
    without = "The native transport does without it."
    if missing:
        return Finding("mpi4jax", "ok", f"not installed. {without}")
    return Finding("mpi4jax", "slow", f"{what} {without}", advice)


def _transport(native: probes.Answer, mpi4jax: probes.Answer) -> Finding:
    """Name the transport of a job on backend mpi, and why it is not the native one."""
    asked = settings.get("JAXMPI_TRANSPORT")
    if asked == "mpi4jax":
        usable = native.ok and not native.found
        advice = "Unset it for the native one." if usable else ""
        return Finding("transport", "slow", "mpi4jax, as JAXMPI_TRANSPORT says", advice)
    if not native.ok:  # the extension is another version's, which ends `init`
        return Finding("transport", "broken", native.what, native.advice)
    if not native.found:
        return Finding("transport", "ok", "native")
    what, advice = native.found["what"], native.found["advice"]
    if asked == "native":
        facts = f"none: JAXMPI_TRANSPORT is native, which cannot be used: {what}"
        return Finding("transport", "broken", facts, advice)
    if mpi4jax.ok and mpi4jax.found["version"]:
        facts = f"mpi4jax, as the native one cannot be used: {what}"
        return Finding("transport", "slow", facts, advice)
    facts = f"none: neither the native one nor mpi4jax can be used: {what}"
    return Finding("transport", "broken", facts, advice)


def _cuda_in_mpi() -> Finding:
    """Ask whether the MPI library takes arrays of a GPU; jaxmpi does not need that."""
    name = "CUDA in MPI"
    try:
        _, _, path = mpiexec.library()
    except LaunchError:
        return Finding(name, "ok", "unknown, as there is no MPI")
    support = probes.ask("cuda_in_mpi", path)
    known = {True: "yes", False: "no", None: "unknown"}[support.found]
    return Finding(name, "ok", f"{known}; arrays of GPUs go through memory of the host")


# the speed


def _job(ranks: int, machine: Machine) -> Iterator[Finding]:
    """Start a job of some ranks; measure the seconds that takes, and the speed of a mean."""
    run_ranks = [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks)]
    command = [*run_ranks, *probes.command("measure")[1:]]
    advice = "Try: " + " ".join(command)
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=probes.DOCTOR_PROBE_SECONDS,
            env=probes.environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        facts = f"{ranks} ranks did not end within {probes.DOCTOR_PROBE_SECONDS:.0f} s"
        yield Finding("a job", "broken", facts, advice)
        return
    seconds = time.monotonic() - start
    measured = probes.record(done.stdout)
    if done.returncode or measured is None:
        last = (done.stderr.strip().splitlines() or ["no error was printed"])[-1]
        facts = f"{ranks} ranks ended with code {done.returncode}: {last}"
        yield Finding("a job", "broken", facts, advice)
        return
    transport = measured["transport"]
    yield Finding(
        "a job", "ok", f"{ranks} ranks on {transport} started and ended in {seconds:.1f} s"
    )
    if ranks == 1:
        return
    advice = "Look for other work on these cores, and at the transport above."
    if ranks > machine.cores:
        advice = "More ranks than cores take turns."
    latency_us = measured["latency_us"]
    slow = latency_us > MAX_LATENCY_US.get(transport, float("inf"))
    facts = f"{latency_us:.0f} µs for the mean of 1 KB in a jitted step"
    yield Finding("latency", "slow" if slow else "ok", facts, advice if slow else "")
    ratio = measured["mean_ms"] / measured["memcpy_ms"]
    slow = ratio > MAX_MEMCPY_RATIO
    facts = (
        f"the mean of {probes.MEASURED_BYTES >> 20} MB takes {measured['mean_ms']:.1f} ms, "
        f"{ratio:.1f} times a memcpy of it"
    )
    yield Finding("bandwidth", "slow" if slow else "ok", facts, advice if slow else "")
