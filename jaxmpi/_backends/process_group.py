"""The ranks of one MPI job, and what they say to each other outside of compiled programs, with mpi4py.

Objects and the monitor's thread have a communicator of their own each, so that neither meets the
other's messages, nor those of the compiled programs.
"""

import contextlib
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS
from jaxmpi._backends import bucketing, handover
from jaxmpi._backends.activity import Activity, Entered
from jaxmpi._backends.base import Collective, Overlap, Place, Registry
from jaxmpi._backends.communicator import Communicator, Request
from jaxmpi._backends.mpi_library import unlink_shared_memory
from jaxmpi._backends.votes import Votes, open_votes
from jaxmpi._job.process import settings
from jaxmpi._job.process.communicating_thread import Turn
from jaxmpi._job.process.launchers import find_for_library
from jaxmpi._job.process.stderr import one_line

__all__ = ["MpiProcessGroup"]

T = TypeVar("T")


class _Pickled(NamedTuple):
    """An object on its way: its bytes, or why there are none."""

    rank: int
    data: bytes
    error: str

    @staticmethod
    def of(obj: object, rank: int) -> "_Pickled":
        """Pickle an object of this rank."""
        try:
            return _Pickled(rank, pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), "")
        except Exception as error:
            # whatever its __reduce__ raises; the other ranks wait for a message
            return _Pickled(
                rank, b"", f"the object of rank {rank} cannot be pickled ({one_line(error)})"
            )


class MpiProcessGroup(Activity):
    """The ranks of `MPI_COMM_WORLD`."""

    name: str  # of the backend
    forked = False  # whether this process is a forked child of the rank
    simulates = global_arrays = nests = fuses_mean = same_module = False
    encodes_int8, takes_references = False, True

    def __init__(self, mpi: ModuleType) -> None:
        """Join the other ranks, after `check_start`; `mpi` is the module `mpi4py.MPI`."""
        super().__init__()
        self._mpi = mpi
        world = mpi.COMM_WORLD
        self._objects, self._channel = world.Dup(), world.Dup()
        node_comm = self._node_communicator()
        leaders = world.allgather(node_comm.bcast(world.rank))
        node = sorted(set(leaders)).index(leaders[world.rank])
        # whether the ranks of each node are numbered one after the other
        self._by_node = leaders == sorted(leaders)
        self.place = Place(world.rank, world.size, node_comm.rank, node_comm.size, node)
        unlink_shared_memory(node_comm)
        node_comm.Free()
        self.axes: Mapping[str, int] = {AXIS: world.size}
        self.launcher_names_the_killed = find_for_library(mpi.get_vendor()[0]).names_killed_rank
        self.registry = Registry()
        self.turn = Turn(self.finish, self._last)  # of the threads
        # whether several threads may be inside MPI at once
        self.concurrent = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self._sending: list[Request] = []
        self._votes: Votes | None = None  # opened by the first one
        self._word, self._words = np.zeros(2, np.int64), np.zeros(2, np.int64)

    @property
    def combines(self) -> bool:
        """Return whether collectives that can travel together do."""
        return True

    @property
    def overlap(self) -> Overlap | None:
        """Operations for collectives beside computation; None if there are none."""
        return None

    def carries(self, call: Collective) -> bool:
        """Return whether the ranks compare what they send when they carry it out."""
        return False

    def connects(self, call: Collective) -> bool:
        """Return whether it carries a collective within its groups, and not through all ranks."""
        return True

    def wrap(self, leaves: list[ArrayLike]) -> list[ArrayLike]:
        """The arrays as they are."""
        return leaves

    def unwrap(self, x: jax.Array) -> jax.Array:
        """The array as it is."""
        return x

    def _node_communicator(self) -> Communicator:
        """The ranks of this node; JAXMPI_NODE_RANKS=k takes every k ranks for a node, to try several on one machine."""
        world = self._mpi.COMM_WORLD
        if pretended := settings.get("JAXMPI_NODE_RANKS"):
            return world.Split(world.rank // pretended, world.rank)
        return world.Split_type(self._mpi.COMM_TYPE_SHARED)

    def _enter(self) -> Entered:
        if threading.get_ident() != self.turn.thread:
            self.turn.take()
        if self.compares_inline:  # one order for both kinds of traffic
            self.finish()
        else:  # never two threads inside MPI for the sake of plain `jax.jit`
            _jaxcompat.wait_for_effects()
        return Entered(self)

    def _last(self, thread: int) -> tuple[int, int]:
        """Return the state that changes with each collective of the communicating thread."""
        return self._entered, id(self.ends.get(thread))

    def finish(self) -> None:
        """Wait until the programs that were started have ended; who reads their outputs learns how."""
        _jaxcompat.wait_for_effects()
        for end in list(self.ends.values()):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                end.block_until_ready()

    def gather_details(self, side: T, ranks: Sequence[int] = ()) -> list[T]:
        """Gather objects while a program of this rank runs, within `ranks` if there are some."""
        with Entered(self):
            return self._of(ranks).allgather(side)

    def _of(self, ranks: Sequence[int]) -> Communicator:
        """The communicator for objects of a group of ranks, or of all."""
        return self._objects

    def allgather_object(self, obj: T) -> list[T]:
        """Return all ranks' objects, in the order of the ranks."""
        pickled = _Pickled.of(obj, self.place.rank)
        with self._enter():
            return self._unpickled("allgather_object", self._objects.allgather(pickled))

    def broadcast_object(self, obj: object, root: int) -> Any:
        """Return the object of rank `root`; on root, it is `obj` itself."""
        here = self.place.rank == root
        pickled = _Pickled.of(obj, root) if here else None
        with self._enter():
            sent = self._objects.bcast(pickled, root)
            # Root has the object; it reads nothing but takes part in what the others say of it.
            objects = self._unpickled("broadcast_object", [sent] if not here or sent.error else [])
        return obj if here else objects[0]

    def _unpickled(self, function: str, received: Sequence["_Pickled"]) -> list[Any]:
        """Read objects that this rank has received; raise the same error on all ranks where that fails on one.

        An object that cannot be pickled is found before its message, and one that cannot be read
        after it. Both times every rank stays in step: its next collective meets the others' next
        one.
        """
        objects, error = [], next((one.error for one in received if one.error), "")
        if not error:
            for one in received:
                try:
                    objects.append(pickle.loads(one.data))  # what a rank of this job has written
                except Exception as caught:
                    error = (
                        f"the object of rank {one.rank} cannot be read back from its pickle on "
                        "rank "
                        f"{self.place.rank} ({one_line(caught)})"
                    )
                    break
            failed = np.array([bool(error)], np.int64)
            somewhere = np.zeros_like(failed)
            self._objects.Allreduce(failed, somewhere, self._mpi.MAX)
            if somewhere[0]:
                error = next(filter(None, self._objects.allgather(error)))
        if error:
            raise TypeError(
                f"{function}: {error}. Send arrays, numbers, text, or objects whose class is in a "
                "module."
            )
        return objects

    def broadcast_buffer(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite a `[n]` uint8 array with that of rank `root`, in pieces that fit MPI's counts."""
        for start in range(0, buffer.size, bucketing.MAX_ITEMS):
            with self._enter():  # each piece is a step forward, for those who watch
                self._objects.Bcast(buffer[start : start + bucketing.MAX_ITEMS], root)

    def allgather_asleep(self, obj: T) -> list[T]:
        """Gather objects, with ranks that wait asleep; for calls that a rank may reach seconds later."""
        with self._enter():
            handover.barrier(self._objects)
            return self._objects.allgather(obj)

    def broadcast_asleep(self, obj: object, ranks: Sequence[int], title: str) -> Any:
        """The picklable object of the first of these ranks, which may take it long to make; they wait for it asleep.

        Every rank calls it, with its own group of ranks. Those who watch learn by `title` what is
        waited for.
        """
        with self.waiting(title if self.place.rank != ranks[0] else ""):
            return handover.broadcast(self._objects, obj, ranks)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        with self._enter():
            self._objects.Barrier()

    def extremes(self, fingerprint: int, title: str = "", program: int = 0) -> tuple[int, int]:
        """The smallest and the largest of the ranks' numbers: 16 bytes from each.

        Those who watch learn by `title` what is compared, and by `program` of which program, if it
        has another word.
        """
        self._entitle(fingerprint, title, program)
        self._word[0], self._word[1] = -fingerprint, fingerprint
        event: list[int | None] = [self._compared, fingerprint, 0, time.monotonic_ns(), None, None]
        self._compared += 1
        self._events.append(event)
        with self._enter():
            self._objects.Allreduce(self._word, self._words, self._mpi.MAX)
        event[4] = event[5] = time.monotonic_ns()
        return -int(self._words[0]), int(self._words[1])

    def start_vote(self, yes: bool, title: str) -> Callable[[], tuple[bool, bool]]:
        """Tell all ranks yes or no, and go on; the function returned waits for the others: (did any say yes, did all)."""
        if threading.get_ident() != self.turn.thread:
            self.turn.take()
        if not self.concurrent:
            self.finish()
        if self._votes is None:
            self._votes = open_votes(self._mpi, self.place, self.concurrent)
        return self._votes.start(yes, partial(self.waiting, title))

    # the monitor's channel: short messages that nobody has to be waiting for

    def send(self, rank: int, message: object) -> None:
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
        """Return whether everything that was sent has been received, votes among it."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        return not self._sending and not (self._votes and self._votes.pending())

    def everyone_leaves(self) -> Callable[[], bool]:
        """Say that this rank is done; the function returned tells whether all ranks have said so."""
        return self._channel.Ibarrier().Test

    def abort(self, code: int) -> None:
        """End every rank of the job, now."""
        self._mpi.COMM_WORLD.Abort(code)

    def name_axes(self, axes: Mapping[str, int]) -> None:
        """Name axes beside AXIS; every rank calls it."""
        if axes and not self._by_node and self.place.rank == 0:
            warnings.warn(
                "init: the ranks of a node are not numbered one after the other, so the last "
                f"axis, {list(axes)[-1]!r}, does not stay within nodes. Start them node by node: "
                "mpirun --map-by slot, srun --distribution=block.",
                stacklevel=3,
            )
        self.axes = {AXIS: self.place.size, **axes}

    def close(self) -> None:
        """Free the communicators, and the programs that were compiled for them."""
        self.finish()
        jax.clear_caches()
        if self._votes:
            self._votes.close()
        for comm in (self._objects, self._channel):
            comm.Free()
