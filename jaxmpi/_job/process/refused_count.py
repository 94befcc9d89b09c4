"""A rank that cannot work in a job of so many ranks tells `jaxmpi run`, which then takes another number."""

import contextlib
import os
import sys
from types import TracebackType

from jaxmpi._errors import RankCountError
from jaxmpi._job.process import run_dir

__all__ = ["note_at_exceptions", "note_refused_count"]


def note_at_exceptions() -> None:
    """Note a `RankCountError` that nobody handles, before it is shown; again does nothing."""
    show = sys.excepthook
    if not os.environ.get("JAXMPI_RUN_DIR") or getattr(show, "notes_refused_count", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note_refused_count(error)
        show(kind, error, trace)

    hook.notes_refused_count = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def note_refused_count(error: BaseException) -> None:
    """Note in the directory of the run that this rank ends because of the number of ranks, if it does.

    A program may have raised an error of its own from ours, or while it handled ours.
    """
    cause: BaseException | None = error
    seen: list[BaseException] = []
    # a chain may lead back to itself
    while cause is not None and not any(cause is other for other in seen):
        if isinstance(cause, RankCountError):
            with contextlib.suppress(KeyError, OSError):
                run_dir.refuse_count(os.environ["JAXMPI_RUN_DIR"], str(cause))
            return
        seen.append(cause)
        # as Python shows them: `raise ... from None` hides what was handled
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
