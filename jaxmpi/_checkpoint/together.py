"""What the ranks say to each other about a checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from jaxmpi import _agreement
from jaxmpi._backends import Backend
from jaxmpi._checkpoint.parts import Leaf
from jaxmpi._errors import CheckpointError

__all__ = ["busy", "meet", "ranks_here", "together"]

T = TypeVar("T")


def meet(backend: Backend, function: str, leaves: Sequence[Leaf], options: str, *, values: bool) -> None:
    """Compare what the ranks are to save or restore; with `values`, their Python numbers, too."""
    shown = [f" = {leaf.value!r}" if values and leaf.value is not None else "" for leaf in leaves]
    lines = [options, *(f"leaf {leaf.name}: {leaf}{value}" for leaf, value in zip(leaves, shown, strict=True))]
    _agreement.meet(backend, _agreement.Statement.of(function, "\n".join([function, *lines])), lambda: {"given": lines})


def together(backend: Backend, function: Callable[[], T]) -> T:
    """Call a function on every rank; where it fails on one, all raise."""
    result: Any = None
    error = None
    try:
        result = function()
    except CheckpointError as caught:
        error = str(caught)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors = [e for e in backend.allgather_object(error) if e]
    if errors:
        raise CheckpointError(errors[0])
    return result


@contextmanager
def busy(backend: Any, what: str) -> Iterator[None]:
    """Tell those who watch for stalls that this rank does something that takes long, and is all right."""
    before, backend.busy = backend.busy, what
    try:
        yield
    finally:
        backend.busy = before


def ranks_here(backend: Backend) -> Iterator[int]:
    """Those of this process."""
    yield from range(backend.place.size) if backend.name == "simulate" else (backend.place.rank,)
