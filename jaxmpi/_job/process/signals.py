"""The signals of this process, received by the monitor's thread.

Python runs signal handlers on the main thread, between two of its instructions; while the main
thread stands inside MPI, none runs. The monitor's thread learns of a signal by the wake-up file
(`signal.set_wakeup_fd`), to which Python writes the number at once. A process has one such file,
and other libraries set theirs, as asyncio's `add_signal_handler` does. Then the handlers tell the
thread; and what arrives at our file is passed on to the file that was set before.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

__all__ = ["Signals"]

INTERRUPT_SECONDS = 2.0  # for Python to react to an interrupt; after that the rank is stuck in MPI


class Signals:
    """Signals that this process receives; none if made on another than the main thread."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], None]] = {signal.SIGINT: self._on_arrived}
        # the handlers that were replaced
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        # when the last interrupt arrived, and when Python last ran its handler
        self._interrupted = self._reacted = 0.0
        self._masks = threading.local()  # the signals that a thread had blocked before `block`
        self._heard, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._poll = select.poll()  # `select` takes no file above 1023
        self._poll.register(self._heard, select.POLLIN)
        self._hears = threading.current_thread() is threading.main_thread()
        self._other = -1  # the wake-up file of another library, which had it before
        if self._hears:
            self._other = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._replace(signal.SIGINT, self._on_interrupt)

    def register(self, number: int, call: Callable[[], None]) -> bool:
        """Register a call that the monitor's thread makes at a signal, until `release`.

        Returns False if the script has a handler of its own.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not (is_main and self._hears and signal.getsignal(number) is signal.SIG_DFL):
            return False
        self._replace(number, lambda number, _: self._tell_of(number))
        self._calls[number] = call
        return True

    def wait(self, seconds: float) -> list[Callable[[], None]]:
        """Sleep until a signal comes, or for so long; return the calls to make."""
        if not self._poll.poll(1000 * seconds):
            return []
        numbers = self._heard.recv(64)
        if self._other != -1:
            with contextlib.suppress(OSError):
                os.write(self._other, numbers)
        return [self._calls[number] for number in set(numbers) & self._calls.keys()]

    def wake(self) -> None:
        """End a `wait`, from any thread."""
        self._written.send(b"\0")

    def interrupt_is_stuck(self, look_seconds: float) -> bool:
        """Return whether Python has not reacted to an interrupt for too long.

        A handler of the script may react without our notice: its interrupts are not counted.

        Args:
          look_seconds: the time between two calls of this method.
        """
        if not self._handles_interrupts():
            self._interrupted = 0.0
        if not self._interrupted or time.monotonic() - self._interrupted <= INTERRUPT_SECONDS:
            return False
        # this thread may learn of the interrupt later than Python
        stuck = self._reacted < self._interrupted - 2 * look_seconds
        self._interrupted = 0.0
        return stuck

    def block(self) -> None:
        """Block the registered signals in the calling thread, until `unblock`, while it forks.

        Python would forget a signal that comes to a child before the child has set its handlers.
        """
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._before.keys())

    def unblock(self) -> None:
        """Unblock the signals, in the parent and in the child."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def release(self, *, wake_others: bool = True) -> None:
        """Restore the handlers and the wake-up file that were set before.

        Args:
          wake_others: False in a forked child, which must not wake up the parent's libraries.
        """
        if self._hears:
            now = signal.set_wakeup_fd(-1)
            if wake_others:
                _wake_up(self._other if now == self._written.fileno() else now)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._written.close()
        self._heard.close()

    def _tell_of(self, number: int) -> None:
        """Send a signal to the monitor's thread, if our wake-up file was replaced or removed."""
        mine = self._written.fileno()
        if (other := signal.set_wakeup_fd(mine, warn_on_full_buffer=False)) != mine:
            _wake_up(other)
            with contextlib.suppress(OSError):
                self._written.send(bytes([number]))

    def _replace(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._before[number] = signal.signal(number, handler)

    def _on_arrived(self) -> None:
        # The script may restore our handler before the next look.
        self._interrupted = time.monotonic() if self._handles_interrupts() else 0.0

    def _handles_interrupts(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._on_interrupt

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._reacted = time.monotonic()
        self._tell_of(number)
        signal.default_int_handler(number, frame)


def _wake_up(file: int) -> None:
    """Set the wake-up file of another library, if there is one and it is open."""
    if file != -1:
        with contextlib.suppress(OSError, ValueError):
            signal.set_wakeup_fd(file)
