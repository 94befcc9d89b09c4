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
    except Exception:
        if launched > 1:
            sys.excepthook = _ends(sys.excepthook)
        raise


def _ends(show: Hook) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    return hook
