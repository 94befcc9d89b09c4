"""Checks that `jaxmpi doctor` makes in processes of their own, as they may crash or hang.

A probe is a function here that returns a record, which JSON holds. `ask` runs one in a new Python
and reads its record. `measure` runs on several ranks, started by `jaxmpi run`.

    python -m jaxmpi._job.tools.probes NAME [ARGUMENT]
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi._errors import MPIError

__all__ = [
    "DOCTOR_PROBE_SECONDS",
    "MEASURED_BYTES",
    "Answer",
    "ask",
    "command",
    "environment",
    "record",
]

DOCTOR_PROBE_SECONDS = 120.0  # for a probe or a job to end, on a file system of many nodes, too
MEASURED_BYTES = 1 << 25
LATENCY_BYTES = 1 << 10
MARK = "jaxmpi doctor: "  # before a record: a program may print more than that
HOME = Path(__file__).parents[3]  # the folder from which jaxmpi is imported


class Answer(NamedTuple):
    """The record of a probe, or its error."""

    found: Any = None  # its record
    what: str = ""  # its error; "" if there is none
    advice: str = ""

    @property
    def ok(self) -> bool:
        """True if the probe has a record."""
        return not self.what


def ask(name: str, *arguments: str) -> Answer:
    """Run a probe in a process of its own."""
    try:
        done = subprocess.run(
            command(name, *arguments),
            capture_output=True,
            text=True,
            timeout=DOCTOR_PROBE_SECONDS,
            env=environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(what=f"no answer within {DOCTOR_PROBE_SECONDS:.0f} s")
    answer = record(done.stdout)
    if answer is not None:
        return Answer(**answer)
    # The probe has not come to its end: a crash, or jaxmpi itself cannot be imported.
    lines = done.stderr.strip().splitlines()
    return Answer(what=lines[-1] if lines else f"exit code {done.returncode}")


def command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a probe."""
    return [sys.executable, "-m", "jaxmpi._job.tools.probes", name, *arguments]


def environment() -> dict[str, str]:
    """Return the environment of a process that imports this jaxmpi.

    The process ignores the working directory, which may hold other packages of the same names.
    """
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    if Path.cwd() == HOME:  # jaxmpi may be found there only
        paths = [str(HOME), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environ


def record(printed: str) -> dict[str, Any] | None:
    """Find the record in what a process has printed; None if there is none."""
    for line in printed.splitlines():
        _, mark, text = line.partition(MARK)  # a launcher may put the rank before it
        if mark:
            found: dict[str, Any] = json.loads(text)
            return found
    return None


def _print_record(fields: Mapping[str, object]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(fields)}\n")
    sys.stdout.flush()


# the probes


def _mpi_libraries() -> dict[str, str] | None:
    """Return what is wrong where a process that loads mpi4py has two MPI libraries."""
    from jaxmpi._backends import mpi_library

    return _parts(mpi_library.loads_two_libraries())


def _mpi4jax() -> dict[str, object]:
    """Return the version of mpi4jax, None if it is not installed."""
    from jaxmpi._backends import mpi_library

    try:
        return {"version": mpi_library.mpi4jax_version()}
    except MPIError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError) or missing.name != "mpi4jax":
            raise
        return {"version": None, **(_parts(error) or {})}


def _native() -> dict[str, str] | None:
    """Return why the native transport cannot be used; None if it can."""
    from jaxmpi._backends.start import why_not_native

    return _parts(why_not_native())


def _parts(error: MPIError | None) -> dict[str, str] | None:
    return None if error is None else {"what": error.what, "advice": error.advice}


def _extension() -> dict[str, str]:
    """Return what compiled the extension, and the version of XLA's FFI it was compiled for."""
    from jaxmpi import _native as native  # type: ignore[attr-defined]

    return {"compiler": str(native.compiler), "ffi": str(native.ffi)}


def _devices() -> dict[str, object]:
    """Return what JAX computes on."""
    import jax

    devices = jax.local_devices()
    first = devices[0]
    return {"count": len(devices), "kind": first.device_kind, "platform": first.platform}


def _nccl() -> dict[str, str]:
    """Return the NCCL that JAX loads, and why ranks cannot share a GPU over it; "" if they can."""
    from jaxmpi._backends import nccl

    found = nccl.find()
    return {"name": str(found), "source": found.source, "why_not": nccl.why_not(found)}


def _dtypes() -> dict[str, object]:
    """Return the dtypes whose sums are wrong on what JAX computes on."""
    import jax
    import jax.numpy as jnp

    names = (
        *("float32", "float64", "bfloat16", "float16", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
    jax.config.update("jax_enable_x64", True)
    wrong = []
    for name in names:
        sums = jax.jit(lambda x: x + x)(jnp.ones(3, name))
        if (sums != 2).any():
            wrong.append(name)
    return {"count": len(names), "wrong": wrong}


def _cuda_in_mpi(path: str) -> bool | None:
    """Return whether the MPI library at `path` takes arrays of a GPU; None if it does not say."""
    import ctypes

    from jaxmpi._backends.mpi_library import import_mpi4py

    import_mpi4py(1)
    library = ctypes.CDLL(path)
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH; 0 is CUDA
        supported = ctypes.c_int()
        library.MPIX_GPU_query_support(0, ctypes.byref(supported))
        return bool(supported.value)
    return None


_PROBES: dict[str, Callable[..., object]] = {
    "mpi_libraries": _mpi_libraries,
    "mpi4jax": _mpi4jax,
    "native": _native,
    "extension": _extension,
    "devices": _devices,
    "nccl": _nccl,
    "dtypes": _dtypes,
    "cuda_in_mpi": _cuda_in_mpi,
}


def _measure() -> None:
    """Measure the latency and the bandwidth of a mean; rank 0 prints the record.

    **Collective:** all ranks of a job run it.
    """
    import jax
    import numpy as np

    import jaxmpi
    from jaxmpi._world import session

    world = jaxmpi.init()
    mean = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))
    small, large = (jax.numpy.zeros(size // 4) for size in (LATENCY_BYTES, MEASURED_BYTES))
    to, source = np.ones(MEASURED_BYTES // 4, np.float32), np.ones(MEASURED_BYTES // 4, np.float32)
    fields = {
        "latency_us": 1e6 * _median_seconds(lambda: mean(small), 200),
        "mean_ms": 1e3 * _median_seconds(lambda: mean(large), 15),
        "memcpy_ms": 1e3 * _median_seconds(lambda: np.copyto(to, source), 15),
        "transport": session.current("doctor").transport.name,
    }
    if world.rank == 0:
        _print_record(fields)


def _median_seconds(call: Callable[[], object], times: int) -> float:
    import jax

    import jaxmpi

    jax.block_until_ready(call())  # compiles it
    jaxmpi.barrier()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _main(name: str, *arguments: str) -> None:
    if name == "measure":  # a rank that raises ends the job, which `jaxmpi run` reports
        _measure()
        return
    try:
        fields: dict[str, object] = {"found": _PROBES[name](*arguments)}
    except MPIError as error:
        fields = {"what": error.what, "advice": error.advice}
    except Exception as error:
        fields = {"what": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    _print_record(fields)


if __name__ == "__main__":
    _main(*sys.argv[1:])
