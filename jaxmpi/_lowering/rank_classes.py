"""On which ranks a value is the same: classes of ranks, as far as they follow from a program.

A value has a number for each rank, equal where the value is known to be: `(0, 0, 1, 1)` after a sum
over "member" of islands of two. `ALL` is a value that is equal on all ranks, `OWN` one of which
nothing is known.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

from jax.extend.core import JaxprEqn

from jaxmpi._lowering.classify import REDUCE

__all__ = ["ALL", "EQUALIZING", "OWN", "Classes", "after_collective", "joined"]

Classes: TypeAlias = tuple[int, ...] | None

ALL: Classes = ()
OWN: Classes = None
EQUALIZING = (*REDUCE, "all_gather")


def joined(values: Iterable[Classes]) -> Classes:
    """Return the class of a value that is computed from all of these."""
    known = [value for value in values if value != ALL]
    if OWN in known or not known:
        return OWN if known else ALL
    return (
        _numbered([*zip(*dict.fromkeys(known), strict=True)]) if len(set(known)) > 1 else known[0]
    )


def after_collective(eqn: JaxprEqn, x: Classes) -> Classes:
    """Return the class of the result of a collective, given the class of its operand."""
    name, groups = eqn.primitive.name, eqn.params.get("axis_index_groups")
    if name not in EQUALIZING:
        return OWN
    if not groups or x == ALL:
        return ALL
    before = range(sum(map(len, groups))) if x is None else x
    seen: dict[int, tuple[int, ...]] = {}  # what the group of each rank puts in
    for group in groups:
        part = [before[rank] for rank in group]
        seen.update(dict.fromkeys(group, tuple(sorted(part) if name in REDUCE else part)))
    return _numbered([seen[rank] for rank in range(len(before))])


def _numbered(keys: Sequence[Hashable]) -> Classes:
    numbers: dict[Hashable, int] = {}
    found = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
    return ALL if len(numbers) == 1 else OWN if len(numbers) == len(keys) else found
