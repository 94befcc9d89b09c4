"""Log of the programs that a rank has entered and left, for transports whose messages nobody sees.

The thread that starts a program writes that it has entered it, and keeps one output: a few stores,
and no message. No thread waits for the end of a program: the monitor's thread asks the outputs now
and then whether they are ready, and then writes that the rank has left the programs. All ranks
start the same compared programs in one order, so program k of one rank is program k of every other.
"""

import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax

__all__ = ["ENTERED", "LEFT", "Current", "ProgramLog"]

ENTERED, LEFT = 0, 1  # of `ProgramLog.counts`
# The last programs whose outputs are kept; JAX lets a rank start 32 ahead of the one that runs.
KEPT_PROGRAMS = 64

# A program whose call has returned: its fingerprint, when it was started (by `time.monotonic`), and
# what tells whether it has ended: an output that is kept, or references to outputs of the user's.
Run: TypeAlias = tuple[int, float, jax.Array | list[weakref.ref[jax.Array]]]


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

    A program is entered, its output is kept or watched, and its call ends:

        log.enter(fingerprint)
        try:
            end, outputs = run(...)
            log.keep(end)
        finally:
            log.end_call()

    Attributes:
      counts: how many programs were entered, and how many were left.
    """

    def __init__(self) -> None:
        self.counts: Counts = [0, 0]
        self._calling: tuple[int, float] | None = None  # fingerprint and start, during the call
        self._runs: deque[Run] = deque(maxlen=KEPT_PROGRAMS)
        self._longest: dict[int, float] = {}  # seconds, by fingerprint
        self._left_at = 0.0

    def share(self, counts: Counts) -> None:
        """Write the counts to memory that other processes read; no program runs meanwhile."""
        counts[ENTERED], counts[LEFT] = self.counts
        self.counts = counts

    # the thread that starts programs

    def enter(self, fingerprint: int) -> None:
        """Note that this rank calls a program."""
        self._calling = fingerprint, time.monotonic()
        self.counts[ENTERED] += 1

    def keep(self, end: jax.Array) -> None:
        """Keep an output that is small and that nobody donates, to see when the program ends."""
        assert self._calling is not None
        self._runs.append((*self._calling, end))

    def watch(self, outputs: Sequence[jax.Array]) -> None:
        """Look at outputs of the user's without keeping their memory: some may be dropped."""
        assert self._calling is not None
        self._runs.append((*self._calling, [weakref.ref(output) for output in outputs]))

    def end_call(self) -> None:
        """Note that the call has returned; without an output, that it has failed."""
        self._calling = None

    # the monitor's thread

    def look(self) -> None:
        """Note which programs are over; only one thread may call it."""
        # A program that is entered after the first line counts as not left until the next look.
        entered, calling = self.counts[ENTERED], self._calling
        runs = [*self._runs]
        pending = _pending(runs)
        left = entered - len(pending) - (calling is not None)
        new = left - self.counts[LEFT]
        if new <= 0:
            return
        now = time.monotonic()
        over = runs[: len(runs) - len(pending)]
        for k, (fingerprint, since, _) in enumerate(over[-new:]):
            # What this rank was in at the last look has ended meanwhile. The others took less time
            # than from look to look.
            seconds = now - max(since, self._left_at) if k == 0 else 0.0
            self._longest[fingerprint] = max(self._longest.get(fingerprint, 0.0), seconds)
        self._left_at = now
        self.counts[LEFT] = left

    # any thread

    def inside(self) -> bool:
        """Return whether this rank is in a program."""
        return self._calling is not None or bool(_pending([*self._runs]))

    def current(self) -> Current | None:
        """Return the program that this rank is in; None if it is in none."""
        calling = self._calling
        pending = _pending([*self._runs])
        oldest = pending[0][:2] if pending else calling
        if oldest is None:
            return None
        fingerprint, since = oldest
        seconds = time.monotonic() - max(since, self._left_at)
        return Current(seconds, self._longest.get(fingerprint))


def _pending(runs: Sequence[Run]) -> Sequence[Run]:
    """Return the runs that have not ended, as far as their outputs tell."""
    pending: list[Run] = []
    for run in reversed(runs):
        end = run[2]
        if isinstance(end, list):
            # an output that the user has dropped tells nothing
            kept = [output for ref in end if (output := ref()) is not None]
            if kept and not _has_ended(kept[0]):
                pending.append(run)
        else:
            # XLA runs the programs of a thread one after the other, and `Turn` has another thread
            # wait for them: those before have ended, too.
            if _has_ended(end):
                break
            pending.append(run)
    return pending[::-1]


def _has_ended(output: jax.Array) -> bool:
    """Return whether the program that has made an array has ended."""
    try:
        return bool(output.is_ready())  # type: ignore[attr-defined]  # no part of JAX's type
    except RuntimeError:  # donated to a later program, which is in the log, too
        return True
