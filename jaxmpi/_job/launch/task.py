"""What the outer process and its ranks say to each other: something to run, and what came of it."""

from typing import Any, NamedTuple

__all__ = ["ADDRESS", "Call", "Result", "Task"]

ADDRESS = "JAXMPI_TESTING_ADDRESS"  # the variable that tells a rank where the outer process listens


class Task(NamedTuple):
    """A function by its file and qualified name, its pickled arguments, and how long it may take."""

    path: str
    qualname: str
    kwargs: Any  # by their names; on the way, pickled
    timeout_seconds: float
    search: tuple[str, ...] = ()  # where the outer process finds modules


class Call(NamedTuple):
    """A function with its arguments, as cloudpickle has pickled them, and how long it may take."""

    pickled: bytes
    timeout_seconds: float


class Result(NamedTuple):
    """What a rank says when it has run a task: its error, what it has printed, and what a call has returned, pickled."""

    rank: int
    error: str | None
    output: str
    value: bytes = b""
