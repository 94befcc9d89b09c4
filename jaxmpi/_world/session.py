"""The one World: which ranks there are, which one this is, and how they talk."""

import contextlib
import copy
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jaxmpi import _axis, _devices
from jaxmpi._backends.base import Backend, Place
from jaxmpi._backends.single import Single
from jaxmpi._consistency import compare
from jaxmpi._errors import NotInitializedError, RankMismatchError
from jaxmpi._monitor import monitor
from jaxmpi._monitor.preemption import Preemption
from jaxmpi._process import children, run_dir, settings
from jaxmpi._process.init_failure import joining

__all__ = [
    "World",
    "check_root",
    "current",
    "finalize",
    "init",
    "initialized",
    "local_rank",
    "local_size",
    "rank",
    "size",
]

LAUNCHERS = (  # what each launcher tells its ranks about their number
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MPI_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PALS_SIZE",
    "FLUX_JOB_SIZE",
    "SLURM_STEP_NUM_TASKS",
)


@dataclass(frozen=True)
class World:
    """What `init` found out: this process's place among the ranks.

    Attributes:
      rank: 0 to size - 1, over all nodes.
      size: the number of ranks.
      local_rank: 0 to local_size - 1, within the node; the device is chosen by it.
      local_size: the number of ranks on this node.
      node: the number of this node; nodes are numbered by their lowest rank.
      backend: "single", "mpi", "xla" or "simulate".
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    backend: str

    @property
    def device(self) -> jax.Device:
        """The device that this rank computes on."""
        return jax.local_devices()[0]


class _State:
    backend: Backend | None = None
    world: World | None = None
    preemption: Preemption | None = None  # of a rank without a monitor that talks to others


def _leave_to_parent() -> None:
    """In a forked child of a rank, keep the World, to be read, and refuse to communicate."""
    if _State.backend is not None and _State.backend.place.size > 1 and not _State.backend.forked:
        backend: Any = copy.copy(_State.backend)  # another one, so that steps look at it anew
        backend.forked = True
        backend.turn.forbid()
        _State.backend = backend


os.register_at_fork(after_in_child=_leave_to_parent)


def init(backend: str = "auto", devices: Sequence[int] | None = None, *, verbose: bool = False) -> World:
    """Find the other ranks and this rank's device; call it once, at the top of the script.

    A second call gives the same World back. Without a launcher there is one rank, and MPI is neither needed nor started.
    A process that a rank starts, such as a worker of a data loader that imports the script again, is alone: whatever it asks
    for, its World has one rank.

    **Collective:** every rank calls it.

    Args:
      backend: "auto", "single", "mpi" or "xla". "auto" is "single" for one rank; under mpirun, srun or `jaxmpi run` it is
        "xla" where every rank has a GPU of its own, and "mpi" otherwise. The environment variable JAXMPI_BACKEND overrides
        "auto".
      devices: the GPUs of this node that the ranks may use, by index; all visible ones by default.
      verbose: print, on rank 0, what was chosen.

    Returns:
      The World: rank, size, local_rank, local_size, node, device, backend.

    Raises:
      ValueError: an unknown backend, or one that differs from that of the first call; an environment variable of jaxmpi has
        a value that is not allowed.
      RankMismatchError: the ranks ask for different backends, or have different settings that must be the same.
      MPIError: MPI is needed and missing, or its parts don't belong together; another rank cannot join.

    >>> import jaxmpi
    >>> world = jaxmpi.init()
    >>> world.rank, world.size
    (0, 1)
    """
    parent = children.parent()
    if parent is not None:
        backend = "auto"
    if backend not in settings.BACKENDS:
        raise ValueError(f"init: backend {backend!r} is unknown. Use one of {', '.join(settings.BACKENDS)}.")
    if _State.world is not None:
        if backend not in ("auto", _State.world.backend):
            raise ValueError(
                f"init: the backend is {_State.world.backend!r} since the first call, and now {backend!r} was asked for. "
                "Call jaxmpi.finalize() first."
            )
        return _State.world
    launched = launched_ranks() if parent is None else 1
    with joining(launched):
        backend = _check_settings(backend, launched) if parent is None else "single"
        if backend == "auto":
            backend = _choose(launched, devices)
        chosen: Any = _start(backend, launched, devices, parent)
        place: Place = chosen.place
        _State.backend, _State.world = chosen, World(*place, backend=backend)
        if place.size > 1:
            children.note_rank(place.local_rank, place.size)
            if directory := os.environ.get("JAXMPI_RUN_DIR"):
                run_dir.join(directory, place.rank)  # the guard notes when the rank leaves
            monitor.install(chosen)
            chosen.turn.release()  # any thread may be the one that communicates
    if verbose and _State.world.rank == 0:
        transport = f", transport {chosen.transport}" if backend == "mpi" else ""
        sys.stderr.write(f"jaxmpi: {_State.world}, device {_State.world.device}{transport}\n")
    return _State.world


def _check_settings(backend: str, launched: int) -> str:
    """Read the environment variables, on all ranks where there are several; returns the backend with JAXMPI_BACKEND applied.

    The first thing that ranks say to each other: what they ask for, and the settings that must be the same.
    """
    with contextlib.suppress(ValueError):  # raised below, on all ranks
        backend = str(settings.get("JAXMPI_BACKEND")) if backend == "auto" else backend
    if backend == "single" or (backend == "auto" and launched == 1):
        _checked()
        return backend
    from jaxmpi._backends.mpi import gathered

    everyone = gathered(launched, lambda: {"backend": backend, **_checked()})
    if (asked := settings.difference(everyone)) is not None:
        name, rank = asked
        values = [repr(everyone[r][name]) if everyone[r][name] is not None else "unset" for r in (0, rank)]
        raise RankMismatchError(
            f"init: {name} is {values[0]} on rank 0 and {values[1]} on rank {rank}. "
            f"Give every rank the same{' argument and the same JAXMPI_BACKEND' if name == 'backend' else ' value'}."
        )
    return backend


def _checked() -> dict[str, Any]:
    try:
        return settings.check()
    except ValueError as error:
        raise ValueError(f"init: {error}") from None


def _choose(launched: int, devices: Sequence[int] | None) -> str:
    """What "auto" is, the same on all ranks."""
    if launched == 1:
        return "single"
    from jaxmpi._backends.mpi import gathered

    shown = gathered(launched, lambda: (socket.gethostname(), _devices.visible(devices)))
    if any(names for _, names in shown) and not _devices.enough(shown):
        shown = gathered(launched, lambda: (socket.gethostname(), [*map(_devices.unique, _devices.visible(devices))]))
    return "xla" if _devices.enough(shown) else "mpi"


def _start(backend: str, launched: int, devices: Sequence[int] | None, parent: children.Parent | None) -> Backend:
    if backend == "xla":
        from jaxmpi._backends.xla import Xla

        return Xla(launched, devices)
    if backend == "single":
        _devices.choose(*(parent[1:] if parent else (0, 1)), devices)  # the GPU of the rank that has started this process
        return Single()
    from jaxmpi._backends.transport import join

    mpi = join(launched, devices)
    compare.set_mismatch_handler(mpi)
    return mpi


def initialized() -> bool:
    """Whether `init` was called, and `finalize` not since."""
    return _State.world is not None


def finalize() -> None:
    """Forget the World, so that `init` can be called again; not needed at the end of a script.

    On the xla backend `init` cannot be called again: JAX's processes join each other once.

    **Collective:** every rank calls it.

    Raises:
      RankMismatchError: on every rank, if one of them calls something else.
    """
    if _State.backend is not None and not _State.backend.forked:
        compare.check_consistent(_State.backend, compare.Statement.of("finalize"))
        monitor.remove()
        _State.backend.close()
    _State.backend = _State.world = _State.preemption = None


def current(function: str) -> Backend:
    """The backend in use, for `function`, whose name the error carries when there is none yet."""
    if _State.backend is None:
        raise NotInitializedError(function)
    return _State.backend


def check_root(function: str, root: Any) -> None:
    """Raise a TypeError or a ValueError that names `function` unless root is a rank."""
    size = current(function).place.size
    if isinstance(root, bool) or not isinstance(root, int):
        raise TypeError(f"{function}: root is a {type(root).__name__}, and must be a Python int, equal on all ranks.")
    if not 0 <= root < size:
        raise ValueError(f"{function}: root is {root}, and the ranks are 0 to {size - 1}.")


def rank() -> Any:
    """This rank's number, 0 to size - 1; it may stand in a differentiated function.

    A Python int; inside of `jaxmpi.jit` it is `lax.axis_index`, an int32 array, as the traced program is that of all ranks.
    """
    place = current("rank").place
    return lax.axis_index(_axis.AXIS) if _axis.bound() else place.rank


def size() -> int:
    """The number of ranks: a Python int, which may stand in a differentiated function."""
    place = current("size").place
    return int(lax.axis_size(_axis.AXIS)) if _axis.bound() else place.size


def local_rank() -> int:
    """This rank's number within its node, 0 to local_size - 1. (In FluxMPI and Lux this name is the global rank.)"""
    return current("local_rank").place.local_rank


def local_size() -> int:
    """The number of ranks on this node."""
    return current("local_size").place.local_size


def launched_ranks() -> int:
    """How many ranks the launcher's environment variables speak of; 1 without a launcher."""
    numbers = [os.environ.get(name, "") for name in LAUNCHERS]
    return max((int(number) for number in numbers if number.isdigit()), default=1)
