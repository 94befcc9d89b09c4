"""Fingerprints of a few samples, by which ranks find that their data are in different orders.

    places = 0, ⌊N/2⌋, N-1, and some drawn from Philox(seed, N)      all places, if N is small
    fingerprint = 64 bits of each of these samples

Samples are read where that takes microseconds and runs no code of the user: rows of arrays in
memory or in a memory map, and what is in a list. The samples of other sources are read on demand
only, because to read one may decode an image, or change the state of the source.

Numbers are compared by their bits. Where these differ, the ranks compare floats once more, up to
rounding: hosts with other processors may compute data that differ in the last bits.

Objects count by their values where these are plain, else by their type and shape. A path, and any
text with a "/", counts by its last two parts alone: the folder above may be another one on each
host.
"""

import dataclasses
import datetime
import enum
import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._data.sources import Arrays, Samples
from jaxmpi._leaves import PyTree, is_key

__all__ = ["ApproximateSample", "Fingerprint", "SampleDigest", "fingerprint_of_samples"]

DRAWN = 29  # places, beside the first, the middle and the last one
MAX_LEAVES = 32  # of a tree of arrays whose rows all count; of more leaves these count
MAX_ITEMS = 16  # of a container, and of its containers, down to MAX_DEPTH
MAX_DEPTH = 4
MAX_NUMBERS = 1024  # of an array, about, at equal distances
SUMS = 4  # of the floats of an array, which are compared up to rounding
ROUNDINGS = 64  # units in the last place
MAX_EPS = 1e-6
MAX_BYTES = 4096  # of a text, at either end
SHOWN = 60  # characters of a sample in an error

# Tuples, because `A | B` would build a new object at each call.
_ARRAYS = (np.ndarray, jax.Array)
_KEYS = (str, int, float, bytes, type(None))


class SampleDigest(NamedTuple):
    """One sample that the ranks compare: its number, and 64 bits of it."""

    row: int
    digest: int


class ApproximateSample(NamedTuple):
    """One sample up to rounding: 64 bits of all but its floats, and sums of these.

    Attributes:
      digest: of what is no float.
      floats: the sums, each with the error that rounding may make.
    """

    digest: int
    floats: list[tuple[float, float]]

    def is_like(self, other: "ApproximateSample") -> bool:
        """Return whether two samples are equal up to rounding."""
        if self.digest != other.digest or len(self.floats) != len(other.floats):
            return False
        pairs = zip(self.floats, other.floats, strict=True)
        return all(abs(mine - theirs) <= error for (mine, error), (theirs, _) in pairs)


class _Floats:
    """Floats that were met in a sample, where they do not count for its digest."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def add(self, x: np.ndarray) -> bytes:
        """Take a few sums of the numbers of an array; return bytes that count beside them.

        Σ_i cos(k·i)·x_i for k < SUMS: other numbers, or another order of them, give other sums.
        """
        eps = float(jnp.finfo(x.dtype).eps)
        numbers = x.flat[:: _step(x.size)]
        if eps > MAX_EPS:  # sums of short floats could not tell rounding from other numbers
            return numbers.tobytes()
        if np.iscomplexobj(numbers):
            numbers = np.stack([numbers.real, numbers.imag])
        numbers = numbers.astype(np.float64).reshape(-1)
        finite = np.isfinite(numbers)
        numbers = np.where(finite, numbers, 0)
        error = ROUNDINGS * eps * float(np.abs(numbers).sum())
        with np.errstate(over="ignore", invalid="ignore"):
            sums = [float(np.cos(k * np.arange(len(numbers))) @ numbers) for k in range(SUMS)]
        if not np.isfinite([*sums, error]).all():
            return numbers.tobytes()
        self.found.extend((total, error) for total in sums)
        return finite.tobytes()


class Fingerprint:
    """Samples of one source at some places, as the ranks compare them.

    Attributes:
      places: the samples, in the order of their numbers.
      is_repeatable: whether the samples that were read were the same ones when they were read
        again; if not, `places` have the bits of their types and shapes.
    """

    def __init__(
        self,
        places: Sequence[SampleDigest],
        source: Arrays | Samples,
        is_repeatable: bool,
        *,
        read: bool,
    ) -> None:
        self.places, self.is_repeatable = tuple(places), is_repeatable
        self._source, self._read = source, read

    def approximate(self) -> list[ApproximateSample]:
        """Return the samples up to rounding, or as they are where one cannot be read again."""
        if not self.is_repeatable:
            return [ApproximateSample(digest, []) for _, digest in self.places]
        samples = []
        for row, digest in self.places:
            floats = _Floats()
            try:
                sample = self._source.sample(row)
                # of a tree of arrays the same leaves as for the digest, whatever kind of tree it is
                is_tree = isinstance(self._source, Arrays)
                parts = [*map(_on_host, _leaves(sample))] if is_tree else [sample]
                rest = b"".join(_encode(part, MAX_DEPTH, self._read, floats) for part in parts)
                samples.append(ApproximateSample(_hash(rest), floats.found))
            except Exception:  # of the user's code, or a dtype without a precision
                samples.append(ApproximateSample(digest, []))
        return samples

    def descriptions(self) -> list[str]:
        """Return the samples as short texts, for an error."""
        texts = []
        for row, _ in self.places:
            try:
                texts.append(_shown(self._source.sample(row)))
            except Exception as error:  # of the user's code
                texts.append(f"unreadable now ({type(error).__name__})")
        return texts


def fingerprint_of_samples(
    source: Arrays | Samples, seed: int | None, *, read: bool = False
) -> Fingerprint | None:
    """Return the fingerprint of a source; None where its samples are not in memory.

    Args:
      source: the source.
      seed: of the places; None is 0.
      read: whether to read the samples of any source, one by one. If some are other ones when they
        are read again, as with random crops, samples count by their types alone.
    """
    rows = _rows(len(source), seed or 0)
    is_repeatable = True
    if isinstance(source, Arrays):
        digests = _of_rows(source.leaves(), rows)
    elif (samples := source.in_memory(rows)) is not None:
        digests = [_digest(sample, read=read) for sample in samples]
    elif read:
        digests, is_repeatable = _of_read(source, rows)
    else:
        return None
    places = [SampleDigest(*place) for place in zip(rows, digests, strict=True)]
    return Fingerprint(places, source, is_repeatable, read=read)


def _rows(n: int, seed: int) -> list[int]:
    """Return the numbers of the samples that are compared."""
    if n <= DRAWN + 3:
        return list(range(n))
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, n])))
    return sorted({0, n // 2, n - 1, *random.integers(0, n, DRAWN).tolist()})


# arrays


def _of_rows(leaves: Sequence[np.ndarray | jax.Array], rows: Sequence[int]) -> list[int]:
    """Return a digest of the rows of all arrays, for each number of a row."""
    hashes = [hashlib.blake2b(digest_size=8) for _ in rows]
    for leaf in _leaves(leaves):
        for each, content in zip(hashes, _contents(leaf, rows), strict=True):
            each.update(content)
    return [int.from_bytes(each.digest(), "big") for each in hashes]


def _leaves(tree: PyTree) -> list[Any]:
    """Return the leaves of a tree of arrays that count."""
    leaves: list[Any] = jax.tree.leaves(tree)
    return leaves[:: len(leaves) // MAX_LEAVES + 1]


def _contents(leaf: np.ndarray | jax.Array, rows: Sequence[int]) -> list[bytes]:
    """Return the bytes of some rows, or of equidistant numbers of them if they are long."""
    layout = f"{leaf.dtype}{list(leaf.shape[1:])}".encode()
    if isinstance(leaf, jax.Array):
        local = _local(leaf)
        if local is None:  # its values are not here: only its layout counts
            return [layout] * len(rows)
        if _is_on_cpu(local):  # no copy
            host = np.asarray(local)
        else:
            host, rows = np.asarray(local[np.asarray(rows, np.int64)]), range(len(rows))
    else:
        host = np.asarray(leaf)  # without the mask of a masked array, or the file of a map
    if host.dtype.hasobject:
        return [layout + _encode(host[row], MAX_DEPTH) for row in rows]
    step = _step(host[0].size if len(host) else 0)
    if step > 1:
        return [layout + host[row].flat[::step].tobytes() for row in rows]
    block = host[np.asarray(rows, np.int64)].tobytes()
    width = len(block) // max(len(rows), 1)
    return [layout + block[i * width : (i + 1) * width] for i in range(len(rows))]


def _step(numbers: int) -> int:
    """Return the distance of the numbers of a long row or array that count."""
    return max(numbers // MAX_NUMBERS, 1)


def _local(x: jax.Array) -> jax.Array | None:
    """Return an array on a device of this process; None where its values cannot be read."""
    if isinstance(x, jax.core.Tracer) or x.is_deleted() or is_key(x):
        return None
    if not x.is_fully_addressable:  # a global one of the xla backend
        return x.addressable_data(0) if x.is_fully_replicated else None
    return x if len(x.devices()) == 1 else None


def _on_host(x: object) -> object:
    """Return an array of JAX as one of NumPy, where its values are here."""
    local = _local(x) if isinstance(x, jax.Array) else None
    return x if local is None else np.asarray(local)


def _is_on_cpu(x: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in x.devices())


# samples


def _of_read(source: Samples, rows: Sequence[int]) -> tuple[list[int], bool]:
    """Return a digest of each sample, and whether all are the same when they are read again.

    If they are not, the digests are those of types and shapes.
    """
    samples = [source.sample(row) for row in rows]
    digests = [_digest(sample, read=True) for sample in samples]
    if digests == [_digest(source.sample(row), read=True) for row in rows]:
        return digests, True
    return [_hash(_layout(sample).encode()) for sample in samples], False


def _digest(sample: PyTree, *, read: bool = False) -> int:
    """Return 64 bits of a sample; of one that was read, objects that convert to arrays count."""
    try:
        return _hash(_encode(sample, MAX_DEPTH, read))
    except Exception:  # of an object's own methods
        return _hash(_kind(sample).encode())


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _encode(x: Any, depth: int, read: bool = False, floats: _Floats | None = None) -> bytes:
    """Return bytes that are equal where plain values are, in every process.

    Args:
      x: any object.
      depth: of the containers that are looked into.
      read: whether to convert objects with `__array__` to arrays.
      floats: takes the floats, which do not count then.
    """
    # The most frequent types first: the check for an array takes 1 µs.
    if type(x) is str:
        return _text(x)
    if type(x) is int:
        return _integer(x)
    if type(x) is dict or type(x) is list:
        return _container(x, depth, read, floats)
    if x is None or isinstance(x, bool):
        return repr(x).encode()
    if isinstance(x, _ARRAYS):
        return _array(x, depth, floats)
    if isinstance(x, np.generic):
        return _array(np.asarray(x), depth, floats)
    if isinstance(x, enum.Enum):
        return f"{_kind(x)}.{x.name}".encode()
    if isinstance(x, int):
        return _integer(x)
    if isinstance(x, float | complex) and floats is not None:
        return _kind(x).encode() + floats.add(np.asarray(x))
    if isinstance(x, float | complex | datetime.date | datetime.time | datetime.timedelta):
        return repr(x).encode()
    if isinstance(x, PurePath):
        return _text("/".join(x.parts[-2:]))
    if isinstance(x, str):
        return _text(x)
    if isinstance(x, bytes | bytearray):
        return _ends(bytes(x[:MAX_BYTES]), bytes(x[-MAX_BYTES:]), len(x))
    return _container(x, depth, read, floats)


def _container(x: Any, depth: int, read: bool, floats: _Floats | None) -> bytes:
    """Return the bytes of `_encode` for the items of a container, or for the type of an object."""
    items: list[bytes] = []
    length = 0
    if depth == 0:
        return _kind(x).encode()
    if isinstance(x, tuple | list):
        length = len(x)
        for item in x[:: length // MAX_ITEMS + 1]:
            items.append(_encode(item, depth - 1, read, floats))
    elif isinstance(x, dict) or (read and isinstance(x, Mapping)):
        length = len(x)
        # Other processes may have another order, and other objects as keys another text.
        if all(isinstance(key, _KEYS) for key in x):
            for key in sorted(x, key=repr)[:MAX_ITEMS]:
                items += _encode(key, depth - 1), _encode(x[key], depth - 1, read, floats)
    elif isinstance(x, set | frozenset):  # its order is another one in each process
        length = len(x)
        if length <= MAX_ITEMS:
            items = sorted(_encode(item, depth - 1) for item in x)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        for field in dataclasses.fields(x)[:MAX_ITEMS]:
            items.append(_encode(getattr(x, field.name), depth - 1, read, floats))
    elif read and hasattr(x, "__array__"):
        return _array(np.asarray(x), depth, floats)
    else:
        return _layout(x).encode()
    lengths = ",".join([str(len(item)) for item in items])
    return f"{length}:{lengths}:".encode() + b"".join(items)


def _array(x: np.ndarray | jax.Array, depth: int, floats: _Floats | None) -> bytes:
    """Return the dtype, the shape, and about MAX_NUMBERS numbers of an array."""
    layout = f"{x.dtype}{list(x.shape)}".encode()
    if isinstance(x, jax.Array):
        local = _local(x)
        if local is None or not _is_on_cpu(local):
            return layout
        x = local
    host = np.asarray(x)
    if floats is not None and jnp.issubdtype(host.dtype, jnp.inexact):
        return layout + floats.add(host)
    picked = host.flat[:: _step(host.size)]
    if host.dtype.hasobject and depth:
        items = [_encode(item, depth - 1, False, floats) for item in picked[:MAX_ITEMS]]
        return layout + b"".join(items)
    if host.dtype.hasobject:
        return layout
    return layout + picked.tobytes()


def _text(x: str) -> bytes:
    """Return a text, or of a path its last two names."""
    if "/" in x:
        x = "/".join(x.rsplit("/", 2)[-2:])
    ends = (x[:MAX_BYTES].encode(errors="replace"), x[-MAX_BYTES:].encode(errors="replace"))
    return _ends(*ends, len(x))


def _integer(x: int) -> bytes:
    """Return the bit length and the low 128 bits of an integer."""
    return f"{x.bit_length()} {x % 2**128}".encode()


def _ends(first: bytes, last: bytes, length: int) -> bytes:
    return f"{length}:".encode() + first + last


def _kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _layout(x: object) -> str:
    """Return the type of an object, and its shape if it has one."""
    try:
        return f"{_kind(x)}{list(x.shape)}"  # type: ignore[attr-defined]
    except Exception:
        return _kind(x)


def _shown(sample: object) -> str:
    try:
        text = " ".join(reprlib.repr(sample).split())
    except Exception:  # of an object's own methods, or a number of too many digits
        text = f"of type {type(sample).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
