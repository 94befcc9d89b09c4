"""Restore: the newest whole checkpoint, whether it fits a tree, and the values of each rank.

The ranks may be more or fewer than those that have saved: shards are joined, and cut anew.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi import _jaxcompat
from jaxmpi._backends.groups import position
from jaxmpi._backends.interface import Ranks, long_operation
from jaxmpi._checkpoint import folders, memory
from jaxmpi._checkpoint.agreement import run_on_all_or_raise, run_on_rank_0_or_raise
from jaxmpi._checkpoint.array_files import PIECE_BYTES, Archive
from jaxmpi._checkpoint.manifest import Leaf, LeafValue, Manifest, dtype_of
from jaxmpi._errors import CheckpointError, CheckpointRankCountError
from jaxmpi._optim.sharded_array import shard_shape

__all__ = ["check_common", "difference", "newest", "only_common", "read"]

NAMES_SHOWN = 8  # in a message

Reader = Callable[[Leaf, int], LeafValue]  # reads what a rank has saved of a leaf


# the newest checkpoint


def newest(
    backend: Ranks, directory: Path, step: int | None
) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    """Return the newest whole checkpoint or None, and the errors of damaged ones, on all ranks.

    It may be in memory, if all ranks are on the host that has it there. Rank 0 looks; it warns of
    each damaged checkpoint.

    **Communication:** a broadcast of the folder in memory that rank 0 has, an allgather of whether
    the ranks have it if there is one, and a broadcast of the manifest or the error.

    Args:
      backend: the ranks.
      directory: of the checkpoints of a run; a relative path is one of rank 0's.
      step: of the checkpoint; any by default.
    """

    def in_memory() -> str | None:
        folder = memory.existing(directory.absolute())
        return None if folder is None else folder.name

    name = run_on_rank_0_or_raise(backend, in_memory)
    # Its name has a random number, so the folder of this name is rank 0's.
    everywhere = name is not None and all(backend.allgather_object(memory.is_here(name)))

    def look() -> tuple[tuple[Path, Manifest] | None, list[str]]:
        directories = [directory.absolute()]
        if name is not None and everywhere:
            directories.append(memory.MEMORY / name)
        with long_operation(backend, f"reading the checkpoints in {directory}"):
            whole, errors = folders.newest(directories, step)
        for error in errors:
            _jaxcompat.warn(f"a checkpoint is passed over: {error}")
        return whole, errors

    return run_on_rank_0_or_raise(backend, look)


# does it fit


class Difference(NamedTuple):
    """A leaf that differs between a checkpoint and `like`.

    Attributes:
      leaf: its name.
      what: how it differs, as a clause that begins with the leaf.
    """

    leaf: str
    what: str


def difference(
    saved: Sequence[Leaf], wanted: Sequence[Leaf], omitted: Sequence[str]
) -> Difference | None:
    """Return the first leaf that differs between a checkpoint and `like`; None if there is none.

    Args:
      saved: the leaves of the checkpoint.
      wanted: the leaves of `like`.
      omitted: names of nodes of `like` that ask for nothing: per-rank leaves below them may differ.
    """
    saved_by_name = {leaf.name: leaf for leaf in saved}
    wanted_by_name = {leaf.name: leaf for leaf in wanted}
    for name in [*saved_by_name, *wanted_by_name]:
        there, here = saved_by_name.get(name), wanted_by_name.get(name)
        if there is None:
            return Difference(name, f"leaf {name} ({here}) of `like` is not in it")
        if here is None:
            below = any(_is_below(name, node) for node in omitted)
            if not (there.layout == "per-rank" and below):
                return Difference(name, f"leaf {name} ({there}) is in it, and not in `like`")
        elif not _fits(there, here):
            return Difference(name, f"leaf {name} is {there} in it, and {here} in `like`")
    return None


def _is_below(name: str, node: str) -> bool:
    """Return whether a leaf has the name of a node, or a name that goes on from it."""
    return name == node or (name.startswith(node) and name[len(node)] in ".[")


def _fits(saved: Leaf, wanted: Leaf) -> bool:
    """Return whether a leaf can be restored as another: unchanged, or a scalar as a number."""
    if (saved.plain, saved.dtype, saved.shape) == (wanted.plain, wanted.dtype, wanted.shape):
        return True
    scalars = saved.plain != wanted.plain and saved.shape == wanted.shape == ()
    return scalars and _number_type(saved) == _number_type(wanted)


def _number_type(leaf: Leaf) -> str:
    """Return "bool", "int" or "float" for a number; the dtype for all else."""
    if leaf.plain or leaf.dtype.startswith("key"):
        return leaf.dtype
    for name, dtypes in {"bool": np.bool_, "int": jnp.integer, "float": jnp.floating}.items():
        if jnp.issubdtype(dtype_of(leaf.dtype), dtypes):
            return name
    return leaf.dtype


def only_common(
    saved: Sequence[Leaf], wanted: Sequence[Leaf]
) -> tuple[list[Leaf], list[Leaf], str]:
    """Return the leaves of a checkpoint and of `like` that both have, and a text about the rest."""
    common = {leaf.name for leaf in saved} & {leaf.name for leaf in wanted}
    texts = []
    for what, leaves in (
        ("left out of the checkpoint", saved),
        ("kept from `like`", wanted),
    ):
        names = [leaf.name for leaf in leaves if leaf.name not in common]
        if names:
            count = len(names) - NAMES_SHOWN
            more = f" and {count} more leaves" if count > 0 else ""
            texts.append(f"{what}: {', '.join(names[:NAMES_SHOWN])}{more}")
    saved = [leaf for leaf in saved if leaf.name in common]
    wanted = [leaf for leaf in wanted if leaf.name in common]
    return saved, wanted, "; ".join(texts)


def check_common(folder: Path, common: Sequence[Leaf]) -> None:
    """Raise unless the checkpoint has some leaf of `like`."""
    if not common:
        raise CheckpointError(
            f"restore: {folder} has no leaf of `like`.",
            advice="Name the leaves as they were saved.",
            path=folder,
        )


def _check_kept(folder: Path, kept: Sequence[tuple[Leaf, LeafValue]]) -> None:
    """Raise unless the leaves that stay as they are in `like` have values.

    The ranks do not compare this: some may have an array, and others a `ShapeDtypeStruct`.
    """
    for leaf, x in kept:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"restore: {folder}: leaf {leaf.name} is not in it, and `like` has only its shape.",
                advice="Pass an array that it keeps.",
                path=folder,
                leaf=leaf.name,
            )


# what each rank gets


def read(
    backend: Ranks,
    folder: Path,
    manifest: Manifest,
    pairs: list[tuple[Leaf, Leaf]],
    kept: Sequence[tuple[Leaf, LeafValue]],
) -> list[LeafValue]:
    """Read the leaves of a checkpoint.

    **Communication:** an allgather of None or the error of each rank, and the numbers of replicated
    leaves from rank 0, which alone reads them.

    Args:
      backend: the ranks.
      folder: of the checkpoint.
      manifest: of the checkpoint.
      pairs: each leaf as it was saved and as `like` wants it.
      kept: the leaves of `like` that are not read, and their values.

    Returns:
      What this process has of each leaf: an array, stacked where simulated ranks differ, or a
      Python number or text.
    """
    place = backend.place
    sent = []
    for saved, wanted in pairs:
        sent.append(saved.layout == wanted.layout == "replicated" and saved.stored)

    def values_here() -> list[LeafValue]:
        _check_kept(folder, kept)
        values = []
        with long_operation(backend, f"reading {folder}"), _reader(folder, manifest) as reader:
            for is_sent, (saved, wanted) in zip(sent, pairs, strict=True):
                if is_sent and place.rank:
                    values.append(_empty(saved, place.size))
                else:
                    values.append(_value(backend, wanted, saved, manifest.ranks, reader))
        return values

    values = run_on_all_or_raise(backend, values_here)
    for is_sent, x in zip(sent, values, strict=True):
        if is_sent:
            backend.broadcast_buffer(x.reshape(-1).view(np.uint8), 0)
    return values


@contextmanager
def _reader(folder: Path, manifest: Manifest) -> Iterator[Reader]:
    """Yield a function that reads what a rank has saved; each file is opened once."""
    with ExitStack() as stack:
        archives: dict[int, Archive] = {}

        def read(leaf: Leaf, rank: int) -> LeafValue:
            if leaf.plain:
                return leaf.value[rank] if leaf.layout == "per-rank" else leaf.value
            if rank not in archives:
                size, members = manifest.file_bytes[rank], manifest.members[rank]
                archives[rank] = stack.enter_context(Archive(folder, rank, size, members))
            return archives[rank].read(leaf, manifest.ranks)

        yield read


def _value(backend: Ranks, wanted: Leaf, saved: Leaf, ranks: int, read: Reader) -> LeafValue:
    """Return what this process has of a leaf that `ranks` ranks have saved."""
    size = backend.place.size
    if not saved.plain and not saved.stored:
        return _empty(wanted, size)
    here = backend.ranks_here if wanted.layout != "replicated" else [backend.place.rank]
    rows = [_fitted(saved, wanted, _of_rank(wanted, r, size, saved, ranks, read)) for r in here]
    equal = all(_same_bits(row, rows[0]) for row in rows[1:])
    return rows[0] if equal else np.stack(rows)


def _empty(leaf: Leaf, size: int) -> np.ndarray:
    """Return an array for what one of `size` ranks has of a leaf, with any numbers."""
    return np.empty(leaf.stored_shape(size), dtype_of(leaf.stored_dtype))


def _fitted(saved: Leaf, wanted: Leaf, value: LeafValue) -> LeafValue:
    """Return a value as an array, if one is wanted and a Python number was saved.

    Raises:
      CheckpointError: the dtype cannot hold the number.
    """
    if isinstance(value, np.ndarray) or wanted.plain:
        return value
    error = ""
    try:
        with np.errstate(over="ignore"):
            x = np.asarray(value, dtype_of(wanted.dtype))
        # a float that becomes infinite does not fit; one that loses digits does
        if not isinstance(value, float) or np.isfinite(float(x)) == np.isfinite(value):
            return x
    except (OverflowError, ValueError) as caught:
        error = f": {caught}"
    raise CheckpointError(
        f"leaf {saved.name} was saved as {value}, which {wanted} cannot hold{error}.",
        advice="Take a wider dtype.",
        leaf=saved.name,
    )


def _same_bits(a: LeafValue, b: LeafValue) -> bool:
    """Return whether two values of a leaf are equal, NaN and the sign of zero included."""
    if not isinstance(a, np.ndarray):
        return repr(a) == repr(b)
    x, y = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    # in pieces: NumPy makes an array of as many bytes as it compares
    for at in range(0, x.size, PIECE_BYTES):
        if not np.array_equal(x[at : at + PIECE_BYTES], y[at : at + PIECE_BYTES]):
            return False
    return True


# shards joined, and cut anew


def _of_rank(
    wanted: Leaf, rank: int, size: int, saved: Leaf, ranks: int, read: Reader
) -> LeafValue:
    """Return what rank `rank` of `size` gets of a leaf that `ranks` ranks have saved."""
    # 1. As it was saved, if it is laid out in the same way.
    same = (saved.layout, saved.stacked, ranks) == (wanted.layout, wanted.stacked, size)
    if same and wanted.layout != "replicated" and saved.groups(ranks) == wanted.groups(size):
        return read(saved, rank)
    description = f"{wanted} on {size} rank{'s' if size > 1 else ''}"
    if wanted.layout != "sharded":
        return _unsharded(saved, ranks, read, description)
    # 2. A shard has the numbers start to stop of the array, and zeros after its end. In a stack,
    #    each array is cut by itself.
    shape = wanted.shape[wanted.stacked :]
    columns = prod(shard_shape(shape, wanted.shard_count(size)))
    start = columns * position(wanted.groups(size), rank)[1]
    stop = start + columns
    if saved.layout == "sharded" and not saved.axis and saved.stacked == wanted.stacked:
        # 3. Of shards that were saved, only those that overlap are read: first to last - 1.
        saved_columns = prod(shard_shape(shape, ranks))
        first = min(start // saved_columns, ranks - 1)
        last = max(first + 1, min(-(-stop // saved_columns), ranks))
        arrays = _columns(saved, [read(saved, r) for r in range(first, last)])
        offset = first * saved_columns
        arrays = arrays[:, : max(0, prod(shape) - offset)]  # without the zeros after the end
    else:
        unsharded = _unsharded(saved, ranks, read, description)
        arrays, offset = unsharded.reshape(prod(wanted.shape[: wanted.stacked]), -1), 0
    piece = arrays[:, start - offset : stop - offset]
    shard = np.zeros((len(piece), columns), piece.dtype)
    shard[:, : piece.shape[1]] = piece
    return shard.reshape(wanted.stored_shape(size))


def _unsharded(leaf: Leaf, ranks: int, read: Reader, description: str) -> LeafValue:
    """Return all of a leaf that `ranks` ranks have saved.

    Args:
      leaf: as it was saved.
      ranks: that have saved it.
      read: reads what a rank has saved.
      description: what it is to be restored as, for the error.

    Raises:
      CheckpointRankCountError: ranks, or groups of ranks, have saved different values.
    """
    if leaf.layout == "replicated":
        return read(leaf, 0)
    if leaf.axis:
        return _of_equal_groups(leaf, ranks, read, description)
    if leaf.layout == "sharded":
        return _joined(leaf, [read(leaf, rank) for rank in range(ranks)])
    first = read(leaf, 0)
    if not all(_same_bits(read(leaf, rank), first) for rank in range(1, ranks)):
        raise CheckpointRankCountError(
            f"leaf {leaf.name} is each rank's own and was saved by {ranks} ranks, whose values "
            "differ: only as many ranks can restore it, in a PerRankState.",
            advice=f"Go on with {ranks} ranks, or leave the PerRankState out with "
            "jaxmpi.PerRankState(None) in its place in `like` (an nnx variable with the value "
            "None) and make it anew. What accumulate holds is equal on all ranks after each of its "
            "windows, so save there; what the inner transform of local_sgd holds never is.",
            leaf=leaf.name,
        )
    return first


def _of_equal_groups(leaf: Leaf, ranks: int, read: Reader, description: str) -> LeafValue:
    """Return all of a leaf that each group of ranks along an axis has saved, as `_unsharded`."""

    def of_group(group: Sequence[int]) -> LeafValue:
        if leaf.layout != "sharded":
            return read(leaf, group[0])
        return _joined(leaf, [read(leaf, rank) for rank in group])

    first_group, *others = leaf.groups(ranks)
    first = of_group(first_group)
    if not all(_same_bits(of_group(group), first) for group in others):
        raise CheckpointRankCountError(
            f"leaf {leaf.name} was saved as {leaf} by {ranks} ranks, whose groups along this axis "
            f"have different values, and `like` has {description}: only {ranks} ranks with the "
            "same axes can restore it, into a leaf over this axis.",
            advice=f"Go on with {ranks} ranks and jaxmpi.init(axes={dict(leaf.axes)}), or save "
            "where the groups have equal values.",
            leaf=leaf.name,
        )
    return first


def _joined(leaf: Leaf, shards: Sequence[np.ndarray]) -> np.ndarray:
    """Return the array of all shards."""
    count = prod(leaf.shape[leaf.stacked :])
    return _columns(leaf, shards)[:, :count].reshape(leaf.shape)


def _columns(leaf: Leaf, shards: Sequence[np.ndarray]) -> np.ndarray:
    """Return neighboring shards side by side: `[arrays of the stack, numbers]`."""
    stack = prod(leaf.shape[: leaf.stacked])
    return np.concatenate([shard.reshape(stack, -1) for shard in shards], axis=1)
