"""The output of MPI's launcher, passed on as it comes."""

import contextlib
import errno
import os
import select
import threading
from typing import IO

__all__ = ["Relay", "open_streams", "say"]

TAIL_BYTES = 65536  # are kept, to find what MPI says about the end of the job
_LINE = b"-" * 74 + b"\n"  # begins and ends what Open MPI's launcher says
_NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF)  # a closed pipe, a terminal that is gone
_NAMES = {1: "stdout", 2: "stderr"}


class Relay:
    """Copies a stream to stdout or stderr in a thread, and keeps its last bytes.

    The job never waits for a stream that nobody reads any more. Where a disk is full, what does not
    fit is left out; the copy goes on once there is space, with a line that says how much is
    missing.
    """

    def __init__(self, source: IO[bytes], sink: int) -> None:
        """Start to copy `source` to the file descriptor `sink`."""
        self.tail = bytearray()
        self.lost = 0  # bytes since the last one that was written
        self.error = ""
        self._source, self._sink, self._name = source, sink, _NAMES.get(sink, "output")
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float) -> None:
        """Wait until the stream has ended."""
        self._thread.join(timeout_seconds)

    def missing(self) -> str:
        """What could not be written at the end of the stream, in words; "" where all of it was."""
        return (
            f"the last {self.lost} bytes of {self._name} could not be written ({self.error})"
            if self.lost
            else ""
        )

    def _copy(self) -> None:
        while chunk := os.read(self._source.fileno(), TAIL_BYTES):
            chunk = self._without_nul(chunk)
            self.tail.extend(chunk)
            del self.tail[:-TAIL_BYTES]
            if self.lost and not self._write(
                f"\njaxmpi run: {self.lost} bytes are missing here ({self.error})\n".encode()
            ):
                self.lost = 0
            if left := len(chunk) if self.lost else self._write(chunk):
                if not self.lost:
                    say(
                        f"{self._name} cannot be written ({self.error}). What does not fit is left "
                        "out."
                    )
                self.lost += left

    def _without_nul(self, chunk: bytes) -> bytes:
        """Leave out the zero byte that Open MPI 5 writes behind what it says of an abort: its string is sent with its end."""
        # it may be in another chunk than the line before it
        before = bytes(self.tail[-len(_LINE) :])
        return (before + chunk).replace(_LINE + b"\0", _LINE)[len(before) :]

    def _write(self, data: bytes) -> int:
        """Write all of it; returns how many bytes were not."""
        try:
            poll = select.poll()
            poll.register(self._sink, select.POLLOUT)
            while data:
                poll.poll()  # somebody may have made the stream one that does not block
                data = data[os.write(self._sink, data) :]
        except OSError as error:
            if error.errno in _NOBODY_READS:
                self._sink = os.open(os.devnull, os.O_WRONLY)
                return 0
            self.error = error.strerror or str(error)
        return len(data)


def say(text: str) -> None:
    """Write one line of the launcher's own to stderr, where that can be written."""
    with contextlib.suppress(OSError):
        os.write(2, f"jaxmpi run: {text}\n".encode(errors="backslashreplace"))


def open_streams() -> None:
    """Open stdin, stdout and stderr where they are closed: the next files would get their numbers, and then the output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
