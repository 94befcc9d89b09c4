"""What the parts of a rank's monitor use of it."""

from collections.abc import Callable
from typing import Any, Protocol

from jaxmpi._backends.process_group import MpiProcessGroup
from jaxmpi._job.process.signals import Signals

__all__ = ["Watching"]


class Watching(Protocol):
    """The monitor, as its parts see it."""

    backend: MpiProcessGroup
    watchers: list[Callable[[], None]]  # called by the thread, ten times a second
    # what to do with a message of a rank, by what it is about
    topics: dict[str, Callable[[int, Any], object]]
    at_end: list[Callable[[str], object]]  # called with the reason
    signals: Signals
    samples: int  # that `Throughput` has counted on this rank
    members: list[tuple[int, str]]  # process and host of each rank

    def send(self, rank: int, topic: str, message: object) -> None:
        """Send a picklable object to another rank's monitor; returns at once."""

    def send_all(self, topic: str, message: object) -> None:
        """Send an object to the monitors of all other ranks."""

    def end(self, code: int, why: str) -> None:
        """End the whole job with a line that says which rank and why."""

    def say(self, text: str) -> None:
        """Write a line of this rank."""
