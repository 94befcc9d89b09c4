"""What a rank gets of a leaf that any number of ranks have saved: the shards are joined, and cut anew."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from jaxmpi._backends.groups import position
from jaxmpi._checkpoint.manifest import Leaf, LeafValue
from jaxmpi._errors import CheckpointRankCountError
from jaxmpi._optim.shards import shard_shape

__all__ = ["Reader", "bits", "part_of"]

Reader = Callable[[Leaf, int], LeafValue]  # what a rank has of a leaf


def part_of(leaf: Leaf, rank: int, size: int, saved: Leaf, ranks: int, read: Reader) -> LeafValue:
    """What rank `rank` of `size` has of a leaf that `ranks` ranks have saved."""
    same = (saved.part, saved.stacked, ranks) == (leaf.part, leaf.stacked, size) and leaf.part != "all"
    if same and saved.groups(ranks) == leaf.groups(size):
        return read(saved, rank)
    wanted = f"{leaf} on {size} rank{'s' if size > 1 else ''}"
    if leaf.part != "shard":
        return _whole(saved, ranks, read, wanted)
    of = leaf.shape[leaf.stacked :]  # each array of a stack is cut by itself
    columns, place = prod(shard_shape(of, leaf.shards(size))), position(leaf.groups(size), rank)[1]
    start, stop = columns * place, columns * (place + 1)
    if saved.part == "shard" and not saved.axis and saved.stacked == leaf.stacked:  # only what overlaps
        each = prod(shard_shape(of, ranks))
        first = min(start // each, ranks - 1)
        arrays = _arrays(saved, [read(saved, r) for r in range(first, max(first + 1, min(-(-stop // each), ranks)))])
        arrays = arrays[:, : max(0, prod(of) - first * each)]
        start, stop = start - first * each, stop - first * each
    else:
        arrays = _whole(saved, ranks, read, wanted).reshape(prod(leaf.shape[: leaf.stacked]), -1)
    piece = arrays[:, start:stop]
    out = np.zeros((len(piece), columns), piece.dtype)
    out[:, : piece.shape[1]] = piece
    return out.reshape(leaf.stored_shape(size))


def _whole(leaf: Leaf, ranks: int, read: Reader, wanted: str) -> LeafValue:
    """A leaf that `ranks` ranks have saved; raises a CheckpointError where each, or each group of them, has its own.

    `wanted` is what it is to be restored as, for the error.
    """
    if leaf.part == "all":
        return read(leaf, 0)
    if leaf.axis:
        return _of_equal_groups(leaf, ranks, read, wanted)
    rows = [read(leaf, rank) for rank in range(ranks)]
    if leaf.part == "shard":
        return _joined(leaf, rows)
    if any(bits(row) != bits(rows[0]) for row in rows):
        raise CheckpointRankCountError(
            f"leaf {leaf.name} is each rank's own and was saved by {ranks} ranks, whose values differ: only as many ranks can "
            f"restore it, in a PerRankState. Go on with {ranks} ranks, or leave the PerRankState out with "
            "jaxmpi.PerRankState(None) in its place in `like` (an nnx variable with the value None) and make it anew. What "
            "accumulate holds is equal on all ranks after each of its windows, so save there; what the inner transform of "
            "local_sgd holds never is."
        )
    return rows[0]


def _of_equal_groups(leaf: Leaf, ranks: int, read: Reader, wanted: str) -> LeafValue:
    """A leaf that each group of ranks has saved."""
    rows = [[read(leaf, rank) for rank in group] for group in leaf.groups(ranks)]
    wholes = [_joined(leaf, of_group) if leaf.part == "shard" else of_group[0] for of_group in rows]
    if any(bits(one) != bits(wholes[0]) for one in wholes):
        raise CheckpointRankCountError(
            f"leaf {leaf.name} was saved as {leaf} by {ranks} ranks, whose groups along this axis have different values, and "
            f"`like` has {wanted}: only {ranks} ranks with the same axes can restore it, into a leaf over this axis. Go on "
            f"with {ranks} ranks and jaxmpi.init(axes={dict(leaf.axes)}), or save where the groups have equal values."
        )
    return wholes[0]


def _joined(leaf: Leaf, rows: Sequence[np.ndarray]) -> np.ndarray:
    """The array of all shards."""
    return _arrays(leaf, rows)[:, : prod(leaf.shape[leaf.stacked :])].reshape(leaf.shape)


def _arrays(leaf: Leaf, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Shards of neighbors, one behind the other: `[arrays of the stack, numbers]`."""
    return np.concatenate([row.reshape(prod(leaf.shape[: leaf.stacked]), -1) for row in rows], axis=1)


def bits(value: LeafValue) -> bytes:
    """What is equal where two values are."""
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
