"""Each rank's part of the data, the same global batches for every number of ranks, and a random stream per rank.

    part(N, r, p) = [⌊r·N/p⌋, ⌊(r+1)·N/p⌋)          N items over p ranks: contiguous, in rank order, sizes within 1
    order         = 0..N-1, or a permutation drawn from Philox(seed, epoch)
    step k        = order[lo : hi],  lo = start + k·B,  hi = min(lo + B, N)
    rank r's rows = order[lo + part(hi - lo, r, p)]

Only the last line knows the ranks, so a run on p ranks sees the batches of a run on one, and one integer, `hi`, says
where an epoch was left, for any p and any B.
"""

import multiprocessing
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from jaxmpi import _axis
from jaxmpi._axis import AXIS, Axis
from jaxmpi._backends.base import Backend
from jaxmpi._backends.groups import groups_along, position
from jaxmpi._backends.simulate import PerRank
from jaxmpi._collectives.arrays import check_axis
from jaxmpi._consistency import compare
from jaxmpi._data.sampler import Batches, Shard
from jaxmpi._data.sources import RandomAccess
from jaxmpi._leaves import PyTree
from jaxmpi._world import session

__all__ = ["Batches", "Shard", "batches", "rank_key", "shard"]


def shard(data: PyTree | RandomAccess, *, axis: Axis = AXIS) -> Shard:
    """Return this rank's part of the data, as a sequence.

    part(N, r, p) = [⌊r·N/p⌋, ⌊(r+1)·N/p⌋): every sample on exactly one rank, in order, for every N and p; a part can be
    empty. For training use `batches`, which gives every rank the same number of steps.

    **Collective:** no; but the parts fit together only if every rank has the same data.
    **Communication:** none: nothing is sent, and NumPy arrays are not copied.

    Args:
        data: A pytree of arrays that share their leading axis (dict, tuple, NamedTuple, dataclass or a bare array; a
            sample is the pytree of their rows), or anything with `__len__` and `__getitem__` (a list of samples, a
            torch, Hugging Face or Grain source).
        axis: The axis, or axes, of the ranks that the data is split over, as in `tree_allreduce`; ranks that differ along
            others only have the same part.

    Returns:
        A sequence; a slice of it is a pytree of sliced arrays, or a list of samples.

    Raises:
        TypeError: `data` is neither, is a list of arrays of equal lengths, which may be columns, or is a `Shard` already.
        ValueError: The leaves differ in length.

    >>> import jaxmpi, numpy as np
    >>> part = jaxmpi.shard({"x": np.arange(18.0).reshape(9, 2), "y": np.arange(9) % 4})
    >>> len(part), part[-1]["x"], part[2:5]["y"]
    (9, array([16., 17.]), array([2, 3, 0]))
    """
    backend = session.current("shard")
    if backend.simulates:
        raise RuntimeError("shard: simulated ranks take one step together, and their shards may differ in length. Use batches.")
    rank, size = _along("shard", axis, backend, backend.place.rank)
    return Shard(data, rank=rank, size=size)


def batches(
    data: PyTree | RandomAccess,
    batch_size: int,
    *,
    seed: int | None = None,
    epoch: int = 0,
    start: int = 0,
    remainder: Literal["drop", "mask"] = "drop",
    axis: Axis = AXIS,
) -> "Batches | StackedBatches":
    """Iterate over this rank's rows of every global batch of one epoch.

    step k = order[lo : hi], lo = start + k·B, hi = min(lo + B, N); rank r gets the rows part(hi - lo, r, p) of it.

    Every rank takes the same number of steps, with the same shapes in every step. Where an iteration begins on the main thread,
    the ranks compare their arguments and the length of the data; `prefetch` does it there, too. On other threads, and in the
    processes of a loader, nothing is compared.

    **Collective:** every rank iterates, with the same arguments; `len` and `position` are this rank's own affair.
    **Communication:** 16 bytes for an iteration.

    Args:
        data: The whole data, as for `shard`. Arrays are gathered by row; samples come from `__getitems__` where there
            is one, else one by one, and are stacked leaf by leaf as NumPy arrays (a list in a sample is one array).
        batch_size: B, the samples per step over all ranks.
        seed: None keeps the order of the data; an int shuffles it by (seed, epoch, N), whatever the number of ranks.
        epoch: The number of the epoch, from 0: each has a permutation of its own.
        start: Where to begin: the `position` of an earlier run, on any number of ranks and with any batch size.
        remainder: "drop" leaves the last incomplete batch out and needs a batch size that the ranks divide. "mask"
            takes every sample exactly once: it yields `(batch, mask)` of ⌈B/p⌉ rows each, where rows with a False mask
            repeat a sample and do not count.
        axis: As for `shard`: the ranks along it share each global batch.

    Returns:
        An iterable whose `len` is the number of steps from `start`, and whose `position` says where it is.

    Warns:
        UserWarning: On rank 0, when an iteration begins that has no step.

    Raises:
        RankMismatchError: On every rank, when an iteration begins, if their arguments differ.
        TypeError: As for `shard`, or an argument is not an int.
        ValueError: An argument is out of its range, the ranks do not divide `batch_size`, or samples do not stack.

    >>> import jaxmpi, numpy as np
    >>> epoch = jaxmpi.batches(np.arange(10.0), 4, seed=0)
    >>> [(batch.shape, epoch.position) for batch in epoch]
    [((4,), 4), ((4,), 8)]
    >>> [float(batch[mask].sum()) for batch, mask in jaxmpi.batches(np.arange(10.0), 4, remainder="mask")]
    [6.0, 22.0, 17.0]
    """
    backend = session.current("batches")
    rank, size = _along("batches", axis, backend, backend.place.rank)
    options: dict[str, Any] = {"seed": seed, "epoch": epoch, "start": start, "remainder": remainder}
    if backend.simulates:
        places = [_along("batches", axis, backend, r)[0] for r in range(backend.place.size)]
        return StackedBatches([Batches(data, batch_size, rank=place, size=size, **options) for place in places])
    made = Batches(data, batch_size, rank=rank, size=size, **options)
    if backend.place.size > 1:
        arguments = {"samples": made.samples, "batch_size": batch_size, **options}
        made.agree = partial(_agree, backend, arguments if axis == AXIS else {**arguments, "axis": axis})
    return made


def _along(function: str, axis: Axis, backend: Backend, rank: int) -> tuple[int, int]:
    """A rank's number along an axis, and how many there are."""
    check_axis(function, axis, backend)
    groups = groups_along(backend.axes, _axis.names(axis))
    return position(groups, rank)[1], len(groups[0])


def rank_key(key: jax.Array) -> jax.Array | Any:
    """Derive this rank's own PRNG key.

    key_r = fold_in(key, r)

    Use it for what must differ between the ranks: dropout, noise, augmentation. Use the plain key for what must be the
    same on all of them: initial parameters, or a choice that all ranks make together. Works inside a traced step.

    **Collective:** no; every rank should pass the same key.
    **Communication:** none: nothing is sent.

    Args:
        key: A key from `jax.random.key` or `jax.random.PRNGKey`.

    Returns:
        A key of the same kind; on one rank, too, it is not `key` itself.

    >>> import jax, jaxmpi
    >>> key = jax.random.key(0)
    >>> bool(jaxmpi.rank_key(key) == jax.random.fold_in(key, jaxmpi.rank()))
    True
    """
    backend = session.current("rank_key")  # before init the error names this function, not rank
    if backend.simulates and not _axis.bound():
        return PerRank(jax.vmap(partial(jax.random.fold_in, key))(np.arange(backend.place.size)))
    return jax.random.fold_in(key, session.rank())


class StackedBatches(Iterable[PyTree]):
    """The batches of all simulated ranks side by side, as `PerRank` arrays."""

    def __init__(self, ranks: Sequence[Batches]) -> None:
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._ranks[0])

    @property
    def position(self) -> int:
        """That of every rank."""
        return self._ranks[0].position

    def __iter__(self) -> Iterator[PyTree]:
        for parts in zip(*self._ranks, strict=True):
            yield jax.tree.map(lambda *xs: PerRank(np.stack(xs)), *parts)


def _agree(backend: Backend, arguments: Mapping[str, object]) -> None:
    """Compare them, where collectives may be called: on the main thread of the rank itself."""
    if threading.current_thread() is threading.main_thread() and multiprocessing.parent_process() is None:
        lines = [f"batches {name}={value}" for name, value in arguments.items()]
        compare.check_consistent(backend, compare.Statement.of("batches", "\n".join(lines)), lambda: {"given": lines})
