"""Deterministic sums: the same bits for any number of ranks, and of threads.

A training step with M micro-batches on p ranks is

    g_i = gradient of micro-batch i          `micro_batch_grads`: M/p of them on each rank
    g   = (1/M) · Σ_i g_i                    `MicroBatchMean`, on all ranks
    updates, state ← inner(g, state)         `invariant_update`

Floating-point sums depend on their order, so the order is fixed in three places:

1. Over micro-batches. A global batch is cut into M micro-batches, whatever the number of ranks.
   Each is differentiated by itself, in a loop with the same body everywhere, and the M gradients
   are added in one binary tree: neighbors first, then their sums (`MicroBatchMean`).
2. Within a micro-batch and within the optimizer, for any number of threads. XLA's CPU backend gives
   sums of arrays to a library that splits them among its threads, so the same program has other
   bits with two threads than with one. XLA keeps a sum in one loop of its own if the summands are
   computed in that loop. So each summand is multiplied by a number that is always 1, which XLA
   cannot know (`in_one_order`). Matrix products stay as they are.
3. Between the two: on one rank XLA could fuse the last sum with the optimizer's arithmetic, which
   it cannot where a message is between them (`not_fused`).
"""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import BRANCHES_AND_LOOPS, communicates
from jaxmpi._analysis.inner_jaxprs import callee, map_subjaxprs, subjaxprs, transform_name
from jaxmpi._analysis.primitives import Op, Trait, has, op_of, reduction_of
from jaxmpi._axis import AXIS, Axis
from jaxmpi._barriers import not_fused, unknown_one
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._errors import RankCountError
from jaxmpi._jit.api import compiled
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._lowering.trace import evaluate
from jaxmpi._marks import with_parameters
from jaxmpi._optim.float_leaves import map_floats, wide
from jaxmpi._optim.mean import Mean, Traits
from jaxmpi._optim.transform_arguments import checked_count
from jaxmpi._world import session

__all__ = ["MicroBatchMean", "invariant_update", "micro_batch_grads"]


# --- gradients of micro-batches ------------------------------------------------------------------


def micro_batch_grads(
    fun: Callable[..., PyTree], micro_batches: int, *, axis: Axis = AXIS
) -> Callable[..., PyTree]:
    """Apply a gradient function to one micro-batch after the other.

        grads = jaxmpi.micro_batch_grads(jax.grad(loss), 8)(params, batch)  # leaves [8 / size, ...]
        tx = jaxmpi.distributed(optax.adam(1e-3), micro_batches=8)
        updates, state = tx.update(grads, state, params)

    The updates have the same bits on any number of ranks that divides M. Sums in `fun` have one
    order for any number of threads. Long matrix products on CPUs do not: give the ranks of all runs
    the same number of threads, with `jaxmpi run --threads 1` or NPROC=1. On GPUs, XLA has one order
    only with `--xla_gpu_deterministic_ops=true` in XLA_FLAGS.

    **Collective:** no; nothing is sent.

    Args:
      fun: (params, batch, *rest) -> any pytree, such as `jax.grad` of a loss that averages over its
        batch. It must not communicate: batch statistics of all ranks, for example, would depend on
        the number of ranks.
      micro_batches: M, of all p ranks together, or of the p ranks of a group.
      axis: as in `distributed`: the ranks of each group share the micro-batches.

    Returns:
      A function of the same arguments. `batch` is this rank's share of the global batch: leaves
      `[b, ...]`. It is cut into M/p micro-batches `[b·p/M, ...]`; the results of `fun` are returned
      as stacks, leaves `[M/p, ...]` in the dtypes of `fun`.

    Warns:
      UserWarning: on a GPU, if XLA_FLAGS has no `--xla_gpu_deterministic_ops`.

    Raises:
      TypeError: M is no integer.
      ValueError: M is below 1; when called, if the number of ranks p does not divide M
        (`RankCountError`), or M/p does not divide the length b of a leaf of the batch, with its
        path; if `fun` communicates, with the source line.
    """
    micro_batches = checked_count(
        "micro_batch_grads", "micro_batches", micro_batches, "how many all ranks have together"
    )

    def grads(params: PyTree, batch: PyTree, *rest: PyTree) -> PyTree:
        count_here = _micro_batches_per_rank("micro_batch_grads", micro_batches, axis)
        flags = os.environ.get("XLA_FLAGS", "")
        if jax.default_backend() == "gpu" and "xla_gpu_deterministic_ops" not in flags:
            warnings.warn(
                "micro_batch_grads: on a GPU, XLA adds in any order. Set "
                "XLA_FLAGS=--xla_gpu_deterministic_ops=true for the same bits in each run.",
                stacklevel=2,
            )

        def split(path: KeyPath, x: ArrayLike) -> jax.Array:
            if jnp.ndim(x) == 0 or len(x) % count_here:
                raise (RankCountError if jnp.ndim(x) else ValueError)(
                    f"micro_batch_grads: leaf {leaf_name(path)} of the batch has shape "
                    f"{list(jnp.shape(x))}, which cannot be cut into {count_here} micro-batches. "
                    f"Choose a batch size that {micro_batches} divides."
                )
            return jnp.reshape(x, (count_here, len(x) // count_here, *jnp.shape(x)[1:]))

        # A loop: its body is the same program on any number of ranks.
        stacks = jax.tree_util.tree_map_with_path(split, batch)
        one_gradient = in_one_order(
            lambda micro_batch: fun(params, micro_batch, *rest), _check_no_communication
        )
        return lax.map(one_gradient, stacks)

    return compiled(grads, "micro_batch_grads")


def _check_no_communication(jaxpr: ClosedJaxpr) -> None:
    """Raise a ValueError if a function of micro-batches communicates, with the source line."""
    for *callers, eqn in _equations(jaxpr):
        is_collective = op_of(eqn) in (Op.TRACED_COLLECTIVE, Op.BROADCAST) or (
            not subjaxprs(eqn) and communicates(eqn)
        )
        if not is_collective:
            continue
        # the innermost line of the user's code: that of the equation, or of a call around it
        lines = map(_jaxcompat.source_place, (eqn, *reversed(callers)))
        line = next(filter(None, lines), _jaxcompat.LIBRARY_LINE)
        raise ValueError(
            f"micro_batch_grads: fun communicates ({eqn.primitive.name} at {line}), so that its "
            "results depend on the number of ranks. Use BatchNorm without axis_name, and reduce "
            "what fun returns after the loop."
        )


# --- their mean, in one binary tree --------------------------------------------------------------


@final
@dataclass(frozen=True)
class MicroBatchMean(Mean):
    """The mean of all ranks' micro-batches, added in one binary tree.

        mean = (1/M) · Σ_i g_i over i = 0 ... M-1

    in an order that does not depend on the number of ranks p: g_0 + g_1, g_2 + g_3, ..., then the
    sums of neighbors, and so on. The leaves of `updates` are `[M/p, ...]`, the gradients of this
    rank's micro-batches; their means are `[...]`, in the same dtypes, added in 32 bits at least.
    `extra` has the same first axis, and is averaged in the same tree.

    **Communication:** an alltoall of the sums of this rank's complete branches, and an allgather of
    the mean, in 32 bits at least. With n numbers in a gradient, and b branches on each rank, a rank
    sends about (p-1)/p · (b + 1) · n numbers; b = 1 if M/p is a power of two.
    """

    function: str
    micro_batches: int
    axis: Axis = AXIS

    @property
    def traits(self) -> Traits:
        return Traits("micro_batches", weights=False, functions=False, one_order=True)

    def init(self, params: PyTree) -> PyTree:
        return ()

    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        if not jax.tree.leaves(extra):  # errors name a leaf of the updates by its path
            return self._mean_of(updates), extra, state
        means, extra = self._mean_of((updates, extra))
        return means, extra, state

    def _mean_of(self, stacks: PyTree) -> PyTree:
        function, micro_batches = self.function, self.micro_batches
        size = axis_size(self.axis, session.current(function))
        count_here = _micro_batches_per_rank(function, micro_batches, self.axis)
        # This rank has the micro-batches from rank · count_here on. Blocks of `branch` of them, the
        # largest power of two that divides count_here, are complete branches of the tree, whatever
        # the rank. On one rank that is the whole tree.
        branch = count_here & -count_here if size > 1 else count_here

        def check(path: KeyPath, x: jax.Array) -> None:
            shape = jnp.shape(x)
            if shape[:1] != (count_here,):
                raise ValueError(
                    f"{function}: leaf {leaf_name(path)} has shape {list(shape)}, and its first "
                    f"axis must be the {count_here} micro-batches of this rank. Make the gradients "
                    "with jaxmpi.micro_batch_grads."
                )

        jax.tree_util.tree_map_with_path(check, stacks)
        # The gradients of integers hold no numbers: none are sent.
        stacks, put = _without_float0(stacks)
        named = with_parameters(stacks, f"{function} micro_batches={micro_batches}")

        # 1. Each rank adds up its complete branches: `[branches, numbers]`, or, on one rank,
        #    `[numbers]`.
        def add_branches(x: jax.Array) -> jax.Array:
            numbers = x.size // count_here
            x = x.astype(wide(x.dtype))
            if size == 1:
                return _tree_sum(x.reshape(count_here, numbers))
            return jax.vmap(_tree_sum)(x.reshape(count_here // branch, branch, numbers))

        sums = map_floats(function, add_branches, named)
        # 2. The rest of the tree spans ranks. Each rank gets its shard of the numbers from all
        #    branches (alltoall: `[size, branches, columns]`, the branches in the order of the
        #    micro-batches), adds them in the order of the tree, and sends the sums to all ranks
        #    (allgather: `[size, columns]`).
        if size > 1:
            caller = Caller(function)
            shards = map_floats(function, lambda x: _shards_of_rows(x, size), sums)
            shards = caller.alltoall(shards, axis=self.axis)
            sums = map_floats(function, lambda x: _tree_sum(lax.collapse(x, 0, 2)), shards)
            sums = caller.allgather(sums, axis=self.axis)

        # 3. Divide by M, and drop the padding of the shards.
        def mean_of(x: jax.Array, total: jax.Array) -> jax.Array:
            numbers = x.size // count_here
            mean = total.reshape(-1)[:numbers] / micro_batches
            return mean.reshape(x.shape[1:]).astype(x.dtype)

        return put(not_fused(map_floats(function, mean_of, stacks, sums)))


def _without_float0(stacks: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return stacks with None for each leaf of float0, and a function that puts them into means.

    The mean of a stack of float0 `[k, ...]` is float0 `[...]`.
    """
    leaves, treedef = jax.tree.flatten(stacks)
    numbers: list[PyTree] = list(leaves)
    kept: dict[int, np.ndarray] = {}
    for i, x in enumerate(leaves):
        if jnp.result_type(x) == jax.dtypes.float0:
            numbers[i], kept[i] = None, np.zeros(jnp.shape(x)[1:], jax.dtypes.float0)

    def put(means: PyTree) -> PyTree:
        outs = treedef.flatten_up_to(means)
        for i, x in kept.items():
            outs[i] = x
        return treedef.unflatten(outs)

    return treedef.unflatten(numbers), put


def _micro_batches_per_rank(function: str, micro_batches: int, axis: Axis) -> int:
    """Return M/p, the number of micro-batches of each rank.

    Raises:
      RankCountError: p does not divide M.
    """
    size = axis_size(axis, session.current(function))
    if micro_batches % size:
        raise RankCountError(
            f"{function}: micro_batches is {micro_batches}, which {size} ranks cannot share "
            f"equally. Use a multiple of {size}."
        )
    return micro_batches // size


def _shards_of_rows(x: jax.Array, size: int) -> jax.Array:
    """Cut each row of `[k, n]` into `size` shards, padded with zeros: `[size, k, ⌈n/size⌉]`."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return x.reshape(len(x), size, x.shape[1] // size).swapaxes(0, 1)


def _tree_sum(x: jax.Array) -> jax.Array:
    """Return the sum of `[k, ...]` over its first axis: of neighbors, then of their sums.

    An odd last element waits for the next round.
    """
    while len(x) > 1:
        even = len(x) // 2 * 2
        x = jnp.concatenate([x[0:even:2] + x[1:even:2], x[even:]])
    return x[0]


# --- sums in one order for any number of threads -------------------------------------------------


def invariant_update(
    inner: optax.GradientTransformationExtraArgs,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return a function like `inner.update` with the same bits for any number of threads.

    When called, it raises a ValueError if `inner` multiplies matrices: the order of those sums
    depends on the threads of a rank.
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        return in_one_order(
            lambda *args: inner.update(*args, **extra_args), _check_no_matrix_product
        )(updates, state, params)

    return update


def _check_no_matrix_product(jaxpr: ClosedJaxpr) -> None:
    """Raise a ValueError if an optimizer multiplies matrices, with the name of the transform."""
    for path in _equations(jaxpr):
        product = path[-1].primitive.name
        if not has(path[-1], Trait.MATRIX_PRODUCT):
            continue
        # the innermost transform around the product
        transform = transform_name(reversed(path)) or "the optimizer"
        raise ValueError(
            "distributed: micro_batches gives the same bits on any number of ranks, and "
            f"{transform} in inner multiplies matrices ({product}), whose sums depend on the "
            "threads of a rank. Use an optimizer without matrix products, such as Adam, LAMB or "
            "Adafactor, or leave micro_batches out."
        )


def in_one_order(
    fun: Callable[..., PyTree], check: Callable[[ClosedJaxpr], None]
) -> Callable[..., PyTree]:
    """Return `fun` with all sums of floats in one order for any number of threads.

    Args:
      fun: a function of pytrees of arrays.
      check: called with the jaxpr of `fun` before it is evaluated; it may raise.
    """

    def run(*args: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(args)
        out_treedef: PyTree = None

        def flat(*xs: jax.Array) -> list[jax.Array]:
            nonlocal out_treedef
            outs, out_treedef = jax.tree.flatten(fun(*treedef.unflatten(xs)))
            return outs

        jaxpr = jax.make_jaxpr(flat)(*leaves)
        check(jaxpr)
        return out_treedef.unflatten(evaluate(jaxpr, _SumsInOneOrder(), *leaves))

    return run


class _SumsInOneOrder:
    """A rule of `evaluate` for each equation: the operand of a sum is multiplied by 1.

    Each sum has its 1 from another computation. If two sums of an array had the same, XLA would
    compute the product once, before both, and the sums would have no arithmetic in their loops.
    """

    def __init__(self) -> None:
        self._numbers = count()  # one for each sum

    def __call__(self, eqn: JaxprEqn, xs: list[jax.Array]) -> list[jax.Array]:
        if _is_float_sum(eqn):
            return _jaxcompat.bind(eqn, [xs[0] * unknown_one(xs[0], next(self._numbers))])
        # A loop, branch or call with a sum in it is evaluated by the same rule; all else as it is.
        op = op_of(eqn)
        if op not in (Op.CALL, Op.LINEAR_SOLVE, *BRANCHES_AND_LOOPS) or not _contains_sum(eqn):
            return _jaxcompat.bind(eqn, xs)
        if op in BRANCHES_AND_LOOPS:
            return _jaxcompat.bind(eqn, xs, **map_subjaxprs(eqn, self._inner))
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            xs = lax.optimization_barrier(xs)  # or XLA would undo the rematerialization
        with _jaxcompat.at_source(eqn):
            jaxpr, operands = callee(eqn, xs)
            return evaluate(jaxpr, self, *operands)

    def _inner(self, jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
        """Return the body of a loop or branch with its sums in one order."""
        avals = [v.aval for v in _jaxcompat.parts(jaxpr)[0].invars]
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        return jax.make_jaxpr(lambda *xs: evaluate(jaxpr, self, *xs))(*structs)


def _is_float_sum(eqn: JaxprEqn) -> bool:
    """Return whether an equation adds up the elements of an array of floats that has some."""
    if not _is_sum_over_elements(eqn):
        return False
    operand = eqn.invars[0].aval
    return jnp.issubdtype(operand.dtype, jnp.inexact) and bool(operand.size)


def _is_sum_over_elements(eqn: JaxprEqn) -> bool:
    """Return whether an equation adds up elements of an array, along some of its axes."""
    return op_of(eqn) is Op.REDUCE and reduction_of(eqn) == "sum"


def _contains_sum(eqn: JaxprEqn) -> bool:
    """Return whether there is a sum in the inner jaxprs of a loop, branch or call."""
    for jaxpr in subjaxprs(eqn):
        for path in _equations(jaxpr):
            if _is_sum_over_elements(path[-1]):
                return True
    return False


def _equations(
    jaxpr: Jaxpr | ClosedJaxpr, callers: tuple[JaxprEqn, ...] = ()
) -> Iterator[tuple[JaxprEqn, ...]]:
    """Yield each equation with those around it, inner equations included.

    The last of a tuple is the equation, those before it contain it, outermost first.
    """
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        yield (*callers, eqn)
        for inner in subjaxprs(eqn):
            yield from _equations(inner, (*callers, eqn))
