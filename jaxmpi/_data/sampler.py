"""A rank's part of the data, and its rows of every global batch, for any rank and size: the equations are in `jaxmpi.data`."""

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from jaxmpi._data.sources import Arrays, RandomAccess, Samples, open_source
from jaxmpi._leaves import PyTree

__all__ = ["Batches", "Shard"]


class Shard(Sequence[PyTree]):
    """One rank's part of the data: what `shard` returns, for any rank and size."""

    def __init__(self, data: PyTree | RandomAccess, *, rank: int, size: int) -> None:
        self._source = _open("shard", data)
        self._rows = _part(len(self._source), rank, size)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> PyTree:
        try:
            rows = self._rows[index]
        except IndexError:
            raise IndexError(f"shard: index {index} is outside the {len(self)} samples of this rank.") from None
        return self._source.view(rows) if isinstance(rows, range) else self._source.sample(rows)

    def __iter__(self) -> Iterator[PyTree]:
        # Sequence's own would take an IndexError of the source for the end.
        return (self._source.sample(row) for row in self._rows)


class Batches(Iterable[PyTree]):
    """One rank's rows of every global batch: what `batches` returns, for any rank and size.

    Attributes:
        position: Samples of this epoch handed out so far, over all ranks. Save it, and give it back as `start`. While
            the step with a batch runs, it counts that batch; a prefetcher that runs ahead moves it ahead.
        samples: How many there are.
        agree: Is called when an iteration begins; for `prefetch`.
    """

    def __init__(
        self,
        data: PyTree | RandomAccess,
        batch_size: int,
        *,
        rank: int,
        size: int,
        seed: int | None = None,
        epoch: int = 0,
        start: int = 0,
        remainder: Literal["drop", "mask"] = "drop",
    ) -> None:
        self._source = _open("batches", data)
        self._batch_size = _int("batch_size", batch_size, 1, "Pass the samples per step over all ranks.")
        self._start = _int("start", start, 0, "Pass the position of an earlier run over this data, or 0.")
        self._order = _order(len(self._source), seed, epoch)
        self._rank, self._size, self._remainder = rank, size, remainder
        if self._start > len(self._order):
            raise ValueError(
                f"batches: start is {self._start}, and the data has {len(self._order)} samples. "
                "Pass the position of an earlier run over this data, or 0."
            )
        if remainder not in ("drop", "mask"):
            raise ValueError(f'batches: remainder is {remainder!r}. Pass "drop" or "mask".')
        if remainder == "drop" and self._batch_size % size:
            raise ValueError(
                f"batches: batch_size is {self._batch_size}, which {size} ranks cannot share equally. "
                f'Use a multiple of {size}, or remainder="mask".'
            )
        self.position, self.samples = self._start, len(self._order)
        self.agree: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        left = len(self._order) - self._start
        return left // self._batch_size if self._remainder == "drop" else -(-left // self._batch_size)

    def __iter__(self) -> Iterator[PyTree]:
        self.agree()
        if not len(self) and not self._start and not self._rank:
            warnings.warn(
                f"batches: an epoch of {self.samples} samples has no step with batch_size {self._batch_size}. Pass a smaller "
                'batch_size, or remainder="mask".',
                stacklevel=2,
            )
        for step in range(len(self)):
            lo = self._start + step * self._batch_size
            hi = min(lo + self._batch_size, len(self._order))
            rows, mask = self._rows(lo, hi)
            batch = self._source.gather(rows)
            self.position = hi
            yield (batch, mask) if self._remainder == "mask" else batch

    def _rows(self, lo: int, hi: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        part = _part(hi - lo, self._rank, self._size)
        n_rows = -(-self._batch_size // self._size)
        rows = np.full(n_rows, self._order[lo], np.int64)
        rows[: len(part)] = self._order[lo + part.start : lo + part.stop]
        return rows, np.arange(n_rows) < len(part)


def _part(n: int, rank: int, size: int) -> range:
    return range(rank * n // size, (rank + 1) * n // size)


def _order(n: int, seed: int | None, epoch: int) -> range | npt.NDArray[np.int64]:
    epoch = _int("epoch", epoch, 0, "Pass the number of the epoch, from 0.")
    if seed is None:
        return range(n)
    seed = _int("seed", seed, 0, "Pass None to keep the order of the data, or an int to shuffle it.")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(n)


def _int(argument: str, value: int, least: int, advice: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"batches: {argument} is {value!r}, not an int. {advice}") from None
    if number < least:
        raise ValueError(f"batches: {argument} is {number}, less than {least}. {advice}")
    return number


def _open(function: str, data: PyTree | RandomAccess) -> Arrays | Samples:
    if isinstance(data, Shard):
        raise TypeError(f"{function}: data is a Shard, which is split over the ranks already. Pass the whole data.")
    return open_source(function, data)
