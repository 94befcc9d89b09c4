"""Feeds: sources of batches with a place in the data, for `jaxmpi.batches` and for other loaders.

A feed is iterated epoch by epoch. With each item comes a mark, the place behind that item; from the
mark of the last item that was used follows the state, a small dict that goes into a checkpoint:

    `batches`             {"epoch", "position", "order"}  samples over all ranks: see sampler.py
    loader without state  {"epoch", "batches"}            batches of this rank, to be read again
    loader with a state   {"epoch", "batches", "source"}  and the loader's own, as text: ABANDONED
                                                          begins it where the rest is left out

`position` counts samples and `batches` counts batches, so that a state of one kind is refused where
the other is wanted.
"""

import base64
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxmpi._data.sampler import Cursor
from jaxmpi._leaves import PyTree
from jaxmpi._per_rank_state import PerRankState

__all__ = [
    "BatchesFeed",
    "Feed",
    "LoaderFeed",
    "Plan",
    "Read",
    "close_iterator",
    "from_text",
    "to_text",
]

State = Mapping[str, Any]


class Feed(ABC):
    """Source of batches, with a mark for the place behind each."""

    stream = False  # whether it is an iterator, which cannot go back

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of an epoch."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Return the number of the epoch that is read."""

    @abstractmethod
    def begin(self) -> Any:
        """Begin an iteration, and return the mark of its start.

        It runs on the main thread, because ranks may compare their places.
        """

    @abstractmethod
    def read(self) -> Iterator[tuple[PyTree, Any]]:
        """Yield (batch, mark) to the end of the epoch; on any thread."""

    @abstractmethod
    def end(self, abandoned_at: Any = None) -> None:
        """Note that the epoch is over: the next one follows.

        Args:
            abandoned_at: The mark behind which the rest of the epoch is left out; None if all of
                it was used.
        """

    @abstractmethod
    def rewind(self, mark: Any) -> None:
        """Go on behind the item with this mark, after more was read; not for streams."""

    @abstractmethod
    def position(self, mark: Any) -> int | None:
        """Return the `position` of the source behind an item, or now if the mark is None."""

    @abstractmethod
    def state(self, mark: Any) -> dict[str, Any]:
        """Return the state behind an item, or now if the mark is None."""

    @abstractmethod
    def go_to(self, state: State, mark: Any, *, may_pass_end: bool) -> int | None:
        """Go on from a state; nothing is being read meanwhile.

        Args:
            state: Of the same kind of source.
            mark: Of the last item that was used, or None.
            may_pass_end: Whether the state may be behind more batches than an epoch has.

        Returns:
            None where all that was read ahead is void; for a stream without a state of its own, the
            number of items behind the mark that are to be left out.
        """


@runtime_checkable
class Plan(Protocol):
    """`jaxmpi.batches` of one rank, or of all simulated ranks."""

    at: Cursor
    state: Any

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[PyTree]: ...
    def begin(self) -> None: ...
    def rest(self) -> Iterator[PyTree]: ...
    def after(self, at: Cursor, steps: int) -> Cursor: ...
    def state_at(self, at: Cursor) -> dict[str, Any]: ...
    def go_to(self, at: Cursor) -> None: ...


Read = Callable[[Any], Iterable[PyTree]]


class BatchesFeed(Feed):
    """Batches of `jaxmpi.batches`, or of a loader that reads their rows.

    A loader with workers takes rows long before it gives out their batch. So the mark is computed
    from the number of batches that it has given out, and not asked of the plan.
    """

    def __init__(self, plan: Plan, read: Read | None) -> None:
        self._plan, self._read = plan, read

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def epoch(self) -> int:
        return self._plan.at.epoch

    def begin(self) -> Cursor:
        self._plan.begin()
        self._from = self._plan.at
        return self._from

    def read(self) -> Iterator[tuple[PyTree, Cursor]]:
        steps, start, number = len(self._plan), self._from, 0
        # At the end of an epoch, resumed, there are no rows, which some loaders refuse.
        if not steps:
            return
        items = self._plan.rest() if self._read is None else iter(self._read(self._plan))
        try:
            for number, batch in enumerate(items, 1):
                if number > steps:
                    break
                yield batch, self._plan.after(start, number)
        finally:
            close_iterator(items)
        if number != steps:
            given = f"more than {steps}" if number > steps else str(number)
            raise ValueError(
                f"prefetch: read gave {given} batches for {steps} batches of rows. Return one for "
                "each, or the state means nothing."
            )

    def end(self, abandoned_at: Cursor | None = None) -> None:
        self._plan.go_to(self._plan.after(self._from, len(self._plan))._replace(over=True))

    def rewind(self, mark: Cursor) -> None:
        self._plan.go_to(mark)

    def position(self, mark: Cursor | None) -> int:
        return (mark or self._plan.at).position

    def state(self, mark: Cursor | None) -> dict[str, Any]:
        return self._plan.state_at(mark or self._plan.at)

    def go_to(self, state: State, mark: Cursor | None, *, may_pass_end: bool) -> None:
        self._plan.state = state


class LoaderPosition(NamedTuple):
    """Place behind an item of a loader."""

    epoch: int
    batches: int  # of this epoch
    source: str | Exception | None  # the loader's state as text, or why there is none
    position: int | None  # the loader's, where it has one


# (reads the state, sets it): methods of Grain, then those of PyTorch and Hugging Face
METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
# before the state, as text, at which an epoch was left whose rest is left out
ABANDONED = "abandoned "


class LoaderFeed(Feed):
    """Batches of any iterable: a loader, a list, an iterator.

    If the loader or its iterator has a state of its own, that is used. Otherwise the batches are
    counted, and those before the state are read again and left out.
    """

    def __init__(self, batches: Iterable[PyTree]) -> None:
        self.batches = batches  # a stream is held here and nowhere else: see prefetch.py
        self.stream = isinstance(batches, Iterator)
        self._methods = _methods(batches)  # of a loader, or a stream, with a state
        self._methods_of_iterators: tuple[str, str] | None = None
        self._keeps_state = _keeps_state(batches)
        self._iterator: Iterator[PyTree] | None = None  # of a loader that is no stream
        self._opened = False  # whether there was one, which shows if it has a state
        self._begun = False  # whether it has given an item
        self._abandoned_at = ""  # the state at which the last epoch was left; "" if it was used up
        self._epoch, self._count = 0, 0  # behind the last item that was read
        self._skip = 0  # items to leave out
        self._may_pass_end = False  # whether there may be fewer than that
        self._wanted: str | None = None  # the state to begin the next iterator with

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    @property
    def epoch(self) -> int:
        return self._epoch

    def begin(self) -> LoaderPosition:
        self._open()
        return self._mark()

    def read(self) -> Iterator[tuple[PyTree, LoaderPosition]]:
        while True:
            try:
                source = self.batches if self.stream else self._iterator
                batch = next(source)  # type: ignore[call-overload]
            except StopIteration:
                break
            self._begun, self._abandoned_at = True, ""
            if self._skip:
                self._skip -= 1
                continue
            self._count += 1
            yield batch, self._mark()
        missing, self._skip = self._skip, 0
        if missing and not self._may_pass_end:
            raise ValueError(
                f"prefetch: the state is behind {self._count} batches, {missing} more than the "
                "loader has in this epoch. Pass the state of a run with the same loader."
            )

    def end(self, abandoned_at: LoaderPosition | None = None) -> None:
        self._epoch, self._count = self._epoch + 1, 0
        self._iterator, self._begun = None, False
        if abandoned_at is not None and self._methods and isinstance(abandoned_at.source, str):
            self._abandoned_at = abandoned_at.source

    def rewind(self, mark: LoaderPosition) -> None:
        self._to(mark.epoch, mark.batches, mark.source if isinstance(mark.source, str) else None)

    def position(self, mark: LoaderPosition | None) -> int | None:
        return getattr(self.batches, "position", None) if mark is None else mark.position

    def state(self, mark: LoaderPosition | None) -> dict[str, Any]:
        if mark is None:
            if not self._opened:
                self._open()
            mark = self._mark()
        if isinstance(mark.source, Exception):
            raise mark.source
        state: dict[str, Any] = {"epoch": mark.epoch, "batches": mark.batches}
        return state if mark.source is None else {**state, "source": PerRankState(mark.source)}

    def go_to(self, state: State, mark: LoaderPosition | None, *, may_pass_end: bool) -> int | None:
        keys = {"epoch", "batches"} | ({"source"} if "source" in self.state(mark) else set())
        if not isinstance(state, Mapping) or set(state) != keys:
            raise ValueError(
                f"prefetch: the state is {state!r}, and one of this loader has the keys "
                f"{sorted(keys)}. Pass the state of a run with the same loader."
            )
        for key in ("epoch", "batches"):
            if int(state[key]) < 0:
                raise ValueError(
                    f"prefetch: {key!r} of the state is {state[key]}. It counts from 0."
                )
        self._may_pass_end = may_pass_end
        epoch, count = int(state["epoch"]), int(state["batches"])
        source = state.get("source")
        if isinstance(source, PerRankState):
            source = source.per_rank
        if not isinstance(source, str | None):
            raise ValueError(
                f"prefetch: 'source' of the state is a {type(source).__name__}, and not the text "
                "that this loader gave. Pass `state` as it was."
            )
        if not self.stream or source is not None:
            self._to(epoch, count, source)
            return None
        used = mark.batches if mark else self._count
        if count < used:
            raise ValueError(
                f"prefetch: the state is behind {count} batches, and {used} were used of an "
                "iterator, which cannot go back. Make a new iterator before you set the state."
            )
        self._epoch = epoch
        return count - used

    def _to(self, epoch: int, count: int, source: str | None) -> None:
        """Go on from a state, with the iterator of this epoch or a new one."""
        self._epoch, self._count = epoch, count
        if self.stream:
            self._set(self.batches, self._methods, source)
            return
        close_iterator(self._iterator)
        self._iterator, self._begun, self._wanted, self._abandoned_at = None, False, source, ""
        self._skip = count if source is None else 0

    def _open(self) -> None:
        """Make the iterator of an epoch, at the state that is wanted."""
        if self.stream or self._iterator is not None:
            return
        wanted, self._wanted, self._opened = self._wanted, None, True
        if self._methods and wanted and wanted.startswith(ABANDONED):
            self._abandon_at(wanted.removeprefix(ABANDONED))
            wanted = None
        if self._methods:  # PyTorch's loaders take a state before they are iterated
            self._set(self.batches, self._methods, wanted)
        self._iterator = iter(self.batches)
        if not self._methods:  # Grain's iterators have one
            self._methods_of_iterators = _methods(self._iterator)
            self._set(self._iterator, self._methods_of_iterators, wanted)

    def _abandon_at(self, text: str) -> None:
        """Begin an epoch at a state and leave it, as the run did whose state this is.

        What a loader keeps from one epoch to the next, such as its random numbers, is then what it
        was in that run, which had read ahead of this state.
        """
        self._set(self.batches, self._methods, text)
        iterator = iter(self.batches)
        next(iterator, None)
        close_iterator(iterator)
        self._abandoned_at = text

    def _set(self, source: Any, methods: tuple[str, str] | None, text: str | None) -> None:
        """Set the state of a loader or an iterator; no text is the beginning of an epoch."""
        if methods is None:
            return
        state = from_text(text) if text else None
        if self._keeps_state:
            # it counts in the epoch alone of which it is
            if state is not None:
                source.set_epoch(state["epoch"])
            source.load_state_dict(state)
        elif text:
            getattr(source, methods[1])(state)

    def _mark(self) -> LoaderPosition:
        position = getattr(self.batches, "position", None)
        return LoaderPosition(self._epoch, self._count, self._source(), position)

    def _source(self) -> str | Exception | None:
        """Return the state of the source as text; "" for the beginning of an epoch."""
        if self._wanted is not None:
            return self._wanted
        methods = self._methods or self._methods_of_iterators
        source = self.batches if self._methods else self._iterator
        if methods is None:
            return None
        if source is None:
            return ""
        # Before its first item, a loader may still tell where the last epoch was left, or its end.
        if not self._begun and not self.stream:
            if self._abandoned_at:
                return ABANDONED + self._abandoned_at
            if self._keeps_state:
                return ""
        try:
            return to_text(getattr(source, methods[0])())
        except Exception as error:  # is raised where somebody asks for the state
            return error


def _keeps_state(loader: object) -> bool:
    """Return whether a loader begins each epoch at the state that was loaded last.

    Hugging Face's streams do: PyTorch's loaders forget it when they are iterated.
    """
    datasets = sys.modules.get("datasets")  # nobody has a stream of it who has not imported it
    return datasets is not None and isinstance(loader, datasets.IterableDataset)


def _methods(source: object) -> tuple[str, str] | None:
    """Return the names of the methods that read and set a loader's state; None if it has none."""
    for names in METHODS:
        if all(callable(getattr(source, name, None)) for name in names):
            return names
    return None


def close_iterator(iterator: object) -> None:
    """Close an iterator that can be closed, and its workers with it."""
    close = getattr(iterator, "close", None)
    if callable(close):
        close()


# state of a loader as text


def to_text(state: object) -> str:
    """Return the state of a loader as one line of text, which goes into any checkpoint.

    The states of Grain, PyTorch and Hugging Face are trees of numbers, text, bytes and arrays.
    Their structure changes as the loader moves on, so no checkpoint of fixed structure could hold
    them. The text is JSON; what JSON does not have is an object with one key that begins with "$".
    Reading it runs no code.

    Raises:
        TypeError: The state holds something else, with its path.
    """
    return json.dumps(_encoded(state, "the state"), separators=(",", ":"))


def from_text(text: str) -> Any:
    """Return the state that `to_text` has written."""
    return _decoded(json.loads(text))


def _encoded(x: object, path: str) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, bytes):
        return {"$bytes": base64.b64encode(x).decode()}
    if type(x) is list:
        return [_encoded(item, f"{path}[{i}]") for i, item in enumerate(x)]
    if type(x) is tuple:
        return {"$tuple": [_encoded(item, f"{path}[{i}]") for i, item in enumerate(x)]}
    if isinstance(x, dict):
        # pairs, where a key is no text or could be taken for one of ours
        if all(type(key) is str and not key.startswith("$") for key in x):
            return {key: _encoded(item, f"{path}[{key!r}]") for key, item in x.items()}
        pairs = [[_encoded(key, path), _encoded(x[key], f"{path}[{key!r}]")] for key in x]
        return {"$dict": pairs}
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufc":
        return {"$array": _array(np.asarray(x)), "scalar": isinstance(x, np.generic)}
    # a tensor is only there where torch was imported by somebody else
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return {"$tensor": _array(x.detach().cpu().numpy())}
    raise TypeError(
        f"prefetch: {path} is a {type(x).__name__}, and a state that goes into a checkpoint holds "
        "numbers, text, bytes, arrays, lists and dicts. Have the loader's state hold these."
    )


def _array(x: np.ndarray) -> list[Any]:
    return [
        x.dtype.str,
        list(x.shape),
        base64.b64encode(np.ascontiguousarray(x).tobytes()).decode(),
    ]


def _decoded(x: Any) -> Any:
    if isinstance(x, list):
        return [_decoded(item) for item in x]
    if not isinstance(x, dict):
        return x
    if "$bytes" in x:
        return base64.b64decode(x["$bytes"])
    if "$tuple" in x:
        return tuple(_decoded(item) for item in x["$tuple"])
    if "$dict" in x:
        return {_decoded(key): _decoded(item) for key, item in x["$dict"]}
    if "$array" in x:
        array = _numbers(x["$array"])
        return array[()] if x["scalar"] else array
    if "$tensor" in x:
        # whose loader has written it, and is to read it
        return import_module("torch").from_numpy(_numbers(x["$tensor"]))
    return {key: _decoded(item) for key, item in x.items()}


def _numbers(fields: list[Any]) -> np.ndarray:
    dtype, shape, data = fields
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
