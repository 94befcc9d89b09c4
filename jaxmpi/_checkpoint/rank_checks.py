"""What the ranks say to each other about a checkpoint."""

import operator
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxmpi._backends.base import Backend, fingerprint_of
from jaxmpi._backends.simulate import PerRank
from jaxmpi._checkpoint.leaf_values import to_host
from jaxmpi._checkpoint.manifest import Leaf, LeafValue, is_plain
from jaxmpi._consistency import compare
from jaxmpi._errors import CheckpointError, CheckpointRankCountError, RankCountError, RankMismatchError

__all__ = [
    "check_call",
    "check_equal",
    "checked",
    "checked_folder",
    "checked_step",
    "each_ranks_values",
    "ranks_here",
    "run_on_all_or_raise",
]

SIGNATURES = {"save": "save(directory, step, tree)", "restore": "restore(directory, like, step)", "latest": "latest(directory)"}

T = TypeVar("T")


def check_call(backend: Backend, function: str, leaves: Sequence[Leaf], *options: str) -> None:
    """Compare what the ranks are to save or restore, but for the values."""
    lines = [*options, *(f"leaf {leaf.name}: {leaf}" for leaf in leaves)]
    compare.check_consistent(backend, compare.Statement.of(function, "\n".join([function, *lines])), lambda: {"given": lines})


def checked(backend: Backend, function: str, check: Callable[[], T]) -> T:
    """What `check` returns; where it raises on one rank, all raise: the same error, or a RankMismatchError."""
    try:
        return check()
    except (TypeError, ValueError) as error:
        check_call(backend, function, [], f"{type(error).__name__}: {error}")
        raise


def checked_folder(function: str, directory: object) -> str:
    """The folder in the words that the ranks compare: as it was given, as ranks may work in folders of their own.

    Raises:
      TypeError: it is no path, which says how the function is called.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"{function}: directory is {_wrong(directory, 'a path', function)}")
    return f"directory {os.path.normpath(directory)}"


def checked_step(function: str, step: object) -> int:
    """The step as an integer.

    Raises:
      TypeError: it is none, which says how the function is called.
    """
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        wanted = "an integer or None" if function == "restore" else "an integer"
        raise TypeError(f"{function}: step is {_wrong(step, wanted, function)}") from None


def _wrong(argument: object, wanted: str, function: str) -> str:
    return f"of type {type(argument).__name__}, and must be {wanted}. Call {SIGNATURES[function]}."


def check_equal(backend: Backend, described: Sequence[tuple[Leaf, LeafValue]]) -> None:
    """Raise a RankMismatchError on all ranks, with the leaf, unless what is saved once is equal on all of them.

    **Communication:** 16 bytes; where the ranks differ, a checksum for each leaf.
    """
    if backend.place.size == 1:
        return
    common = [(leaf, x) for leaf, x in described if leaf.part == "all" and (leaf.stored or leaf.plain)]
    if backend.simulates:
        common = [(leaf, x) for leaf, x in common if isinstance(x, PerRank)]  # all else is equal
        everyone = [[_digest(x[rank]) for _, x in common] for rank in range(backend.place.size)]
    else:
        mine = [_digest(x) for _, x in common]
        smallest, largest = backend.extremes(fingerprint_of(repr(mine)), "save")
        everyone = [] if smallest == largest else backend.allgather_object(mine)
    differ = [(leaf, of_ranks) for (leaf, _), *of_ranks in zip(common, *everyone, strict=False) if len(set(of_ranks)) > 1]
    if not differ:
        return
    leaf, of_ranks = differ[0]
    others, who_have = compare.outliers(of_ranks)
    usual = next(one for rank, one in enumerate(of_ranks) if rank not in others)
    values = f" ({of_ranks[others[0]]}, and {usual} elsewhere)" if leaf.plain else ""
    more = f", and {len(differ) - 1} more leaves" if len(differ) > 1 else ""
    raise RankMismatchError(
        f"save: leaf {leaf.name} is not equal on all ranks: {who_have} other values{values}{more}. If each rank has its own (a "
        "key, an environment, BatchNorm statistics), wrap it in a jaxmpi.PerRankState, or in nnx make it an nnx.BatchStat; if "
        "not, make it equal with jaxmpi.synchronize."
    )


def _digest(x: LeafValue) -> int | str:
    """What is equal where values are: a CRC-32 of an array, the text of a number of Python's own."""
    if is_plain(x):
        return repr(x)[:80] + (f"... {zlib.crc32(repr(x).encode())}" if len(repr(x)) > 80 else "")
    return zlib.crc32(np.ascontiguousarray(to_host(x, copy=False)).reshape(-1).view(np.uint8).data)


def each_ranks_values(backend: Backend, leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaves, with all ranks' values of those numbers of Python's own that each rank has of its own."""
    mine = {leaf.name: leaf.value for leaf in leaves if leaf.part != "all" and leaf.plain}
    everyone = backend.allgather_object(mine) if mine else []
    return [leaf._replace(value=[values[leaf.name] for values in everyone]) if leaf.name in mine else leaf for leaf in leaves]


def run_on_all_or_raise(backend: Backend, function: Callable[[], T]) -> T:
    """Call a function on every rank; where it fails on one, all raise."""
    result: Any = None
    error, of_count = "", False
    try:
        result = function()
    except CheckpointError as caught:
        error, of_count = str(caught), isinstance(caught, RankCountError)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors = [one for one in backend.allgather_object((error, of_count)) if one[0]]
    if errors:
        error, of_count = errors[0]
        raise (CheckpointRankCountError if of_count else CheckpointError)(error)
    return result


def ranks_here(backend: Backend) -> Iterator[int]:
    """Those of this process."""
    yield from range(backend.place.size) if backend.simulates else (backend.place.rank,)
