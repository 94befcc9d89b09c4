"""Comparison of what the ranks of an MPI job do, and the log of it that the monitor reads.

A `Comparison` belongs to a transport. That of the native transport travels with the messages of
programs (`native.InlineComparison`). All others have `SeparateComparison`, a message of its own
between programs.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Event, Explain, Message
from jaxmpi._backends.interface import Processes, Transport
from jaxmpi._backends.mpi_library import Communicator

__all__ = ["EVENTS", "Comparison", "MpiTransport", "SeparateComparison"]

E = TypeVar("E")

EVENTS = 4096  # are kept


class Comparison(ABC):
    """Comparison of the ranks; all but `extremes` may be called from any thread."""

    @abstractmethod
    def extremes(self, fingerprint: int, title: str, program: int) -> tuple[int, int]:
        """Return the smallest and largest of the ranks' fingerprints; see `Ranks.extremes`."""

    @abstractmethod
    def executor(self, *, inline: E, before: E) -> E:
        """Return which of two executors compares programs in this way; see `Ranks.executor`."""

    @abstractmethod
    def explain_mismatches(self, explain: Explain) -> None:
        """Have `explain` write errors; see `Ranks.explain_mismatches`."""

    @abstractmethod
    def communicator(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator for objects of a group of ranks, or of all."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for programs that were started, as far as a message outside of them must."""

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Return how many messages of programs have started, and how many of these have ended."""

    @abstractmethod
    def last_fingerprint(self) -> int:
        """Return the fingerprint of the last collective, or program, that this rank has entered."""

    @abstractmethod
    def described(self, fingerprint: int) -> tuple[int, Message] | None:
        """Return (program fingerprint, message) for a message of a program; None for any other."""

    @abstractmethod
    def events(self) -> Sequence[Event]:
        """Return the last collectives; a time that has not come, or is unknown, is None."""

    @abstractmethod
    def waits(self) -> Sequence[tuple[int, int]]:
        """Return when this rank's last waits for messages began and ended, in monotonic ns."""

    @abstractmethod
    def exposed_ns(self) -> int | None:
        """Return for how long this rank has waited for messages; None where nobody counts it."""


class SeparateComparison(Comparison):
    """Comparison between programs: a reduction of two numbers by MPI."""

    def __init__(self, ranks: Processes, objects: Communicator, maximum: object) -> None:
        """Begin with an empty log.

        Args:
          ranks: whose calls are compared.
          objects: their communicator.
          maximum: the operation `MPI.MAX`.
        """
        self._ranks, self._objects, self._maximum = ranks, objects, maximum
        self._mine, self._all = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._compared = 0
        # of branches, which some transport compares while a program runs
        self.explain: Explain = lambda program, message, ranks: str(message)

    def extremes(self, fingerprint: int, title: str, program: int) -> tuple[int, int]:
        """Return the smallest and largest fingerprint, by one reduction for both."""
        # the largest of the negatives is the negative of the smallest
        self._mine[0], self._mine[1] = -fingerprint, fingerprint
        event = Event(self._compared, fingerprint, 0, time.monotonic_ns(), None, None)
        self._compared += 1
        self._events.append(event)
        with self._ranks.entered():
            self._objects.Allreduce(self._mine, self._all, self._maximum)
        now_ns = time.monotonic_ns()
        self._events[-1] = event._replace(all_entered_ns=now_ns, done_ns=now_ns)
        return -int(self._all[0]), int(self._all[1])

    def executor(self, *, inline: E, before: E) -> E:
        """Return `before`."""
        return before

    def explain_mismatches(self, explain: Explain) -> None:
        """Have `explain` write the error where the ranks take different branches."""
        self.explain = explain

    def communicator(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of all ranks, which all take part in a comparison."""
        return self._objects

    def drain(self) -> None:
        """Wait for effects: never two threads inside MPI for the sake of plain `jax.jit`."""
        _jaxcompat.wait_for_effects()

    def counts(self) -> tuple[int, int]:
        """Return zeros: messages of programs are not seen."""
        return 0, 0

    def last_fingerprint(self) -> int:
        """Return the fingerprint of the last comparison, or 0."""
        return self._events[-1].fingerprint if self._events else 0

    def described(self, fingerprint: int) -> tuple[int, Message] | None:
        """Return None: messages of programs are not seen."""
        return None

    def events(self) -> Sequence[Event]:
        """Return the last comparisons."""
        return [*self._events]

    def waits(self) -> Sequence[tuple[int, int]]:
        """Return none."""
        return []

    def exposed_ns(self) -> int | None:
        """Return None."""
        return None


class MpiTransport(Transport):
    """A transport of `mpi_ranks.MpiRanks`.

    Attributes:
      waits_asleep: whether a rank that waits inside a program leaves its processor to others, so
        that CPU time tells a rank that computes from one that waits.
    """

    waits_asleep: bool

    @abstractmethod
    def comparison(self, ranks: Processes, objects: Communicator, maximum: object) -> Comparison:
        """Return how its programs, and calls outside of them, are compared.

        Args:
          ranks: the ranks.
          objects: their communicator for objects.
          maximum: the operation `MPI.MAX`.
        """

    @abstractmethod
    def wait_for_all(self) -> None:
        """Wait until all messages have ended, those that no program waits for, too."""

    @abstractmethod
    def monitored(self, is_in_program: Callable[[], bool]) -> None:
        """Hear from the monitor, ten times a second, whether this rank is in a program.

        What else would end the job for a long wait leaves that to the monitor meanwhile.
        """
