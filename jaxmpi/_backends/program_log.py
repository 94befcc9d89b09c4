"""Log of the programs that a rank has entered and left, for transports whose messages nobody sees.

The thread that starts a program writes that it has entered it: two stores, and no message. No
thread waits for the end of a program: the monitor's thread asks its output now and then whether it
is ready, and then writes that the rank has left it. All ranks start the same compared programs in
one order, so program k of one rank is program k of every other.
"""

import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import jax

__all__ = ["ENTERED", "LEFT", "Current", "ProgramLog", "ProgramRun"]

ENTERED, LEFT = 0, 1  # of `ProgramLog.counts`


class ProgramRun:
    """One run of a program, from the call that starts it until its outputs are ready."""

    __slots__ = ("_end", "_of_user", "_starting", "fingerprint", "since")

    def __init__(self, fingerprint: int) -> None:
        self.fingerprint, self.since = fingerprint, time.monotonic()
        self._starting = True  # JAX may run a short program before the call of it returns
        self._end: jax.Array | None = None
        self._of_user: Sequence[weakref.ref[jax.Array]] = ()

    def keep(self, end: jax.Array) -> None:
        """Keep an output that is small and that nobody donates."""
        self._end = end

    def watch(self, outputs: Sequence[jax.Array]) -> None:
        """Look at outputs of the user's without keeping their memory: some may be dropped."""
        self._of_user = [weakref.ref(output) for output in outputs]

    def note_started(self) -> None:
        """Note that the call has returned: from here on the output tells."""
        self._starting = False

    def has_ended(self) -> bool:
        """Return whether the output that was kept tells that the program has ended."""
        return not self._starting and self._end is not None and self.is_over()

    def is_over(self) -> bool:
        """Return whether the program has ended, as far as its output tells."""
        if self._starting:
            return False
        end = self._end
        for output in self._of_user:
            end = end if end is not None else output()
        if end is None:  # the call has failed, or the user has dropped the outputs
            return True
        try:
            return bool(end.is_ready())  # type: ignore[attr-defined]  # no part of JAX's type
        except RuntimeError:  # donated to a later program, which is in the log, too
            return True


class Current(NamedTuple):
    """The program that a rank is in: the oldest one that it has not left."""

    seconds: float  # since it was entered, or the one before it was left
    usual_seconds: float | None  # the longest run of it until now; None for the first one


class Counts(Protocol):
    """Two numbers: a list, or memory that other processes read."""

    def __iter__(self) -> Iterator[int]: ...
    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, number: int, /) -> None: ...


class ProgramLog:
    """The programs of one rank; one thread at a time enters them, and the monitor's looks.

    Attributes:
      counts: how many programs were entered, and how many were left.
    """

    def __init__(self) -> None:
        self.counts: Counts = [0, 0]
        self._runs: deque[ProgramRun] = deque()  # those that were not seen to be over
        self._longest: dict[int, float] = {}  # seconds, by fingerprint
        self._left_at = 0.0

    def share(self, counts: Counts) -> None:
        """Write the counts to memory that other processes read; no program runs meanwhile."""
        counts[ENTERED], counts[LEFT] = self.counts
        self.counts = counts

    def enter(self, fingerprint: int) -> ProgramRun:
        """Note that this rank starts a program."""
        run = ProgramRun(fingerprint)
        self._runs.append(run)
        self.counts[ENTERED] += 1
        return run

    def look(self) -> None:
        """Note which programs are over; only one thread may call it."""
        over = self._count_over()
        if not over:
            return
        now, first = time.monotonic(), self._runs[0]
        seconds = now - max(first.since, self._left_at)
        self._longest[first.fingerprint] = max(self._longest.get(first.fingerprint, 0.0), seconds)
        for _ in range(over):
            self._longest.setdefault(self._runs.popleft().fingerprint, 0.0)
        self._left_at = now
        self.counts[LEFT] += over

    def _count_over(self) -> int:
        """Return how many programs, from the oldest on, are over."""
        runs = self._runs
        # XLA runs a rank's programs one after the other: where one has ended, so have those before
        # it. A rank starts a hundred short ones between two looks, and the last but one tells.
        for k in range(len(runs), 0, -1):
            if runs[k - 1].has_ended():
                return k
        over = 0
        for run in [*runs]:
            if not run.is_over():
                break
            over += 1
        return over

    def inside(self) -> bool:
        """Return whether this rank is in a program; for any thread."""
        # XLA runs a rank's programs one after the other: usually the last one tells.
        return any(not run.is_over() for run in reversed([*self._runs]))

    def current(self) -> Current | None:
        """Return the program that this rank is in; None if it is in none. For any thread."""
        for run in [*self._runs]:
            if not run.is_over():
                seconds = time.monotonic() - max(run.since, self._left_at)
                return Current(seconds, self._longest.get(run.fingerprint))
        return None
