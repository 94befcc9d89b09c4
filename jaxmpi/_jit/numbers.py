"""Numbers of a step that must be equal on all ranks: compared while the ranks train.

Such are a learning rate or a count (`_analysis.carried`). If one rank alone changes its own, the
ranks' parameters drift apart, or with `sharded` the parts of one array train at different rates and
nothing differs at all.

A program returns its numbers beside its outputs, in the array `end` that tells when it has ended
(`Numbers.pack`). The executor notes each call's `end` (`NumberWatch`). It reads that of every
EVERY-th call, once it is ready, and gives it to `_job.monitor.neighbor_exchange`, which compares it
with the neighbors' without waiting for them. If it differs, each rank raises at its next call.

    call b      a rank changes a number
    b + 25      at most; the first call whose numbers are read
    b + 50      they are sent, and compared with those of the neighbor
    b + 100     at most; all ranks have been told, and raise
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

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
TOLERANCE = 1e-4  # of the larger number; and at least TOLERANCE_ULPS
TOLERANCE_ULPS = 4


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
            wide = _wide(np.dtype(jnp.dtype(dtype)))
            count = wide.itemsize // 4
            found.append(words[start : start + count].view(wide)[0])
            start += count
        return found

    def difference(self, rank: int, mine: bytes, other: int, theirs: bytes) -> Finding | None:
        """Return the finding for the numbers of two ranks; None if they agree up to rounding."""
        names, lines = [], []
        pairs = zip(self.unpack(mine), self.unpack(theirs), strict=True)
        for name, dtype, (a, b) in zip(self.names, self.dtypes, pairs, strict=True):
            if not _agree(a, b, np.dtype(jnp.dtype(dtype))):
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


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array of one number, `[words]` uint32."""
    x = x.reshape(1)
    if jnp.iscomplexobj(x):
        return jnp.concatenate([_words(x.real), _words(x.imag)])
    x = x.astype(_wide(np.dtype(x.dtype)))
    return lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)


def _agree(a: np.generic, b: np.generic, dtype: np.dtype) -> bool:
    """Return whether two numbers, which were of a dtype, are equal up to rounding."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return bool(a == b)
    relative = max(TOLERANCE, TOLERANCE_ULPS * float(jnp.finfo(dtype).eps))
    return bool(np.isclose(a, b, rtol=relative, atol=0, equal_nan=True))


def _is_ready(x: jax.Array) -> bool:
    return bool(x.is_ready())  # type: ignore[attr-defined]


def _has_failed(x: jax.Array) -> bool:
    """Wait for a program, and return whether it has failed."""
    try:
        x.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return True
    return False


class NumberWatch:
    """The numbers of one step's calls: a `Stream` of the exchange."""

    def __init__(self, backend: Processes, title: str, exchange: NeighborExchange) -> None:
        self._backend, self._title, self._exchange = backend, title, exchange
        self._calls, self._due = 0, 1  # the calls so far, and the one at which to do something
        # Errors and calls of the exchange, and `end`: of the last call, and of one to compare
        self._last: tuple[int, int, jax.Array] | None = None
        self._kept: tuple[int, int, jax.Array] | None = None

    def note(self, end: jax.Array) -> None:
        """Note the `end` of a call; it has no axis if the program has no collective."""
        if not end.ndim:
            return
        exchange = self._exchange
        exchange.count(partial(_has_failed, end))
        self._calls += 1
        self._last = exchange.errors, exchange.calls, end
        if self._calls >= self._due:
            self._exchange_numbers()

    def _exchange_numbers(self) -> None:
        """Send the numbers of the call that was kept, and keep this one."""
        if self._kept is None:
            self._exchange.watch(self)
        elif not _is_ready(self._kept[2]):  # many programs are under way: look again
            self._due = self._calls + 1
            return
        else:
            self._add(*self._kept)
        self._kept = self._last
        self._due = self._calls + EVERY
        self._exchange.poll()

    def send_last(self) -> None:
        """Compare the last call, and the one that is still kept."""
        if self._kept is not None and self._kept is not self._last:
            self._add(*self._kept)
        if self._last is not None:
            self._add(*self._last)
        self._kept = self._last = None

    def _add(self, errors: int, call: int, end: jax.Array) -> None:
        try:
            numbers = np.asarray(self._backend.transport.arrays.local(end)).tobytes()
        except jax.errors.JaxRuntimeError:  # the program has failed
            return
        self._exchange.add(self, At(errors, call), numbers)

    def difference(self, mine: bytes, theirs: bytes, rank: int) -> Finding | None:
        """Return the finding for numbers of this rank and of rank `rank`; None if they agree."""
        numbers = self._backend.registry.numbers.get(int(np.frombuffer(mine, np.uint32)[0]))
        # The ranks' programs may differ in what is local.
        if not isinstance(numbers, Numbers) or mine[:4] != theirs[:4]:
            return None
        return numbers.difference(self._backend.place.rank, mine, rank, theirs)

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
