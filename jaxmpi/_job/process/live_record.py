"""The live record of a rank: two files without names that processes of the same user can read.

They are in `/proc/PID/fd`:

jaxmpi-rank    a JSON object that the rank's monitor writes twice a second (`Writer`), and behind
               it the numbers of the programs that the rank has entered and left
jaxmpi-events  the ring of the last messages, which the native transport records (native/record.h)

Where a program has not called jaxmpi.init, the library for plain JAX writes the first one, too
(native/plain_record.cc).

They are memory: nothing is left of them when the rank has ended, and they can be read while it is
stopped.

The second file begins with its own layout, as JSON: offsets of the counters and of the ring, and of
each field of an event. So `jaxmpi top` needs no extension, and reads the record of a rank that runs
another version of jaxmpi right, or says that it cannot.
"""

import contextlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Event", "Reader", "Writer", "processes"]

RANK, EVENTS = "jaxmpi-rank", "jaxmpi-events"
TEXT_BYTES = 1 << 14  # of the JSON object
LAYOUT_BYTES = 1 << 12  # at the beginning of jaxmpi-events, which has its layout there
INT64_BYTES = 8
COUNTS = 2  # int64 behind the JSON object: the programs that the rank has entered, and left
FIELDS = ("fingerprint", "bytes", "start", "all_entered", "end")  # of an event, by name
# its number, then FIELDS; the last three are nanoseconds of time.monotonic_ns()
Event = tuple[int, int, int, int, int, int]


class Layout(NamedTuple):
    """Where the numbers of a record of messages are: indices and counts of int64."""

    started: int  # how many messages have begun
    exposed_ns: int  # nanoseconds for which programs have waited for messages
    events: int  # the ring
    kept: int  # events in the ring
    stride: int  # from one event to the next
    fields: tuple[int, ...]  # of each of FIELDS, within an event


class Writer:
    """The rank's side of the live record.

    Attributes:
      counts: the programs that the rank has entered, and those that it has left.
    """

    def __init__(self) -> None:
        """Make the file.

        Raises:
          OSError: there is no memory for it.
        """
        self._file = os.memfd_create(RANK, os.MFD_CLOEXEC)
        size = TEXT_BYTES + COUNTS * INT64_BYTES
        os.ftruncate(self._file, size)
        # The rank writes each of the counts by one store, so another process may read them at any
        # moment.
        self._memory = mmap.mmap(self._file, size)
        self.counts = memoryview(self._memory)[TEXT_BYTES:].cast("q")

    def write(self, about: Mapping[str, object]) -> None:
        """Show these values instead of the last ones; what does not fit is not shown."""
        text = json.dumps(about).encode()
        if len(text) < TEXT_BYTES:
            # a reader that comes in the middle finds no valid JSON, and reads again
            os.pwrite(self._file, text + b"\n", 0)

    def close(self) -> None:
        """Stop showing anything; nobody may write `counts` any more."""
        self.counts.release()
        self._memory.close()  # it has a descriptor of the file, too
        os.close(self._file)


class Reader:
    """Another process's side of the live record.

    Attributes:
      pid: the process of the rank.
      problem: why the record of its messages cannot be read; "" if it can, or if there is none.
    """

    def __init__(self, pid: int) -> None:
        """Open the files of a process.

        Raises:
          OSError: it is not a rank of this user that has a live record, or it has ended.
        """
        self.pid, self.problem = pid, ""
        names = _files(pid)
        self._text = os.open(names[RANK], os.O_RDONLY | os.O_CLOEXEC) if RANK in names else -1
        self._ring: mmap.mmap | None = None
        if self._text < 0:
            raise OSError(f"process {pid} is not a rank of jaxmpi")
        with contextlib.suppress(OSError):
            file = os.open(names.get(EVENTS, ""), os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._ring, self._layout = _mapped(file)
            except ValueError:
                self.problem = (
                    "jaxmpi top cannot read the messages of this rank, which runs another version "
                    "of jaxmpi. Use the jaxmpi that the job uses."
                )
            finally:
                os.close(file)

    def about(self) -> dict[str, Any]:
        """Return the JSON object that the rank wrote last; empty before the first one.

        Where its messages cannot be read, its `doing` says so.
        """
        for _ in range(3):
            with contextlib.suppress(ValueError):
                about = json.loads(os.pread(self._text, TEXT_BYTES, 0).partition(b"\n")[0])
                if not isinstance(about, dict):
                    return {}
                return about | {"doing": self.problem} if self.problem else about
        return {}

    def programs(self) -> tuple[int, int] | None:
        """Return how many programs the rank has entered, and left; None where it does not say."""
        numbers = os.pread(self._text, COUNTS * INT64_BYTES, TEXT_BYTES)
        if len(numbers) < COUNTS * INT64_BYTES:  # of an earlier version of jaxmpi
            return None
        entered, left = memoryview(numbers).cast("q")
        return entered, left

    def events(self, most: int) -> list[Event]:
        """Return its last messages; none on a transport that records none."""
        if self._ring is None:
            return []
        layout, found = self._layout, []
        with memoryview(self._ring) as memory, memory.cast("q") as numbers:
            started = numbers[layout.started]
            # half of the ring, because the rank overwrites the oldest events meanwhile
            for number in range(max(0, started - min(most, layout.kept // 2)), started):
                event = layout.events + number % layout.kept * layout.stride
                fingerprint, bytes_, *times = (numbers[event + field] for field in layout.fields)
                start, all_entered, end = times
                found.append((number, fingerprint, bytes_, start, all_entered, end))
        return found

    def exposed(self) -> int | None:
        """Return for how many nanoseconds its programs have waited for messages.

        It is None on a transport that does not count it.
        """
        if self._ring is None:
            return None
        with memoryview(self._ring) as memory, memory.cast("q") as numbers:
            return numbers[self._layout.exposed_ns]

    def close(self) -> None:
        """Close the files."""
        os.close(self._text)
        if self._ring is not None:
            self._ring.close()


def processes() -> list[int]:
    """Return the processes of this user on this host that have a live record.

    Children of a rank that have inherited its files are among them.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if RANK in _files(int(path.name)):
            found.append(int(path.name))
    return found


def _mapped(file: int) -> tuple[mmap.mmap, Layout]:
    """Map a record of messages, and read its layout.

    Raises:
      ValueError: it does not begin with a layout, or not with one that has what is read here.
    """
    described = json.loads(os.pread(file, LAYOUT_BYTES, 0).partition(b"\0")[0])
    try:
        counters, events = described["counters"], described["events"]
        layout = Layout(
            started=_index(counters["started"]),
            exposed_ns=_index(counters["exposed_ns"]),
            events=_index(events["offset"]),
            kept=int(events["count"]),
            stride=_index(events["bytes"]),
            fields=tuple(_index(events["fields"][name]) for name in FIELDS),
        )
        size = _index(described["bytes"])
    except (KeyError, TypeError) as error:
        raise ValueError("no layout of a record of messages") from error
    end = layout.events + layout.kept * layout.stride
    inside = max(layout.started, layout.exposed_ns, end - 1) < size
    if not inside or max(layout.fields) >= layout.stride:
        raise ValueError("a layout with numbers outside of the record")
    # fails with a ValueError where the file is shorter than that
    return mmap.mmap(file, size * INT64_BYTES, prot=mmap.PROT_READ), layout


def _index(offset: int) -> int:
    """Return the index of the int64 at an offset in bytes."""
    if offset % INT64_BYTES:
        raise ValueError(f"no int64 begins at byte {offset}")
    return offset // INT64_BYTES


def _files(pid: int) -> dict[str, str]:
    """Return the paths of the live record's files among those that a process has open."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(entry.path).removeprefix("/memfd:").removesuffix(" (deleted)")
                if name in (RANK, EVENTS):
                    found[name] = entry.path
    return found
