"""The messages of the monitors, by topic, which nobody has to be waiting for; printing in the order of the ranks is one."""

import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from jaxmpi._backends.process_group import MpiProcessGroup
from jaxmpi._job.monitor.ordered_output import Key, OrderedOutput
from jaxmpi._job.process import stderr

__all__ = ["Messages"]


class Messages:
    """The part of a monitor that sends objects to others, and hands over what has arrived.

    Attributes:
      topics: who gets a message, by its topic: called with the rank that has sent it, and the
        object.
      rounds: text of all ranks that is to be shown, on rank 0.
    """

    def __init__(self, backend: MpiProcessGroup) -> None:
        self.backend = backend
        self.rounds = OrderedOutput(backend.place.size)
        self.topics: dict[str, Callable[[int, Any], object]] = {"print": self._on_print}
        self._failed: list[Callable[..., object]] = []
        self._lock = threading.Lock()

    def print(self, key: Key, text: str) -> None:
        """Show this rank's text on rank 0, with the other ranks' of the same round."""
        if self.backend.place.rank != 0:
            self.send(0, "print", (key, text))
            return
        self.rounds.add(0, key, text)
        while self.rounds.pending(key):
            self.poll()
            time.sleep(0.001)
        self.rounds.flush()

    def send(self, rank: int, topic: str, message: object) -> None:
        """Send a picklable object to another rank's monitor; returns at once."""
        with self._lock:
            self.backend.send(rank, (topic, message))

    def send_all(self, topic: str, message: object) -> None:
        """Send an object to the monitors of all other ranks."""
        for rank in range(self.backend.place.size):
            if rank != self.backend.place.rank:
                self.send(rank, topic, message)

    def poll(self) -> None:
        """Hand over what has arrived."""
        with self._lock:
            arrived = self.backend.receive()
        for rank, (topic, message) in arrived:
            if topic in self.topics:
                self._call(self.topics[topic], rank, message)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Call what watches; a defect in it must not end the watching of the rest."""
        try:
            function(*args)
        except Exception:
            if function not in self._failed:
                self._failed.append(function)
                self.say(f"a defect in jaxmpi's monitor, which goes on:\n{traceback.format_exc()}")

    def say(self, text: str) -> None:
        """Write to stderr, with who says it."""
        place = self.backend.place
        stderr.say(f"jaxmpi: [rank {place.rank}/{place.size} on {os.uname().nodename}] {text}\n")

    def _on_print(self, rank: int, message: tuple[Key, str]) -> None:
        self.rounds.add(rank, *message)
