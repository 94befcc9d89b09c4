"""The collectives on pytrees.

All are pure functions: eagerly, under `jit`, `grad`, `vmap`, `scan`, `cond` and `while_loop`. A
leaf is a JAX or NumPy array or a Python number and comes back as a JAX array of the same dtype;
PRNG keys move but cannot be reduced. `None` and empty containers are structure and send nothing.
"""

import hashlib
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath, PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _axis, _jaxcompat
from jaxmpi._axis import AXIS, Axis
from jaxmpi._backends.base import Backend, Collective
from jaxmpi._collectives import arrays, exact_counts
from jaxmpi._collectives.arrays import check_axis
from jaxmpi._consistency.compare import raising_on_all
from jaxmpi._jit.api import eager
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, as_array, check_fits, check_rows, is_key, leaf_name
from jaxmpi._per_rank_state import shard_axis
from jaxmpi._world import session

__all__ = [
    "Caller",
    "refuse_stray",
    "tree_allgather",
    "tree_allreduce",
    "tree_alltoall",
    "tree_bcast",
    "tree_reduce",
    "tree_reduce_scatter",
]

SHOWN = 3  # names of leaves in a text
OPS = ("mean", "sum", "max", "min", "prod")


def tree_allreduce(tree: PyTree, op: str = "mean", *, axis: Axis = AXIS) -> PyTree:
    """Reduce a pytree over all ranks; every rank gets the result.

    out = (1/p) · Σ_r tree_r for "mean", leaf by leaf; p = size. The mean of integers is their sum
    divided by p and rounded down (`//`). Floats below 32 bits, and for the mean integers, too, are
    summed in 32 bits and rounded once; wider integers wrap as NumPy's do. Sums and means of
    integers of Python and NumPy are exact, called eagerly, or raise; a leaf is such an integer on
    all ranks or on none.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes and op.
    **Communication:** small leaves of one dtype share a message, large ones go alone; about 2
    (p-1)/p · bytes sent per rank.

    Args:
      tree: any pytree of arrays and numbers.
      op: "mean", "sum", "max", "min" or "prod". Booleans take "max" (or) and "min" (and) only.
      axis: the name of an axis of `init(axes=...)`, or a tuple of several: the ranks of each group
        along it reduce theirs. All ranks, `jaxmpi.AXIS`, by default. Shards of `fully_shard` may be
        reduced over other axes than their own.

    Returns:
      A pytree of JAX arrays, equal on all ranks, or on all of a group.

    Raises:
      ValueError: an unknown op, or axis.
      TypeError: a leaf that cannot be reduced so, with its path.
      OverflowError: a number of Python or NumPy, or a sum of such integers, that does not fit the
        dtype of JAX, with its path; without `jax_enable_x64` that has 32 bits.

    >>> tree_allreduce({"loss": 2.0}, op="sum")
    {'loss': Array(2., dtype=float32, weak_type=True)}
    """
    return Caller("tree_allreduce").allreduce(tree, op, axis=axis)


def tree_bcast(tree: PyTree, root: int = 0, *, axis: Axis = AXIS) -> PyTree:
    """Give every rank the pytree of rank `root`.

    out = tree_root; with `axis`, as in `tree_allreduce`, within each group, whose ranks count from
    0. For parameters and optimizer states `synchronize` is the safe way: it checks the structure
      first.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes and root.
    **Communication:** that of a sum of as many bytes, `tree_allreduce(tree, "sum")`: the other
    ranks add zeros. Under plain `jax.jit`, mpi4jax sends each leaf's bytes once, from root.

    Raises:
      ValueError: root is not a rank, or of no group; an unknown axis.
      TypeError: a leaf that is no array, with its path; a root that is no Python int.
    """
    return _apply(
        "tree_bcast",
        partial(arrays.move, call=Collective("bcast", root=root)),
        tree,
        axis,
        root=root,
    )


def tree_reduce(tree: PyTree, op: str = "mean", root: int = 0, *, axis: Axis = AXIS) -> PyTree:
    """Reduce a pytree over all ranks onto rank `root`; the other ranks get their own tree back.

    out_root = (1/p) · Σ_r tree_r for "mean"; out_r = tree_r for r ≠ root. `axis` and root are as in
    `tree_bcast`.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes, op and root.
    **Communication:** that of `tree_allreduce`.

    Raises:
      ValueError: an unknown op, or root is not a rank.
      TypeError: a leaf that cannot be reduced so, with its path; a root that is no Python int.
    """
    return _apply(
        "tree_reduce", partial(arrays.reduce, op=op, root=root), tree, axis, op=op, root=root
    )


def tree_allgather(tree: PyTree, *, axis: Axis = AXIS, tiled: bool = False) -> PyTree:
    """Stack all ranks' pytrees: each leaf `[...]` becomes `[size, ...]`, in the order of the ranks.

    out[r] = tree_r. With `axis`, as in `tree_allreduce`, size is that of a group, and r counts its
    ranks.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** about (p-1) · bytes received per rank.

    Args:
      tree: any pytree of arrays and numbers.
      axis: as in `tree_allreduce`.
      tiled: as in `jax.lax.all_gather`: the ranks' arrays are joined along their first axis, so
        that a leaf `[n, ...]` becomes `[size · n, ...]`, without a new axis.

    Raises:
      ValueError: a leaf without an axis, where they are to be joined, with its path.
      TypeError: a leaf that is no array, with its path.

    >>> tree_allgather(jnp.array([1.0, 2.0]), tiled=True)
    Array([1., 2.], dtype=float32)
    """
    caller = Caller("tree_allgather")
    return caller.allgather_tiled(tree, axis=axis) if tiled else caller.allgather(tree, axis=axis)


def tree_reduce_scatter(tree: PyTree, op: str = "mean", *, axis: Axis = AXIS) -> PyTree:
    """Reduce over all ranks and keep this rank's part: each leaf `[size, ...]` becomes `[...]`.

    out_q = (1/p) · Σ_r tree_r[q] for "mean". `tree_allgather` of the result is `tree_allreduce` of
    the input. `axis` is as in `tree_allgather`.

    **Collective:** every rank calls it, with the same structure, shapes, dtypes and op.
    **Communication:** about (p-1)/p · bytes sent per rank.

    Raises:
      ValueError: an unknown op, or a leaf whose first axis is not size, with its path.
      TypeError: a leaf that cannot be reduced so, with its path.
    """
    return Caller("tree_reduce_scatter").reduce_scatter(tree, op, axis=axis)


def tree_alltoall(tree: PyTree, *, axis: Axis = AXIS) -> PyTree:
    """Send row q of every leaf to rank q: `[size, ...]` stays `[size, ...]`.

    out_q[r] = tree_r[q], a transposition of ranks and rows. `axis` is as in `tree_allgather`.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** (p-1)/p · bytes sent per rank.

    Raises:
      ValueError: a leaf whose first axis is not size, with its path.
      TypeError: a leaf that is no array, with its path.
    """
    return Caller("tree_alltoall").alltoall(tree, axis=axis)


class Caller:
    """The collectives on pytrees on behalf of another function of jaxmpi.

    Errors and the comparison of the ranks name that function, so that a rank that calls it is not
    taken for one that calls `tree_allreduce` with arrays of the same shapes.

    Attributes:
      function: its name, such as "local_sgd".
    """

    def __init__(self, function: str) -> None:
        self.function = function

    def allreduce(self, tree: PyTree, op: str = "mean", *, axis: Axis = AXIS) -> PyTree:
        """Reduce a pytree as `tree_allreduce` does."""
        return _apply(self.function, partial(arrays.allreduce, op=op), tree, axis, op=op)

    def allgather(self, tree: PyTree, *, axis: Axis = AXIS) -> PyTree:
        """Stack the ranks' pytrees as `tree_allgather` does."""
        return _apply(self.function, partial(arrays.move, call=Collective("allgather")), tree, axis)

    def allgather_tiled(self, tree: PyTree, *, axis: Axis = AXIS) -> PyTree:
        """Join the ranks' pytrees as `tree_allgather(tiled=True)` does."""
        return _apply(self.function, partial(arrays.join), tree, axis)

    def alltoall(self, tree: PyTree, *, axis: Axis = AXIS) -> PyTree:
        """Send rows to the ranks as `tree_alltoall` does."""
        return _apply(
            self.function, partial(arrays.move, call=Collective("alltoall")), tree, axis, rows=True
        )

    def reduce_scatter(self, tree: PyTree, op: str = "mean", *, axis: Axis = AXIS) -> PyTree:
        """Reduce a pytree and keep a part as `tree_reduce_scatter` does."""
        work = partial(arrays.reduce_scatter, op=op)
        return _apply(self.function, work, tree, axis, op=op, rows=True)


def check_op(function: str, op: object) -> None:
    """Raise a ValueError that names `function` unless op is one of OPS."""
    if op not in OPS:
        raise ValueError(f"{function}: op {op!r} is unknown. Use one of {', '.join(OPS)}.")


def refuse_stray(function: str, tree: PyTree, backend: Backend) -> None:
    """Raise a TypeError that names `function` if a `PerRank` stands where the ranks are not simulated, or in traced code."""
    if not any(map(is_per_rank, jax.tree.leaves(tree, is_leaf=is_per_rank))):
        return
    if not backend.simulates:
        raise TypeError(
            f"{function}: a leaf is a PerRank, the values of simulated ranks, and this is no `with "
            "jaxmpi.simulate(n)`. Pass "
            "this rank's own array."
        )
    if _jaxcompat.tracing():
        raise TypeError(
            f"{function}: a PerRank stands inside of a traced function. Make it an argument of the "
            "jaxmpi.jit."
        )


# from trees to lists of arrays


def _apply(
    function: str,
    work: partial[list[jax.Array]],
    tree: PyTree,
    axis: Axis,
    *,
    op: str | None = None,
    rows: bool = False,
    root: int | None = None,
) -> PyTree:
    """Check the arguments, then apply `work` to the list of the leaves that hold numbers.

    Called eagerly on several ranks, it is a program that calls this function again, in traced code.
    """
    backend = session.current(function)
    outside = (backend.place.size > 1 or backend.simulates) and not _jaxcompat.tracing()
    with raising_on_all(backend, function) if outside else nullcontext():
        check_axis(function, axis, backend)
        if root is not None:
            session.check_root(function, root, arrays.axis_size(axis, backend))
        if "op" in work.keywords:
            check_op(function, op)
        if outside and backend.simulates:
            # the stacks of those that are a PerRank
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                check_fits(function, path, leaf)
        else:
            paths, treedef, leaves = _checked_leaves(function, tree, axis, op, rows, backend)
            if work.func is arrays.join:
                for (path, _), x in zip(paths, leaves, strict=True):
                    _check_joinable(function, path, x)
    run = (
        _program_of(function, work.func, tuple(sorted(work.keywords.items())), axis, op, rows)
        if outside
        else None
    )
    if run and backend.simulates:
        return (
            _simulated(function, work, tree, axis, rows, run)
            if op in ("sum", "mean")
            else run(tree)
        )
    counts = [
        i
        for i, (_, leaf) in enumerate(paths)
        if op in ("sum", "mean") and exact_counts.is_count(leaf)
    ]
    if run and counts:
        return _with_exact_counts(function, work, paths, leaves, counts, run, axis, treedef)
    if run:
        return run(treedef.unflatten(leaves))
    keys = {i: jax.random.key_impl(x) for i, x in enumerate(leaves) if is_key(x)}
    for i in keys:
        leaves[i] = jax.random.key_data(leaves[i])
    ranks = arrays.along(axis, backend)
    # the gradients of integers hold no numbers, and only take the shape of the result
    sent = [i for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0]
    text = _parameters(function, work, axis, [leaf_name(path) for path, _ in paths])
    outs = work(_axis.with_parameters([leaves[i] for i in sent], text), ranks)
    for i, out in zip(sent, outs, strict=True):
        # that of Python's numbers, which lax.psum drops
        weak = leaves[i].weak_type and not out.weak_type
        leaves[i] = _jaxcompat.as_weak(out) if weak else out
    for i in {*range(len(leaves))}.difference(sent):
        shape = _out_shape(work, leaves[i].shape, ranks.size)
        leaves[i] = np.zeros(shape, jax.dtypes.float0)  # type: ignore[call-overload]
    for i, impl in keys.items():
        leaves[i] = jax.random.wrap_key_data(leaves[i], impl=impl)
    return treedef.unflatten(leaves)


def _checked_leaves(
    function: str, tree: PyTree, axis: Axis, op: str | None, rows: bool, backend: Backend
) -> tuple[list[tuple[KeyPath, ArrayLike]], PyTreeDef, list[jax.Array]]:
    """Return the paths, the structure and the leaves as arrays; raise an error that names a leaf that is refused."""
    refuse_stray(function, tree, backend)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    cuts = [(path, cut) for path, _ in paths if op and (cut := shard_axis(path)) is not None]
    if refused := [path for path, cut in cuts if rows or _axis.overlap(axis, cut)]:
        raise ValueError(
            f"{function}: leaf {leaf_name(refused[0][:-1])} is a ShardedArray, of which each rank "
            "has another part. Its "
            "gradients, by jaxmpi.unshard, are means over the ranks already; jaxmpi.unshard makes "
            "other things whole."
        )
    leaves = [as_array(function, path, leaf, op) for path, leaf in paths]
    if rows:
        size = arrays.axis_size(axis, backend)
        for (path, _), x in zip(paths, leaves, strict=True):
            check_rows(function, path, x, size)
    return paths, treedef, leaves


def _check_joinable(function: str, path: KeyPath, x: jax.Array) -> None:
    if x.ndim == 0:
        raise ValueError(
            f"{function}: leaf {leaf_name(path)} has no axis along which the ranks' arrays could "
            "be joined. Leave out "
            "tiled=True to stack them, or pass an array of shape [1]."
        )


def _with_exact_counts(
    function: str,
    work: partial[list[jax.Array]],
    paths: Sequence[tuple[KeyPath, ArrayLike]],
    leaves: list[jax.Array],
    counts: list[int],
    run: Callable[[PyTree], PyTree],
    axis: Axis,
    treedef: PyTreeDef,
) -> PyTree:
    """Reduce a tree outside of traced code, the leaves `counts`, integers of Python and NumPy, by `exact_counts`."""
    backend, options = session.current(function), dict(work.keywords)
    size, place = arrays.axis_size(axis, backend), arrays.along(axis, backend).index()
    rest = treedef.unflatten([None if i in counts else x for i, x in enumerate(leaves)])
    reduced = iter(jax.tree.leaves(run(rest)) if len(counts) < len(leaves) else [])
    outs = [x if i in counts else next(reduced) for i, x in enumerate(leaves)]
    # Where only some ranks need the sum, all get it, so that all raise. The keys have the ranks
    # compare what it is for.
    purpose = ", ".join(f"{name} {value}" for name, value in sorted(options.items()))
    keys = {i: f"integers of Python or NumPy, {leaf_name(paths[i][0])}, {purpose}" for i in counts}
    sent = {key: jnp.stack(exact_counts.halves(leaves[i])) for i, key in keys.items()}
    sums = Caller(function).allreduce(sent, "sum", axis=axis)
    for i, key in keys.items():
        path, leaf = paths[i]
        x = exact_counts.total(
            function, path, leaf, leaves[i].dtype, sums[key], options["op"], size
        )
        if work.func is arrays.reduce_scatter:
            x = x[place]
        outs[i] = leaves[i] if options.get("root", place) != place else x
    return treedef.unflatten(outs)


def _simulated(
    function: str,
    work: partial[list[jax.Array]],
    tree: PyTree,
    axis: Axis,
    rows: bool,
    run: Callable[[PyTree], PyTree],
) -> PyTree:
    """Reduce a tree under `simulate`, integers of Python and NumPy by `exact_counts`, and all else by `run`."""
    op = work.keywords["op"]
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_per_rank)
    exact = [exact_counts.is_count(leaf.stack if is_per_rank(leaf) else leaf) for _, leaf in paths]
    reduced = run(
        treedef.unflatten(
            [None if known else leaf for known, (_, leaf) in zip(exact, paths, strict=True)]
        )
    )
    if not any(exact):
        return reduced
    keywords = tuple(sorted({**work.keywords, "op": "sum"}.items()))
    sum_of = _program_of(function, work.func, keywords, axis, "sum", rows)
    counts = iter(
        exact_counts.simulated(
            function, [p for p, known in zip(paths, exact, strict=True) if known], op, sum_of
        )
    )
    others = iter(jax.tree.leaves(reduced, is_leaf=is_per_rank))
    return treedef.unflatten([next(counts) if known else next(others) for known in exact])


def _out_shape(
    work: partial[list[jax.Array]], shape: tuple[int, ...], size: int
) -> tuple[int, ...]:
    """The shape of the result that `work` has for an array of shape `shape`."""
    if work.func is arrays.join:
        return arrays.joined_shape(shape, size)
    kind = "reduce_scatter" if work.func is arrays.reduce_scatter else "allreduce"
    return work.keywords.get("call", Collective(kind)).out_shape(shape, size)


def _parameters(function: str, work: partial[list[jax.Array]], axis: Axis, names: list[str]) -> str:
    """Return what must be equal in a call on all ranks, in words: such as "tree_bcast of ['w'] root=0"."""
    known = {name: value for name, value in work.keywords.items() if name != "call"}
    call = work.keywords.get("call")
    if call and call.kind == "bcast":
        known["root"] = call.root
    if work.func is arrays.join:
        known["tiled"] = True
    if axis != AXIS:
        known["axis"] = axis
    # addresses, which differ between processes
    names = [re.sub("0x[0-9a-f]+", "", name) for name in names]
    of = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        digest = hashlib.blake2b(repr(names).encode(), digest_size=4).hexdigest()
        of += f" and {len(names) - SHOWN} more leaves, with digest {digest}"
    return " ".join(
        [function, "of", of, *(f"{name}={value}" for name, value in sorted(known.items()))]
    )


@cache
def _program_of(
    function: str,
    work: Callable[..., list[jax.Array]],
    keywords: tuple[tuple[str, Hashable], ...],
    axis: Axis,
    op: str | None,
    rows: bool,
) -> Callable[[PyTree], PyTree]:
    """An eager call as a function of `jaxmpi.jit`: compiled once for each kind of tree."""
    bound = partial(work, **dict(keywords))
    return eager(lambda tree: _apply(function, bound, tree, axis, op=op, rows=rows), function)
