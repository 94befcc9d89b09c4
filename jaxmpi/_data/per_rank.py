"""Batches of data that differs between the ranks, which end on all ranks together.

With n_r the batches of rank r, all ranks take min_r n_r steps, or, with a mask, max_r n_r. No rank
knows the others' n_r, nor its own before its data ends. So each looks one batch ahead: before it
gives out batch k it tells the others whether it has batch k + 1, or could not read it, and it reads
their answers when batch k + 1 is asked for. The answers travel while step k runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._errors import RankMismatchError
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._votes import Outcome, Vote

__all__ = ["Exchange", "Layout", "Loader", "PerRankBatches"]


class Loader(Protocol):
    """Batches of one rank, read ahead: `Reading` of prefetch.py."""

    mark: Any

    @property
    def feed(self) -> Any: ...
    def begin(self) -> None: ...
    def take(self) -> PyTree: ...
    def end_epoch(self) -> None: ...
    def go_to(self, state: Mapping[str, Any], *, may_pass_end: bool = False) -> None: ...
    def close(self) -> None: ...


class Layout(NamedTuple):
    """Arrays of a batch, without their first axis, by name; and its rows."""

    arrays: dict[str, tuple[tuple[int, ...], str]]
    rows: int
    names: PyTree  # of the arrays, in the structure of the batch


class Exchange(NamedTuple):
    """Questions that the ranks ask each other."""

    # raises unless the arguments are equal on all ranks
    compare: Callable[[Mapping[str, object]], None]
    layouts: Callable[[Layout | None], Sequence[Layout | None]]  # of all ranks' first batches
    vote: Callable[[Vote], Callable[[], Outcome]]
    # raises on all ranks, once one has failed: its error, or None on the others
    fail: Callable[[Exception | None], NoReturn]


class PerRankBatches(Iterator[PyTree]):
    """Batches of one rank up to the common end: the result of `per_rank_batches`."""

    def __init__(
        self, loader: Any, reading: Loader, remainder: Literal["drop", "mask"], ranks: Exchange
    ) -> None:
        self._loader = loader  # keeps the thread
        self._reading, self._remainder, self._ranks = reading, remainder, ranks
        self._epoch, self._count = 0, 0  # batches that were given out in this epoch
        self._mark: Any = None  # of this rank's last one
        self._next: tuple[PyTree, Any] | None = None  # batch k + 1 and its mark
        self._error: Exception | None = None  # of reading it
        # of this rank about it; None if it is to be read, as at the beginning of an epoch
        self._vote: Vote | None = None
        # of all ranks; None between epochs, and after an error
        self._answers: Callable[[], Outcome] | None = None
        self._over = False
        self._rows = 0  # of the batches of this epoch, with masks; 0 where they are not known
        self._has_agreed = False  # whether the ranks have agreed on these rows and the padding
        self._padding: PyTree = None  # shapes of a batch without samples

    @property
    def epoch(self) -> int:
        """Return the epoch of the last batch that was given out; before it, of the first one."""
        return self._epoch

    @property
    def state(self) -> dict[str, Any]:
        """Return the place behind the last batch that was given out, across epochs.

        Assign it, on all ranks, to go on there.
        """
        rows = {"rows": self._rows} if self._remainder == "mask" else {}
        return {
            **self._reading.feed.state(self._mark),
            **rows,
            "epoch": self._epoch,
            "batches": self._count,
        }

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        if self._answers is not None:
            self._answers()  # every vote is waited for, on all ranks
        self._leave_epoch()
        self._over = False
        rows = 0
        if self._remainder == "mask" and isinstance(state, Mapping):
            rows = int(state.get("rows", 0))  # of the first batches, which are not read again
            state = {key: value for key, value in state.items() if key != "rows"}
        # with masks, it may be behind batches of other ranks only
        self._reading.go_to(state, may_pass_end=self._remainder == "mask")
        self._rows = rows
        self._epoch, self._count = int(state["epoch"]), int(state["batches"])

    def close(self) -> None:
        """End the thread that reads. Nothing is lost: what follows is read when it is asked for."""
        self._reading.close()

    def __iter__(self) -> Iterator[PyTree]:
        if self._answers is None:
            self._begin()
        return self

    def __next__(self) -> PyTree:
        if self._answers is None:
            if self._over:
                raise StopIteration
            self._begin()
        assert self._answers is not None
        outcome = self._outcome()
        if not (outcome.any if self._remainder == "mask" else outcome.all):
            self._end()
            raise StopIteration
        mine = self._next
        self._look_ahead()
        self._count += 1
        if mine is None:
            return jax.tree.map(jnp.zeros_like, self._padding), np.zeros(self._rows, np.bool_)
        batch, self._mark = mine
        return self._masked(batch) if self._remainder == "mask" else batch

    def _begin(self) -> None:
        """Begin an epoch, or go on with one after an error: the ranks compare where they are.

        For the masks, they also compare the layouts of their first batches.
        """
        stream = self._reading.feed.stream
        if self._over and stream:
            raise RuntimeError(
                "per_rank_batches: the batches come from an iterator, and have ended. Make a new "
                "one for each epoch."
            )
        self._ranks.compare(
            {
                "remainder": self._remainder,
                "iterator": stream,
                "epoch": self._epoch,
                "batches": self._count,
            }
        )
        self._over = False
        if self._vote is None:
            self._look_ahead(begin=True)
        else:  # another rank could not read its batch; this one has read, and votes again
            self._answers = self._ranks.vote(self._vote)
        if self._remainder == "mask" and not self._has_agreed:
            self._outcome()  # without a batch there is no layout
            # Where the layouts differ, the next call begins here again, and raises again.
            answers, self._answers = self._answers, None
            self._agree_on_layout()
            self._answers = answers

    def _look_ahead(self, begin: bool = False) -> None:
        """Take this rank's next batch, and tell the others whether there is one."""
        self._next, self._vote = None, Vote.YES
        try:
            if begin:
                self._reading.begin()
                self._mark = self._reading.mark
            batch = self._reading.take()
            if self._remainder == "mask":
                self._check_rows(_layout(batch))
            self._next = batch, self._reading.mark
        except StopIteration:
            self._vote = Vote.NO
        except Exception as error:
            self._error, self._vote = error, Vote.FAILED
        self._answers = self._ranks.vote(self._vote)

    def _outcome(self) -> Outcome:
        """Return what all ranks have; raise on all of them if one could not read its batch."""
        assert self._answers is not None
        outcome = self._answers()
        if outcome.failed:
            error, self._error, self._answers = self._error, None, None
            if self._vote is Vote.FAILED:
                self._vote = None
            self._ranks.fail(error)
        return outcome

    def _end(self) -> None:
        self._reading.end_epoch()
        self._epoch, self._count = self._epoch + 1, 0
        self._leave_epoch()
        self._over = True

    def _leave_epoch(self) -> None:
        """Forget what is known of the epoch under way."""
        self._answers, self._vote, self._error = None, None, None
        self._next, self._mark = None, None
        self._rows, self._has_agreed = 0, False

    # masks

    def _agree_on_layout(self) -> None:
        """Find the rows of all batches, and the batch of a rank that has no more."""
        mine = _layout(self._next[0]) if self._next else None
        layouts = self._ranks.layouts(mine)
        having = [(rank, layout) for rank, layout in enumerate(layouts) if layout is not None]
        if not having:
            return
        first_rank, first = having[0]
        for rank, layout in having:
            for name in {**first.arrays, **layout.arrays}:
                here, there = first.arrays.get(name), layout.arrays.get(name)
                if here != there:
                    raise RankMismatchError(
                        f"per_rank_batches: leaf {name} of the first batch is {_words(here)} on "
                        f"rank {first_rank} and {_words(there)} on rank {rank}, their rows aside.",
                        advice="Give all ranks batches of one structure.",
                        function="per_rank_batches",
                        leaf=name,
                        ranks=[first_rank, rank],
                    )
        self._rows = max(self._rows, *(layout.rows for _, layout in having))
        self._has_agreed = True
        self._padding = jax.tree.map(
            lambda name: jax.ShapeDtypeStruct(
                (self._rows, *first.arrays[name][0]), first.arrays[name][1]
            ),
            first.names,
        )

    def _check_rows(self, layout: Layout) -> None:
        """Raise if a batch has more rows than the first ones, once these are known."""
        if self._has_agreed and layout.rows > self._rows:
            raise ValueError(
                f"per_rank_batches: a batch has {layout.rows} rows, and the first batches of all "
                f"ranks had at most {self._rows}. Begin with a batch of all rows."
            )

    def _masked(self, batch: PyTree) -> tuple[PyTree, np.ndarray]:
        """Return a batch with all rows, and the mask of its own; others repeat the first row."""
        rows = len(jax.tree.leaves(batch)[0])
        index = np.arange(self._rows)
        mask = index < rows
        if rows < self._rows:
            batch = jax.tree.map(lambda x: x[np.where(mask, index, 0)], batch)
        return batch, mask


def _layout(batch: PyTree) -> Layout:
    """Return the arrays of a batch; raise unless they have rows in common."""
    arrays: dict[str, tuple[tuple[int, ...], str]] = {}
    rows: dict[str, int] = {}
    for path, x in jax.tree.leaves_with_path(batch):
        name = leaf_name(path)
        if not isinstance(x, jax.Array | np.ndarray) or x.ndim == 0:
            raise TypeError(
                f"per_rank_batches: leaf {name} is a {type(x).__name__} without rows, and "
                'remainder="mask" needs arrays '
                "that share their first axis. Take it out of the batch."
            )
        arrays[name], rows[name] = (x.shape[1:], str(x.dtype)), len(x)
    if len({*rows.values()}) != 1 or not min(rows.values()):
        raise ValueError(
            f"per_rank_batches: the leaves of a batch have {rows or 'no'} rows, and "
            'remainder="mask" needs arrays that share '
            "their first axis, of 1 row or more. Give all leaves the same."
        )
    names = [leaf_name(path) for path, _ in jax.tree.leaves_with_path(batch)]
    return Layout(arrays, rows[names[0]], jax.tree.unflatten(jax.tree.structure(batch), names))


def _words(array: tuple[tuple[int, ...], str] | None) -> str:
    return "not there" if array is None else f"{array[1]}{list(array[0])}"
