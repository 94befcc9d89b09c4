"""Exchanges outside of programs in which a rank that waits sleeps: barrier, broadcast, votes.

MPI's own calls would take the core that another rank needs, which may be busy for seconds.

In a vote each rank says yes, no or that it has failed, goes on, and hears later what the others
said. A vote waits for no program that was started, and none waits for it. Each rank has voted
before it hears of the vote before, so it is at most one vote ahead of the others.
"""

import contextlib
import mmap
import os
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TypeVar

import numpy as np

from jaxmpi._backends.base import Place
from jaxmpi._backends.mpi_library import Communicator, Request
from jaxmpi._backends.native_transports import shared_memory
from jaxmpi._errors import MPIError
from jaxmpi._job.process.waits import waits
from jaxmpi._votes import Outcome, Vote

__all__ = ["Votes", "barrier", "broadcast", "open_votes"]

T = TypeVar("T")

HEADER, BODY = 1, 2  # tags
PIECE_BYTES = 1 << 28  # of one message: MPI's counts are 32 bits wide
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-4, 2e-2  # between two looks


def barrier(comm: Communicator) -> None:
    """Return once every rank has called it."""
    _until(comm.Ibarrier().Test)


def broadcast(comm: Communicator, obj: T, ranks: Sequence[int]) -> T:
    """Return the picklable object of the first of these ranks, on all of them.

    Each passes it on to those after it, as in a tree.

    Args:
      comm: the communicator, which carries nothing else from rank to rank.
      obj: the object, on the first of `ranks`.
      ranks: who calls this, in the same order on each.
    """
    here, size = ranks.index(comm.rank), len(ranks)
    data = (
        np.frombuffer(pickle.dumps(obj), np.uint8)
        if here == 0
        else _received(comm, ranks[here & (here - 1)])
    )
    step = 1
    while step < size and not here & step:
        step *= 2
    while step := step // 2:
        if here + step < size:
            _send(comm, data, ranks[here + step])
    return obj if here == 0 else pickle.loads(data.data)  # what a rank of this job has written


def _send(comm: Communicator, data: np.ndarray, rank: int) -> None:
    comm.send(data.size, rank, HEADER)
    for start in range(0, data.size, PIECE_BYTES):
        comm.Send(data[start : start + PIECE_BYTES], rank, BODY)


def _received(comm: Communicator, rank: int) -> np.ndarray:
    _until(lambda: comm.iprobe(rank, HEADER))
    data = np.empty(comm.recv(source=rank, tag=HEADER), np.uint8)
    for start in range(0, data.size, PIECE_BYTES):
        comm.Recv(data[start : start + PIECE_BYTES], rank, BODY)
    return data


def _until(done: Callable[[], bool]) -> None:
    for seconds in waits(SHORTEST_SECONDS, LONGEST_SECONDS):
        if done():
            return
        time.sleep(seconds)


# votes

LINE_NUMBERS = 16  # of 8 bytes: a cache line and its neighbor, which two ranks should not write to
SPINS = 50  # looks before a rank that waits sleeps
LONGEST_SLEEP_SECONDS = 0.001


class Votes(ABC):
    """The votes of all ranks, in one order."""

    @abstractmethod
    def start(
        self, vote: Vote, waiting: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], Outcome]:
        """Vote; the function returned waits for the others, inside of `waiting`.

        `start` itself waits for the vote before, if nobody has asked for its outcome; and for this
        one, where MPI allows one thread alone.
        """

    @abstractmethod
    def pending(self) -> bool:
        """Return whether a vote of this rank may not have reached the others."""

    @abstractmethod
    def close(self) -> None:
        """Free what it has; every rank calls it."""


def open_votes(mpi: ModuleType, place: Place, concurrent: bool) -> Votes:
    """Return the votes of all ranks: in shared memory on one node, by MPI between nodes.

    **Collective:** every rank calls it.
    """
    world = mpi.COMM_WORLD
    if place.local_size == place.size:
        # it raises on all ranks or on none
        with contextlib.suppress(MPIError):
            return _InMemory(place, *shared_memory(world, world, place.size * LINE_NUMBERS * 8))
    return _ByMpi(world.Dup(), mpi.MAX, concurrent)


class _InMemory(Votes):
    """Votes of one node: each rank writes its own where the others read it; nothing is sent.

    Vote k is the number 4·k + vote. Two numbers of each rank are enough, as none is more than one
    vote ahead; 8 bytes are written at once.
    """

    def __init__(self, place: Place, file: int, memory: mmap.mmap) -> None:
        self._rank, self._file, self._memory = place.rank, file, memory
        self._numbers = np.frombuffer(memory, np.int64).reshape(place.size, LINE_NUMBERS)
        self._number = 0
        self._hear_last: Callable[[], Outcome] = lambda: Outcome(False, False, False)

    def start(
        self, vote: Vote, waiting: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], Outcome]:
        # of a vote that nobody has asked about: its numbers are about to be overwritten
        self._hear_last()
        self._number += 1
        number, column = self._number, self._numbers[:, self._number % 2]
        column[self._rank] = 4 * number + vote
        heard: list[Outcome] = []

        def hear() -> Outcome:
            if not heard:
                numbers = column.tolist()
                if min(numbers) < 4 * number:
                    with waiting():
                        numbers = _wait(column, 4 * number)
                heard.append(Outcome.of([Vote(n - 4 * number) for n in numbers]))
            return heard[0]

        self._hear_last = hear
        return hear

    def pending(self) -> bool:
        return False  # it is in the memory at once

    def close(self) -> None:
        del self._numbers, self._hear_last
        os.close(self._file)
        with contextlib.suppress(BufferError):  # somebody has kept a vote
            self._memory.close()


def _wait(column: np.ndarray, least: int) -> list[int]:
    """Return the numbers of all ranks, once none is less."""
    looks, seconds = 0, 1e-5
    while min(numbers := column.tolist()) < least:
        looks += 1
        if looks < SPINS:
            os.sched_yield()
        else:
            time.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_SLEEP_SECONDS)
    return numbers


class _ByMpi(Votes):
    """Votes of several nodes: a reduction of three numbers, which travels while the rank goes on.

    Each number is 1 if some rank has given this vote.
    """

    def __init__(self, world: Communicator, maximum: object, concurrent: bool) -> None:
        self._world, self._maximum, self._concurrent = world, maximum, concurrent
        # with the buffers, which must live until it has ended, also where nobody waits for it any
        # more
        self._on_their_way: list[tuple[Request, np.ndarray, np.ndarray]] = []

    def start(
        self, vote: Vote, waiting: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], Outcome]:
        mine = np.array([vote is kind for kind in Vote], np.int32)
        votes = np.zeros_like(mine)
        request = self._world.Iallreduce(mine, votes, self._maximum)
        self._forget_ended()
        self._on_their_way.append((request, mine, votes))

        def hear() -> Outcome:
            if not request.Test():
                with waiting():
                    _until(request.Test)
            return Outcome.of([vote for vote in Vote if votes[vote]])

        # no two threads may be inside MPI at once, so it cannot be left on its way
        if not self._concurrent:
            hear()
        return hear

    def pending(self) -> bool:
        self._forget_ended()
        return bool(self._on_their_way)

    def _forget_ended(self) -> None:
        self._on_their_way = [vote for vote in self._on_their_way if not vote[0].Test()]

    def close(self) -> None:
        for request, _, _ in self._on_their_way:
            request.Wait()
        self._world.Free()
