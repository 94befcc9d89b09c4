"""Bucketing: group leaves into messages, by arithmetic on shapes without arrays.

Every collective sees a leaf as a matrix of columns, `[rows, columns]`: one row for what a rank
sends to all, `size` rows for what it sends to each. Leaves of one dtype are laid side by side as
columns, so packing, splitting and unpacking are the same for all collectives.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["MAX_ITEMS", "SMALL_BYTES", "Piece", "messages"]

SMALL_BYTES = 64 * 1024  # below this a leaf shares a message: latency costs more than the copy
MAX_ITEMS = 2**30  # per message and rank: MPI counts are C ints


class Piece(NamedTuple):
    """Columns `start` to `stop` of leaf number `leaf`."""

    leaf: int
    start: int
    stop: int


def messages(
    columns: Sequence[int],
    itemsize: int,
    *,
    small_bytes: int = SMALL_BYTES,
    max_items: int = MAX_ITEMS,
) -> list[list[Piece]]:
    """Group the leaves of one dtype into messages.

    Small leaves are packed, in order, until a message holds `small_bytes`; a larger leaf travels
    alone and uncopied, in pieces of at most `max_items` columns. Empty leaves travel in no message.

    >>> messages([2, 100_000, 3, 0], itemsize=4)
    [[Piece(leaf=1, start=0, stop=100000)], [Piece(leaf=0, start=0, stop=2), Piece(leaf=2, start=0,
    stop=3)]]
    """
    alone: list[list[Piece]] = []
    packed: list[list[Piece]] = []
    packed_bytes = 0
    for leaf, count in enumerate(columns):
        if count * itemsize >= small_bytes or count > max_items:
            alone.extend([piece] for piece in _split(leaf, count, max_items))
        elif count:
            if not packed or packed_bytes + count * itemsize > small_bytes:
                packed.append([])
                packed_bytes = 0
            packed[-1].append(Piece(leaf, 0, count))
            packed_bytes += count * itemsize
    return alone + packed


def _split(leaf: int, count: int, max_items: int) -> Iterator[Piece]:
    for start in range(0, count, max_items):
        yield Piece(leaf, start, min(start + max_items, count))
