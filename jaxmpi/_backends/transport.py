"""Choose the transport of an MPI job: the native one if all ranks can use it, else mpi4jax."""

import os
import socket
from collections.abc import Sequence
from functools import partial

import jax

from jaxmpi._backends import extension
from jaxmpi._backends.jax_processes import join_jax_processes
from jaxmpi._backends.mpi4jax import Mpi4jax
from jaxmpi._backends.mpi_library import import_mpi4py
from jaxmpi._backends.mpi_ranks import MpiRanks
from jaxmpi._backends.native import Native, on_host
from jaxmpi._backends.shared_memory import SHARED_MEMORY
from jaxmpi._backends.start_checks import (
    check_platforms,
    check_start,
    find_mpi4jax,
    gathered,
    take_device,
)
from jaxmpi._backends.xla import Xla
from jaxmpi._errors import MPIError
from jaxmpi._job.process import settings

__all__ = ["join", "join_xla", "why_not_native"]

CUDA_DRIVER = "libcuda.so.1"


def join_xla(launched: int, devices: Sequence[int] | None) -> MpiRanks:
    """Join the other ranks, with programs that talk through XLA.

    Args:
      launched: the number of ranks in the launcher's environment.
      devices: as in `jaxmpi.init`.
    """
    mpi = import_mpi4py(launched)
    check_start(mpi, launched)
    take_device(launched, devices)
    return MpiRanks("xla", mpi, Xla)


def join(launched: int, devices: Sequence[int] | None, jax_processes: bool) -> MpiRanks:
    """Join the other ranks, on the transport of JAXMPI_TRANSPORT if it is set.

    Without it the transport is the native one if every rank can use it, else mpi4jax.

    Args:
      launched: the number of ranks in the launcher's environment.
      devices: as in `jaxmpi.init`.
      jax_processes: as in `jaxmpi.init`.
    """
    asked = settings.get("JAXMPI_TRANSPORT")
    mpi = import_mpi4py(launched)
    check_start(mpi, launched)
    take_device(launched, devices)  # before anything else starts JAX's backend
    if jax_processes and launched > 1:
        world = mpi.COMM_WORLD
        one_host = len({*gathered(launched, socket.gethostname)}) == 1
        join_jax_processes(world.rank, world.size, one_host, partial(world.bcast, root=0))
    found = gathered(launched, lambda: None if asked == "mpi4jax" else why_not_native())
    obstacles = [f"rank {rank}: {why}" for rank, why in enumerate(found) if why]
    if asked == "native" and obstacles:
        raise MPIError(
            "init: JAXMPI_TRANSPORT is native, and the native transport is not available. "
            f"{obstacles[0]}. Set it to mpi4jax."
        )
    if asked == "mpi4jax":
        return _on_mpi4jax(launched)
    if not obstacles:
        return _on_native(launched)
    try:
        return _on_mpi4jax(launched)
    except MPIError as error:
        # of mpi4jax, which is needed only as the native transport is not there
        raise MPIError(
            "init: several ranks need the native transport or mpi4jax, and neither is available. "
            f"Native: {obstacles[0]}. mpi4jax: {error}"
        ) from None


def _on_mpi4jax(launched: int) -> MpiRanks:
    """Join the other ranks, with programs that talk with mpi4jax."""
    mpi, mpi4jax = import_mpi4py(launched), find_mpi4jax(launched)
    check_platforms(gathered(launched, jax.default_backend))
    return MpiRanks("mpi", mpi, partial(Mpi4jax, mpi4jax=mpi4jax))


def _on_native(launched: int) -> MpiRanks:
    """Join the other ranks, with programs that talk through the extension."""
    native, mpi = extension.load(), import_mpi4py(launched)
    check_platforms(gathered(launched, jax.default_backend))
    concurrent = mpi.Query_thread() == mpi.THREAD_MULTIPLE
    return MpiRanks("mpi", mpi, partial(Native, native=native, concurrent=concurrent))


def why_not_native() -> MPIError | None:
    """Return why this process cannot use the native transport, and what to do; None if it can.

    Raises:
      MPIError: the extension is there, but belongs to other sources, another version or another XLA
        FFI.
    """
    try:
        native = extension.load()
    except ImportError as error:
        what = "is not built" if isinstance(error, ModuleNotFoundError) else "does not load"
        return MPIError(f"the extension {what} ({error}).", advice=extension.how_to_build())
    if not native.can_reduce():
        return MPIError("the processor has no AVX2")
    on_cpu = on_host()
    extension.check_ffi(native)
    if not on_cpu:
        version = jax.local_devices()[0].client.platform_version
        if "cuda" not in version.lower():
            return MPIError(f"it supports arrays on CPUs and CUDA GPUs, and these are on {version}")
        try:
            native.use_cuda(CUDA_DRIVER)
        except RuntimeError as error:
            return MPIError(str(error))
    return None if os.path.isdir(SHARED_MEMORY) else MPIError(f"there is no {SHARED_MEMORY}")
