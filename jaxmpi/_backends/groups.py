"""Groups of ranks: those along named axes.

Rank r has its coordinates in row-major order: the last axis is the fastest, and stays within a node
where it can.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from jaxmpi._axis import AXIS

__all__ = ["Groups", "coordinates", "described", "groups_along", "named_groups", "position"]


class Groups(tuple[tuple[int, ...], ...]):
    """Ranks of each group, as in JAX's `axis_index_groups`, with a name for people."""

    name: str = ""

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], name: str = "") -> "Groups":
        """Return these groups, in the order of their first ranks."""
        made = cls(sorted(tuple(map(int, group)) for group in groups))
        made.name = name
        return made


def described(groups: tuple[tuple[int, ...], ...]) -> str:
    """Text for users: "island" or "ranks [0, 2], [1, 3]"."""
    name = getattr(groups, "name", "")
    return name or f"ranks {', '.join(str(list(group)) for group in groups)}"


def groups_along(axes: Mapping[str, int], names: Sequence[str]) -> Groups:
    """Return the groups of ranks that differ only in their coordinates along `names`.

    Ranks within a group are in the order of these names.

    Args:
      axes: of the backend; without names beside AXIS, that is the only one.
      names: of axes, each once.
    """
    named = {name: size for name, size in axes.items() if name != AXIS}
    ranks = np.arange(axes[AXIS])
    if tuple(names) == (AXIS,):
        return Groups.of([ranks.tolist()], AXIS)
    order = [*named]
    grid = ranks.reshape([*named.values()])
    others = [i for i, name in enumerate(order) if name not in names]
    along = [order.index(name) for name in names]
    rows = grid.transpose([*others, *along]).reshape(
        -1, int(np.prod([named[name] for name in names]))
    )
    return Groups.of(rows.tolist(), ", ".join(names))


def named_groups(axes: Mapping[str, int]) -> Iterator[Groups]:
    """Yield the groups along one or more axes, each once, but for those of one rank and of all."""
    names = [name for name, size in axes.items() if name != AXIS and size > 1]
    for count in range(1, len(names)):
        for some in combinations(names, count):
            yield groups_along(axes, some)


def coordinates(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return the coordinates of a rank along the axes other than AXIS."""
    named = {name: size for name, size in axes.items() if name != AXIS}
    return (
        dict(zip(named, map(int, np.unravel_index(rank, [*named.values()])), strict=True))
        if named
        else {}
    )


def position(groups: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """Return the index of a rank's group, and the rank's index in it."""
    return next((i, group.index(rank)) for i, group in enumerate(groups) if rank in group)
