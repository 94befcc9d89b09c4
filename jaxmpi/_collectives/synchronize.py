"""Synchronize pytrees: give all ranks the pytree of one, after checking that they can be equal."""

import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jaxmpi._backends.interface import Ranks
from jaxmpi._backends.one_process import PerRank
from jaxmpi._collectives.objects import agreed, untraced
from jaxmpi._consistency import compare
from jaxmpi._consistency.identity import identity, same, structure_of
from jaxmpi._errors import RankMismatchError
from jaxmpi._leaves import PyTree, is_key, leaf_name
from jaxmpi._per_rank_state import flatten_with_path, is_per_rank_leaf
from jaxmpi._world import session

__all__ = ["synchronize"]

NUMBERS = (bool, int, float, complex)


class _Leaf(NamedTuple):
    """One leaf as the ranks compare it."""

    name: str
    kind: str  # "array", "number", or the type of any other object
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.kind == "array" else self.kind


class _Difference(NamedTuple):
    """The first difference between the tree of one rank and the tree of root."""

    leaf: str  # its name; "" for the structure of the tree
    here: str | None  # the leaf or the tree on this rank; None if it is missing
    on_root: str | None
    unsendable: str = ""  # the type of a leaf that cannot be sent


def synchronize(tree: PyTree, root: int = 0, *, strict: bool = True) -> PyTree:
    """Give every rank the pytree of rank `root`: parameters, optimizer and model state, PRNG keys.

    Structure, shapes and dtypes are compared on all ranks before anything is sent. Arrays keep
    their dtype, device and kind (JAX or NumPy), numbers stay Python numbers. A leaf that is neither
    (a string, a function, an enum) must be equal on all ranks already; with `strict=False` each
    rank keeps its own. It always keeps what is in a `PerRankState`, such as the shards of
    `sharded`, the gradients that `accumulate` has, and what a codec has not sent.

    **Collective:** every rank calls it, with the same root and strict.
    **Communication:** 16 bytes are compared, and a digest of the structure is gathered. Then root
    broadcasts Python numbers, if there are some, and the bytes of each dtype. With `strict`, leaves
    that cannot be sent take one broadcast and one allgather more.

    Args:
      tree: any pytree, an `nnx.State` or an optax state, say.
      root: the rank whose values count.
      strict: raise where a leaf that cannot be sent differs.

    Returns:
      A new pytree; `tree` is unchanged.

    Raises:
      RankMismatchError: on every rank, naming leaf and ranks, when structure, shapes, dtypes or
        unsendable leaves differ.
      ValueError, TypeError: root is not a rank, or no Python int.
      RuntimeError: called in traced code.

    >>> synchronize({"w": np.ones(2), "step": 3, "name": "mlp"})
    {'name': 'mlp', 'step': 3, 'w': array([1., 1.])}
    """
    with compare.raising_on_all(untraced("synchronize"), "synchronize"):
        session.check_root("synchronize", root)
    backend = agreed(f"synchronize root={root} strict={strict}")
    # simulated ranks stack the leaves that differ between them
    is_leaf = backend.eager(alone=None, stacked=_is_per_rank, parallel=None)
    paths, treedef = flatten_with_path(tree, is_leaf=is_leaf)
    leaves = [leaf for _, leaf in paths]
    spec = [_describe(path, leaf) for path, leaf in paths]
    _agree_on_structure(backend, spec, structure_of(treedef), root)
    sent = [i for i, (path, _) in enumerate(paths) if not is_per_rank_leaf(path)]
    some, spec = [leaves[i] for i in sent], [spec[i] for i in sent]
    send = backend.eager(alone=_send, stacked=_pick, parallel=_send)
    for i, leaf in zip(sent, send(backend, some, spec, root, strict), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def _pick(
    backend: Ranks, leaves: list[Any], spec: list[_Leaf], root: int, strict: bool
) -> list[Any]:
    """Return the root's values of leaves that simulated ranks have stacked."""
    return [leaf[root] if isinstance(leaf, PerRank) else leaf for leaf in leaves]


def _send(
    backend: Ranks, leaves: list[Any], spec: list[_Leaf], root: int, strict: bool
) -> list[Any]:
    """Return the root's leaves; with `strict`, compare those that cannot be sent."""
    leaves = _send_numbers(backend, leaves, spec, root)
    if strict:
        _agree_on_others(backend, leaves, spec, root)
    return _send_arrays(backend, leaves, spec, root)


def _is_per_rank(x: object) -> bool:
    return isinstance(x, PerRank)


def _describe(path: KeyPath, leaf: object) -> _Leaf:
    name = leaf_name(path)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic) and leaf.dtype != object:
        return _Leaf(name, "array", str(leaf.dtype), leaf.shape)
    return _Leaf(name, "number" if type(leaf) in NUMBERS else type(leaf).__qualname__)


def _agree_on_structure(backend: Ranks, spec: list[_Leaf], treedef: str, root: int) -> None:
    """Compare hashes of the trees; raise on all ranks if a tree differs from that of root."""
    digest = hashlib.sha256(repr((spec, treedef)).encode()).hexdigest()
    if len(set(backend.allgather_object(digest))) == 1:
        return
    root_spec, root_treedef = backend.broadcast_object((spec, treedef), root)
    _raise_first(backend, _first_difference(spec, treedef, root_spec, root_treedef), root)


def _first_difference(
    spec: list[_Leaf], treedef: str, root_spec: list[_Leaf], root_treedef: str
) -> _Difference | None:
    mine, roots = {leaf.name: leaf for leaf in spec}, {leaf.name: leaf for leaf in root_spec}
    for name in [*roots, *mine]:
        here, on_root = mine.get(name), roots.get(name)
        if here != on_root:
            return _Difference(
                name,
                None if here is None else str(here),
                None if on_root is None else str(on_root),
            )
    return None if treedef == root_treedef else _Difference("", treedef, root_treedef)


def _raise_first(backend: Ranks, difference: _Difference | None, root: int) -> None:
    """Raise the difference of the lowest rank that has one, on every rank."""
    for rank, its in enumerate(backend.allgather_object(difference)):
        if its is None:
            continue
        if its.here is None:
            what = f"leaf {its.leaf} is on rank {root} ({its.on_root}) and missing on rank {rank}."
        elif its.on_root is None:
            what = f"leaf {its.leaf} is on rank {rank} ({its.here}) and missing on rank {root}."
        else:
            subject = f"leaf {its.leaf} is" if its.leaf else "the tree is"
            if its.unsendable:
                subject = f"leaf {its.leaf}, a {its.unsendable}, cannot be sent and is"
            what = f"{subject} {its.here} on rank {rank} and {its.on_root} on rank {root}."
        advice = "Build the same tree on every rank before the call."
        if its.unsendable:
            advice = f"With strict=False each rank keeps its own. {advice}"
        raise RankMismatchError(
            f"synchronize: {what}",
            advice=advice,
            function="synchronize",
            leaf=its.leaf,
            ranks=[rank, root],
        )


def _send_numbers(
    backend: Ranks, leaves: list[object], spec: list[_Leaf], root: int
) -> list[object]:
    numbers = [i for i, leaf in enumerate(spec) if leaf.kind == "number"]
    if not numbers:
        return leaves
    received = backend.broadcast_object([leaves[i] for i in numbers], root)
    leaves = list(leaves)
    for i, value in zip(numbers, received, strict=True):
        leaves[i] = value
    return leaves


def _agree_on_others(backend: Ranks, leaves: list[object], spec: list[_Leaf], root: int) -> None:
    others = [i for i, leaf in enumerate(spec) if leaf.kind not in ("array", "number")]
    if not others:
        return
    mine = [identity(leaves[i]) for i in others]
    roots = backend.broadcast_object(mine, root)
    difference = None
    for i, here, on_root in zip(others, mine, roots, strict=True):
        if not same(here[0], on_root[0]):
            leaf = spec[i]
            difference = _Difference(leaf.name, here[1][:80], on_root[1][:80], leaf.kind)
            break
    _raise_first(backend, difference, root)


def _send_arrays(backend: Ranks, leaves: list[Any], spec: list[_Leaf], root: int) -> list[Any]:
    leaves = list(leaves)
    # the gradients of integers hold no numbers, and stay as they are
    nothing = str(np.dtype(jax.dtypes.float0))
    for dtype in sorted({leaf.dtype for leaf in spec if leaf.kind == "array"} - {nothing}):
        indices = [i for i, leaf in enumerate(spec) if leaf.dtype == dtype]
        raw = [
            np.asarray(jax.random.key_data(leaves[i]) if is_key(leaves[i]) else leaves[i])
            for i in indices
        ]
        is_root = backend.place.rank == root
        buffer = np.empty(sum(x.nbytes for x in raw), np.uint8)
        if is_root and buffer.size:
            np.concatenate(
                [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in raw], out=buffer
            )
        backend.broadcast_buffer(buffer, root)
        start = 0
        for i, x in zip(indices, raw, strict=True):
            value = buffer[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
            start += x.nbytes
            leaves[i] = _like(leaves[i], value)
    return leaves


def _like(leaf: object, value: np.ndarray) -> ArrayLike:
    """Return `value` as the type of array that `leaf` is, on its device."""
    if not isinstance(leaf, jax.Array):
        return value.copy() if isinstance(leaf, np.ndarray) else value[()]
    if is_key(leaf):
        return jax.random.wrap_key_data(jax.device_put(value), impl=jax.random.key_impl(leaf))
    sharding = leaf.sharding if leaf.committed else None
    return jax.device_put(value.copy(), sharding)
