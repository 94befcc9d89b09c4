"""Before there is a guard: a rank that fails to join the others does not wait for them in MPI's own end, nor they for it."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeAlias

__all__ = ["joining"]

GRACE_SECONDS = 0.5  # for the others to say what they have found, where all fail
Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@contextlib.contextmanager
def joining(launched: int) -> Iterator[None]:
    """Where this fails on one of several ranks and nobody handles it, end without MPI_Finalize: MPI's launcher ends the rest.

    Args:
      launched: how many ranks the launcher's environment speaks of.
    """
    try:
        yield
    except Exception as error:
        if launched > 1:
            _add_rank(error)
            sys.excepthook = _ends(sys.excepthook)
        raise


def _add_rank(error: Exception) -> None:
    """Say on which rank it was, as far as MPI is up: not every launcher says who has ended the job."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        error.add_note(f"This is rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size}.")


def _ends(show: Hook) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    return hook
