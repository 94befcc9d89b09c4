"""Comparison of values that must be equal on all ranks, by checksums of their bytes.

With JAXMPI_CHECK=1, the arguments and outputs of every call of a step are compared, which makes a
step many times slower: it finds out when and where replicas diverge.

Arrays are also compared before each rank keeps its shard of them. If the ranks held two different
models, the shards would form a third one, which is equal on all ranks, so that nothing finds the
difference later.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends import extension
from jaxmpi._backends.base import fingerprint_of
from jaxmpi._backends.groups import groups_along
from jaxmpi._backends.interface import Ranks
from jaxmpi._backends.one_process import PerRank
from jaxmpi._consistency.compare import gather_reports
from jaxmpi._consistency.mismatch import (
    Call,
    CallDetails,
    Report,
    facts_of,
    in_words,
    mismatch_of,
    outliers,
    ranks_have,
)
from jaxmpi._errors import MPIError, RankMismatchError
from jaxmpi._job.process import settings
from jaxmpi._leaves import is_key

__all__ = [
    "EqualLeaf",
    "check_equal_leaves",
    "check_equal_values",
    "checksum",
    "first_difference",
    "wanted",
]


# Checksums

WORDS = 16384  # of 64 bits in a block: two arrays of so many words stay in a core's cache
SHIFT = 29
BLOCK_FACTOR = 0x9E3779B97F4A7C15  # odd: multiplication by it loses no bit
MASK = (1 << 64) - 1


def checksum(x: ArrayLike) -> int:
    """Return a checksum of 64 bits of the bytes of an array, at the speed of memory.

    Of a reference, it is the checksum of the array that is in it.

    With words x_i of 64 bits, odd factors w_i and all sums modulo 2^64,

        y_i = x_i xor (x_i >> 29)        h_b = sum_i w_i y_i over a block of WORDS
        checksum = sum_b F^(n-b) h_b     over n blocks, for an odd F

    One bit that differs changes y_i by at most two bits, h_b by w_i times an odd multiple of a
    power of two, and so the checksum. Words that change places change it, as each place has another
    factor; the shift keeps two words that differ in their high bits only from having a difference
    of many low zeros, with which equal low bits of two factors would do.
    """
    if _jaxcompat.is_reference(getattr(x, "aval", None)):
        x = x[...]
    if isinstance(x, jax.Array) and not x.is_fully_addressable:  # a global one of the xla backend
        x = x.addressable_data(0)
    if isinstance(x, jax.Array) and is_key(x):
        x = jax.random.key_data(x)
    # the gradient of integers holds no numbers
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return 0
    contents = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    whole = contents.size // 8 * 8
    total = _sum_of_words(contents[:whole].view(np.uint64), contents.size | 1)
    if whole < contents.size:
        last = int.from_bytes(contents[whole:].tobytes(), "little")
        total = _sum_of_words(np.array([last], np.uint64), total)
    return total


def _sum_of_words(words: np.ndarray, total: int) -> int:
    """Return the checksum of `[n]` uint64 words after those that have led to `total`."""
    if words.size == 0:
        return total
    factors = _factors()
    if (native := _native()) is not None:
        return native.sum_of_words(
            words.ctypes.data, words.size, factors.ctypes.data, WORDS, SHIFT, BLOCK_FACTOR, total
        )
    mixed = np.empty(min(WORDS, words.size), np.uint64)
    for start in range(0, words.size, WORDS):
        block = words[start : start + WORDS]
        y = mixed[: block.size]
        np.right_shift(block, np.uint64(SHIFT), out=y)
        np.bitwise_xor(block, y, out=y)
        np.multiply(y, factors[: block.size], out=y)
        total = (total * BLOCK_FACTOR + int(np.add.reduce(y))) & MASK
    return total


@cache
def _native() -> extension.Extension | None:
    """Return the extension, which takes half of NumPy's time; None where it does not load."""
    try:
        return extension.load()
    except (ImportError, MPIError):
        return None


@cache
def _factors() -> np.ndarray:
    """Return odd pseudorandom numbers, `[WORDS]` uint64: splitmix64 of 1, 2, 3, ..."""
    z = np.arange(1, WORDS + 1, dtype=np.uint64) * np.uint64(BLOCK_FACTOR)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def first_difference(everyone: Sequence[Mapping[str, int]]) -> tuple[str, list[int]] | None:
    """Return the first name whose checksum differs, and the ranks that differ; None if all agree.

    Args:
      everyone: for each rank, the checksums of its arrays by their names.
    """
    for name in everyone[0]:
        differ = outliers([of_rank.get(name) for of_rank in everyone])
        if differ:
            return name, differ
    return None


# JAXMPI_CHECK=1


def wanted() -> bool:
    """Return whether JAXMPI_CHECK asks for the comparison of every call."""
    return settings.get("JAXMPI_CHECK") == "1"


def check_equal_values(
    backend: Ranks,
    title: str,
    names: Sequence[str],
    leaves: Sequence[ArrayLike],
    equal: Sequence[bool],
) -> None:
    """Raise a RankMismatchError on all ranks for the first array that should be equal and is not.

    Args:
      backend: the ranks.
      title: the name of the step.
      names: the names of the arrays.
      leaves: the arrays.
      equal: which of them should be equal on all ranks.
    """
    sums = {}
    for name, x, same in zip(names, leaves, equal, strict=True):
        if same:
            sums[name] = checksum(x)
    difference = first_difference(backend.allgather_object(sums))
    if difference is not None:
        name, ranks = difference
        raise RankMismatchError(
            f"{title}: {name} is not equal on all ranks: {ranks_have(ranks)} other values "
            "(JAXMPI_CHECK).",
            advice="Synchronize what is different from the start with jaxmpi.synchronize, and "
            "look for what changes it on one rank alone.",
            function=title,
            leaf=name,
            ranks=ranks,
        )


# before each rank keeps its shard


class EqualLeaf(NamedTuple):
    """An array that must be equal on the ranks of each group along an axis."""

    name: str  # such as "['w']"
    value: ArrayLike | PerRank
    axis: Axis = AXIS


class _Sum(NamedTuple):
    """One leaf as the ranks compare it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    def __str__(self) -> str:
        return f"leaf {self.name}: {self.dtype}{list(self.shape)}"


class _Sums(NamedTuple):
    """All leaves of one rank, in their order: the facts of its report."""

    leaves: Sequence[_Sum]


def check_equal_leaves(backend: Ranks, function: str, leaves: Sequence[EqualLeaf]) -> None:
    """Raise a RankMismatchError on all ranks unless every leaf is equal within its groups.

    It names the leaf and the ranks. In traced code there are no values to compare, and nothing
    happens.

    **Collective:** every rank calls it, with leaves of the same names, shapes, dtypes and axes.
    **Communication:** 16 bytes; where the ranks differ, a checksum for each leaf.
    """
    if backend.place.size == 1 or _jaxcompat.tracing():
        return
    if any(isinstance(leaf.value, jax.core.Tracer) for leaf in leaves):
        return
    if len(backend.ranks_here) == backend.place.size:
        each = [[_sum(leaf, rank) for leaf in leaves] for rank in range(backend.place.size)]
        _refuse_difference(backend, function, leaves, each)
        return
    # One fingerprint of all checksums: mostly, that is all that is sent.
    mine = [_sum(leaf, 0) for leaf in leaves]
    call = Call(fingerprint_of(f"{function} {[tuple(one) for one in mine]}"), function)
    smallest, largest = backend.extremes(*call)
    if smallest == largest:
        return
    # All ranks get here; those that have called something else report that.
    details = CallDetails(parameters=[str(one) for one in mine])
    reports = gather_reports(backend, Report(call, details, facts=_Sums(mine)))
    everyone = facts_of(reports, _Sums)
    calls = {(report.call.title, tuple(report.details.parameters)) for report in reports}
    if everyone is None or len(calls) > 1:
        raise mismatch_of(reports)
    # All ranks compare the same leaves, whose values differ.
    _refuse_difference(backend, function, leaves, [sums.leaves for sums in everyone])


def _sum(leaf: EqualLeaf, rank: int) -> _Sum:
    x = leaf.value[rank] if isinstance(leaf.value, PerRank) else leaf.value
    typed = x if isinstance(x, jax.Array) else np.asarray(x)
    return _Sum(leaf.name, str(typed.dtype), typed.shape, checksum(x))


def _refuse_difference(
    backend: Ranks, function: str, leaves: Sequence[EqualLeaf], each: Sequence[Sequence[_Sum]]
) -> None:
    """Raise for the first leaf that differs within a group along its axis."""
    for i, leaf in enumerate(leaves):
        for group in groups_along(backend.axes, names(leaf.axis)):
            differ = [group[k] for k in outliers([each[rank][i].checksum for rank in group])]
            if not differ:
                continue
            rest = [rank for rank in group if rank not in differ]
            along = "" if leaf.axis == AXIS else f" along axis {leaf.axis!r}"
            raise RankMismatchError(
                f"{function}: leaf {leaf.name} ({each[group[0]][i].dtype} "
                f"{list(each[group[0]][i].shape)}) has other values on {in_words(differ)} than on "
                f"{in_words(rest)}{along}, and each rank would keep its part of another array.",
                advice="Make it equal before the call, with jaxmpi.synchronize, or restore it on "
                "every rank.",
                function=function,
                leaf=leaf.name,
                ranks=differ,
            )
