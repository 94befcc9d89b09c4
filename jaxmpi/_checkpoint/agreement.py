"""What the ranks compare and tell each other before a call on a checkpoint takes effect."""

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jaxmpi._backends.base import Backend
from jaxmpi._checkpoint.manifest import Leaf
from jaxmpi._consistency import compare
from jaxmpi._errors import CheckpointError, CheckpointRankCountError, RankCountError

__all__ = [
    "check_call",
    "checked",
    "checked_folder",
    "checked_step",
    "ranks_here",
    "run_on_all_or_raise",
]

SIGNATURES = {
    "save": "save(directory, step, tree)",
    "restore": "restore(directory, like, step)",
    "latest": "latest(directory)",
}

T = TypeVar("T")


def check_call(backend: Backend, function: str, leaves: Sequence[Leaf], *options: str) -> None:
    """Compare what the ranks are to save or restore, but for the values.

    **Communication:** 16 bytes.

    Raises:
      RankMismatchError: on every rank, with the first difference.
    """
    lines = [*options, *(f"leaf {leaf.name}: {leaf}" for leaf in leaves)]
    statement = compare.Statement.of(function, "\n".join([function, *lines]))
    compare.check_consistent(backend, statement, lambda: {"given": lines})


def checked(backend: Backend, function: str, check: Callable[[], T]) -> T:
    """Return what `check` returns; where it raises on one rank, all raise.

    The others get a RankMismatchError with its text, unless they raise the same.
    """
    try:
        return check()
    except (TypeError, ValueError) as error:
        check_call(backend, function, [], f"{type(error).__name__}: {error}")
        raise


def checked_folder(function: str, directory: object) -> str:
    """Return the line that the ranks compare: as it was given, as ranks may work in other folders.

    Raises:
      TypeError: it is no path, with how the function is called.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"{function}: directory is {_wrong(directory, 'a path', function)}")
    return f"directory {os.path.normpath(directory)}"


def checked_step(function: str, step: object) -> int:
    """Return the step as an integer.

    Raises:
      TypeError: it is none, with how the function is called.
    """
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        wanted = "an integer or None" if function == "restore" else "an integer"
        raise TypeError(f"{function}: step is {_wrong(step, wanted, function)}") from None


def _wrong(argument: object, wanted: str, function: str) -> str:
    signature = SIGNATURES[function]
    return f"of type {type(argument).__name__}, and must be {wanted}. Call {signature}."


def run_on_all_or_raise(backend: Backend, function: Callable[[], T]) -> T:
    """Call a function on every rank; where it fails on one, raise its error on all.

    **Communication:** an allgather of the error texts, if any.
    """
    result: Any = None
    error, of_count = "", False
    try:
        result = function()
    except CheckpointError as caught:
        error, of_count = str(caught), isinstance(caught, RankCountError)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    for its_error, its_of_count in backend.allgather_object((error, of_count)):
        if its_error:
            raise (CheckpointRankCountError if its_of_count else CheckpointError)(its_error)
    return result


def ranks_here(backend: Backend) -> Iterator[int]:
    """Yield the ranks that live in this process."""
    yield from range(backend.place.size) if backend.simulates else (backend.place.rank,)
