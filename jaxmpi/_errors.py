"""The errors that jaxmpi raises on its own account.

Bad arguments are `ValueError` or `TypeError`, as everywhere in Python; these are for the rest.
"""

__all__ = [
    "CheckpointError",
    "CheckpointRankCountError",
    "MPIError",
    "NotInitializedError",
    "RankCountError",
    "RankMismatchError",
]


class NotInitializedError(RuntimeError):
    """Something that needs to know the ranks was called before `jaxmpi.init()`."""

    def __init__(self, function: str) -> None:
        super().__init__(
            f"{function} was called before jaxmpi.init(). Call jaxmpi.init() once, at the top of "
            "the script."
        )


class RankMismatchError(RuntimeError):
    """The ranks disagree: on structure, shape, dtype, value or on what to call. Raised on every rank."""


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
    """A checkpoint cannot be written or read, or is not of what is to be restored. Raised on every rank."""


class RankCountError(ValueError):
    """The program cannot run on this number of ranks, and may on another one.

    Raised for a batch that the ranks cannot share, axes of other sizes, states of another number of
    ranks, and the like. Where nobody handles it, `jaxmpi run --restarts K --min-ranks M` starts the
    job on another number of ranks, and does not count a failure. A program may raise its own.
    """


class CheckpointRankCountError(CheckpointError, RankCountError):
    """A checkpoint has what only as many ranks can restore as have saved it."""
