"""The live record of a rank: what it shows of itself to `jaxmpi top` while it runs.

jaxmpi-rank    a JSON object that the rank's monitor writes twice a second (`Writer`)
jaxmpi-events  the ring of the last messages, which the native transport writes (`Record` of
               native/record.cc)

Both are files in memory, in no file system: processes of the same user find them in `/proc/PID/fd`.
Nothing is left of them when the rank has ended, and they can be read while it is stopped.
"""

import contextlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Event", "Reader", "Writer", "processes"]

RANK, EVENTS = "jaxmpi-rank", "jaxmpi-events"
TEXT_BYTES = 1 << 14  # of the JSON object
HEAD = 3  # numbers before the ring: messages started, ended, and nanoseconds of waiting for them
KEPT = 4096  # events in the ring
FIELDS = 5  # of an event
WORD = 8  # bytes
# number, word, bytes, start, met, end, in nanoseconds of time.monotonic_ns()
Event = tuple[int, int, int, int, int, int]


class Writer:
    """The record as the rank writes it."""

    def __init__(self) -> None:
        """Make the file.

        Raises:
          OSError: there is no memory for it.
        """
        self._file = os.memfd_create(RANK, os.MFD_CLOEXEC)
        os.ftruncate(self._file, TEXT_BYTES)

    def write(self, about: Mapping[str, object]) -> None:
        """Replace the values; a text that is too long is not written."""
        text = json.dumps(about).encode()
        if len(text) < TEXT_BYTES:
            # a reader that reads meanwhile finds no valid JSON, and reads again
            os.pwrite(self._file, text + b"\n", 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Reader:
    """The record of the rank with this pid, as another process reads it."""

    def __init__(self, pid: int) -> None:
        """Open the files of the process.

        Raises:
          OSError: it is not a rank of this user, or has ended.
        """
        self.pid = pid
        names = _files(pid)
        self._text = os.open(names[RANK], os.O_RDONLY | os.O_CLOEXEC) if RANK in names else -1
        self._ring: mmap.mmap | None = None
        if self._text < 0:
            raise OSError(f"process {pid} is not a rank of jaxmpi")
        with contextlib.suppress(OSError, ValueError):
            file = os.open(names.get(EVENTS, ""), os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._ring = mmap.mmap(file, (HEAD + KEPT * FIELDS) * WORD, prot=mmap.PROT_READ)
            finally:
                os.close(file)

    def about(self) -> dict[str, Any]:
        """Return the rank's last values; empty if it has written none yet."""
        for _ in range(3):
            with contextlib.suppress(ValueError):
                about = json.loads(os.pread(self._text, TEXT_BYTES, 0).partition(b"\n")[0])
                return about if isinstance(about, dict) else {}
        return {}

    def events(self, most: int) -> list[Event]:
        """Return the rank's last messages; none if its transport records none."""
        if self._ring is None:
            return []
        with memoryview(self._ring) as memory, memory.cast("q") as words:
            started = words[0]
            numbers = range(max(0, started - min(most, KEPT // 2)), started)
            return [_event(words, i) for i in numbers]

    def exposed(self) -> int | None:
        """Return the nanoseconds that its programs have waited for messages; None if unknown."""
        if self._ring is None:
            return None
        with memoryview(self._ring) as memory, memory.cast("q") as words:
            return words[2]

    def close(self) -> None:
        """Close the files."""
        os.close(self._text)
        if self._ring is not None:
            self._ring.close()


def processes() -> list[int]:
    """Return the processes of this user on this host that have a live record."""
    return [
        int(path.name) for path in Path("/proc").glob("[0-9]*") if RANK in _files(int(path.name))
    ]


def _event(words: "memoryview[int]", number: int) -> Event:
    word, bytes_, start, met, end = words[HEAD + number % KEPT * FIELDS :][:FIELDS].tolist()
    return number, word, bytes_, start, met, end


def _files(pid: int) -> dict[str, str]:
    """Return the paths of our files among those that a process has open."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(entry.path).removeprefix("/memfd:").removesuffix(" (deleted)")
                if name in (RANK, EVENTS):
                    found[name] = entry.path
    return found
