"""The collectives on pytrees.

All are pure functions: eagerly, under `jit`, `grad`, `vmap`, `scan`, `cond` and `while_loop`. A leaf is a JAX or NumPy array
or a Python number and comes back as a JAX array of the same dtype; PRNG keys move but cannot be reduced. `None` and empty
containers are structure and send nothing.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi import _axis, _jaxcompat, _primitive, _world
from jaxmpi._backends import Backend, Collective, named
from jaxmpi._backends.single import Single
from jaxmpi._jit import eager
from jaxmpi._leaves import as_array, check_rows, is_key

__all__ = ["tree_allgather", "tree_allreduce", "tree_alltoall", "tree_bcast", "tree_reduce", "tree_reduce_scatter"]

OPS = ("mean", "sum", "max", "min", "prod")
WIDE: list[tuple[Any, Any, Any]] = [
    (jnp.floating, jnp.finfo, np.float32),
    (jnp.signedinteger, jnp.iinfo, np.int32),
    (jnp.unsignedinteger, jnp.iinfo, np.uint32),
]


def tree_allreduce(tree: Any, op: str = "mean") -> Any:
    """Reduce a pytree over all ranks; every rank gets the result.

    out = (1/p) · Σ_r tree_r for "mean", leaf by leaf; p = size. The mean of integers is their sum divided by p and
    rounded down (`//`). Floats below 32 bits, and for the mean integers, too, are summed in 32 bits and rounded once; wider
    integers wrap as NumPy's do.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes and op.
    **Communication:** small leaves of one dtype share a message, large ones go alone; about 2 (p-1)/p · bytes sent per rank.

    Args:
      tree: any pytree of arrays and numbers.
      op: "mean", "sum", "max", "min" or "prod". Booleans take "max" (or) and "min" (and) only.

    Returns:
      A pytree of JAX arrays, equal on all ranks.

    Raises:
      ValueError: an unknown op.
      TypeError: a leaf that cannot be reduced so, with its path.

    >>> tree_allreduce({"loss": 2.0}, op="sum")
    {'loss': Array(2., dtype=float32, weak_type=True)}
    """
    check_op("tree_allreduce", op)
    return _apply("tree_allreduce", partial(_allreduce, op=op), tree, op=op)


def tree_bcast(tree: Any, root: int = 0) -> Any:
    """Give every rank the pytree of rank `root`.

    out = tree_root. For parameters and optimizer states `synchronize` is the safe way: it checks the structure first.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes and root.
    **Communication:** each leaf's bytes once, from root.

    Raises:
      ValueError: root is not a rank.
      TypeError: a leaf that is no array, with its path; a root that is no Python int.
    """
    _world.check_root("tree_bcast", root)
    return _apply("tree_bcast", partial(_move, call=Collective("bcast", root=root)), tree)


def tree_reduce(tree: Any, op: str = "mean", root: int = 0) -> Any:
    """Reduce a pytree over all ranks onto rank `root`; the other ranks get their own tree back.

    out_root = (1/p) · Σ_r tree_r for "mean"; out_r = tree_r for r ≠ root.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes, op and root.
    **Communication:** that of `tree_allreduce`.

    Raises:
      ValueError: an unknown op, or root is not a rank.
      TypeError: a leaf that cannot be reduced so, with its path; a root that is no Python int.
    """
    _world.check_root("tree_reduce", root)
    check_op("tree_reduce", op)
    return _apply("tree_reduce", partial(_reduce, op=op, root=root), tree, op=op)


def tree_allgather(tree: Any) -> Any:
    """Stack all ranks' pytrees: each leaf `[...]` becomes `[size, ...]`, in the order of the ranks.

    out[r] = tree_r.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** about (p-1) · bytes received per rank.

    Raises:
      TypeError: a leaf that is no array, with its path.
    """
    return _apply("tree_allgather", partial(_move, call=Collective("allgather")), tree)


def tree_reduce_scatter(tree: Any, op: str = "mean") -> Any:
    """Reduce over all ranks and keep this rank's part: each leaf `[size, ...]` becomes `[...]`.

    out_q = (1/p) · Σ_r tree_r[q] for "mean". `tree_allgather` of the result is `tree_allreduce` of the input.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes and op.
    **Communication:** about (p-1)/p · bytes sent per rank.

    Raises:
      ValueError: an unknown op, or a leaf whose first axis is not size, with its path.
      TypeError: a leaf that cannot be reduced so, with its path.
    """
    check_op("tree_reduce_scatter", op)
    return _apply("tree_reduce_scatter", partial(_reduce_scatter, op=op), tree, op=op, rows=True)


def tree_alltoall(tree: Any) -> Any:
    """Send row q of every leaf to rank q: `[size, ...]` stays `[size, ...]`.

    out_q[r] = tree_r[q], a transposition of ranks and rows.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** (p-1)/p · bytes sent per rank.

    Raises:
      ValueError: a leaf whose first axis is not size, with its path.
      TypeError: a leaf that is no array, with its path.
    """
    return _apply("tree_alltoall", partial(_move, call=Collective("alltoall")), tree, rows=True)


def check_op(function: str, op: Any) -> None:
    """Raise a ValueError that names `function` unless op is one of OPS."""
    if op not in OPS:
        raise ValueError(f"{function}: op {op!r} is unknown. Use one of {', '.join(OPS)}.")


# from trees to lists of arrays


class Ranks(Protocol):
    """The ranks as the functions on lists of arrays see them, in traced code."""

    size: int

    def index(self) -> Any:
        """This rank's number."""

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out a collective on every array."""


class _Axis:
    """The ranks where their axis is bound."""

    def __init__(self) -> None:
        self.size = int(lax.axis_size(_axis.AXIS))

    def index(self) -> jax.Array:
        return lax.axis_index(_axis.AXIS)

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        return named.run(call, xs) if xs else []


class _Plain:
    """The ranks of a backend where no axis is bound: under plain `jax.jit`."""

    def __init__(self, backend: Backend) -> None:
        self.size, self._backend = backend.place.size, backend

    def index(self) -> int:
        return self._backend.place.rank

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        return Single().run(call, xs) if self.size == 1 else _primitive.run(call, xs, self._backend)


ListFunction = Callable[[list[jax.Array], Ranks], list[jax.Array]]


def _apply(function: str, work: ListFunction, tree: Any, *, op: str | None = None, rows: bool = False) -> Any:
    """Check every leaf, then apply `work` to the list of those that hold numbers."""
    backend = _world.current(function)
    outside = not _jaxcompat.tracing()
    if outside and backend.name == "simulate":
        return _program_of(function, _Hashable(work), op, rows)(tree)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [as_array(function, path, leaf, op) for path, leaf in paths]
    if rows:
        for (path, _), x in zip(paths, leaves, strict=True):
            check_rows(function, path, x, _world.size())
    if outside and backend.place.size > 1:
        return _program_of(function, _Hashable(work), op, rows)(treedef.unflatten(leaves))
    keys = {i: jax.random.key_impl(x) for i, x in enumerate(leaves) if is_key(x)}
    for i in keys:
        leaves[i] = jax.random.key_data(leaves[i])
    sent = [i for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0]  # the gradients of integers hold no numbers
    ranks = _Axis() if _axis.bound() else _Plain(backend)
    outs = work([leaves[i] for i in sent], ranks)
    for i, out in zip(sent, outs, strict=True):
        weak = leaves[i].weak_type and not out.weak_type  # that of Python's numbers, which lax.psum drops
        leaves[i] = _jaxcompat.as_weak(out) if weak else out
    for i, impl in keys.items():
        leaves[i] = jax.random.wrap_key_data(leaves[i], impl=impl)
    return treedef.unflatten(leaves)


@cache
def _program_of(function: str, work: "_Hashable", op: str | None, rows: bool) -> Callable[[Any], Any]:
    return eager(lambda tree: _apply(function, work.work, tree, op=op, rows=rows), function)


class _Hashable:
    """A `partial` that equals another of the same function and arguments, so that eager calls compile once per signature."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.key = (work.func, tuple(sorted(work.keywords.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


# on lists of arrays


def _move(xs: Sequence[jax.Array], ranks: Ranks, *, call: Collective) -> list[jax.Array]:
    return ranks.run(call, xs)


def _allreduce(xs: Sequence[jax.Array], ranks: Ranks, *, op: str) -> list[jax.Array]:
    if ranks.size == 1:
        return list(xs)
    if op in ("max", "min", "prod"):
        return _nonlinear(op, ranks, list(xs))
    return _divide(ranks.run(Collective("allreduce", op="sum"), _widen(xs, op)), xs, op, ranks)


def _reduce(xs: Sequence[jax.Array], ranks: Ranks, *, op: str, root: int) -> list[jax.Array]:
    if ranks.size == 1:
        return list(xs)
    # a choice in the data, not in Python: the program, and so its derivative's messages, is the same on every rank
    is_root = jnp.asarray(ranks.index() == root)
    return [jnp.where(is_root, y, x) for x, y in zip(xs, _allreduce(xs, ranks, op=op), strict=True)]


def _reduce_scatter(xs: Sequence[jax.Array], ranks: Ranks, *, op: str) -> list[jax.Array]:
    if op in ("max", "min", "prod"):
        return [x[ranks.index()] for x in _allreduce(xs, ranks, op=op)]
    return _divide(ranks.run(Collective("reduce_scatter", op="sum"), _widen(xs, op)), xs, op, ranks)


def _widen(xs: Sequence[jax.Array], op: str) -> list[jax.Array]:
    """Short floats as float32, so that the sum is rounded once; for the mean, short integers in 32 bits, so that it fits."""
    wide = [_wide(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) or op == "mean" else x.dtype for x in xs]
    return [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(xs, wide, strict=True)]


def _wide(dtype: np.dtype) -> np.dtype:
    for kind, info, wide in WIDE:
        if jnp.issubdtype(dtype, kind) and info(dtype).bits < 32:
            return np.dtype(wide)
    return dtype


def _divide(sums: Sequence[jax.Array], xs: Sequence[jax.Array], op: str, ranks: Ranks) -> list[jax.Array]:
    size = ranks.size
    if op == "mean" and size > 1:
        sums = [s // size if jnp.issubdtype(s.dtype, jnp.integer) else s / size for s in sums]
    return [s if s.dtype == x.dtype else s.astype(x.dtype) for s, x in zip(sums, xs, strict=True)]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _nonlinear(op: str, ranks: Ranks, xs: list[jax.Array]) -> list[jax.Array]:
    """max, min and prod over ranks."""
    return ranks.run(Collective("allreduce", op=op), xs)


@_nonlinear.defjvp
def _nonlinear_jvp(op: str, ranks: Ranks, primals: Any, tangents: Any) -> Any:
    """Dy = Σ_r w_r dx_r: for max and min w = 1/k on the k ranks that hold the extreme; for prod w_r = Π_{s≠r} x_s."""
    (xs,), (dxs,) = primals, tangents
    outs = _nonlinear(op, ranks, xs)
    live = [i for i, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if op == "prod":
        weights = [_product_of_others(x, ranks) for x in ranks.run(Collective("allgather"), [xs[i] for i in live])]
    else:
        holds = [(xs[i] == outs[i]).astype(xs[i].dtype) for i in live]
        counts = ranks.run(Collective("allreduce", op="sum"), holds)
        weights = [h / c for h, c in zip(holds, counts, strict=True)]
    sums = iter(ranks.run(Collective("allreduce", op="sum"), [w * dxs[i] for w, i in zip(weights, live, strict=True)]))
    zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in xs]
    return outs, [next(sums) if i in live else zeros[i] for i in range(len(xs))]


def _product_of_others(stack: jax.Array, ranks: Ranks) -> jax.Array:
    """Π_{s≠rank} stack[s] of a `[size, ...]` stack, right where factors are zero."""
    mine = jnp.arange(ranks.size).reshape(-1, *[1] * (stack.ndim - 1)) == ranks.index()
    return jnp.prod(jnp.where(mine, 1, stack), axis=0, dtype=stack.dtype)
