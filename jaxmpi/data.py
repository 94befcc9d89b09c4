"""Data of the ranks: shards, global batches that are the same for every number of ranks, and keys.

    part(N, r, p) = [⌊r·N/p⌋, ⌊(r+1)·N/p⌋)          N items over p ranks: contiguous, in rank order
    order         = 0..N-1, or a permutation drawn from Philox(seed, epoch)
    step k        = order[lo : hi],  lo = start + k·B,  hi = min(lo + B, N)
    rank r's rows = order[lo + part(hi - lo, r, p)]

The sizes of parts differ by at most 1. Only the last line knows the ranks, so a run on p ranks sees
the batches of a run on one, and two integers, the epoch and `hi`, say where the data was left, for
any p and any B.
"""

import multiprocessing
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from jaxmpi import _axis, _jaxcompat
from jaxmpi._axis import AXIS, Axis
from jaxmpi._backends.groups import groups_along, position
from jaxmpi._backends.interface import Ranks
from jaxmpi._backends.one_process import PerRank
from jaxmpi._collectives.arrays import check_axis
from jaxmpi._consistency import compare
from jaxmpi._consistency.data_order import check_same_data
from jaxmpi._consistency.findings import allowed_names, is_checked
from jaxmpi._consistency.mismatch import Call, CallDetails
from jaxmpi._data.feeds import BatchesFeed
from jaxmpi._data.fingerprint import Fingerprint, fingerprint_of_samples
from jaxmpi._data.per_rank import Exchange, Layout, PerRankBatches
from jaxmpi._data.prefetch import AHEAD_BATCHES, Prefetched, prefetch
from jaxmpi._data.sampler import Batches, Cursor, Shard, open_whole
from jaxmpi._data.sources import RandomAccess
from jaxmpi._errors import RankMismatchError
from jaxmpi._job.process.stderr import one_line
from jaxmpi._leaves import PyTree
from jaxmpi._votes import Outcome, Vote
from jaxmpi._world import session

__all__ = ["Batches", "Shard", "batches", "check_data", "per_rank_batches", "rank_key", "shard"]


def shard(
    data: PyTree | RandomAccess, *, axis: Axis = AXIS, allow: str | Sequence[str] = ()
) -> Shard:
    """Return this rank's part of the data, as a sequence.

    part(N, r, p) = [⌊r·N/p⌋, ⌊(r+1)·N/p⌋): every sample on exactly one rank, in order, for every N
    and p; a part can be empty. For training use `batches`, which gives every rank the same number
    of steps.

    The parts fit together only if every rank has the same data in the same order. So at the first
    call from a line of code, on the main thread, the ranks compare the length of the data and a few
    samples, as in `batches`.

    **Collective:** every rank calls it; with `allow="data_order"`, on other threads and in traced
    code it is local. **Communication:** 16 bytes at the first call from a line. NumPy arrays are
    not copied.

    Args:
        data: A pytree of arrays that share their leading axis (dict, tuple, NamedTuple, dataclass
            or a bare array; a sample is the pytree of their rows), or anything with `__len__` and
            `__getitem__` (a list of samples, a torch, Hugging Face or Grain source).
        axis: The axis, or axes, of the ranks that the data is split over, as in `tree_allreduce`;
            ranks that differ along others only have the same part.
        allow: "data_order" turns the comparison off.

    Returns:
        A sequence; a slice of it is a pytree of sliced arrays, or a list of samples.

    Raises:
        RankMismatchError: On every rank, if the data differ between the ranks.
        TypeError: `data` is neither, is a list of arrays of equal lengths, which may be columns, or
          is a `Shard` already.
        ValueError: The leaves differ in length; `allow` has an unknown name.

    >>> import jaxmpi, numpy as np
    >>> part = jaxmpi.shard({"x": np.arange(18.0).reshape(9, 2), "y": np.arange(9) % 4})
    >>> len(part), part[-1]["x"], part[2:5]["y"]
    (9, array([16., 17.]), array([2, 3, 0]))
    """
    backend = session.current("shard")
    backend.check_one_rank_here(
        "shard: simulated ranks take one step together, and their shards may differ in length. Use "
        "batches."
    )
    rank, size = _along("shard", axis, backend, backend.place.rank)
    is_compared = is_checked("data_order", allowed_names("shard", allow)) and size > 1
    line = _jaxcompat.called_at()
    # A script may call it for each batch: its messages would wait for the step before.
    if not is_compared or line in backend.registry.shards or not _may_communicate():
        part = Shard(data, rank=rank, size=size)
    else:
        with compare.raising_on_all(backend, "shard", sends=False):
            part = Shard(data, rank=rank, size=size)
            fingerprint = fingerprint_of_samples(part.source, None)
        arguments = [f"shard samples={len(part.source)}"]
        if axis != AXIS:
            arguments.append(f"shard axis={axis}")
        check_same_data(backend, "shard", arguments, fingerprint, _groups(backend, axis))
        backend.registry.shards.add(line)
    if not part.even:  # a loop over it is longer on some ranks
        backend.registry.uneven_shard = line
    return part


def batches(
    data: PyTree | RandomAccess,
    batch_size: int,
    *,
    seed: int | None = None,
    epoch: int = 0,
    start: int | Mapping[str, Any] = 0,
    remainder: Literal["drop", "mask"] = "drop",
    axis: Axis = AXIS,
    allow: str | Sequence[str] = (),
) -> "Batches | StackedBatches":
    """Return this rank's rows of every global batch, as an iterable of one epoch after the other.

    step k = order[lo : hi], lo = start + k·B, hi = min(lo + B, N); rank r gets the rows part(hi -
    lo, r, p) of it.

    Every rank takes the same number of steps, with the same shapes in every step.

    An iteration goes on from `state` to the end of the epoch. The first one begins at `start`; the
    one after it is the next epoch, from 0 and shuffled anew; the one after a loop that was left
    early is the rest of its epoch. What follows depends on `state` alone, so that a job that is
    started again sees what it would have seen.

    Where an iteration begins on the main thread, the ranks compare their arguments, the length of
    the data and where they are in it; `prefetch` does it there, too. On other threads, and in the
    processes of a loader, nothing is compared.

    They also compare a few samples: the first, the middle and the last one, and 29 that the seed
    selects. These are rows of NumPy arrays, memory maps and arrays of JAX, and what is in a list:
    numbers, texts, paths by their last two names, small tuples, lists and dicts, and arrays; other
    objects by their type and shape. A source with a `__getitem__` of its own is not read for that:
    use `check_data`.

    **Collective:** every rank iterates, with the same arguments; `len`, `position` and `state` are
    local. **Communication:** 16 bytes for an iteration.

    Args:
        data: The whole data, as for `shard`. Arrays are gathered by row; samples come from
            `__getitems__` where there is one, else one by one, and are stacked leaf by leaf as
            NumPy arrays (a list in a sample is one array). Of a list, each leaf has the dtype that
            NumPy gives to all samples together.
        batch_size: B, the samples per step over all ranks.
        seed: None keeps the order of the data; an int shuffles it by (seed, epoch, N), whatever the
          number of ranks.
        epoch: The number of the first epoch, from 0: each has a permutation of its own.
        start: Where to begin in it: the `position` of an earlier run, on any number of ranks and
            with any batch size. Or its `state`, which has the epoch, too.
        remainder: "drop" leaves the last incomplete batch out and needs a batch size that the ranks
            divide. "mask" takes every sample exactly once: it yields `(batch, mask)` of ⌈B/p⌉ rows
            each, where rows with a False mask repeat a sample and do not count.
        axis: As for `shard`: the ranks along it share each global batch.
        allow: "data_order" leaves the samples out of the comparison.

    Returns:
        An iterable. Its `epoch` and `position` are those of the batch in hand, its `len` is the
        number of steps of this epoch from where its iteration begins. Its `state` is a small dict
        that goes into a checkpoint: the place behind the batch in hand, which at the end of an
        epoch is the next one's start. It can be assigned.

    Warns:
        UserWarning: On rank 0, when an iteration begins that has no step.

    Raises:
        RankMismatchError: On every rank, when an iteration begins, if their arguments, states or
          samples differ.
        TypeError: As for `shard`, or an argument is not an int.
        ValueError: An argument is out of its range, the ranks do not divide `batch_size`, samples
            do not stack, a state belongs to other data or another seed, or `allow` has an unknown
            name.

    >>> import jaxmpi, numpy as np
    >>> loader = jaxmpi.batches(np.arange(10.0), 4, seed=0)
    >>> [(batch.shape, loader.position) for batch in loader]
    [((4,), 4), ((4,), 8)]
    >>> loader.state
    {'epoch': 1, 'position': 0, 'order': '10 samples shuffled by seed 0'}
    >>> loader = jaxmpi.batches(np.arange(10.0), 4, remainder="mask")
    >>> [float(batch[mask].sum()) for batch, mask in loader]
    [6.0, 22.0, 17.0]
    """
    backend = session.current("batches")
    allowed = allowed_names("batches", allow)
    _, size = _along("batches", axis, backend, backend.place.rank)
    options: dict[str, Any] = {"seed": seed, "epoch": epoch, "start": start, "remainder": remainder}
    places = [_along("batches", axis, backend, rank)[0] for rank in backend.ranks_here]
    ranks = [Batches(data, batch_size, rank=place, size=size, **options) for place in places]
    made = ranks[0]
    if len(ranks) < backend.place.size:
        arguments: dict[str, object] = {
            "samples": made.samples,
            "batch_size": batch_size,
            "seed": seed,
            "remainder": remainder,
        }
        if axis != AXIS:
            arguments["axis"] = axis
        if allowed:
            arguments["allow"] = sorted(allowed)
        is_compared = is_checked("data_order", allowed)
        made.agree = _Agreement(backend, made, arguments, _groups(backend, axis), seed, is_compared)
    return backend.eager(alone=_first, stacked=_side_by_side, parallel=_first)(ranks)


def _first(ranks: Sequence[Batches]) -> "Batches | StackedBatches":
    return ranks[0]


def _side_by_side(ranks: Sequence[Batches]) -> "Batches | StackedBatches":
    return StackedBatches(ranks)


def per_rank_batches(
    loader: Iterable[PyTree],
    *,
    remainder: Literal["drop", "mask"] = "drop",
    ahead: int = AHEAD_BATCHES,
) -> PerRankBatches:
    """Return an iterator over this rank's own batches that ends on all ranks together.

    With n_r the number of batches of rank r, all ranks take min_r n_r steps ("drop") or max_r n_r
    steps ("mask"). It is for data that the ranks do not share: each has its own files, or a stream
    of unknown length. Where every rank can index all of the data, use `batches`.

    The batches are read ahead as by `prefetch`. Each rank reads one batch further than it gives
    out, and tells the others whether there is one while the step before is running.

    **Collective:** every rank iterates, with the same arguments and equally often, and a loop that
    is left early is left at the same step on all ranks; nothing else needs to be equal.
    **Communication:** 8 bytes from each rank for each batch, which travel while the step runs and
    wait for no program; 16 bytes when an epoch begins, and with "mask" the shapes of the first
    batches. After an error of reading, its text.

    Args:
        loader: This rank's batches: anything that `prefetch` takes, or a `prefetch`.
        remainder: "drop" ends with the first rank that has no batch, and leaves the rest of the
            others out. "mask" ends with the last one and takes every sample: it yields
            `(batch, mask)`, where a rank without a batch gets zeros and a batch of fewer rows is
            filled up, both with a False mask. The rows are those of the largest first batch.
        ahead: As for `prefetch`.

    Returns:
        An iterator, with `state`, `epoch` and `close()` as those of `prefetch`. In the state,
        "epoch", "batches" and, with masks, "rows" are equal on all ranks, and so is a `loader`'s
        own where it counts alike. The next `for` loop is the next epoch.

    Raises:
        RankMismatchError: On every rank, when an epoch begins: other arguments, another place in
            the data, or, with "mask", batches of other structure, shapes (but for the rows) or
            dtypes. On all other ranks if one cannot read a batch, at the step of that batch.
        TypeError: `jaxmpi.batches`, which gives all ranks the same number of steps; with "mask", a
          leaf without rows.
        ValueError: `remainder` is neither; a batch with more rows than the first ones; as for
            `prefetch`. What reading a batch raises is raised at the step of that batch.
        RuntimeError: On simulated ranks, which have one process and so no data of their own.

    >>> import jaxmpi, numpy as np
    >>> files = [np.arange(3.0), np.arange(3.0, 5.0)]  # this rank's
    >>> loader = jaxmpi.per_rank_batches(files, remainder="mask")
    >>> [(float(batch[mask].sum()), mask.tolist()) for batch, mask in loader]
    [(3.0, [True, True, True]), (7.0, [True, True, False])]
    """
    backend = session.current("per_rank_batches")
    backend.check_one_rank_here(
        "per_rank_batches: simulated ranks are one process, which has no data of one rank. Use "
        "batches, or ranks of MPI."
    )
    if remainder not in ("drop", "mask"):
        raise ValueError(f'per_rank_batches: remainder is {remainder!r}. Pass "drop" or "mask".')
    if isinstance(loader, PerRankBatches):
        raise TypeError(
            "per_rank_batches: the loader is a per_rank_batches already. Pass its loader."
        )
    read_ahead = prefetch(loader, ahead)
    assert isinstance(read_ahead, Prefetched)
    if isinstance(read_ahead.reading.feed, BatchesFeed):
        raise TypeError(
            "per_rank_batches: the loader is jaxmpi.batches, which gives all ranks the same number "
            "of steps already. Use it as it is."
        )

    def check(arguments: Mapping[str, object]) -> None:
        lines = [f"per_rank_batches {name}={value}" for name, value in arguments.items()]
        title = "per_rank_batches"
        call = Call.of(title, "\n".join(lines))
        compare.check_consistent(backend, call, lambda: CallDetails(parameters=lines))

    def layouts(mine: Layout | None) -> list[Layout | None]:
        return backend.allgather_object(mine)

    def vote(mine: Vote) -> Callable[[], Outcome]:
        return backend.start_vote(mine, "per_rank_batches, for the other ranks' data")

    def fail(error: Exception | None) -> NoReturn:
        texts = backend.allgather_object("" if error is None else one_line(error))
        if error is not None:
            raise error
        failed = [rank for rank, text in enumerate(texts) if text]
        raise RankMismatchError(
            f"per_rank_batches: rank {failed[0]} could not read its next batch: {texts[failed[0]]}",
            advice="No rank has taken that step: mend its data, and go on or end on all ranks.",
            function="per_rank_batches",
            ranks=failed,
        )

    ranks = Exchange(check, layouts, vote, fail)
    return PerRankBatches(read_ahead, read_ahead.reading, remainder, ranks)


def check_data(data: PyTree | RandomAccess, *, seed: int = 0, axis: Axis = AXIS) -> None:
    """Check that all ranks have the same data in the same order.

    It reads a few samples on each rank, and the ranks compare them: the first, the middle and the
    last one, and 29 that the seed selects. Call it once, before the training, for data of which
    jaxmpi sees the row numbers only: a data set that Grain, a torch DataLoader or tf.data reads, or
    that has a `__getitem__` of its own. `batches` and `shard` check arrays and lists by themselves.

        jaxmpi.check_data(dataset)
        plan = jaxmpi.batches(np.arange(len(dataset)), B, seed=0)

    Numbers, texts, paths (by their last two names), arrays, and small tuples, lists and dicts of
    these count by their values, and so does what converts to a NumPy array; other objects by their
    type. Each of these samples is read twice. If one is another one then, as with random crops, all
    samples count by their types: pass the data set without them.

    **Collective:** every rank calls it. **Communication:** 16 bytes. On one rank, and in traced
    code, only the type of the data is checked.

    Args:
        data: The whole data, as for `shard`.
        seed: Which samples are compared: another seed selects others.
        axis: The ranks that share the data, as in `tree_allreduce`; each group may have its own,
            of one length.

    Raises:
        RankMismatchError: On every rank, if the number of samples, or a sample, differs between the
            ranks: with its number and the ranks. Also if a sample cannot be read on another rank;
            there the error is that of the data.
        TypeError: As for `shard`.
        ValueError: The leaves differ in length; an unknown axis; a negative seed.

    >>> import jaxmpi
    >>> jaxmpi.check_data(sorted(["b.png", "a.png"]))
    """
    backend = session.current("check_data")
    _, size = _along("check_data", axis, backend, backend.place.rank)
    if len(backend.ranks_here) == backend.place.size or size == 1 or _jaxcompat.tracing():
        open_whole("check_data", data)
        return
    with compare.raising_on_all(backend, "check_data", sends=False):
        source = open_whole("check_data", data)
        fingerprint = fingerprint_of_samples(source, seed, read=True)
    arguments = [f"check_data samples={len(source)}", f"check_data seed={seed}"]
    if axis != AXIS:
        arguments.append(f"check_data axis={axis}")
    groups = _groups(backend, axis)
    check_same_data(backend, "check_data", arguments, fingerprint, groups, has_allow=False)


def _along(function: str, axis: Axis, backend: Ranks, rank: int) -> tuple[int, int]:
    """Return a rank's number along an axis, and the number of ranks along it."""
    check_axis(function, axis, backend)
    groups = groups_along(backend.axes, _axis.names(axis))
    return position(groups, rank)[1], len(groups[0])


def rank_key(key: jax.Array) -> jax.Array | Any:
    """Derive this rank's own PRNG key.

    key_r = fold_in(key, r)

    Use it for what must differ between the ranks: dropout, noise, augmentation. Use the plain key
    for what must be the same on all of them: initial parameters, or a choice that all ranks make
    together. Works inside a traced step.

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
    if _axis.bound():
        return jax.random.fold_in(key, session.rank())
    make = backend.eager(alone=_rank_key, stacked=_keys_of_ranks, parallel=_rank_key)
    return make(key, backend)


def _rank_key(key: jax.Array, backend: Ranks) -> jax.Array:
    return jax.random.fold_in(key, backend.place.rank)


def _keys_of_ranks(key: jax.Array, backend: Ranks) -> PerRank:
    return PerRank(jax.vmap(partial(jax.random.fold_in, key))(np.arange(backend.place.size)))


class StackedBatches(Iterable[PyTree]):
    """Batches of all simulated ranks side by side, as `PerRank` arrays, at one place."""

    def __init__(self, ranks: Sequence[Batches]) -> None:
        self._ranks = ranks
        self._one = ranks[0]
        self.samples, self.agree = self._one.samples, self._one.agree

    def __len__(self) -> int:
        return len(self._one)

    @property
    def epoch(self) -> int:
        """Return the epoch of the batch in hand."""
        return self._one.epoch

    @property
    def position(self) -> int:
        """Return the samples of this epoch handed out so far."""
        return self._one.position

    @property
    def state(self) -> dict[str, Any]:
        """Return the place in the data, as `Batches.state`."""
        return self._one.state

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        for of_rank in self._ranks:
            of_rank.state = state

    @property
    def at(self) -> Cursor:
        """Return the place behind the batch that was handed out last."""
        return self._one.at

    def __iter__(self) -> Iterator[PyTree]:
        self.begin()
        return self.rest()

    def begin(self) -> None:
        """Begin an iteration on every rank."""
        for of_rank in self._ranks:
            of_rank.begin()

    def rest(self) -> Iterator[PyTree]:
        """Yield the batches from here to the end of the epoch."""
        for parts in zip(*(of_rank.rest() for of_rank in self._ranks), strict=True):
            yield jax.tree.map(lambda *xs: PerRank(np.stack(xs)), *parts)

    def after(self, at: Cursor, steps: int) -> Cursor:
        """Return the place that is so many steps behind another."""
        return self._one.after(at, steps)

    def state_at(self, at: Cursor) -> dict[str, Any]:
        """Return the state at a place."""
        return self._one.state_at(at)

    def go_to(self, at: Cursor) -> None:
        """Go on from a place."""
        for of_rank in self._ranks:
            of_rank.go_to(at)


class _Agreement:
    """Comparison of the ranks when an iteration of `batches` begins.

    Args:
      backend: the ranks.
      made: the batches.
      arguments: that must be equal on all ranks.
      groups: the ranks that share one data set, for each data set.
      seed: of the samples that are compared.
      is_compared: whether any are.
    """

    def __init__(
        self,
        backend: Ranks,
        made: Batches,
        arguments: Mapping[str, object],
        groups: Sequence[Sequence[int]],
        seed: int | None,
        is_compared: bool,
    ) -> None:
        self._backend, self._made, self._arguments = backend, made, arguments
        self._groups, self._seed, self._is_compared = groups, seed, is_compared

    def __call__(self) -> None:
        """Compare arguments, places and samples, if collectives may be called here."""
        if not _may_communicate():
            return
        at = {"epoch": self._made.epoch, "start": self._made.position}
        lines = [f"batches {name}={value}" for name, value in {**self._arguments, **at}.items()]
        with compare.raising_on_all(self._backend, "batches", sends=False):
            fingerprint = self._fingerprint if self._is_compared else None
        if not check_same_data(self._backend, "batches", lines, fingerprint, self._groups):
            # Each group has data of its own, or some ranks cannot compare: only once is enough.
            self._is_compared = False

    @cached_property
    def _fingerprint(self) -> Fingerprint | None:
        return fingerprint_of_samples(self._made.source, self._seed)


def _may_communicate() -> bool:
    """Return whether collectives may be called here.

    That is on the main thread of the rank itself, not in the processes of a loader, and not while a
    function is traced, which may happen on one rank alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and multiprocessing.parent_process() is None and not _jaxcompat.tracing()


def _groups(backend: Ranks, axis: Axis) -> Sequence[Sequence[int]]:
    """Return the ranks that share one data set, for each group along an axis."""
    return groups_along(backend.axes, _axis.names(axis))
