"""Numbers of a step that must be equal on all ranks: compared while the ranks train.

Such are a learning rate or a count (`_analysis.carried`). If one rank alone changes its own, the
ranks' parameters drift apart, or with `sharded` and `fully_shard` the parts of one array train at
different rates and nothing differs at all.

A program returns its numbers in an extra output, the array `end`, which is ready when the program
has ended (`Numbers.pack`). The executor notes the `end` of each call (`NumberWatch`). It samples
one of every EVERY calls that the ranks make together, the same ones on all ranks. Once a sample is
ready, it goes to `_job.monitor.neighbor_exchange`, which compares it with the neighbors' without
waiting for them. If it differs, each rank raises at its next call.

    call b      a rank changes a number
    b + 25      at most; the first sample with it
    b + 50      it is sent, and compared with that of the neighbor
    b + 100     all ranks have been told, and raise

A sample that is not ready at call b + 50, since many programs are under way, is sent as soon as it
is, and raised as many calls later.
"""

import math
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmpi._backends.base import fingerprint_of
from jaxmpi._backends.interface import Processes
from jaxmpi._consistency.compare import raise_found
from jaxmpi._consistency.findings import MAX_LEAVES, Finding
from jaxmpi._job.monitor.neighbor_exchange import At, NeighborExchange

__all__ = ["NumberWatch", "Numbers"]

EVERY = 25  # calls
# Processors of different kinds round exp, cos and pow differently, and so a schedule.
TOLERANCE = 1e-4  # of the number; and at least TOLERANCE_ULPS
TOLERANCE_ULPS = 4
# And a schedule that ends at 0 may end beside it: of the largest value that the number has had.
TOLERANCE_NEAR_ZERO = 2e-6


class Numbers(NamedTuple):
    """Numbers that a program returns in `end`: `[1 + words]` uint32, with `tag` as the first one.

    Attributes:
      title: the name of the step.
      indices: the leaves of the arguments that they are.
      names: the names of these leaves.
      dtypes: their dtypes.
    """

    title: str
    indices: tuple[int, ...]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]

    @property
    def tag(self) -> int:
        """Return a number of 32 bits that tells these numbers from those of other programs."""
        return fingerprint_of(f"{self.title} {self.names} {self.dtypes}") & 0xFFFFFFFF

    def pack(self, leaves: Sequence[ArrayLike]) -> jax.Array:
        """Return `end` for the leaves of a call, in traced code."""
        words = [jnp.full((1,), self.tag, jnp.uint32)]
        for i in self.indices:
            words.append(_words(jnp.asarray(leaves[i])))
        return jnp.concatenate(words)

    def unpack(self, packed: bytes) -> list[np.generic]:
        """Return the numbers in the bytes of an `end`."""
        words, start, found = np.frombuffer(packed, np.uint32), 1, []
        for dtype in self.dtypes:
            wide = _wide_by_name(dtype)
            count = wide.itemsize // 4
            found.append(words[start : start + count].view(wide)[0])
            start += count
        return found

    def magnitudes(self, packed: bytes) -> list[float]:
        """Return the absolute values of the numbers in the bytes of an `end`; 0 if not finite."""
        absolute = [float(np.abs(x)) for x in self.unpack(packed)]
        return [x if math.isfinite(x) else 0.0 for x in absolute]

    def difference(
        self, rank: int, mine: bytes, other: int, theirs: bytes, largest: Sequence[float]
    ) -> Finding | None:
        """Return the finding for the numbers of two ranks; None if they agree up to rounding.

        `largest` has the largest magnitude of each number until now.
        """
        names, lines = [], []
        pairs = zip(self.unpack(mine), self.unpack(theirs), largest, strict=True)
        for name, dtype, (a, b, scale) in zip(self.names, self.dtypes, pairs, strict=True):
            if not _agree(a, b, np.dtype(jnp.dtype(dtype)), scale):
                names.append(name)
                lines.append(f"{a!s} on rank {rank} and {b!s} on rank {other}")
        if not names:
            return None
        return Finding("unequal_number", self.title, names, detail=", ".join(lines[:MAX_LEAVES]))


def _wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype of 32 bits or a multiple in which numbers of a dtype travel."""
    if dtype.itemsize >= 4:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32)
    return np.dtype(np.uint32 if dtype.kind in "ub" else np.int32)


@cache
def _wide_by_name(dtype: str) -> np.dtype:
    """Return `_wide` for the name of a dtype; cached, as each number of a sample needs it."""
    return _wide(np.dtype(jnp.dtype(dtype)))


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array of one number, `[words]` uint32."""
    x = x.reshape(1)
    if jnp.iscomplexobj(x):
        return jnp.concatenate([_words(x.real), _words(x.imag)])
    x = x.astype(_wide(np.dtype(x.dtype)))
    return lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)


def _agree(a: np.generic, b: np.generic, dtype: np.dtype, scale: float) -> bool:
    """Return whether two numbers of a dtype and a magnitude are equal up to rounding."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return bool(a == b)
    relative = max(TOLERANCE, TOLERANCE_ULPS * float(jnp.finfo(dtype).eps))
    return bool(np.isclose(a, b, rtol=relative, atol=TOLERANCE_NEAR_ZERO * scale, equal_nan=True))


def _tag_of(packed: bytes) -> int:
    """Return the tag of the numbers in the bytes of an `end`."""
    return int(np.frombuffer(packed, np.uint32)[0])


def _is_ready(x: jax.Array) -> bool:
    return bool(x.is_ready())  # type: ignore[attr-defined]


def _has_failed(x: jax.Array) -> bool:
    """Wait for a program, and return whether it has failed."""
    try:
        x.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return True
    return False


# (errors, call, end) of a call: the first two as in `At`, and the array with the numbers. It is a
# plain tuple because each call of a step makes one.
Sample: TypeAlias = tuple[int, int, jax.Array]


class NumberWatch:
    """The numbers of one step's calls: a `Stream` of the exchange."""

    def __init__(self, backend: Processes, title: str, exchange: NeighborExchange) -> None:
        self._backend, self._title, self._exchange = backend, title, exchange
        self._last: Sample | None = None  # of the last call
        self._samples: deque[Sample] = deque()  # that are to be sent
        self._sampled = -1, 0  # errors and calls of the exchange at the last sample
        self._is_late = False  # whether a sample was not ready when it was due
        self._largest: dict[int, list[float]] = {}  # magnitudes of numbers, by their tag

    def note(self, end: jax.Array) -> None:
        """Note the `end` of a call; it has no axis if the program compares nothing."""
        exchange = self._exchange
        if not end.shape or not exchange.count(_has_failed, end):
            return
        self._last = exchange.errors, exchange.calls, end
        errors, call = self._sampled
        is_due = errors != exchange.errors or exchange.calls >= call + EVERY
        if is_due or self._is_late:
            self._send_ready()
        if is_due:
            if errors < 0:
                exchange.watch(self)
            self._samples.append(self._last)
            self._sampled = exchange.errors, exchange.calls
            exchange.poll()

    def _send_ready(self) -> None:
        """Send the samples whose programs have ended."""
        while self._samples:
            _, _, end = self._samples[0]
            if not _is_ready(end):
                break
            self._send(self._samples.popleft())
        self._is_late = bool(self._samples)

    def send_last(self) -> None:
        """Send the samples that are left, and the last call."""
        is_queued = bool(self._samples) and self._samples[-1] is self._last
        if self._last is not None and not is_queued:
            self._samples.append(self._last)
        while self._samples:
            self._send(self._samples.popleft())
        self._last = None

    def _send(self, sample: Sample) -> None:
        errors, call, end = sample
        try:
            packed = np.asarray(self._backend.transport.arrays.local(end)).tobytes()
        except jax.errors.JaxRuntimeError:  # the program has failed
            return
        tag = _tag_of(packed)
        numbers = self._backend.registry.numbers.get(tag)
        if isinstance(numbers, Numbers):
            now = numbers.magnitudes(packed)
            before = self._largest.get(tag, now)
            self._largest[tag] = [max(pair) for pair in zip(before, now, strict=True)]
        self._exchange.add(self, At(errors, call), packed)

    def difference(self, mine: bytes, theirs: bytes, rank: int) -> Finding | None:
        """Return the finding for numbers of this rank and of rank `rank`; None if they agree."""
        tag = _tag_of(mine)
        numbers = self._backend.registry.numbers.get(tag)
        # The ranks' programs may differ in what is local.
        if not isinstance(numbers, Numbers) or tag != _tag_of(theirs):
            return None
        here = self._backend.place.rank
        return numbers.difference(here, mine, rank, theirs, self._largest[tag])

    def raise_found(self) -> None:
        """Raise what was found, on all ranks: those that are in a collective raise there.

        Raises:
          RankMismatchError: on all ranks.
        """
        finding = self._exchange.take()
        if finding is None:
            return
        self.note_error()
        raise_found(self._backend, finding.error())

    def note_error(self) -> None:
        """Note that a call raises an error on all ranks."""
        self._exchange.note_error()
