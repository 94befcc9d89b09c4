"""Ranks of an MPI job: what they send each other outside of compiled programs, with mpi4py.

Objects and the monitor's thread have a communicator of their own each, so that neither meets the
other's messages, nor those of the compiled programs.
"""

import contextlib
import copy
import math
import os
import pickle
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS
from jaxmpi._backends import asleep
from jaxmpi._backends.base import (
    Event,
    Explain,
    Message,
    Place,
    Progress,
    Registry,
)
from jaxmpi._backends.comparison import EVENTS, MpiTransport
from jaxmpi._backends.interface import Lowering, Processes
from jaxmpi._backends.mpi_library import Communicator, Request, unlink_shared_memory
from jaxmpi._backends.one_process import Identity
from jaxmpi._backends.program_log import ProgramLog
from jaxmpi._backends.wire import MAX_ITEMS
from jaxmpi._job.process import settings
from jaxmpi._job.process.communicating_thread import Turn
from jaxmpi._job.process.launchers import find_for_library
from jaxmpi._job.process.processor import quota
from jaxmpi._job.process.stderr import one_line
from jaxmpi._votes import Outcome, Vote

__all__ = ["Letter", "MpiRanks"]

R = TypeVar("R")
T = TypeVar("T")


class _Pickled(NamedTuple, Generic[T]):
    """An object on its way: its bytes, or why there are none."""

    rank: int
    data: bytes
    error: str

    @staticmethod
    def of(obj: T, rank: int) -> "_Pickled[T]":
        """Pickle an object of this rank."""
        try:
            return _Pickled(rank, pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), "")
        except Exception as error:
            # whatever its __reduce__ raises; the other ranks wait for a message
            return _Pickled(
                rank, b"", f"the object of rank {rank} cannot be pickled ({one_line(error)})"
            )


class Letter(NamedTuple):
    """A message of one rank's monitor to another's: a picklable object, and what it is about."""

    topic: str
    content: object


def _cores_per_rank(node: Communicator) -> float:
    """Return the cores that the ranks of a node may use, divided by the number of these ranks."""
    cores = len(set().union(*node.allgather(os.sched_getaffinity(0))))
    return min(cores, quota() or math.inf) / node.size


class MpiRanks(Processes):
    """The ranks of `MPI_COMM_WORLD`.

    Attributes:
      launcher: the entry of the table of launchers that belongs to the MPI library.
      programs: those that this rank has entered and left.
      gpus: a line about the GPUs of all ranks; "" without any.
    """

    def __init__(
        self,
        name: str,
        mpi: ModuleType,
        open_transport: Callable[[Place, ModuleType], MpiTransport],
    ) -> None:
        """Join the other ranks, after `check_start`.

        Args:
          name: of the backend.
          mpi: the module `mpi4py.MPI`.
          open_transport: makes the transport; every rank calls it.
        """
        self.name, self._mpi = name, mpi
        world = mpi.COMM_WORLD
        self._objects, self._channel = world.Dup(), world.Dup()
        node_comm = self._node_communicator()
        leaders = world.allgather(node_comm.bcast(world.rank))
        node = sorted(set(leaders)).index(leaders[world.rank])
        # whether the ranks of each node are numbered one after the other
        self._by_node = leaders == sorted(leaders)
        self.place = Place(world.rank, world.size, node_comm.rank, node_comm.size, node)
        self.ranks_here = (world.rank,)
        unlink_shared_memory(node_comm)
        self.cores_per_rank = min(world.allgather(_cores_per_rank(node_comm)))
        node_comm.Free()
        self.axes: Mapping[str, int] = {AXIS: world.size}
        self.launcher = find_for_library(mpi.get_vendor()[0])
        self.gpus = ""
        self.registry = Registry()
        self.ends: dict[int, jax.Array] = {}
        self.turn = Turn(self.finish, self._last)
        self.concurrent = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self._sending: list[Request] = []
        self._votes: asleep.Votes | None = None  # opened by the first one
        self._votes_given, self._in_vote = 0, False
        # for the monitor: it asks from another thread
        self.long_operation = ""
        self._waiting = "", 0  # for what, if for no collective, and which thread
        self._entered = 0  # collectives outside of programs, and programs
        self._inside = False
        self.programs = ProgramLog()
        self._titles: OrderedDict[int, tuple[int, str]] = OrderedDict()  # of the last comparisons
        self.transport: MpiTransport = open_transport(self.place, mpi)
        self._comparison = self.transport.comparison(self, self._objects, mpi.MAX)

    # programs

    def eager(self, *, alone: T, stacked: T, parallel: T) -> T:
        """Return `parallel`, or `alone` in a job of one rank."""
        return alone if self.place.size == 1 else parallel

    def check_one_rank_here(self, error: str) -> None:
        """Return: this process is one rank."""

    def executor(
        self, *, inline: Callable[[Processes], R], before: Callable[[Processes], R]
    ) -> R | None:
        """Make the executor of several ranks; None for one."""
        if self.place.size == 1:
            return None
        return self._comparison.executor(inline=inline, before=before)(self)

    def lower(self, lowering: Lowering[R]) -> R:
        """Make a program one of the transport; a program of one rank sends nothing."""
        return (Identity() if self.place.size == 1 else self.transport).lower(lowering)

    def explain_mismatches(self, explain: Explain) -> None:
        """Have `explain` write the error where messages of a program differ."""
        self._comparison.explain_mismatches(explain)

    def _node_communicator(self) -> Communicator:
        """Return the communicator of this node.

        JAXMPI_NODE_RANKS=k takes every k ranks for a node, to try several on one machine.
        """
        world = self._mpi.COMM_WORLD
        if pretended := settings.get("JAXMPI_NODE_RANKS"):
            return world.Split(world.rank // pretended, world.rank)
        return world.Split_type(self._mpi.COMM_TYPE_SHARED)

    # collectives, and programs

    @contextlib.contextmanager
    def starting(self, program: int) -> Iterator[ProgramLog]:
        """Mark this rank as inside a collective while the program with this fingerprint starts."""
        if not self.concurrent:  # no monitor looks at the log
            self.programs.look()
        log = self.programs
        log.enter(program)
        try:
            with Entered(self):
                yield log
        finally:
            log.end_call()

    @contextlib.contextmanager
    def waiting(self, title: str) -> Iterator[None]:
        """Mark this rank as inside what not every rank has to wait for: no collective counts it."""
        self._waiting, self._inside = (title, threading.get_ident()), True
        try:
            yield
        finally:
            self._waiting, self._inside = ("", 0), False

    def entered(self) -> "Entered":
        """Mark this rank as inside a collective outside of programs, once these allow one."""
        self.turn.ensure()
        self._comparison.drain()
        return Entered(self)

    def _last(self, thread: int) -> tuple[int, int]:
        """Return the state that changes with each collective of the communicating thread."""
        return self._entered, id(self.ends.get(thread))

    def finish(self) -> None:
        """Wait until the programs that were started have ended; their outputs tell how."""
        _jaxcompat.wait_for_effects()
        for end in list(self.ends.values()):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                end.block_until_ready()

    def finish_all(self) -> None:
        """Wait until programs and all messages have ended, those that no program waits for, too."""
        self.finish()
        self.transport.wait_for_all()

    def gather_details(self, side: T, ranks: Sequence[int] = ()) -> list[T]:
        """Gather objects while a program of this rank runs, within `ranks` if there are some."""
        with Entered(self):
            return self._comparison.communicator(ranks).allgather(side)

    def allgather_object(self, obj: T) -> list[T]:
        """Return all ranks' objects, in the order of the ranks."""
        pickled = _Pickled.of(obj, self.place.rank)
        with self.entered():
            return self._unpickled("allgather_object", self._objects.allgather(pickled))

    def broadcast_object(self, obj: T, root: int) -> T:
        """Return the object of rank `root`; on root, it is `obj` itself."""
        here = self.place.rank == root
        pickled = _Pickled.of(obj, root) if here else None
        with self.entered():
            sent = self._objects.bcast(pickled, root)
            assert sent  # root's
            # Root has the object; it reads nothing but takes part in what the others say of it.
            received = [] if here and not sent.error else [sent]
            objects: list[T] = self._unpickled("broadcast_object", received)
        return obj if here else objects[0]

    def _unpickled(self, function: str, received: Sequence["_Pickled[T]"]) -> list[T]:
        """Read received objects; raise the same error on all ranks where that fails on one.

        An object that cannot be pickled is found before its message, and one that cannot be read
        after it. Both times every rank stays in step: its next collective meets the others' next
        one.
        """
        objects: list[T] = []
        error = next((one.error for one in received if one.error), "")
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
        """Overwrite a `[n]` uint8 array with that of rank `root`."""
        # in pieces that fit MPI's counts
        for start in range(0, buffer.size, MAX_ITEMS):
            with self.entered():  # each piece is progress, for the monitor
                self._objects.Bcast(buffer[start : start + MAX_ITEMS], root)

    def allgather_asleep(self, obj: T) -> list[T]:
        """Gather objects; ranks sleep while they wait, as one may come seconds later."""
        with self.entered():
            asleep.barrier(self._objects)
            return self._objects.allgather(obj)

    def broadcast_asleep(self, obj: T, ranks: Sequence[int], title: str) -> T:
        """Return the picklable object of the first of these ranks; the others wait asleep."""
        with self.waiting(title if self.place.rank != ranks[0] else ""), Entered(self):
            return asleep.broadcast(self._objects, obj, ranks)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        with self.entered():
            self._objects.Barrier()

    def extremes(self, fingerprint: int, title: str = "", program: int = 0) -> tuple[int, int]:
        """Return the smallest and largest of the ranks' fingerprints: 16 bytes from each."""
        # Titles are kept as long as events are: each step that is saved has another fingerprint.
        self._titles[fingerprint] = program or fingerprint, title
        self._titles.move_to_end(fingerprint)
        if len(self._titles) > EVENTS:
            self._titles.popitem(last=False)
        return self._comparison.extremes(fingerprint, title, program)

    def start_vote(self, vote: Vote, title: str) -> Callable[[], Outcome]:
        """Tell all ranks a vote, and go on."""
        self.turn.ensure()
        if not self.concurrent:
            self.finish()
        if self._votes is None:
            self._votes = asleep.open_votes(self._mpi, self.place, self.concurrent)
        self._votes_given += 1
        return self._votes.start(vote, partial(self._waiting_for_votes, title))

    @contextlib.contextmanager
    def _waiting_for_votes(self, title: str) -> Iterator[None]:
        self._in_vote = True
        try:
            with self.waiting(title):
                yield
        finally:
            self._in_vote = False

    # the monitor's questions, from any thread

    def in_program(self) -> bool:
        """Return whether this rank is inside a program, which may take long, as one whole."""
        return self.programs.inside()

    def progress(self) -> Progress:
        """Return how many collectives and programs it has entered, and whether it is in one."""
        inside = self.in_program() or (
            self._inside and not _jaxcompat.compiling(threading.main_thread().ident)
        )
        started, ended = self._comparison.counts()
        in_vote = self._in_vote
        return Progress(
            entered=self._entered + started,
            votes=self._votes_given,
            inside=inside or started > ended,
            in_vote=in_vote,
        )

    def waits_for(self) -> tuple[str, int]:
        """Return the title of `waiting`, "" outside of it, and the thread that waits."""
        return self._waiting

    def last_fingerprint(self) -> int:
        """Return the fingerprint of the last collective, or program, that it has entered."""
        return self._comparison.last_fingerprint()

    def events(self) -> Sequence[Event]:
        """Return the last collectives, as `Comparison.events`."""
        return self._comparison.events()

    def waits(self) -> Sequence[tuple[int, int]]:
        """Return the last waits for messages, as `Comparison.waits`."""
        return self._comparison.waits()

    def exposed_ns(self) -> int | None:
        """Return for how long it has waited for messages, as `Comparison.exposed_ns`."""
        return self._comparison.exposed_ns()

    def described(self, fingerprint: int) -> tuple[int, str | Message]:
        """Return (program fingerprint, title or message) for a message fingerprint."""
        sent = self._comparison.described(fingerprint)
        return sent or self._titles.get(fingerprint, (fingerprint, ""))

    # the monitor's channel: short messages that nobody has to be waiting for

    def send(self, rank: int, letter: Letter) -> None:
        """Start sending a letter to one rank; returns at once."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        self._sending.append(self._channel.issend(letter, rank))

    def receive(self) -> list[tuple[int, Letter]]:
        """Return the (rank, letter) pairs that have arrived since the last call."""
        arrived, status = [], self._mpi.Status()
        while (message := self._channel.improbe(status=status)) is not None:
            arrived.append((status.source, message.recv()))
        return arrived

    def all_received(self) -> bool:
        """Return whether everything that was sent has been received, votes among it."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        return not self._sending and not (self._votes and self._votes.pending())

    def everyone_leaves(self) -> Callable[[], bool]:
        """Announce that this rank is done; the function returned asks whether all ranks are."""
        return self._channel.Ibarrier().Test

    def abort(self, code: int) -> None:
        """End every rank of the job, now."""
        self._mpi.COMM_WORLD.Abort(code)

    def name_axes(self, axes: Mapping[str, int]) -> None:
        """Name axes beside AXIS, and connect the ranks of each group; every rank calls it."""
        if axes and not self._by_node and self.place.rank == 0:
            warnings.warn(
                "init: the ranks of a node are not numbered one after the other, so the last "
                f"axis, {list(axes)[-1]!r}, does not stay within nodes. Start them node by node: "
                "mpirun --map-by slot, srun --distribution=block.",
                stacklevel=3,
            )
        self.axes = {AXIS: self.place.size, **axes}
        self.transport.connect(self.axes)

    def check_process(self) -> None:
        """Raise a RuntimeError in a forked child of a rank."""
        self.turn.check_process()

    def in_forked_child(self) -> "MpiRanks":
        """Return a copy: steps that know this object look at the new one, and are refused."""
        if self.place.size == 1:  # it communicates with nobody
            return self
        child = copy.copy(self)
        child.turn.forbid()
        return child

    def close(self) -> None:
        """Free the communicators, and the programs that were compiled for them."""
        self.finish()
        jax.clear_caches()
        if self._votes:
            self._votes.close()
        for comm in (self._objects, self._channel):
            comm.Free()
        self.transport.close()


class Entered:
    """Marks, for the monitor, that this rank is inside a collective."""

    def __init__(self, ranks: MpiRanks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        self._ranks._entered += 1
        self._ranks._inside = True

    def __exit__(self, *_: object) -> None:
        self._ranks._inside = False
