"""Lines of text from many ranks, put in the order of the ranks."""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TextIO

from jaxmpi._job.process import stderr

__all__ = ["WAIT_SECONDS", "Key", "OrderedOutput"]

WAIT_SECONDS = 0.2  # how long a round waits for ranks that do not print


class Key(NamedTuple):
    """The n-th call of one thread from one line of the source: the same round on every rank."""

    file: str
    line: int
    thread: str
    call: int
    stream: str = "stdout"  # or "stderr": where rank 0 writes it


class OrderedOutput:
    """Collects the ranks' lines by round, and writes a round when it is complete or has waited long enough."""

    def __init__(self, size: int, write: Callable[[str], object] | None = None) -> None:
        self._size = size
        self._write = write
        self._failed = False  # to write the last one
        self._texts: dict[Key, dict[int, str]] = defaultdict(dict)
        self._since: dict[Key, float] = {}
        self._lock = threading.RLock()

    def add(self, rank: int, key: Key, text: str) -> None:
        """Take one rank's text."""
        with self._lock:
            self._texts[key][rank] = text
            self._since.setdefault(key, time.monotonic())
            if len(self._texts[key]) == self._size:
                self._flush(key)

    def pending(self, key: Key) -> bool:
        """Whether the round still waits for ranks, and may."""
        since = self._since.get(key)
        return since is not None and time.monotonic() - since < WAIT_SECONDS

    def flush(self, *, all_rounds: bool = False) -> None:
        """Write the rounds that have waited long enough, or all."""
        with self._lock:
            for key in list(self._since):
                if all_rounds or not self.pending(key):
                    self._flush(key)

    def _flush(self, key: Key) -> None:
        del self._since[key]
        write = self._write or partial(self._show, key.stream)
        write("".join(text for _, text in sorted(self._texts.pop(key).items())))

    def _show(self, name: str, text: str) -> None:
        """Write what a stream of `sys` can show; another rank's text must not end this one."""
        stream: TextIO | None = getattr(sys, name)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))  # type: ignore[union-attr]
            stream.flush()  # type: ignore[union-attr]
            self._failed = False
        except Exception as error:
            # a full disk, a closed stream, none, or whatever a stream of the script raises
            if not self._failed:
                stderr.say(
                    f"jaxmpi: a line of jaxmpi.print cannot be written to {name} ({error}):\n{text}"
                )
            self._failed = True
