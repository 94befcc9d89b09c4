"""What `jaxmpi doctor` looks at, each with what to do: jax, cores, shared memory, devices, MPI, the transport."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxmpi import _devices, _jaxcompat
from jaxmpi._job.launch import mpiexec
from jaxmpi._job.launch.machine import Machine
from jaxmpi._job.process import compiled_files, processor, settings
from jaxmpi._job.tools.finding import Finding, ask, two

__all__ = ["compiled", "cores", "devices", "mpi", "native", "the_jax"]

_LOADED_TWICE = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
from jaxmpi._backends.mpi_library import loaded_twice
print(loaded_twice(MPI) or "")
"""
SHARED_BYTES = 1 << 23  # in /dev/shm, for a rank


def the_jax() -> Finding:
    """The versions of jax and jaxlib, and whether steps are dispatched the fast way on them."""
    from jaxlib import version

    text = f"{jax.__version__}, jaxlib {version.__version__}"
    if jax.__version__ in _jaxcompat.TESTED:
        return Finding("ok", "jax", text)
    if not _jaxcompat.can_hide_effects():
        return Finding(
            "slow",
            "jax",
            text,
            f"Not one of {', '.join(_jaxcompat.TESTED)}: steps are dispatched more slowly.",
        )
    return Finding("ok", "jax", f"{text}; tested are {', '.join(_jaxcompat.TESTED)}")


def cores(ranks: int, machine: Machine) -> Iterator[Finding]:
    """Whether each rank has a core of its own, and the shared memory that the transport needs."""
    text = f"{machine.cores} that this process may use, of {os.cpu_count()} processors"
    if (quota := processor.quota()) is not None and quota < min(ranks, machine.cores):
        yield Finding(
            "slow",
            "cores",
            f"{text}, but a quota of {quota:g}",
            "Ask the container or the job for more CPU time.",
        )
    elif ranks > machine.cores:
        yield Finding(
            "slow",
            "cores",
            f"{text}, for {ranks} ranks",
            "Ranks take turns: start as many as there are cores.",
        )
    elif not machine.bindable:
        advice = "An affinity mask is set (taskset, a scheduler): ranks are not bound to cores, and may disturb each other."
        yield Finding("ok", "cores", text, advice)
    else:
        yield Finding("ok", "cores", f"{text}; ranks are bound to them")
    try:
        space = os.statvfs("/dev/shm")
        free = space.f_bavail * space.f_frsize
    except OSError:
        yield Finding(
            "slow",
            "shared memory",
            "there is no /dev/shm",
            "Mount it: without it, mpi4jax carries everything.",
        )
        return
    if free < SHARED_BYTES * ranks:
        advice = f"Give the container more (docker run --shm-size), {SHARED_BYTES >> 20} MB for each rank and what MPI needs."
        yield Finding("slow", "shared memory", f"{free / 1e6:.0f} MB free in /dev/shm", advice)
    else:
        yield Finding("ok", "shared memory", f"{free / 1e9:.1f} GB free in /dev/shm")


def compiled() -> Finding:
    """Where `jaxmpi run` keeps what was compiled, and how large it is."""
    limit = settings.get("JAXMPI_CACHE_BYTES")
    if theirs := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        path = Path(theirs).absolute()
        nearest = next(parent for parent in (path, *path.parents) if parent.exists())
        if "://" in theirs or os.access(nearest, os.W_OK | os.X_OK):
            return Finding(
                "ok", "compiled programs", f"kept in {theirs}, as JAX_COMPILATION_CACHE_DIR says"
            )
        advice = "Set JAX_COMPILATION_CACHE_DIR to a folder of yours."
        return Finding(
            "slow", "compiled programs", f"not kept, as {theirs} cannot be written", advice
        )
    folder = compiled_files.folder_of(os.environ, limit)
    if not folder:
        return Finding(
            "ok", "compiled programs", "not kept, as JAXMPI_CACHE_BYTES is 0, or there is no HOME"
        )
    try:
        compiled_files.CompiledFiles(folder, limit, lambda why: None)
    except OSError as error:
        advice = "Make it a folder that is yours alone, or set XDG_CACHE_HOME to one; JAXMPI_CACHE_BYTES=0 does without."
        return Finding(
            "slow", "compiled programs", f"not kept in {folder}: {error.strerror or error}", advice
        )
    count, used = compiled_files.usage(folder)
    return Finding(
        "ok",
        "compiled programs",
        f"{count} in {folder}, {used / 1e6:.0f} MB of at most {limit / 1e6:.0f}",
    )


def devices(ranks: int, dev: Path = Path("/dev")) -> Finding:
    """What JAX computes on, and whether there are GPUs that it does not see, or fewer than ranks."""
    there = len([*dev.glob("nvidia[0-9]*")])
    gpus = _devices.visible(dev=dev)
    set_ = [
        f"{name}={os.environ[name]}"
        for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
        if name in os.environ
    ]
    hidden = (
        f"; {there} NVIDIA devices, hidden by {' and '.join(set_)}"
        if there and not gpus and set_
        else ""
    )
    if there and not gpus and not (hidden and _devices.has_plugin()):
        return Finding(
            "slow",
            "GPUs",
            f"{there} NVIDIA devices, which JAX does not use",
            "Install its plugin: pip install 'jax[cuda13]'.",
        )
    ok, said = ask(
        "import jax; d = jax.local_devices(); print(len(d), d[0].device_kind, d[0].platform)"
    )
    if not ok:
        return Finding(
            "broken",
            "devices",
            f"JAX does not start: {said}",
            "Fix JAX first: see its installation guide.",
        )
    if gpus and len(gpus) < ranks:
        text = f"{len(gpus)} for {ranks} ranks, which take turns, each with a part of the memory, and without NCCL"
        return Finding("slow", "GPUs", text, f"Start {len(gpus)} ranks on this node.")
    backend = "xla (NCCL)" if gpus else "mpi"
    return Finding("ok", "devices", f"{said}; several ranks use backend {backend}{hidden}")


def mpi() -> Iterator[Finding]:
    """mpi4py, the launcher, mpi4jax: each with what to do."""
    try:
        vendor, version, path = mpiexec.library()
        _, twice = ask(_LOADED_TWICE)
        yield (
            Finding("broken", "mpi4py", *two(twice))
            if twice
            else Finding("ok", "mpi4py", f"{vendor} {version} ({path})")
        )
    except mpiexec.LaunchError as error:
        yield Finding("broken", "mpi4py", *two(str(error)))
    try:
        launcher = mpiexec.identify(mpiexec.find_launcher(None, os.environ))
        mpiexec.check_library(launcher)
        yield Finding("ok", "launcher", f"{launcher.vendor} {launcher.version} ({launcher.path})")
    except mpiexec.LaunchError as error:
        yield Finding("broken", "launcher", *two(str(error)))
    code = "from jaxmpi._backends.mpi_library import mpi4jax_version; print(mpi4jax_version())"
    ok, said = ask(code)
    if ok:
        yield Finding("ok", "mpi4jax", said)
        return
    text, advice = two(re.sub(r"^\S*MPIError: (MPI was asked for, but )?", "", said))
    without = "The native transport does without it."
    transport = native()
    if transport.verdict == "slow" and settings.get("JAXMPI_TRANSPORT") != "mpi4jax":
        yield Finding(
            "broken",
            "mpi4jax",
            text,
            f"Best build the native transport, which does without it: see below. {advice}",
        )
    elif transport.verdict != "ok":
        yield Finding("broken", "mpi4jax", text, advice)
    elif "No module named" in text:
        yield Finding("ok", "mpi4jax", f"not installed. {without}")
    else:
        yield Finding("slow", "mpi4jax", f"{text} {without}", advice)


def native(instead: bool = True) -> Finding:
    """Whether the native transport is there, and why not; mpi4jax does `instead`, where that works."""
    ok, said = ask("from jaxmpi._backends.transport import why_not_native; print(why_not_native())")
    if settings.get("JAXMPI_TRANSPORT") == "mpi4jax":
        return Finding(
            "slow", "transport", "mpi4jax, as JAXMPI_TRANSPORT says", "Unset it for the native one."
        )
    if ok and not said:
        return Finding("ok", "transport", "native")
    if not ok:
        return Finding("broken", "transport", *two(re.sub(r"^\S*MPIError: ", "", said)))
    why, advice = two(said)
    if not instead:
        return Finding(
            "broken",
            "transport",
            f"none: neither the native one nor mpi4jax can be used. {why}",
            advice,
        )
    return Finding("slow", "transport", f"mpi4jax, as the native one cannot be used: {why}", advice)
