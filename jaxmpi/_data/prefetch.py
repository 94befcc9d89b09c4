"""Batches that are read and brought to the device while the step before is running."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmpi._leaves import PyTree

__all__ = ["Prefetched", "prefetch"]


def prefetch(batches: Iterable[PyTree], ahead: int = 2) -> "Prefetched":
    """The same batches, each on this rank's device before it is asked for.

    A thread reads them, up to `ahead` of the one in use, and copies their NumPy arrays; other leaves stay as they are. Reading
    must not communicate: collectives belong to the main thread.

    **Collective:** no, but for `jaxmpi.batches`, of which the ranks compare the arguments first.
    **Communication:** none but that.

    Args:
      batches: anything to iterate over: `jaxmpi.batches`, a Grain or torch DataLoader, a generator.
      ahead: how many batches wait on the device.

    Returns:
      An iterable of the batches; a second time only where `batches` is more than an iterator. Its `position` is that of the
      last batch that it has given out, where `batches` has one: the `start` for `jaxmpi.batches` to go on from.

    Raises:
      ValueError: `ahead` is below 1.
      RuntimeError: an iterator is asked for its batches again. What reading raises is raised here, too.

    >>> import jaxmpi, numpy as np
    >>> loader = jaxmpi.prefetch(jaxmpi.batches(np.arange(8.0), 4))
    >>> [(float(batch.sum()), loader.position) for batch in loader]
    [(6.0, 4), (22.0, 8)]
    """
    if ahead < 1:
        raise ValueError(f"prefetch: ahead is {ahead}. It is a number of batches: 1 or more.")
    return Prefetched(batches, ahead)


class Prefetched:
    """What `prefetch` returns."""

    def __init__(self, batches: Iterable[PyTree], ahead: int) -> None:
        self._batches, self._ahead = batches, ahead
        self._begun = False
        self.position: int | None = getattr(batches, "position", None)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[PyTree]:
        if self._begun and isinstance(self._batches, Iterator):
            raise RuntimeError("prefetch: the batches come from an iterator, which has begun. Make a new one for each epoch.")
        self._begun = True
        return self._read()

    def _read(self) -> Iterator[PyTree]:
        ready: queue.Queue[tuple[str, Any, int | None]] = queue.Queue(self._ahead)
        left = threading.Event()
        device = jax.config.jax_default_device  # of the thread that trains

        def put(kind: str, value: Any, position: int | None = None) -> None:
            while not left.is_set():
                try:
                    return ready.put((kind, value, position), timeout=0.1)
                except queue.Full:
                    pass

        def read() -> None:
            try:
                with jax.default_device(device):  # `device_put(x, device)` would pin the step's outputs, and compile it twice
                    for batch in self._batches:
                        moved = jax.tree.map(
                            lambda x: jax.device_put(x, may_alias=False) if isinstance(x, np.ndarray) else x, batch
                        )
                        put("batch", moved, getattr(self._batches, "position", None))
                        if left.is_set():
                            return
                put("end", None)
            except BaseException as error:
                put("error", error)

        getattr(self._batches, "agree", lambda: None)()
        threading.Thread(target=read, name="jaxmpi-prefetch", daemon=True).start()
        try:
            while True:
                kind, value, position = ready.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise value
                self.position = position
                yield value
        finally:
            left.set()
