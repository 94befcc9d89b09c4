"""Sources of samples with random access: pytrees of arrays, and sequences of samples.

Each has a length, `sample(row)`, `view(rows)` for a slice and `gather(rows)` for a batch; for
fingerprints, `leaves` or `in_memory`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Protocol, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt
from jax.tree_util import PyTreeDef

from jaxmpi._leaves import PyTree

__all__ = ["Arrays", "RandomAccess", "Samples", "open_source"]

READ_AT_ONCE = 1024  # samples of a list whose parts are held


@runtime_checkable
class RandomAccess(Protocol):
    """Sequence of samples: all that `shard` and `batches` need of it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> PyTree: ...


@runtime_checkable
class BulkAccess(Protocol):
    """Source that fetches many samples at once, as torch and Hugging Face ones do."""

    def __getitems__(self, indices: list[int], /) -> Sequence[PyTree]: ...


class Arrays:
    """Pytree of arrays; a sample is the pytree of their rows."""

    def __init__(self, function: str, tree: PyTree) -> None:
        leaves = [
            (jax.tree_util.keystr(path) or "data", leaf)
            for path, leaf in jax.tree.leaves_with_path(tree)
        ]
        if not leaves:
            raise TypeError(
                f"{function}: data is {tree!r}, which holds no arrays. Pass arrays or a list of "
                "samples."
            )
        for name, leaf in leaves:
            if not isinstance(leaf, np.ndarray | jax.Array) or leaf.ndim == 0:
                raise TypeError(
                    f"{function}: leaf {name} is of type {type(leaf).__name__} and shape "
                    f"{np.shape(leaf)}, not an array of samples. Pass a NumPy or JAX array there, "
                    "or a list of samples as the data."
                )
            if len(leaf) != len(leaves[0][1]):
                raise ValueError(
                    f"{function}: leaf {name} has {len(leaf)} samples, and leaf {leaves[0][0]} has "
                    f"{len(leaves[0][1])}. Give all leaves the same leading axis."
                )
        self._tree, self._n = tree, len(leaves[0][1])

    def __len__(self) -> int:
        return self._n

    def leaves(self) -> list[np.ndarray | jax.Array]:
        return jax.tree.leaves(self._tree)

    def sample(self, row: int) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[row], self._tree)

    def view(self, rows: range) -> PyTree:
        # A range that counts down to row 0 stops at -1, which a slice would take for the last row.
        index = (
            slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step)
            if rows
            else slice(0)
        )
        return jax.tree.map(lambda leaf: leaf[index], self._tree)

    def gather(self, rows: npt.NDArray[np.int64]) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[rows], self._tree)


class Samples:
    """Sequence of samples; a batch is their leaves, stacked."""

    def __init__(self, function: str, data: RandomAccess) -> None:
        self._function, self._data = function, data

    def __len__(self) -> int:
        return len(self._data)

    def in_memory(self, rows: Iterable[int]) -> list[PyTree] | None:
        """Return samples if to read them runs no code of the user, as in a list; else None."""
        if type(self._data) not in (list, range):
            return None
        return [self._data[row] for row in rows]

    def sample(self, row: int) -> PyTree:
        return self._data[row]

    def view(self, rows: Iterable[int]) -> list[PyTree]:
        rows = list(rows)
        if not isinstance(self._data, BulkAccess):
            return [self._data[row] for row in rows]
        samples = list(self._data.__getitems__(rows))
        if len(samples) != len(rows):
            raise ValueError(
                f"{self._function}: {type(self._data).__name__}.__getitems__ returned "
                f"{len(samples)} samples for {len(rows)} indices. Return a list with one sample "
                "for each."
            )
        return samples

    def gather(self, rows: npt.NDArray[np.int64]) -> PyTree:
        samples = self.view(rows.tolist())
        samples = [jax.tree.map(np.asarray, sample, is_leaf=_is_list) for sample in samples]
        layout = _layout(samples[0])
        for row, sample in zip(rows, samples, strict=True):
            if _layout(sample) != layout:
                raise ValueError(
                    f"{self._function}: sample {row} has the shapes "
                    f"{jax.tree.map(np.shape, sample)}, and sample {rows[0]} has "
                    f"{jax.tree.map(np.shape, samples[0])}. Pad or crop the samples to one shape."
                )
        batch, structure = jax.tree.flatten(jax.tree.map(lambda *xs: np.stack(xs), *samples))
        for c, dtype in self._mixed_dtypes.items():
            # never to a narrower one: a Python int of 64 bits may be unsigned
            batch[c] = batch[c].astype(np.result_type(batch[c].dtype, dtype), copy=False)
        return structure.unflatten(batch)

    @cached_property
    def _mixed_dtypes(self) -> dict[int, np.dtype]:
        """Return the common dtype of each leaf that has several in a list, by the leaf's number.

        Of [1, 2, 0.5, 3], rank 0 of two reads integers and rank 1 floats, and from its own rows no
        rank can tell. Every rank has the whole list, so all find the dtype that NumPy gives to all
        samples together. It is empty for samples of several structures, and for sources that run
        code of the user, where to read all samples may take as long as an epoch.
        """
        if type(self._data) is not list:
            return {}
        first, n = self._data[0], len(self._data)
        found: list[set[np.dtype]] = [set() for _ in jax.tree.leaves(first, is_leaf=_is_list)]
        for start in range(0, n, READ_AT_ONCE):
            # one call for many samples, which takes a small part of the time of a call for each
            samples = tuple(self._data[start : start + READ_AT_ONCE])
            leaves, structure = jax.tree.flatten(samples, is_leaf=_is_list)
            if structure != jax.tree.structure((first,) * len(samples), is_leaf=_is_list):
                return {}
            for c, dtypes in enumerate(found):
                dtypes |= _dtypes(leaves[c :: len(found)])
        return {c: np.result_type(*dtypes) for c, dtypes in enumerate(found) if len(dtypes) > 1}


def _dtypes(parts: Sequence[object]) -> set[np.dtype]:
    """Return the dtypes of numbers, arrays of numbers, and lists of these; of no other objects."""
    dtypes: set[np.dtype] = set()
    for kind in set(map(type, parts)):
        if kind in (bool, int, float, complex) or issubclass(kind, np.number | np.bool_):
            dtypes.add(np.dtype(kind))
        elif issubclass(kind, list):
            lists = [part for part in parts if type(part) is kind]
            dtypes |= _dtypes([*chain.from_iterable(lists)])
        elif issubclass(kind, np.ndarray | jax.Array):
            dtypes |= {part.dtype for part in parts if type(part) is kind}
    return {dtype for dtype in dtypes if isinstance(dtype, np.dtype) and dtype.kind in "biufc"}


def _is_list(x: object) -> bool:
    """Return whether a part of a sample is a list, which is one array."""
    return isinstance(x, list)


def _layout(sample: PyTree) -> tuple[PyTreeDef, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(sample)
    return structure, [leaf.shape for leaf in leaves]


def open_source(function: str, data: PyTree | RandomAccess) -> Arrays | Samples:
    """Return the adapter for `data`, or raise an error that names `function` and what it takes."""
    if isinstance(data, np.ndarray | jax.Array) or not (
        isinstance(data, list) or jax.tree_util.all_leaves([data])
    ):
        return Arrays(function, data)
    if isinstance(data, list) and _is_columns(data):
        raise TypeError(
            f"{function}: data is a list of {len(data)} arrays with {len(data[0])} rows each, and "
            "a list is one of samples. Pass a tuple of the arrays; or, where each array is one "
            "sample, np.stack(data)."
        )
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, RandomAccess):
        raise TypeError(
            f"{function}: data is of type {type(data).__name__}. Pass arrays that share their "
            "leading axis, or anything with __len__ and __getitem__."
        )
    return Samples(function, data)


def _is_columns(data: Sequence[object]) -> bool:
    """Return whether a list looks like arrays of as many samples, and not like samples."""
    arrays = [x for x in data[:8] if isinstance(x, np.ndarray | jax.Array) and x.ndim]
    lengths = {len(x) for x in arrays}
    return 0 < len(data) == len(arrays) and len(lengths) == 1 and lengths.pop() > len(data)
