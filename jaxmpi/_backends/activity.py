"""Activity of a rank, for the monitor: collectives it has entered, and what it waits for."""

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Message

__all__ = ["EVENTS", "Activity", "Entered"]

EVENTS = 4096  # are kept


class Activity:
    """The part of a backend that counts what its rank does, and answers from any thread."""

    compares_inline = False

    def __init__(self) -> None:
        self.ends: dict[int, Any] = {}  # an output of the last program that each thread has started
        self.long_operation = ""  # with what takes long, for those who watch
        self._waiting = "", 0  # for what, if for no collective, and which thread
        self._entered = 0  # collectives outside of programs, and programs
        self._inside = False
        self._starting = False  # a program
        # of `extremes`, as in `events`
        self._events: deque[list[int | None]] = deque(maxlen=EVENTS)
        self._compared = 0
        self._titles: OrderedDict[int, tuple[int, str]] = OrderedDict()  # of what was compared last

    @contextlib.contextmanager
    def starting(self) -> Iterator[Callable[[jax.Array], None]]:
        """Mark this rank as inside a collective while a program starts.

        JAX may run the program to its end before the call returns. Yields a callback that records
        an output to wait on, which must not be donated: XLA keeps the order of a thread's programs.
        """
        self._starting = True
        try:
            with Entered(self):
                yield partial(self.ends.__setitem__, threading.get_ident())
        finally:
            self._starting = False

    @contextlib.contextmanager
    def waiting(self, title: str) -> Iterator[None]:
        """Count as a collective what is waited for in another way."""
        self._waiting = title, threading.get_ident()
        try:
            with Entered(self):
                yield
        finally:
            self._waiting = "", 0

    def _entitle(self, fingerprint: int, title: str, program: int) -> None:
        """Remember what a word stands for as long as events do: there is another one for each step that is saved."""
        self._titles[fingerprint] = program or fingerprint, title
        self._titles.move_to_end(fingerprint)
        if len(self._titles) > EVENTS:
            self._titles.popitem(last=False)

    # for those who watch, from any thread

    def in_program(self) -> bool:
        """Return whether this rank is inside a program that is watched as a whole, and so may take long."""
        return not self.compares_inline and (
            self._starting or any(not end.is_ready() for end in list(self.ends.values()))
        )

    def progress(self) -> tuple[int, bool]:
        """Return the number of collectives and programs entered, and whether this rank is inside one."""
        return self._entered, self.in_program() or (
            self._inside and not _jaxcompat.compiling(threading.main_thread().ident)
        )

    def waits_for(self) -> tuple[str, int]:
        """The title of `waiting`, "" outside of it, and the thread that waits."""
        return self._waiting

    def doing(self) -> int:
        """The word of the last collective, or program, that this rank has entered."""
        return self._events[-1][1] or 0 if self._events else 0

    def events(self) -> list[Sequence[Any]]:
        """The last collectives: number, word, bytes, and when this rank entered it, all had, and it was done.

        Times are `time.monotonic_ns`, and 0 or None for what has not happened or is not known.
        """
        return [*self._events]

    def waits(self) -> list[tuple[int, int]]:
        """When programs and calls have lately begun and ended to wait for messages, and done nothing else; see `events`."""
        return []

    def exposed_ns(self) -> int | None:
        """For how long programs and calls have waited for messages, since this process began; None where nobody counts it."""
        return None

    def described(self, fingerprint: int) -> tuple[int, str | Message]:
        """Return (program fingerprint, title or message) for a message fingerprint."""
        return self._titles.get(fingerprint, (fingerprint, ""))


class Entered:
    """Marks, for the monitor, that this rank is inside a collective."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    def __enter__(self) -> None:
        self._activity._entered += 1
        self._activity._inside = True

    def __exit__(self, *_: object) -> None:
        self._activity._inside = False
