"""Make all ranks' pytrees equal to one rank's, after checking that they can be."""

import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jaxmpi._backends.base import Backend
from jaxmpi._backends.simulate import PerRank
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
    """What must be the same on all ranks: `kind` is "array", "number" or the type of any other object."""

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.kind == "array" else self.kind


def synchronize(tree: PyTree, root: int = 0, *, strict: bool = True) -> PyTree:
    """Give every rank the pytree of rank `root`: parameters, optimizer state, model state, PRNG keys.

    Structure, shapes and dtypes are compared on all ranks before anything is sent. Arrays keep
    their dtype, device and kind (JAX or NumPy), numbers stay Python numbers. A leaf that is neither
    (a string, a function, an enum) must be equal on all ranks already; with `strict=False` each
    rank keeps its own. It always keeps what is in a `PerRankState`, such as the shards of
    `sharded`, the gradients that `accumulate` has, and what a codec has not sent.

    **Collective:** every rank calls it, with the same root and strict.
    **Communication:** a hash, then every dtype's bytes in one broadcast from root.

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
    # of simulated ranks, what differs between them is stacked
    paths, treedef = flatten_with_path(tree, is_leaf=_is_per_rank if backend.simulates else None)
    leaves = [leaf for _, leaf in paths]
    spec = [_describe(path, leaf) for path, leaf in paths]
    _agree_on_structure(backend, spec, structure_of(treedef), root)
    sent = [i for i, (path, _) in enumerate(paths) if not is_per_rank_leaf(path)]
    if backend.simulates:
        for i in sent:
            leaves[i] = leaves[i][root] if isinstance(leaves[i], PerRank) else leaves[i]
        return treedef.unflatten(leaves)
    some, spec = [leaves[i] for i in sent], [spec[i] for i in sent]
    some = _send_numbers(backend, some, spec, root)
    if strict:
        _agree_on_others(backend, some, spec, root)
    for i, leaf in zip(sent, _send_arrays(backend, some, spec, root), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def _is_per_rank(x: object) -> bool:
    return isinstance(x, PerRank)


def _describe(path: KeyPath, leaf: object) -> _Leaf:
    name = leaf_name(path)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic) and leaf.dtype != object:
        return _Leaf(name, "array", str(leaf.dtype), leaf.shape)
    return _Leaf(name, "number" if type(leaf) in NUMBERS else type(leaf).__qualname__)


def _agree_on_structure(backend: Backend, spec: list[_Leaf], treedef: str, root: int) -> None:
    """Compare hashes; where they differ, every rank compares its own with root's and all report the first difference."""
    digest = hashlib.sha256(repr((spec, treedef)).encode()).hexdigest()
    if len(set(backend.allgather_object(digest))) == 1:
        return
    root_spec, root_treedef = backend.broadcast_object((spec, treedef), root)
    _raise_first(
        backend, _first_difference(spec, treedef, root_spec, root_treedef, backend.place.rank, root)
    )


def _first_difference(
    spec: list[_Leaf], treedef: str, root_spec: list[_Leaf], root_treedef: str, rank: int, root: int
) -> str | None:
    mine, roots = {leaf.name: leaf for leaf in spec}, {leaf.name: leaf for leaf in root_spec}
    for name in [*roots, *mine]:
        if name not in mine:
            return f"leaf {name} is on rank {root} ({roots[name]}) and missing on rank {rank}."
        if name not in roots:
            return f"leaf {name} is on rank {rank} ({mine[name]}) and missing on rank {root}."
        if mine[name] != roots[name]:
            return f"leaf {name} is {mine[name]} on rank {rank} and {roots[name]} on rank {root}."
    if treedef != root_treedef:
        return f"the tree is {treedef} on rank {rank} and {root_treedef} on rank {root}."
    return None


def _raise_first(backend: Backend, difference: str | None) -> None:
    """Raise the lowest rank's difference on every rank, if there is one."""
    differences = [d for d in backend.allgather_object(difference) if d]
    if differences:
        raise RankMismatchError(
            f"synchronize: {differences[0]} Build the same tree on every rank before the call."
        )


def _send_numbers(
    backend: Backend, leaves: list[object], spec: list[_Leaf], root: int
) -> list[object]:
    numbers = [i for i, leaf in enumerate(spec) if leaf.kind == "number"]
    if not numbers:
        return leaves
    received = backend.broadcast_object([leaves[i] for i in numbers], root)
    leaves = list(leaves)
    for i, value in zip(numbers, received, strict=True):
        leaves[i] = value
    return leaves


def _agree_on_others(backend: Backend, leaves: list[object], spec: list[_Leaf], root: int) -> None:
    others = [i for i, leaf in enumerate(spec) if leaf.kind not in ("array", "number")]
    if not others:
        return
    mine = [identity(leaves[i]) for i in others]
    roots = backend.broadcast_object(mine, root)
    difference = None
    for i, here, there in zip(others, mine, roots, strict=True):
        if not same(here[0], there[0]):
            rank = backend.place.rank
            difference = (
                f"leaf {spec[i].name}, a {spec[i].kind}, cannot be sent and is {here[1][:80]} on "
                f"rank {rank} and "
                f"{there[1][:80]} on rank {root}. With strict=False each rank keeps its own."
            )
            break
    _raise_first(backend, difference)


def _send_arrays(backend: Backend, leaves: list[Any], spec: list[_Leaf], root: int) -> list[Any]:
    leaves = list(leaves)
    # the gradients of integers, which hold no numbers: they stay as they are
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
    """`value` as the kind of array that `leaf` is, on its device."""
    if not isinstance(leaf, jax.Array):
        return value.copy() if isinstance(leaf, np.ndarray) else value[()]
    if is_key(leaf):
        return jax.random.wrap_key_data(jax.device_put(value), impl=jax.random.key_impl(leaf))
    sharding = leaf.sharding if leaf.committed else None
    return jax.device_put(value.copy(), sharding)
