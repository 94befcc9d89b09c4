"""Start of an MPI job: the ranks check that all can join, and choose the transport together.

The transport of backend "mpi" is the native one if all ranks can use it, else mpi4jax.
"""

import os
import socket
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TypeVar

import jax

from jaxmpi import _devices
from jaxmpi._backends import extension, nccl
from jaxmpi._backends.jax_processes import join_jax_processes
from jaxmpi._backends.mpi4jax import Mpi4jax
from jaxmpi._backends.mpi_library import import_mpi4jax, import_mpi4py, unlink_shared_memory
from jaxmpi._backends.mpi_ranks import MpiRanks
from jaxmpi._backends.native import Native, on_host
from jaxmpi._backends.native_transports import SHARED_MEMORY
from jaxmpi._backends.xla import Xla
from jaxmpi._errors import MPIError
from jaxmpi._job.process import jax_collectives, launchers, settings

__all__ = [
    "check_platforms",
    "check_start",
    "find_mpi4jax",
    "gathered",
    "join",
    "join_xla",
    "take_device",
    "why_not_native",
]

T = TypeVar("T")

CUDA_DRIVER = "libcuda.so.1"


def join_xla(launched: int, devices: Sequence[int] | None) -> MpiRanks:
    """Join the other ranks, with programs that talk through XLA.

    Args:
      launched: the number of ranks in the launcher's environment.
      devices: as in `jaxmpi.init`.
    """
    jax_collectives.leave_rank_to_monitor()
    mpi = import_mpi4py(launched)
    check_start(mpi, launched)
    gpus = take_device(launched, devices, over_xla=True)
    ranks = MpiRanks("xla", mpi, Xla)
    ranks.gpus = gpus
    return ranks


def join(launched: int, devices: Sequence[int] | None, jax_processes: bool) -> MpiRanks:
    """Join the other ranks, on the transport of JAXMPI_TRANSPORT if it is set.

    Without it the transport is the native one if every rank can use it, else mpi4jax.

    Args:
      launched: the number of ranks in the launcher's environment.
      devices: as in `jaxmpi.init`.
      jax_processes: as in `jaxmpi.init`.
    """
    jax_collectives.leave_rank_to_monitor()
    asked = settings.get("JAXMPI_TRANSPORT")
    mpi = import_mpi4py(launched)
    check_start(mpi, launched)
    gpus = take_device(launched, devices)  # before anything else starts JAX's backend
    if jax_processes and launched > 1:
        world = mpi.COMM_WORLD
        one_host = len({*gathered(launched, socket.gethostname)}) == 1
        join_jax_processes(world.rank, world.size, one_host, world.allgather)
    ranks = _on_transport(asked, launched)
    ranks.gpus = gpus
    return ranks


def _on_transport(asked: str, launched: int) -> MpiRanks:
    """Join the other ranks, on the transport that JAXMPI_TRANSPORT asks for."""
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


# checks


def gathered(launched: int, answer: Callable[[], T]) -> list[T]:
    """Return the result of `answer` on each rank, before there is a backend.

    Raises:
      MPIError: `answer` raised on another rank; that rank raises its error.
    """
    mine: T | None = None
    failed: Exception | None = None
    try:
        mine = answer()
    except Exception as error:
        failed = error
    everyone = import_mpi4py(launched).COMM_WORLD.allgather(
        (mine, failed and f"{type(failed).__name__}: {failed}")
    )
    if failed:
        raise failed
    for rank, (_, why) in enumerate(everyone):
        if why:
            raise MPIError(f"init: rank {rank} cannot join the others. {why}")
    return [theirs for theirs, _ in everyone]


def check_start(mpi: ModuleType, launched: int) -> None:
    """Check that the launcher belongs to the MPI that runs.

    Args:
      mpi: the module `mpi4py.MPI`.
      launched: the number of ranks in the launcher's environment.

    Raises:
      MPIError: each rank is alone, because the launcher belongs to another MPI.
    """
    world = mpi.COMM_WORLD
    if launched > world.size == 1:
        vendor, numbers = mpi.get_vendor()
        version = ".".join(map(str, numbers))
        unlink_shared_memory(world)
        mpi.Finalize()  # nothing is left of it, however the process ends
        raise MPIError(
            f"{launched} ranks were launched{launchers.launched(os.environ).by}, but each of them "
            f"is alone: mpi4py runs on {vendor} {version}, and the launcher belongs to another "
            "MPI. Start the job with the mpirun of that MPI, or with `jaxmpi run -n N script.py`."
        )


def find_mpi4jax(launched: int) -> ModuleType:
    """Import mpi4jax; raise an MPIError on all ranks if it does not load on one of them."""
    gathered(launched, lambda: import_mpi4jax(launched).__name__)
    return import_mpi4jax(launched)


def check_platforms(platforms: Sequence[str]) -> None:
    """Raise an error if the ranks compute on different platforms: their programs would differ.

    Args:
      platforms: the `jax.default_backend()` of each rank.

    Raises:
      MPIError: the platforms differ.
    """
    other = next(
        (rank for rank, platform in enumerate(platforms) if platform != platforms[0]), None
    )
    if other is not None:
        raise MPIError(
            f"init: rank 0 uses platform {platforms[0]}, and rank {other} uses platform "
            f"{platforms[other]}. All ranks must use the same platform. Run `jaxmpi doctor` on "
            "both hosts to see why no GPU is used, or set JAX_PLATFORMS=cpu on all ranks."
        )


def take_device(launched: int, devices: Sequence[int] | None, *, over_xla: bool = False) -> str:
    """Select this rank's GPU before JAX starts; ranks that share one get a fraction of its memory.

    Args:
      launched: the number of ranks in the launcher's environment.
      devices: as in `jaxmpi.init`.
      over_xla: whether the ranks communicate over XLA; NCCL must allow it then, where they use it.

    Returns:
      A line about the GPUs of all ranks; "" without any.

    Warns:
      UserWarning: on the first of the ranks that share a GPU.

    Raises:
      Exception: as in `_devices.choose`; on the other ranks an MPIError.
      MPIError: as in `nccl.check_versions` and `nccl.allow_sharing`.
    """
    mpi = import_mpi4py(launched)
    world = mpi.COMM_WORLD
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank = node.rank
    node.Free()

    chosen = gathered(launched, partial(_choose_gpu, local_rank, world.size, devices))
    if all(one.gpu is None for one in chosen):
        return ""
    gpus, memory = _share_gpus(launched, chosen, world.rank)
    ranks = _devices.sharing(gpus, world.rank)
    if len(ranks) > 1 and ranks[0] == world.rank:
        mine = chosen[world.rank]
        warnings.warn(
            f"init: ranks {ranks} share GPU {mine.gpu} of {mine.host}: they take turns unless "
            f"CUDA's MPS runs (`jaxmpi run --mps`), and {memory}. Start one rank per GPU.",
            stacklevel=5,
        )
    line = _devices.describe(gpus, memory)
    if over_xla:
        line += _check_nccl(launched, gpus, world.rank)
    return line


def _choose_gpu(local_rank: int, size: int, devices: Sequence[int] | None) -> _devices.RankGpu:
    """Choose this rank's GPU, and hide the others from JAX.

    The arguments and errors are those of `_devices.choose`.
    """
    # Look at the list first: choosing a MIG slice changes it.
    listed, variable = len(_devices.visible(devices)), _devices.listed_in()
    gpu = _devices.choose(local_rank, size, devices)
    return _devices.RankGpu(os.uname().nodename, gpu, listed, variable)


def _share_gpus(
    launched: int, chosen: Sequence[_devices.RankGpu], rank: int
) -> tuple[Sequence[_devices.RankGpu], str]:
    """Give each rank of a GPU an equal share of its memory.

    Args:
      launched: the number of ranks in the launcher's environment.
      chosen: the GPU of each rank.
      rank: this rank.

    Returns:
      (gpus, memory): the GPU of each rank, with names that are equal for one GPU only; and what
      becomes of the memory of this rank's GPU, in words.
    """
    names = [(one.host, one.gpu) for one in chosen if one.gpu is not None]
    if len(set(names)) == len(names):
        return chosen, _devices.memory_of_one()
    # Equal numbers may be different GPUs, where the launcher shows each rank its own.
    mine = chosen[rank]
    gpus = gathered(launched, lambda: mine._replace(gpu=mine.gpu and _devices.unique(mine.gpu)))
    ranks = _devices.sharing(gpus, rank)
    if len(ranks) > 1:
        return gpus, _devices.share_memory(len(ranks))
    return gpus, _devices.memory_of_one()


def _check_nccl(launched: int, gpus: Sequence[_devices.RankGpu], rank: int) -> str:
    """Check NCCL on all ranks, and let those that share a GPU do so; return how, in words.

    Args:
      launched: the number of ranks in the launcher's environment.
      gpus: the GPU of each rank.
      rank: this rank.
    """
    # All ranks answer, also one without a GPU or with one of AMD's, whose RCCL is not asked.
    everyone = gathered(launched, lambda: nccl.find() if _devices.uses_nccl() else nccl.Nccl())
    uses = gathered(launched, _devices.uses_nccl)
    nccl.check_versions(everyone)
    on_gpu = []
    for other in range(len(gpus)):
        on_gpu.append(_devices.sharing(gpus, other) if uses[other] else [])
    shared = nccl.allow_sharing(everyone, on_gpu, rank, os.environ)
    return f"; {shared}" if shared else ""
