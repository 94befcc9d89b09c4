"""Blocks of code in which a rank works alone for long, and the others wait for it.

The open blocks of a process stand in memory that has a name but is in no file system: processes of
the same user find it in `/proc/PID/fd`. So the ranks that wait in `init` see it, where no messages
can be sent yet, and so it can be seen while C code of the busy rank holds the GIL.
"""

import contextlib
import inspect
import json
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, NamedTuple, TypeVar

__all__ = ["Block", "Work", "busy", "note_end_of_work", "work", "work_of"]

F = TypeVar("F", bound=Callable[..., Any])

FILE = "jaxmpi-busy"
FILE_BYTES = 1 << 12
TEXT_LETTERS = 200  # of the description


class Block(NamedTuple):
    """An open block; times are those of `time.monotonic`, one clock for all processes of a host."""

    what: str
    since: float
    limit_seconds: float | None

    @property
    def end(self) -> float:
        """When the block reaches its limit."""
        return math.inf if self.limit_seconds is None else self.since + self.limit_seconds

    @property
    def past_limit(self) -> bool:
        """True once the block has lasted longer than its limit."""
        return time.monotonic() > self.end

    def __str__(self) -> str:
        past = f", past its limit of {self.limit_seconds:g} s" if self.past_limit else ""
        return f"busy: {self.what}, for {time.monotonic() - self.since:.0f} s{past}"


class Work(NamedTuple):
    """The work that a process has declared."""

    block: Block | None = None  # an open block
    counts: bool = False  # whether the block is within its limit
    ended: float = 0.0  # when the process was last at work, if it is not any more

    @property
    def idle_seconds(self) -> float:
        """Seconds since the process was last at work, or since its host started."""
        return 0.0 if self.counts else time.monotonic() - self.ended


class busy(ContextDecorator):
    """Tell the other ranks that this one is at work: they wait for it, and do not end the job.

    A rank that waits longer than JAXMPI_STALL_END_SECONDS (ten minutes by default) for another one
    ends the job. While the missing rank is inside of such a block, the reports of the others name
    the block, "rank 0 is busy: tokenizing, for 75 s", and the job goes on. A busy rank that ends,
    crashes or is stopped is found out as ever.

    Blocks can be nested, and opened in any thread; the one that was entered last is shown. It is
    also a decorator. Before `init`, ranks of the same host see it.

    **Collective:** no.
    **Communication:** none.

    Args:
      what: what the rank does, for the reports of the others.
      limit_seconds: after so many seconds, the block counts no more; None for no limit.

    Raises:
      TypeError: `what` is not a string, or `limit_seconds` is not a number; or the function that it
        decorates is a generator or async function.
      ValueError: `what` is empty, or `limit_seconds` is not above 0.

    >>> import jaxmpi
    >>> with jaxmpi.busy("tokenizing", limit_seconds=3600):
    ...     tokens = [ord(letter) for letter in "long text"]
    >>> @jaxmpi.busy("evaluating")
    ... def evaluate():
    ...     return sum(tokens)
    >>> evaluate()
    917
    """

    def __init__(self, what: str, *, limit_seconds: float | None = None) -> None:
        if not isinstance(what, str):
            raise TypeError(f"busy: what is {what!r}. Pass a string, such as 'tokenizing'.")
        if not what.strip():
            raise ValueError("busy: what is empty. Name what this rank does, such as 'tokenizing'.")
        if isinstance(limit_seconds, bool) or not isinstance(limit_seconds, int | float | None):
            raise TypeError(
                f"busy: limit_seconds is {limit_seconds!r}. Pass a number of seconds, or None."
            )
        if limit_seconds is not None and not limit_seconds > 0:  # true for NaN, too
            raise ValueError(f"busy: limit_seconds is {limit_seconds}. Pass more than 0, or None.")
        self._what = " ".join(what.split())[:TEXT_LETTERS]
        # JSON has no infinity
        self._limit = None if limit_seconds == math.inf else limit_seconds
        self._entered: list[int] = []

    def __enter__(self) -> "busy":
        self._entered.append(_blocks.enter(Block(self._what, time.monotonic(), self._limit)))
        return self

    def __exit__(self, *_: object) -> None:
        _blocks.leave(self._entered.pop())

    def __call__(self, function: F) -> F:
        """Return the function with each of its calls in a block of its own."""
        # Such a call only makes an object; the work is done later, where the block has ended.
        for is_kind, kind in (
            (inspect.iscoroutinefunction, "an async function"),
            (inspect.isgeneratorfunction, "a generator function"),
            (inspect.isasyncgenfunction, "an async generator function"),
        ):
            if is_kind(function):
                raise TypeError(
                    f"busy: {function.__qualname__} is {kind}, whose call does no work yet. Write "
                    f"`with jaxmpi.busy({self._what!r}):` inside of it."
                )
        return super().__call__(function)

    def _recreate_cm(self) -> "busy":
        """Return a new block for each call of a decorated function, as threads may share it."""
        return busy(self._what, limit_seconds=self._limit)


def work() -> Work:
    """Return the work of this process."""
    return _work([*_blocks.entered.values()], _blocks.ended)


def work_of(pid: int) -> Work:
    """Return the work of another process of this host and user."""
    with contextlib.suppress(OSError):  # of another user, or it has ended
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError):  # the file has been closed since
                if os.readlink(path).startswith(f"/memfd:{FILE}"):
                    return _read(path)
    return Work()


def note_end_of_work() -> None:
    """Note that this process was at work until now, outside of any block."""
    _blocks.ended = time.monotonic()


def _read(path: str) -> Work:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(3):  # the process may be writing
            with contextlib.suppress(ValueError, TypeError):
                ended, blocks = json.loads(os.pread(file, FILE_BYTES, 0).partition(b"\n")[0])
                return _work([Block(*block) for block in blocks], ended)
    finally:
        os.close(file)
    return Work()


def _work(blocks: list[Block], ended: float) -> Work:
    """Return the block that was entered last; blocks within their limits come first."""
    within = [block for block in blocks if not block.past_limit]
    shown = within or blocks
    ended = max([ended, *(block.end for block in blocks if block.past_limit)])
    return Work(shown[-1] if shown else None, bool(within), ended)


class _Blocks:
    """The open blocks of this process."""

    def __init__(self) -> None:
        self.entered: dict[int, Block] = {}  # in the order in which they were entered
        self.ended = 0.0  # when the last one has ended
        self._number, self._file, self._lock = 0, -1, threading.Lock()

    def enter(self, block: Block) -> int:
        """Add a block and return its number."""
        with self._lock:
            self._number += 1
            self.entered = {**self.entered, self._number: block}
            self._write()
            return self._number

    def leave(self, number: int) -> None:
        """Remove a block; a child that was forked inside the block does not have it."""
        with self._lock:
            self.entered = {key: block for key, block in self.entered.items() if key != number}
            self.ended = time.monotonic()
            self._write()

    def forget(self) -> None:
        """Drop all blocks in a forked child: they and the file are its parent's."""
        if self._file >= 0:
            os.close(self._file)
        self.entered, self.ended, self._file, self._lock = {}, 0.0, -1, threading.Lock()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # without memory, other processes see nothing
            if self._file < 0:
                self._file = os.memfd_create(FILE, os.MFD_CLOEXEC)
                os.ftruncate(self._file, FILE_BYTES)
            last = [*self.entered.values()]  # as many of the last ones as there is room for
            while len(text := json.dumps([self.ended, last]).encode() + b"\n") > FILE_BYTES:
                del last[0]
            os.pwrite(self._file, text, 0)


_blocks = _Blocks()  # of the process, which can be busy before there is a job
os.register_at_fork(after_in_child=_blocks.forget)
