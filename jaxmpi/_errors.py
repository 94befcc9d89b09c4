"""Errors that jaxmpi raises on its own account.

Bad arguments are `ValueError` or `TypeError`, as everywhere in Python; these are for the rest. Each
is made of its parts, which stay there as attributes, and its text is made of them here.
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "CheckpointError",
    "CheckpointRankCountError",
    "MPIError",
    "MismatchSide",
    "NotInitializedError",
    "RankCountError",
    "RankMismatchError",
]


class NotInitializedError(RuntimeError):
    """Something that needs to know the ranks was called before `jaxmpi.init()`.

    Attributes:
      function: the function that was called.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        super().__init__(
            f"{function} was called before jaxmpi.init(). Call jaxmpi.init() once, at the top of "
            "the script."
        )

    def __reduce__(self) -> tuple[type["NotInitializedError"], tuple[str]]:
        return type(self), (self.function,)


class MismatchSide(NamedTuple):
    """One of two groups of ranks that disagree.

    Attributes:
      ranks: the ranks of the group.
      function: the function that they have called.
      lines: (verb, line) for each difference, such as ("sent", "allreduce sum of float32[3]"); the
        lines of both groups stand side by side.
      called_at: the user's lines of the call.
    """

    ranks: tuple[int, ...]
    function: str
    lines: tuple[tuple[str, str], ...] = ()
    called_at: tuple[str, ...] = ()


class RankMismatchError(RuntimeError):
    """The ranks disagree on structure, shape, dtype, value or the call. Raised on every rank.

    Attributes:
      what: what differs, as a sentence.
      advice: what to do about it; "" where nothing is known.
      function: the function that all ranks have called; "" if they have called different ones.
      leaf: the name of the leaf that differs, such as "['w']"; "" if it is something else.
      ranks: the ranks that differ from the others, if these are known.
      sides: two groups of ranks whose calls differ, and how.
    """

    def __init__(
        self,
        what: str,
        *,
        advice: str = "",
        details: str = "",
        function: str = "",
        leaf: str = "",
        ranks: Sequence[int] = (),
        sides: Sequence[MismatchSide] = (),
    ) -> None:
        """Make the text: what differs, the advice and, on lines below, the details."""
        super().__init__((f"{what} {advice}" if advice else what) + details)
        self.what, self.advice, self.function, self.leaf = what, advice, function, leaf
        self.ranks, self.sides = tuple(ranks), tuple(sides)


class MPIError(RuntimeError):
    """MPI is missing, or the parts of it that are installed do not belong together.

    Attributes:
      what: what is wrong.
      advice: what to do about it; "" where nothing is known.
      occasion: why MPI is needed, such as "2 ranks were launched"; "" where that is plain.
    """

    def __init__(self, what: str, *, advice: str = "", occasion: str = "") -> None:
        text = f"{occasion}, but {what}" if occasion else what
        super().__init__(f"{text} {advice}" if advice else text)
        self.what, self.advice, self.occasion = what, advice, occasion


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read, or does not fit the tree. Raised on every rank.

    Attributes:
      what: what is wrong, as a sentence.
      advice: what to do about it; "" where nothing is known.
      path: the file or folder; "" if it is none in particular.
      leaf: the name of the leaf, such as "['w']"; "" if it is none in particular.
    """

    def __init__(self, what: str, *, advice: str = "", path: object = "", leaf: str = "") -> None:
        super().__init__(f"{what} {advice}" if advice else what)
        self.what, self.advice, self.path, self.leaf = what, advice, str(path), leaf


class RankCountError(ValueError):
    """The program cannot run on this number of ranks, and may on another one.

    Raised for a batch that the ranks cannot share, axes of other sizes, states of another number of
    ranks, and the like. Where nobody handles it, `jaxmpi run --restarts K --min-ranks M` starts the
    job on another number of ranks, and does not count a failure. A program may raise its own.
    """


class CheckpointRankCountError(CheckpointError, RankCountError):
    """A checkpoint has parts that only as many ranks can restore as have saved it."""
