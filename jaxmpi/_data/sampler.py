"""Samples of one rank: its part of the data, and its rows of every global batch.

Both work for any rank and size; the equations are in `jaxmpi.data`.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmpi import _jaxcompat
from jaxmpi._data.sources import Arrays, RandomAccess, Samples, open_source
from jaxmpi._errors import RankCountError
from jaxmpi._leaves import PyTree

__all__ = ["Batches", "Cursor", "Shard", "open_whole"]


class Shard(Sequence[PyTree]):
    """Part of the data of one rank: the result of `shard`, for any rank and size.

    Attributes:
        source: The whole data.
        even: Whether all ranks have as many samples.
    """

    def __init__(self, data: PyTree | RandomAccess, *, rank: int, size: int) -> None:
        self.source = open_whole("shard", data)
        self._rows = _part(len(self.source), rank, size)
        self.even = len(self.source) % size == 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> PyTree:
        try:
            rows = self._rows[index]
        except IndexError:
            raise IndexError(
                f"shard: index {index} is outside the {len(self)} samples of this rank."
            ) from None
        return self.source.view(rows) if isinstance(rows, range) else self.source.sample(rows)

    def __iter__(self) -> Iterator[PyTree]:
        # Sequence's own would take an IndexError of the source for the end.
        return (self.source.sample(row) for row in self._rows)


class Cursor(NamedTuple):
    """Place in the data, across epochs.

    Attributes:
        epoch: The number of the epoch.
        position: Samples of this epoch handed out so far, over all ranks.
        over: Whether the epoch has no step left, so that the next iteration begins the next epoch.
    """

    epoch: int
    position: int
    over: bool = False


class Batches(Iterable[PyTree]):
    """Rows of one rank of every global batch: the result of `batches`, for any rank and size.

    An iteration goes on from `state`, and ends with the epoch; the one after it is the next epoch.
    So the samples that follow depend on `state` alone, however often a loop was left on the way.

    Attributes:
        source: The data.
        samples: The number of samples of an epoch.
        at: The place behind the batch that was handed out last.
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
        start: int | Mapping[str, Any] = 0,
        remainder: Literal["drop", "mask"] = "drop",
    ) -> None:
        self.source = open_whole("batches", data)
        self._batch_size = _int(
            "batch_size", batch_size, 1, "Pass the samples per step over all ranks."
        )
        epoch = _int("epoch", epoch, 0, "Pass the number of the epoch, from 0.")
        if seed is not None:
            advice = "Pass None to keep the order of the data, or an int to shuffle it."
            seed = _int("seed", seed, 0, advice)
        self.samples, self._seed = len(self.source), seed
        self._rank, self._size, self._remainder = rank, size, remainder
        if remainder not in ("drop", "mask"):
            raise ValueError(f'batches: remainder is {remainder!r}. Pass "drop" or "mask".')
        if remainder == "drop" and self._batch_size % size:
            raise RankCountError(
                f"batches: batch_size is {self._batch_size}, which {size} ranks cannot share "
                "equally. "
                f'Use a multiple of {size}, or remainder="mask".'
            )
        self.agree: Callable[[], None] = lambda: None
        self.at = Cursor(epoch, 0)
        self._order_epoch = -1
        if isinstance(start, Mapping):
            self.state = start
            if epoch not in (0, self.epoch):
                raise ValueError(
                    f"batches: epoch is {epoch}, and start is a state of epoch {self.epoch}. "
                    "Leave epoch out, or pass a position as start."
                )
        else:
            self.go_to(Cursor(epoch, self._checked_position(start)))

    @property
    def epoch(self) -> int:
        """Return the epoch of the batch in hand; before the first one, of the batches to come."""
        return self.at.epoch

    @property
    def position(self) -> int:
        """Return the samples of this epoch handed out so far, over all ranks.

        It is the `start` to go on from. While the step with a batch runs, it counts that batch. It
        stays at the end of an epoch until the next one begins; `state` says both.
        """
        return self.at.position

    @property
    def state(self) -> dict[str, Any]:
        """Return the place in the data: {"epoch", "position", "order"}.

        Behind an epoch, it is the start of the next one. It is equal on all ranks, and holds for
        any number of ranks and any batch size. Give it back as `start`, or assign it. The position
        has a meaning only for its "order".
        """
        return self.state_at(self.at)

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        keys = {"epoch", "position", "order"}
        if not isinstance(state, Mapping) or set(state) != keys:
            raise ValueError(
                f"batches: the state is {state!r}, and one of batches has the keys {sorted(keys)}. "
                "Pass the state of a run over this data."
            )
        if state["order"] != self._order_name():
            raise ValueError(
                f"batches: the state belongs to {state['order']}, and this is "
                f"{self._order_name()}, where its position means other samples. Use the data and "
                "the seed of that run, or begin an epoch with epoch=."
            )
        epoch = _int(
            "the state's epoch", state["epoch"], 0, "Pass the state of a run over this data."
        )
        self.go_to(Cursor(epoch, self._checked_position(state["position"])))

    def __len__(self) -> int:
        return self._steps(self._begin)

    def __iter__(self) -> Iterator[PyTree]:
        self.begin()
        return self.rest()

    def begin(self) -> None:
        """Move to the next epoch if this one is over; the ranks compare where they are.

        This is the part of an iteration that belongs to the main thread; `rest` is the other one.
        """
        self.go_to(Cursor(self.at.epoch + 1, 0) if self.at.over else self.at)
        self.agree()
        if not len(self) and not self.at.position and not self._rank:
            _jaxcompat.warn(
                f"batches: an epoch of {self.samples} samples has no step with batch_size "
                f'{self._batch_size}. Pass a smaller batch_size, or remainder="mask".',
            )

    def rest(self) -> Iterator[PyTree]:
        """Yield the batches from here to the end of the epoch."""
        while not self.at.over and self._steps(self.at.position):
            lo = self.at.position
            rows, mask = self._rows(lo, min(lo + self._batch_size, self.samples))
            batch = self.source.gather(rows)
            self.at = self.after(self.at, 1)  # what has failed was not handed out
            yield (batch, mask) if self._remainder == "mask" else batch
        self.at = self.at._replace(over=True)

    def after(self, at: Cursor, steps: int) -> Cursor:
        """Return the place that is so many steps of one epoch behind another."""
        position = min(at.position + steps * self._batch_size, self.samples)
        return Cursor(at.epoch, position, not self._steps(position)) if steps else at

    def state_at(self, at: Cursor) -> dict[str, Any]:
        """Return the state at a place."""
        epoch, position = (at.epoch + 1, 0) if at.over else (at.epoch, at.position)
        return {"epoch": epoch, "position": position, "order": self._order_name()}

    def go_to(self, at: Cursor) -> None:
        """Go on from a place."""
        self.at = at
        if not at.over:  # `len` stays that of an epoch until the next one begins
            self._begin = at.position
        if at.epoch != self._order_epoch:
            self._order, self._order_epoch = _order(self.samples, self._seed, at.epoch), at.epoch

    def _steps(self, position: int) -> int:
        """Return the number of steps of an epoch that follow a position."""
        left = self.samples - position
        return (
            left // self._batch_size if self._remainder == "drop" else -(-left // self._batch_size)
        )

    def _order_name(self) -> str:
        how = "in order" if self._seed is None else f"shuffled by seed {self._seed}"
        return f"{self.samples} samples {how}"

    def _checked_position(self, position: int) -> int:
        advice = "Pass the position of an earlier run over this data, or 0."
        position = _int("start", position, 0, advice)
        if position > self.samples:
            raise ValueError(
                f"batches: start is {position}, and the data has {self.samples} samples. {advice}"
            )
        return position

    def _rows(self, lo: int, hi: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        part = _part(hi - lo, self._rank, self._size)
        n_rows = -(-self._batch_size // self._size)
        rows = np.full(n_rows, self._order[lo], np.int64)
        rows[: len(part)] = self._order[lo + part.start : lo + part.stop]
        return rows, np.arange(n_rows) < len(part)


def _part(n: int, rank: int, size: int) -> range:
    return range(rank * n // size, (rank + 1) * n // size)


def _order(n: int, seed: int | None, epoch: int) -> range | npt.NDArray[np.int64]:
    if seed is None:
        return range(n)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(
        n
    )


def _int(argument: str, value: int, least: int, advice: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"batches: {argument} is {value!r}, not an int. {advice}") from None
    if number < least:
        raise ValueError(f"batches: {argument} is {number}, less than {least}. {advice}")
    return number


def open_whole(function: str, data: PyTree | RandomAccess) -> Arrays | Samples:
    """Return the adapter for the whole data, or raise an error that names `function`."""
    if isinstance(data, Shard):
        raise TypeError(
            f"{function}: data is a Shard, which is split over the ranks already. Pass the whole "
            "data."
        )
    return open_source(function, data)
