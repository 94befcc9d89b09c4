"""Agreement of the ranks on a call that saves or restores, before it takes effect."""

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxmpi._backends.base import fingerprint_of
from jaxmpi._backends.interface import Ranks
from jaxmpi._checkpoint.manifest import Leaf
from jaxmpi._consistency import compare
from jaxmpi._consistency.mismatch import Call, CallDetails, Report, facts_of, mismatch_of
from jaxmpi._errors import CheckpointError, CheckpointRankCountError, RankCountError

__all__ = [
    "RaisedError",
    "Side",
    "agree",
    "checked_folder",
    "checked_step",
    "lines_of",
    "run_on_all_or_raise",
    "run_on_rank_0_or_raise",
]

SIGNATURES = {
    "save": "save(directory, step, tree)",
    "restore": "restore(directory, like, step)",
    "latest": "latest(directory)",
}

T = TypeVar("T")


class RaisedError(NamedTuple):
    """An error of one rank, in the parts that all ranks make a `CheckpointError` of.

    Attributes:
      what: what is wrong, as a sentence.
      advice: what to do about it; "" where nothing is known.
      path: the file or folder; "" if it is none in particular.
      leaf: the name of the leaf; "" if it is none in particular.
      of_count: whether it is a `RankCountError`.
    """

    what: str
    advice: str = ""
    path: str = ""
    leaf: str = ""
    of_count: bool = False

    @classmethod
    def of(cls, error: Exception) -> "RaisedError":
        """Return the parts of an error; what it says begins with its type if it is not ours."""
        of_count = isinstance(error, RankCountError)
        if isinstance(error, CheckpointError):
            return cls(error.what, error.advice, error.path, error.leaf, of_count)
        return cls(f"{type(error).__name__}: {error}", of_count=of_count)

    def to_raise(self) -> CheckpointError:
        """Return the error that every rank raises."""
        kind = CheckpointRankCountError if self.of_count else CheckpointError
        return kind(self.what, advice=self.advice, path=self.path, leaf=self.leaf)


class Side(NamedTuple):
    """One rank's side of a call, which the ranks compare before the call takes effect.

    Attributes:
      lines: what the call is given, but for values.
      digests: of the values that are to be equal on all ranks.
      error: why this rank cannot go on; None if it can.
      last_save: how this rank's part of the last save has failed; None if it has not.
    """

    lines: Sequence[str]
    digests: Sequence[str] = ()
    error: RaisedError | None = None
    last_save: RaisedError | None = None


def lines_of(leaves: Sequence[Leaf], *options: str) -> list[str]:
    """Return the lines that tell what a call is given."""
    return [*options, *(f"leaf {leaf.name}: {leaf}" for leaf in leaves)]


def agree(backend: Ranks, function: str, side: Side) -> list[Side]:
    """Compare the ranks' sides of a call.

    The calls that the ranks make must be equal. What else differs is for the caller to judge, which
    comes to the same judgment on every rank.

    **Communication:** 16 bytes, one round; where the sides differ, an allgather of them.

    Returns:
      All ranks' sides, in their order; or this one alone, if all are equal.

    Raises:
      RankMismatchError: on every rank, if they make different calls, with the first difference.
    """
    smallest, largest = backend.extremes(fingerprint_of(repr((function, *side))), function)
    if smallest == largest:
        return [side]
    # A rank that makes another call is in `compare.check_consistent` now, and gathers details, too.
    call = Call.of(function, "\n".join([function, *side.lines]))
    report = Report(call, CallDetails(parameters=side.lines), facts=side)
    reports = compare.gather_reports(backend, report)
    sides = facts_of(reports, Side)
    if sides is None or any(report.call != call for report in reports):
        raise mismatch_of(reports)
    return sides


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


def run_on_all_or_raise(backend: Ranks, function: Callable[[], T]) -> T:
    """Call a function on every rank; where it fails on one, raise its error on all.

    **Communication:** one allgather, of None or the error of each rank.
    """
    result: Any = None
    error: RaisedError | None = None
    try:
        result = function()
    except Exception as caught:
        error = RaisedError.of(caught)
    for its_error in backend.allgather_object(error):
        if its_error is not None:
            raise its_error.to_raise()
    return result


def run_on_rank_0_or_raise(backend: Ranks, function: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on all ranks; where it fails, all raise.

    **Communication:** a broadcast of the result, or of the error.
    """
    result: Any = None
    error: RaisedError | None = None
    if backend.place.rank == 0:
        try:
            result = function()
        except Exception as caught:
            error = RaisedError.of(caught)
    result, error = backend.broadcast_object((result, error), 0)
    if error is not None:
        raise error.to_raise()
    return result
