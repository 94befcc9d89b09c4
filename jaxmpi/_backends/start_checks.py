"""Checks at start, before there is a backend: can all ranks join, and are their platforms equal?

Ranks that share a GPU share its memory, too.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeVar

from jaxmpi import _devices
from jaxmpi._backends.mpi_library import import_mpi4jax, import_mpi4py, unlink_shared_memory
from jaxmpi._errors import MPIError
from jaxmpi._job.process import launchers

__all__ = ["check_platforms", "check_start", "find_mpi4jax", "gathered", "take_device"]

T = TypeVar("T")


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
            f"is alone: mpi4py runs on {vendor} {version}, and the launcher belongs to another MPI. "
            "Start the job with the mpirun of that MPI, or with `jaxmpi run -n N script.py`."
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


def take_device(launched: int, devices: Sequence[int] | None) -> None:
    """Select this rank's GPU before JAX starts; ranks that share one get a fraction of its memory.

    Args:
      launched: the number of ranks in the launcher's environment.
      devices: as in `jaxmpi.init`.

    Warns:
      UserWarning: on the first of the ranks that share a GPU.

    Raises:
      Exception: as in `_devices.choose`; on the other ranks an MPIError.
    """
    mpi = import_mpi4py(launched)
    world, host = mpi.COMM_WORLD, os.uname().nodename
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank = node.rank
    node.Free()
    taken = gathered(launched, lambda: (host, _devices.choose(local_rank, world.size, devices)))
    names = [gpu for gpu in taken if gpu[1] is not None]
    if len(set(names)) == len(names):
        return
    mine = taken[world.rank][1]
    taken = gathered(launched, lambda: (host, mine and _devices.unique(mine)))
    ranks = _devices.sharing(taken, world.rank)
    if len(ranks) > 1:
        done = _devices.share_memory(len(ranks))
        if ranks[0] == world.rank:
            warnings.warn(
                f"init: ranks {ranks} share GPU {mine} of {host}: they take turns, and {done}. "
                "Start one rank per GPU.",
                stacklevel=5,
            )
