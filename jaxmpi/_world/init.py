"""`init`: find the other ranks, choose how they talk, and begin the session."""

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence

import jax

from jaxmpi import _devices, _jaxcompat
from jaxmpi._backends.base import Place
from jaxmpi._backends.interface import Ranks
from jaxmpi._backends.mpi_ranks import MpiRanks
from jaxmpi._backends.one_process import Single
from jaxmpi._consistency import compare
from jaxmpi._errors import RankMismatchError
from jaxmpi._job.process import joining, launchers, run_dir, settings, stderr
from jaxmpi._job.process.compiled_files import CompiledFiles
from jaxmpi._world import session
from jaxmpi._world.leftover_pmap import notice_pmaps
from jaxmpi._world.world import World, checked_axes, sized_axes

__all__ = ["init", "launched_ranks"]


def init(
    backend: str = "auto",
    devices: Sequence[int] | None = None,
    *,
    verbose: bool = False,
    axes: Mapping[str, int] | None = None,
    jax_processes: bool = False,
) -> World:
    """Find the other ranks and this rank's device; call it once, at the top of the script.

    A second call gives the same World back. Without a launcher there is one rank, and MPI is
    neither needed nor started. A process that a rank starts, such as a worker of a data loader that
    imports the script again, is alone: whatever it asks for, its World has one rank.

    **Collective:** every rank calls it.

    Args:
      backend: "auto", "single", "mpi" or "xla". "auto" is "single" for one rank; under mpirun, srun
        or `jaxmpi run` it is "xla" where every rank has a GPU of its own, and "mpi" otherwise. The
        environment variable JAXMPI_BACKEND overrides "auto".
      devices: the GPUs of this node that the ranks may use, by index; all visible ones by default.
      verbose: print, on rank 0, what was chosen.
      axes: names beside `jaxmpi.AXIS` for groups of ranks, and their sizes, such as {"island": 2,
        "member": -1}; one size may be -1, for what is left. The last axis is the fastest: rank r of
        islands of m ranks is member r % m of island r // m. So the last axis stays within nodes
        where its size divides the number of ranks of a node.
      jax_processes: on the mpi backend, have JAX know the ranks as its processes, for libraries
        that ask it: then `jax.process_index()` is the rank, `jax.process_count()` and
        `jax.device_count()` are the size, and `jax.experimental.multihost_utils` communicates.
        Without it they are 0 and 1 there; on xla they always are the rank and the size.

    Returns:
      The World: rank, size, local_rank, local_size, node, device, backend, axes, coordinates.

    Raises:
      ValueError: an unknown backend; another one, other axes or `jax_processes` than in the first
        call; axes whose sizes are not those of all ranks together; an environment variable of
        jaxmpi has a value that is not allowed.
      TypeError: axes are no mapping from names to ints.
      RankMismatchError: the ranks ask for different backends or axes, or have different settings
        that must be the same.
      RuntimeError: an array was made before `init`, on the xla backend or with `jax_processes`.
      MPIError: MPI is needed and missing, or its parts don't belong together; another rank cannot
        join.

    >>> import jaxmpi
    >>> world = jaxmpi.init()
    >>> world.rank, world.size
    (0, 1)
    """
    parent = joining.parent()
    if parent is not None:
        backend = "auto"
    if backend not in settings.BACKENDS:
        raise ValueError(
            f"init: backend {backend!r} is unknown. Use one of {', '.join(settings.BACKENDS)}."
        )
    if (world := session.world()) is not None:
        if backend not in ("auto", world.backend):
            raise ValueError(
                f"init: the backend is {world.backend!r} since the first call, and now {backend!r} "
                "was asked for. Call jaxmpi.finalize() first."
            )
        named = sized_axes("init", checked_axes("init", axes), world.size)
        if axes is not None and [*named.items()] != [*world.axes.items()]:
            raise ValueError(
                f"init: axes are {dict(world.axes)} since the first call, and now {named} were "
                "asked for. Call jaxmpi.finalize() first."
            )
        if jax_processes and world.size > jax.process_count():
            raise ValueError(
                "init: jax_processes was not asked for in the first call, and JAX has started "
                "since. Ask for it there."
            )
        return world
    if parent is None:
        run_dir.note_at_exceptions()
    launched = launched_ranks() if parent is None else 1
    with joining.joining(launched):
        if parent is None:
            backend, named = _check_settings(backend, launched, axes, jax_processes)
        else:
            backend, named = "single", dict.fromkeys(checked_axes("init", axes), 1)
        if backend == "auto":
            backend = _choose(launched, devices)
        joined = _join(backend, launched, devices, parent, jax_processes)
        ranks: Ranks = joined or Single()
        _keep_compiled(ranks.place)
        ranks.name_axes(named)
        place = ranks.place
        world = World(*place, backend=backend, axes=named)
        session.begin(ranks, world)
        if joined is not None and place.size > 1:
            joining.note_rank(place.local_rank, place.size)
            if directory := os.environ.get("JAXMPI_RUN_DIR"):
                run_dir.join(directory, place.rank)  # the monitor notes when the rank leaves
            session.watch(joined)
            joined.turn.release()  # any thread may be the one that communicates
            notice_pmaps()
    if verbose and world.rank == 0:
        details = [str(world), f"device {world.device}", ranks.transport.description]
        about = ", ".join(filter(None, details))
        sys.stderr.write(f"jaxmpi: {about}\n")
        if joined is not None and joined.gpus:
            sys.stderr.write(f"jaxmpi: {joined.gpus}\n")
    return world


def _keep_compiled(place: Place) -> None:
    """Make JAX keep compiled programs in the folder that `jaxmpi run` has chosen.

    If that is not possible, the first rank of a host says why.
    """
    directory, limit = settings.get("JAXMPI_CACHE_DIR"), settings.get("JAXMPI_CACHE_BYTES")
    if not directory or not limit or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return

    def say(why: str) -> None:
        if place.local_rank == 0:
            stderr.say(f"jaxmpi: {why}\n")

    try:
        _jaxcompat.keep_compiled(CompiledFiles(directory, limit, say))
    except OSError as error:
        reason = error.strerror or str(error)
        say(
            f"what is compiled is not kept in {directory}: {reason}. JAXMPI_CACHE_BYTES=0 does "
            "without."
        )


def _check_settings(
    backend: str, launched: int, axes: Mapping[str, int] | None, jax_processes: bool
) -> tuple[str, dict[str, int]]:
    """Compare the arguments and environment variables of all ranks; return (backend, sized axes).

    This is the first communication of the ranks. The backend has JAXMPI_BACKEND applied.
    """
    with contextlib.suppress(ValueError):  # raised below, on all ranks
        backend = str(settings.get("JAXMPI_BACKEND")) if backend == "auto" else backend
    if backend == "single" or (backend == "auto" and launched == 1):
        _checked()
        return backend, sized_axes("init", checked_axes("init", axes), 1)
    from jaxmpi._backends.start import gathered

    def asked_for() -> dict[str, object]:
        named = str(checked_axes("init", axes) or None)
        return {"backend": backend, "axes": named, "jax_processes": jax_processes, **_checked()}

    everyone = gathered(launched, asked_for)
    if (asked := settings.difference(everyone)) is not None:
        name, rank = asked
        show = str if name == "axes" else repr
        values = []
        for value in (everyone[0][name], everyone[rank][name]):
            values.append("unset" if value is None else show(value))
        same = "argument and the same JAXMPI_BACKEND" if name == "backend" else "value"
        raise RankMismatchError(
            f"init: {name} is {values[0]} on rank 0 and {values[1]} on rank {rank}.",
            advice=f"Give every rank the same {same}.",
            function="init",
            ranks=[0, rank],
        )
    return backend, sized_axes("init", checked_axes("init", axes), len(everyone))


def _checked() -> dict[str, object]:
    try:
        return settings.check()
    except ValueError as error:
        raise ValueError(f"init: {error}") from None


def _choose(launched: int, devices: Sequence[int] | None) -> str:
    """Return the backend for "auto", the same on all ranks."""
    if launched == 1:
        return "single"
    from jaxmpi._backends.start import gathered

    shown = gathered(launched, lambda: (socket.gethostname(), _devices.visible(devices)))
    if any(names for _, names in shown) and not _devices.each_has_own_gpu(shown):
        shown = gathered(
            launched,
            lambda: (socket.gethostname(), [*map(_devices.unique, _devices.visible(devices))]),
        )
    return "xla" if _devices.each_has_own_gpu(shown) else "mpi"


def _join(
    backend: str,
    launched: int,
    devices: Sequence[int] | None,
    parent: joining.Parent | None,
    jax_processes: bool,
) -> MpiRanks | None:
    """Choose this rank's device, and join the other ranks; None without any, by "single"."""
    if backend == "single":
        # the GPU of the rank that has started this process
        _devices.choose(*(parent[1:] if parent else (0, 1)), devices)
        return None
    # here, as a job of one rank does not need it
    from jaxmpi._backends.start import join, join_xla

    if backend == "xla":
        ranks = join_xla(launched, devices)
    else:
        ranks = join(launched, devices, jax_processes)
    compare.set_mismatch_handler(ranks)
    return ranks


def launched_ranks() -> int:
    """Return the number of ranks in the launcher's environment variables; 1 without a launcher."""
    return launchers.launched(os.environ).size
