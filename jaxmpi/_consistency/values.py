"""JAXMPI_CHECK=1: what should be equal on all ranks is compared, bit by bit, before and after every call of a step.

A step is many times slower with it: it is for finding out when, and where, replicas part.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends.base import Backend, ProcessGroup, fingerprint_of
from jaxmpi._backends.groups import groups_along
from jaxmpi._backends.simulate import PerRank
from jaxmpi._consistency.compare import Statement, gather_sides, in_words, mismatch_of, outliers
from jaxmpi._errors import RankMismatchError
from jaxmpi._job.process import settings
from jaxmpi._leaves import is_key

__all__ = ["EqualLeaf", "check_equal_leaves", "checksum", "compare", "wanted"]


def wanted() -> bool:
    """Whether JAXMPI_CHECK asks for it."""
    return bool(settings.get("JAXMPI_CHECK"))


def compare(
    backend: Backend,
    title: str,
    names: Sequence[str],
    leaves: Sequence[ArrayLike],
    equal: Sequence[bool],
) -> None:
    """Raise a RankMismatchError on all ranks, with the first of the arrays that is to be equal and is not.

    Args:
      backend: the ranks.
      title: of the step.
      names: of the arrays.
      leaves: the arrays.
      equal: which of them are to be equal.
    """
    sums = {name: checksum(x) for name, x, same in zip(names, leaves, equal, strict=True) if same}
    everyone = backend.allgather_object(sums)
    for name in sums:
        differs, who_has = outliers([of_rank.get(name) for of_rank in everyone])
        if differs:
            raise RankMismatchError(
                f"{title}: {name} is not equal on all ranks: {who_has} other values "
                "(JAXMPI_CHECK). Synchronize what is "
                "different from the start with jaxmpi.synchronize, and look for what changes it on "
                "one rank alone."
            )


def checksum(x: ArrayLike) -> int:
    """That of an array's bytes."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:  # a global one of the xla backend
        x = x.addressable_data(0)
    if isinstance(x, jax.Array) and is_key(x):
        x = jax.random.key_data(x)
    # the gradient of integers, which holds no numbers
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return 0
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


class EqualLeaf(NamedTuple):
    """An array that must be equal on the ranks of each group along an axis."""

    name: str  # such as "['w']"
    value: ArrayLike | PerRank
    axis: Axis = AXIS


class _Sum(NamedTuple):
    """What is compared of a leaf."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    def __str__(self) -> str:
        return f"leaf {self.name}: {self.dtype}{list(self.shape)}"


def check_equal_leaves(backend: Backend, function: str, leaves: Sequence[EqualLeaf]) -> None:
    """Raise a RankMismatchError on all ranks, with the leaf and the ranks, unless every leaf is equal on its groups.

    In traced code there are no values to compare, and nothing happens.

    **Collective:** every rank calls it, with leaves of the same names, shapes, dtypes and axes.
    **Communication:** 16 bytes; where the ranks differ, a checksum for each leaf.
    """
    if backend.place.size == 1 or _jaxcompat.tracing():
        return
    if any(isinstance(leaf.value, jax.core.Tracer) for leaf in leaves):
        return
    if backend.simulates:
        each = [[_sum(leaf, rank) for leaf in leaves] for rank in range(backend.place.size)]
        _refuse_difference(backend, function, leaves, each)
        return
    mine = [_sum(leaf, 0) for leaf in leaves]
    statement = Statement(fingerprint_of(f"{function} {[tuple(one) for one in mine]}"), function)
    smallest, largest = backend.extremes(*statement)
    if smallest == largest:
        return
    # All ranks get here, those that have called something else with their own sides.
    details = {"given": [*map(str, mine)], "checksums": [str(one.checksum) for one in mine]}
    sides = gather_sides(cast(ProcessGroup, backend), statement, details)
    if (
        len(
            {
                (title, tuple(lines["given"]))
                for (_, title, *_), lines, _ in sides
                if "given" in lines
            }
        )
        > 1
    ):
        raise mismatch_of(sides)
    if any("checksums" not in lines for _, lines, _ in sides):
        raise mismatch_of(sides)
    of_ranks = [[int(number) for number in lines["checksums"]] for _, lines, _ in sides]
    each = [
        [one._replace(checksum=s) for one, s in zip(mine, sums, strict=True)] for sums in of_ranks
    ]
    _refuse_difference(backend, function, leaves, each)


def _sum(leaf: EqualLeaf, rank: int) -> _Sum:
    x = leaf.value[rank] if isinstance(leaf.value, PerRank) else leaf.value
    typed = x if isinstance(x, jax.Array) else np.asarray(x)
    return _Sum(leaf.name, str(typed.dtype), typed.shape, checksum(x))


def _refuse_difference(
    backend: Backend, function: str, leaves: Sequence[EqualLeaf], each: Sequence[Sequence[_Sum]]
) -> None:
    """Raise for the first leaf that differs within a group of its axis."""
    for i, leaf in enumerate(leaves):
        for group in groups_along(backend.axes, names(leaf.axis)):
            sums = [each[rank][i].checksum for rank in group]
            if len(set(sums)) == 1:
                continue
            usual = max(sums, key=sums.count)
            others = [rank for rank, number in zip(group, sums, strict=True) if number != usual]
            rest = [rank for rank in group if rank not in others]
            along = "" if leaf.axis == AXIS else f" along axis {leaf.axis!r}"
            raise RankMismatchError(
                f"{function}: leaf {leaf.name} ({each[group[0]][i].dtype} "
                f"{list(each[group[0]][i].shape)}) has other values on "
                f"{in_words(others)} than on {in_words(rest)}{along}, and each rank would keep its "
                "part of another array. Make "
                "it equal before the call, with jaxmpi.synchronize, or restore it on every rank."
            )
