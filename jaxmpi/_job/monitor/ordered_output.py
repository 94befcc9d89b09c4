"""Text of many ranks, written in the order of the ranks: for `jaxmpi.print`.

Rank 0 collects the ranks' text by `Key`, which is the same on all ranks for one call of a script.
A round is the text of all ranks with one key.
"""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TextIO

from jaxmpi._job.process import stderr

__all__ = ["ROUND_SECONDS", "Key", "OrderedOutput"]

ROUND_SECONDS = 0.2  # how long a round waits for ranks that print nothing


class Key(NamedTuple):
    """The n-th call of a thread at a line of the source."""

    file: str
    line: int
    thread: str
    call: int
    stream: str = "stdout"  # or "stderr": where rank 0 writes it


class OrderedOutput:
    """Rounds of text; each is written once it is complete or has waited long enough."""

    def __init__(self, size: int, write: Callable[[str], object] | None = None) -> None:
        """Collect text of `size` ranks, for a function or for the stream that a key names."""
        self._size = size
        self._write = write
        self._failed = False  # to write the last round
        self._texts: dict[Key, dict[int, str]] = defaultdict(dict)  # by rank
        self._since: dict[Key, float] = {}
        self._lock = threading.RLock()  # the monitor's thread and threads that print

    def add(self, rank: int, key: Key, text: str) -> None:
        """Add one rank's text; write the round if it is complete."""
        with self._lock:
            self._texts[key][rank] = text
            self._since.setdefault(key, time.monotonic())
            if len(self._texts[key]) == self._size:
                self._flush(key)

    def pending(self, key: Key) -> bool:
        """Return whether a round waits for ranks and may wait longer."""
        since = self._since.get(key)
        return since is not None and time.monotonic() - since < ROUND_SECONDS

    def flush(self, *, all_rounds: bool = False) -> None:
        """Write the rounds that have waited long enough, or all."""
        with self._lock:
            for key in list(self._since):
                if all_rounds or not self.pending(key):
                    self._flush(key)

    def _flush(self, key: Key) -> None:
        del self._since[key]
        write = self._write or partial(self._write_to_stream, key.stream)
        write("".join(text for _, text in sorted(self._texts.pop(key).items())))

    def _write_to_stream(self, name: str, text: str) -> None:
        """Write to `sys.stdout` or `sys.stderr`; another rank's text must not end this one."""
        stream: TextIO | None = getattr(sys, name)
        # Escape what the stream's encoding does not have: it may be another one on that rank.
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))  # type: ignore[union-attr]
            stream.flush()  # type: ignore[union-attr]
            self._failed = False
        except Exception as error:
            # A full disk, a closed stream, none, or whatever a stream of the script raises. It is
            # reported once.
            if not self._failed:
                stderr.say(
                    f"jaxmpi: a line of jaxmpi.print cannot be written to {name} ({error}):\n{text}"
                )
            self._failed = True
