"""The errors that jaxmpi raises on its own account.

Bad arguments are `ValueError` or `TypeError`, as everywhere in Python; these are for the rest.
"""

__all__ = ["CheckpointError", "MPIError", "NotInitializedError", "RankMismatchError"]


class NotInitializedError(RuntimeError):
    """Something that needs to know the ranks was called before `jaxmpi.init()`."""

    def __init__(self, function: str) -> None:
        super().__init__(f"{function} was called before jaxmpi.init(). Call jaxmpi.init() once, at the top of the script.")


class RankMismatchError(RuntimeError):
    """The ranks disagree: on structure, shape, dtype, value or on what to call. Raised on every rank."""


class MPIError(RuntimeError):
    """MPI is missing, or the parts of it that are installed do not belong together."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read, or is not of what is to be restored. Raised on every rank."""
