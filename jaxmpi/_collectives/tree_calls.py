"""One call of a collective on a pytree: eager, under `simulate`, or in traced code.

An eager call on several ranks checks its arguments on all of them, and runs a compiled program.
That program traces the same call in traced code, which hands the leaves to a function of `arrays`.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath, PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _axis, _jaxcompat
from jaxmpi._axis import AXIS, Axis
from jaxmpi._backends.base import Collective
from jaxmpi._backends.interface import Ranks
from jaxmpi._collectives import arrays, exact_counts
from jaxmpi._consistency.compare import raising_on_all
from jaxmpi._consistency.identity import without_addresses
from jaxmpi._jit.api import eager
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, as_array, check_fits, check_rows, is_key, leaf_name
from jaxmpi._marks import with_parameters
from jaxmpi._per_rank_state import shard_axis
from jaxmpi._world import session

__all__ = ["OPS", "Operation", "call_on_tree", "refuse_stray"]

OPS = ("mean", "sum", "max", "min", "prod")
SHOWN = 3  # names of leaves in a text

Paths = Sequence[tuple[KeyPath, ArrayLike]]


class Operation(NamedTuple):
    """One collective on pytrees, with its parameters.

    Attributes:
      function: the function that the user has called, for errors and for the comparison of ranks.
      work: the function of `arrays` that does it, on a list of arrays and the ranks.
      options: the keyword arguments of `work`, in the order of their names.
      axis: the axis of the ranks.
      op: the reduction; None if arrays are only moved.
      root: the rank whose arrays are sent, or that gets the result; None if there is none.
      rows: whether the first axis of each leaf must be the ranks.
    """

    function: str
    work: Callable[..., list[jax.Array]]
    options: tuple[tuple[str, Hashable], ...] = ()
    axis: Axis = AXIS
    op: str | None = None
    root: int | None = None
    rows: bool = False

    def joins(self) -> bool:
        """Return whether it concatenates arrays, and so needs an axis of each leaf."""
        return self.work is arrays.join


def call_on_tree(operation: Operation, tree: PyTree) -> PyTree:
    """Apply a collective to a pytree, in whatever code it is called."""
    backend = session.current(operation.function)
    if _jaxcompat.tracing():
        return _traced(operation, tree)
    apply = backend.eager(alone=_alone, stacked=_simulated, parallel=_eager)
    return apply(operation, tree, backend)


# eager calls


def _alone(operation: Operation, tree: PyTree, backend: Ranks) -> PyTree:
    """Carry out the call at once: on one rank nothing is sent."""
    return _traced(operation, tree)


def _eager(operation: Operation, tree: PyTree, backend: Ranks) -> PyTree:
    """Check the arguments, then run the program of the call."""
    # A rank that refuses its arguments must not leave the others waiting.
    with raising_on_all(backend, operation.function):
        _check_parameters(operation, backend)
        paths, treedef, leaves = _checked_leaves(operation, tree, backend)
    # Sums of Python's and NumPy's integers must be exact, so they are sent in another form.
    counts = []
    if operation.op in ("sum", "mean"):
        counts = [i for i, (_, leaf) in enumerate(paths) if exact_counts.is_count(leaf)]
    if counts:
        return _with_exact_counts(operation, backend, paths, leaves, counts, treedef)
    return _program_of(operation)(treedef.unflatten(leaves))


@cache
def _program_of(operation: Operation) -> Callable[[PyTree], PyTree]:
    """Return an eager call as a step, which is compiled once for each kind of tree."""
    return eager(lambda tree: _traced(operation, tree), operation.function)


def _with_exact_counts(
    operation: Operation,
    backend: Ranks,
    paths: Paths,
    leaves: list[jax.Array],
    counts: list[int],
    treedef: PyTreeDef,
) -> PyTree:
    """Reduce a tree whose leaves at `counts` are integers of Python or NumPy.

    All ranks get the sum of these, even if only some of them need it, so that all raise if it does
    not fit its dtype.
    """
    # 1. The other leaves are reduced as ever.
    reduced: Iterator[jax.Array] = iter(())
    if len(counts) < len(leaves):
        rest = treedef.unflatten([None if i in counts else x for i, x in enumerate(leaves)])
        reduced = iter(jax.tree.leaves(_program_of(operation)(rest)))
    outs = [x if i in counts else next(reduced) for i, x in enumerate(leaves)]
    # 2. The counts are sent as halves. The ranks compare the keys of the tree, and so what each sum
    #    is for.
    purpose = ", ".join(f"{name} {value}" for name, value in operation.options)
    sent = {}
    for i in counts:
        key = f"integers of Python or NumPy, {leaf_name(paths[i][0])}, {purpose}"
        sent[key] = jnp.stack(exact_counts.halves(leaves[i]))
    add = Operation(operation.function, arrays.allreduce, (("op", "sum"),), operation.axis, "sum")
    sums = call_on_tree(add, sent)
    # 3. Each rank keeps its part of the result.
    size = arrays.axis_size(operation.axis, backend)
    index = arrays.along(operation.axis, backend).index()
    assert operation.op is not None
    for i, key in zip(counts, sent, strict=True):
        path, leaf = paths[i]
        x = exact_counts.total(
            operation.function, path, leaf, leaves[i].dtype, sums[key], operation.op, size
        )
        if operation.work is arrays.reduce_scatter:
            x = x[index]
        is_result = operation.root in (None, index)  # a reduce leaves the other ranks their own
        outs[i] = x if is_result else leaves[i]
    return treedef.unflatten(outs)


# eager calls under `simulate`


def _simulated(operation: Operation, tree: PyTree, backend: Ranks) -> PyTree:
    """Check the arguments, then run the program of the call, on all simulated ranks."""
    function = operation.function
    with raising_on_all(backend, function):
        _check_parameters(operation, backend)
        # This looks at the stack of a `PerRank`. Its program checks the rest, as it is traced.
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            check_fits(function, path, leaf)
    program = _program_of(operation)
    if operation.op not in ("sum", "mean"):
        return program(tree)
    # Integers of Python and NumPy are summed exactly, and all other leaves by the program.
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_per_rank)
    exact = [exact_counts.is_count(leaf.stack if is_per_rank(leaf) else leaf) for _, leaf in paths]
    rest = [None if known else leaf for known, (_, leaf) in zip(exact, paths, strict=True)]
    reduced = program(treedef.unflatten(rest))
    if not any(exact):
        return reduced
    options = tuple(sorted({**dict(operation.options), "op": "sum"}.items()))
    sum_of = _program_of(operation._replace(options=options, op="sum"))
    found = [pair for pair, known in zip(paths, exact, strict=True) if known]
    counts = iter(exact_counts.simulated(function, found, operation.op, sum_of))
    others = iter(jax.tree.leaves(reduced, is_leaf=is_per_rank))
    return treedef.unflatten([next(counts) if known else next(others) for known in exact])


# calls in traced code, or on one rank


def _traced(operation: Operation, tree: PyTree) -> PyTree:
    """Check the arguments, and apply the collective to the list of the leaves that hold numbers."""
    backend = session.current(operation.function)
    _check_parameters(operation, backend)
    paths, treedef, leaves = _checked_leaves(operation, tree, backend)
    # PRNG keys are moved as their numbers.
    keys = {i: jax.random.key_impl(x) for i, x in enumerate(leaves) if is_key(x)}
    for i in keys:
        leaves[i] = jax.random.key_data(leaves[i])
    # The gradients of integers hold no numbers: they only get the shape of the result.
    ranks = arrays.along(operation.axis, backend)
    sent = [i for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0]
    text = _parameters_text(operation, [leaf_name(path) for path, _ in paths])
    xs = with_parameters([leaves[i] for i in sent], text)
    outs = operation.work(xs, ranks, **dict(operation.options))
    for i, out in zip(sent, outs, strict=True):
        # `lax.psum` drops the weak type of Python numbers.
        weak = leaves[i].weak_type and not out.weak_type
        leaves[i] = _jaxcompat.as_weak(out) if weak else out
    for i in {*range(len(leaves))}.difference(sent):
        shape = _out_shape(operation, leaves[i].shape, ranks.size)
        leaves[i] = np.zeros(shape, jax.dtypes.float0)  # type: ignore[call-overload]
    for i, impl in keys.items():
        leaves[i] = jax.random.wrap_key_data(leaves[i], impl=impl)
    return treedef.unflatten(leaves)


def _parameters_text(operation: Operation, names: list[str]) -> str:
    """Return what all ranks must have equal in a call, such as "tree_bcast of ['w'] root=0"."""
    known = {name: value for name, value in operation.options if name != "call"}
    if operation.root is not None:
        known["root"] = operation.root
    if operation.joins():
        known["tiled"] = True
    if operation.axis != AXIS:
        known["axis"] = operation.axis
    names = [without_addresses(name) for name in names]
    of = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        digest = hashlib.blake2b(repr(names).encode(), digest_size=4).hexdigest()
        of += f" and {len(names) - SHOWN} more leaves, with digest {digest}"
    values = [f"{name}={value}" for name, value in sorted(known.items())]
    return " ".join([operation.function, "of", of, *values])


def _out_shape(operation: Operation, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of the result for an array of shape `shape`."""
    if operation.joins():
        return arrays.joined_shape(shape, size)
    for name, value in operation.options:
        if name == "call" and isinstance(value, Collective):
            return value.out_shape(shape, size)
    kind = "reduce_scatter" if operation.work is arrays.reduce_scatter else "allreduce"
    return Collective(kind).out_shape(shape, size)


# checks of arguments


def _check_parameters(operation: Operation, backend: Ranks) -> None:
    """Raise an error that names the function for a wrong axis, root or op."""
    arrays.check_axis(operation.function, operation.axis, backend)
    if operation.root is not None:
        size = arrays.axis_size(operation.axis, backend)
        session.check_root(operation.function, operation.root, size)
    for name, op in operation.options:
        if name == "op" and op not in OPS:
            raise ValueError(
                f"{operation.function}: op {op!r} is unknown. Use one of {', '.join(OPS)}."
            )


def _checked_leaves(
    operation: Operation, tree: PyTree, backend: Ranks
) -> tuple[Paths, PyTreeDef, list[jax.Array]]:
    """Return the paths, the structure and the leaves as arrays; refuse a wrong leaf by name."""
    function = operation.function
    refuse_stray(function, tree, backend)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if operation.op:
        for path, _ in paths:
            _refuse_shard(operation, path)
    leaves = [as_array(function, path, leaf, operation.op) for path, leaf in paths]
    if operation.rows:
        size = arrays.axis_size(operation.axis, backend)
        for (path, _), x in zip(paths, leaves, strict=True):
            check_rows(function, path, x, size)
    if operation.joins():
        for (path, _), x in zip(paths, leaves, strict=True):
            if x.ndim == 0:
                raise ValueError(
                    f"{function}: leaf {leaf_name(path)} has no axis along which the ranks' arrays "
                    "could be joined. Leave out tiled=True to stack them, or pass an array of "
                    "shape [1]."
                )
    return paths, treedef, leaves


def _refuse_shard(operation: Operation, path: KeyPath) -> None:
    """Raise a ValueError for a leaf that is sharded over ranks that would be reduced."""
    axis = shard_axis(path)
    if axis is not None and (operation.rows or _axis.overlap(operation.axis, axis)):
        raise ValueError(
            f"{operation.function}: leaf {leaf_name(path[:-1])} is a ShardedArray, of which each "
            "rank has another part. Its gradients, by jaxmpi.unshard, are means over the ranks "
            "already; jaxmpi.unshard makes other things whole."
        )


def refuse_stray(function: str, tree: PyTree, backend: Ranks) -> None:
    """Raise a TypeError for a `PerRank` in traced code, or where ranks are not simulated."""
    if not any(map(is_per_rank, jax.tree.leaves(tree, is_leaf=is_per_rank))):
        return
    refuse = backend.eager(
        alone=_refuse_simulated, stacked=_refuse_traced, parallel=_refuse_simulated
    )
    refuse(function)


def _refuse_simulated(function: str) -> None:
    raise TypeError(
        f"{function}: a leaf is a PerRank, the values of simulated ranks, and this is no `with "
        "jaxmpi.simulate(n)`. Pass this rank's own array."
    )


def _refuse_traced(function: str) -> None:
    if _jaxcompat.tracing():
        raise TypeError(
            f"{function}: a PerRank stands inside of a traced function. Make it an argument of the "
            "jaxmpi.jit."
        )
