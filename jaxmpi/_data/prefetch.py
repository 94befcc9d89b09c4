"""Batches that are read and copied to the device while the step before is running.

A thread reads up to `ahead` batches and stops there. It belongs to a `Reading`, which outlives the
loop: a loop that is left early loses nothing, and the next one goes on with what was read.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath

from jaxmpi._data.feeds import BatchesFeed, Feed, LoaderFeed, Plan, Read, close_iterator
from jaxmpi._data.per_rank import PerRankBatches
from jaxmpi._job.process.at_exit import start_thread
from jaxmpi._leaves import PyTree, check_fits, leaf_name

__all__ = ["AHEAD_BATCHES", "Prefetched", "Reading", "prefetch"]

AHEAD_BATCHES = 2  # read ahead by default


def prefetch(
    batches: Iterable[PyTree], ahead: int = AHEAD_BATCHES, *, read: Read | None = None
) -> "Prefetched | PerRankBatches":
    """Return an iterator over the same batches, each on this rank's device before it is asked for.

    A thread reads up to `ahead` batches beside the one in use, and copies their NumPy arrays; other
    leaves stay as they are. Reading must not communicate: collectives belong to the main thread.

    A `for` loop over it runs to the end of an epoch, and the next loop is the next epoch. A loop
    that is left early loses nothing: the next one goes on behind the last batch that was used, also
    where `batches` is an iterator and is given to `prefetch` again.

    **Collective:** no, but for `jaxmpi.batches`, of which the ranks compare the arguments when an
    epoch begins. **Communication:** none but that.

    Args:
        batches: Anything to iterate over: `jaxmpi.batches`, a Grain or torch DataLoader, a
          generator.
        ahead: How many batches wait on the device.
        read: With `jaxmpi.batches` only: a function that gets them when an epoch begins, and
            returns what is to be iterated over in their place, with one batch for each: a loader
            that reads the rows, a generator that augments them. The state stays that of `batches`.

    Returns:
        An iterator; `next` works, too. Its `state` is a small dict that goes into a checkpoint: the
        place behind the last batch that it has given out, across epochs. Assign it to go on from
        there. For `jaxmpi.batches` it is equal on all ranks and holds for any number of them. For
        other loaders it counts batches, which are read again and left out; a loader with
        `get_state` and `set_state` (Grain's), or `state_dict` and `load_state_dict` (PyTorch's),
        goes on by itself, and the state has its own in a `PerRankState`. `epoch` and `position` are
        those of the last batch, where `batches` has them; `close()` ends the thread.

    Raises:
        ValueError: `ahead` is below 1; `read` has not returned one batch for each; a state belongs
          to something else.
        TypeError: `read` without `jaxmpi.batches`; `batches` cannot be iterated; a loader's state
            holds what cannot go into a checkpoint; a batch holds text or objects as an array, with
            its path.
        OverflowError: A batch holds numbers that 32 bits cannot hold, without the option
          jax_enable_x64, with their path.
        RuntimeError: An iterator that has ended is iterated again. What reading raises is raised
          here, too.

    >>> import jaxmpi, numpy as np
    >>> loader = jaxmpi.prefetch(jaxmpi.batches(np.arange(8.0), 4))
    >>> [(float(batch.sum()), loader.position) for batch in loader]
    [(6.0, 4), (22.0, 8)]
    >>> loader.state
    {'epoch': 1, 'position': 0, 'order': '8 samples in order'}
    """
    if isinstance(ahead, bool) or not isinstance(ahead, int):
        raise TypeError(
            f"prefetch: ahead is {ahead!r}. It is a number of batches: an int of 1 or more."
        )
    if ahead < 1:
        raise ValueError(f"prefetch: ahead is {ahead}. It is a number of batches: 1 or more.")
    if isinstance(batches, Prefetched | PerRankBatches):
        if read is not None:
            raise TypeError(
                "prefetch: read needs jaxmpi.batches, and was given with what is read ahead. Pass "
                "the batches."
            )
        return batches
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"prefetch: batches is a {type(batches).__name__}. Pass a loader, an iterator or a "
            "list of batches."
        )
    return Prefetched(_reading(batches, ahead, read))


class Prefetched(Iterator[PyTree]):
    """Batches that are read ahead: the result of `prefetch`."""

    def __init__(self, reading: "Reading") -> None:
        self.reading = reading
        self.reading.users += 1
        # without a user, the thread and its batches would stay until the end of the process
        weakref.finalize(self, _let_go, reading).atexit = False

    def __len__(self) -> int:
        return len(self.reading.feed)

    def __iter__(self) -> Iterator[PyTree]:
        self.reading.begin()
        return self

    def __next__(self) -> PyTree:
        return self.reading.take()

    @property
    def epoch(self) -> int:
        """Return the epoch of the last batch that was given out; before it, of the first one."""
        return self.reading.feed.epoch

    @property
    def position(self) -> int | None:
        """Return the `position` of the source behind the last batch that was given out.

        It is None if the source has none.
        """
        return self.reading.feed.position(self.reading.mark)

    @property
    def state(self) -> dict[str, Any]:
        """Return the place behind the last batch that was given out, across epochs.

        Assign it to go on there.
        """
        return self.reading.feed.state(self.reading.mark)

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.reading.go_to(state)

    def close(self) -> None:
        """End the thread that reads. Nothing is lost: what follows is read when it is asked for."""
        self.reading.close()


class Reading:
    """Source that is read ahead, with the place behind the last batch that was used.

    Only the thread of the user calls its methods. The thread that reads runs `_run`; they share
    what `_changed` guards.

    Attributes:
        feed: The source.
        mark: Of the last batch that was used; None where no iteration is under way.
        users: How many `Prefetched` there are.
    """

    def __init__(self, feed: Feed, ahead: int) -> None:
        self.feed, self.ahead, self.users = feed, ahead, 0
        self.mark: Any = None
        self._items: Iterator[tuple[PyTree, Any]] | None = None  # of the iteration under way
        self._over = False  # whether an epoch has ended, and nobody has begun the next one
        self._changed = threading.Condition()
        self._ready: deque[tuple[str, Any, Any]] = deque()  # (what, batch or error, mark)
        self._thread: threading.Thread | None = None
        self._stops = False

    def begin(self) -> None:
        """Begin an epoch, or go on with the one that is under way."""
        if self._items is None:
            if self._over and self.feed.stream:
                raise RuntimeError(
                    "prefetch: the batches come from an iterator, which has begun and ended. Make "
                    "a new one for each epoch."
                )
            self._over = False
            self.mark = self.feed.begin()
            self._items = self.feed.read()
        self._start()

    def take(self) -> PyTree:
        """Return the next batch.

        Raises:
            StopIteration: At the end of the epoch, until another one begins.
        """
        if self._items is None:
            if self._over:
                raise StopIteration
            self.begin()
        self._start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            what, value, mark = self._ready.popleft()
            self._changed.notify_all()
        if what == "batch":
            self.mark = mark
            return value
        self._join()
        if what == "end":
            self._items, self.mark, self._over = None, None, True
            self.feed.end()
            raise StopIteration
        self._leave()
        raise value

    def go_to(self, state: Mapping[str, Any], *, may_pass_end: bool = False) -> None:
        """Go on from a state; `may_pass_end` as in `Feed.go_to`."""
        self._stop()
        skip = self.feed.go_to(state, self.mark, may_pass_end=may_pass_end)
        if skip is None:
            self._ready.clear()
            self._items, self.mark = None, None
        self._over = False
        for _ in range(skip or 0):
            try:
                self.take()
            except StopIteration:
                if may_pass_end:
                    return
                raise ValueError(
                    f"prefetch: the state is behind {state['batches']} batches, more than the "
                    "iterator has. Pass the state of a run over the same data."
                ) from None

    def end_epoch(self) -> None:
        """Leave the rest of the epoch out."""
        if self._items is None:
            return
        self._stop()
        self._ready.clear()
        close_iterator(self._items)
        mark, self._items, self.mark, self._over = self.mark, None, None, True
        self.feed.end(abandoned_at=mark)

    def close(self) -> None:
        """End the thread.

        What a stream has given stays; anything else is read again from the mark.
        """
        self._stop()
        if not self.feed.stream:
            self._leave()

    def stop_soon(self) -> None:
        """Have the thread end after the batch that it reads."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()

    def _start(self) -> None:
        """Have a thread read, unless one does or nothing is left to read."""
        with self._changed:
            self._stops = False
            ended = bool(self._ready) and self._ready[-1][0] != "batch"
            if self._thread is not None or ended:
                return
            self._device = jax.config.jax_default_device  # of the thread that trains
            self._thread = start_thread(self._run, "jaxmpi-prefetch", stop=self.stop_soon)

    def _stop(self) -> None:
        self.stop_soon()
        self._join()

    def _join(self) -> None:
        # taken out first: a thread that ends sets it to None
        if thread := self._thread:
            thread.join()

    def _leave(self) -> None:
        """Leave the iteration: the next one begins behind the mark."""
        if self._items is None:
            return
        items, self._items = self._items, None
        close_iterator(items)
        self._ready.clear()
        mark, self.mark = self.mark, None
        if self.feed.stream:
            self._over = True
        else:
            self.feed.rewind(mark)

    def _run(self) -> None:
        # `device_put(x, device)` would pin the step's outputs, and compile it twice
        with jax.default_device(self._device):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stops or len(self._ready) < self.ahead)
                    # under the lock, so that `_start` either stops this end or sees it
                    if self._stops:
                        self._thread = None
                        return
                item = self._next()
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                    if item[0] != "batch":
                        self._thread = None
                        return

    def _next(self) -> tuple[str, Any, Any]:
        assert self._items is not None
        try:
            batch, mark = next(self._items)
            return "batch", jax.tree_util.tree_map_with_path(_on_device, batch), mark
        except StopIteration:
            return "end", None, None
        except BaseException as error:
            return "error", error, None


def _on_device(path: KeyPath, x: Any) -> Any:
    """Copy a NumPy array to the device; leave all else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    check_fits("prefetch", path, x)
    if x.dtype.kind in "USO":
        raise TypeError(
            f"prefetch: leaf {leaf_name(path)} of a batch has dtype {x.dtype}, which no device "
            "holds. Take it out of the batch, make numbers of it, or pass it as a list."
        )
    return jax.device_put(x, may_alias=False)


# Streams, by the identity of the iterator, so that a second `prefetch` of one goes on with what the
# first has read ahead. An identity holds as long as the reading, which holds the iterator.
_streams: weakref.WeakValueDictionary[int, Reading] = weakref.WeakValueDictionary()
# those that no `Prefetched` has, of iterators that somebody else has
_left: dict[int, Reading] = {}


def _reading(batches: Iterable[PyTree], ahead: int, read: Read | None) -> Reading:
    """Return the reading of a source: the one that has begun a stream, or a new one."""
    for key, left in list(_left.items()):
        if not _held_elsewhere(left):
            del _left[key]
    if isinstance(batches, Plan):
        return Reading(BatchesFeed(batches, read), ahead)
    if read is not None:
        raise TypeError(
            f"prefetch: read needs jaxmpi.batches, and batches is a {type(batches).__name__}. Pass "
            "the batches, or leave read out."
        )
    reading = _streams.get(id(batches))
    if reading is None:
        reading = Reading(LoaderFeed(batches), ahead)
        if reading.feed.stream:
            _streams[id(batches)] = reading
    reading.ahead = ahead
    return reading


def _let_go(reading: Reading) -> None:
    """End the thread of a reading without a user.

    What was read of a stream that is used elsewhere stays.
    """
    reading.users -= 1
    if reading.users:
        return
    reading.stop_soon()
    if reading.feed.stream and _held_elsewhere(reading):
        _left[id(reading.feed.batches)] = reading  # type: ignore[attr-defined]


def _held_elsewhere(reading: Reading) -> bool:
    # the feed holds the iterator once, and `getrefcount` its argument
    return sys.getrefcount(reading.feed.batches) > 2  # type: ignore[attr-defined]
