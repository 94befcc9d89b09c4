"""Votes: each rank says yes or no and goes on, and hears later whether any and whether all said yes.

A vote waits for no program that was started, and none waits for it. Each rank has voted before it
hears of the vote before, so it is at most one vote ahead of the others.
"""

import contextlib
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType

import numpy as np

from jaxmpi._backends.base import Place
from jaxmpi._backends.communicator import Communicator, Request
from jaxmpi._backends.shared_memory import shared_memory
from jaxmpi._errors import MPIError

__all__ = ["Votes", "open_votes"]

Outcome = tuple[bool, bool]  # (any, all)

LINE_WORDS = 16  # of 8 bytes: a cache line and its neighbor, which two ranks should not write to
SPINS = 50  # looks before a rank that waits sleeps
LONGEST_SLEEP_SECONDS = 0.001


class Votes(ABC):
    """The votes of all ranks, in one order."""

    @abstractmethod
    def start(
        self, yes: bool, waiting: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], Outcome]:
        """Vote; the function returned waits for the others, inside of `waiting`."""

    @abstractmethod
    def pending(self) -> bool:
        """Return whether a vote of this rank may not have reached the others."""

    @abstractmethod
    def close(self) -> None:
        """Free what it has; every rank calls it."""


def open_votes(mpi: ModuleType, place: Place, concurrent: bool) -> Votes:
    """Return the votes of all ranks: in shared memory on one node, by MPI between nodes; every rank calls it."""
    world = mpi.COMM_WORLD
    if place.local_size == place.size:
        # it raises on all ranks or on none
        with contextlib.suppress(MPIError):
            return _InMemory(place, *shared_memory(world, world, place.size * LINE_WORDS * 8))
    return _ByMpi(world.Dup(), mpi.MAX, concurrent)


class _InMemory(Votes):
    """The votes of one node: each rank writes its own where the others read it, and nothing is sent.

    The word of vote k is 2·k + yes. Two words of each rank are enough, as none is more than one
    vote ahead; a word of 8 bytes is written at once.
    """

    def __init__(self, place: Place, file: int, memory: mmap.mmap) -> None:
        self._rank, self._file, self._memory = place.rank, file, memory
        self._words = np.frombuffer(memory, np.int64).reshape(place.size, LINE_WORDS)
        self._number = 0
        self._hear_last: Callable[[], Outcome] = lambda: (False, False)

    def start(
        self, yes: bool, waiting: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], Outcome]:
        # of a vote that nobody has asked about: its words are about to be overwritten
        self._hear_last()
        self._number += 1
        number, column = self._number, self._words[:, self._number % 2]
        column[self._rank] = 2 * number + yes
        heard: list[Outcome] = []

        def hear() -> Outcome:
            if not heard:
                words = column.tolist()
                if min(words) < 2 * number:
                    with waiting():
                        words = _wait(column, 2 * number)
                heard.append((max(words) == 2 * number + 1, min(words) == 2 * number + 1))
            return heard[0]

        self._hear_last = hear
        return hear

    def pending(self) -> bool:
        return False  # it is in the memory at once

    def close(self) -> None:
        del self._words, self._hear_last
        os.close(self._file)
        with contextlib.suppress(BufferError):  # somebody has kept a vote
            self._memory.close()


def _wait(column: np.ndarray, least: int) -> list[int]:
    """The words of all ranks, once none is less."""
    looks, seconds = 0, 1e-5
    while min(words := column.tolist()) < least:
        looks += 1
        if looks < SPINS:
            os.sched_yield()
        else:
            time.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_SLEEP_SECONDS)
    return words


class _ByMpi(Votes):
    """The votes of several nodes: a reduction of two numbers, which travels while the rank goes on."""

    def __init__(self, world: Communicator, maximum: object, concurrent: bool) -> None:
        self._world, self._maximum, self._concurrent = world, maximum, concurrent
        # with the buffers, which must live until it has ended, also where nobody waits for it any
        # more
        self._on_their_way: list[tuple[Request, np.ndarray, np.ndarray]] = []

    def start(
        self, yes: bool, waiting: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], Outcome]:
        mine, votes = np.array([not yes, yes], np.int32), np.zeros(2, np.int32)
        # no two threads may be inside MPI at once, so it cannot be left on its way
        if not self._concurrent:
            with waiting():
                self._world.Allreduce(mine, votes, self._maximum)
            return lambda: (bool(votes[1]), not votes[0])
        request = self._world.Iallreduce(mine, votes, self._maximum)
        self.pending()
        self._on_their_way.append((request, mine, votes))

        def hear() -> Outcome:
            if not request.Test():
                with waiting():
                    request.Wait()
            return bool(votes[1]), not votes[0]

        return hear

    def pending(self) -> bool:
        self._on_their_way = [vote for vote in self._on_their_way if not vote[0].Test()]
        return bool(self._on_their_way)

    def close(self) -> None:
        for request, _, _ in self._on_their_way:
            request.Wait()
        self._world.Free()
