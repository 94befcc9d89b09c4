"""The same bits for any number of ranks: fixed micro-batches, and sums in one order.

A global batch is cut into M micro-batches, whatever the number of ranks. Each is differentiated by
itself, in a loop with the same body everywhere, and the M gradients are added in one binary tree:
neighbours first. Within a micro-batch and within the optimizer, sums have one order for any number
of threads of a rank (`ordered`).
"""

import os
import warnings
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS, Axis, with_parameters
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._errors import RankCountError
from jaxmpi._jit.api import compiled
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._lowering.classify import BROADCASTS, communicates, subjaxprs
from jaxmpi._optim.float_leaves import map_floats, wide
from jaxmpi._optim.ordered_sums import equations, in_one_order
from jaxmpi._world import session

__all__ = ["canonical_mean", "invariant_update", "micro_batch_grads"]

MATRIX_PRODUCTS = (
    *(
        "dot_general",
        "ragged_dot_general",
        "conv_general_dilated",
        "cholesky",
        "eig",
        "eigh",
        "geqrf",
        "hessenberg",
    ),
    *(
        "householder_product",
        "lu",
        "qr",
        "schur",
        "svd",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    ),
)


def micro_batch_grads(
    fun: Callable[..., PyTree], micro_batches: int, *, axis: Axis = AXIS
) -> Callable[..., PyTree]:
    """A gradient function that is applied to one micro-batch after the other.

        grads = jaxmpi.micro_batch_grads(jax.grad(loss), 8)(params, batch)  # leaves [8 / size, ...]
        updates, state = jaxmpi.distributed(optax.adam(1e-3), micro_batches=8).update(grads, state, params)

    Sums in `fun` have one order for any number of threads. Long matrix products on CPUs do not:
    give the ranks of all runs as many threads, as `jaxmpi run --threads 1` does, or NPROC=1. On
    GPUs, XLA has one order only with `--xla_gpu_deterministic_ops=true` in XLA_FLAGS.

    **Collective:** no.

    Args:
      fun: (params, batch, *rest) -> any pytree, such as `jax.grad` of a loss that averages over its
        batch. It does not communicate: the batch statistics of all ranks would depend on their
        number.
      micro_batches: M, of all ranks together, or of those of a group.
      axis: as in `distributed`: the groups whose ranks share the micro-batches out.

    Returns:
      A function of the same arguments. It cuts the leaves of `batch`, `[b, ...]`, into M/p parts
      and returns the stacked results, `[M/p, ...]`.

    Warns:
      UserWarning: on a GPU, if XLA_FLAGS does not say so.

    Raises:
      ValueError: when called, if the ranks do not divide M, or M/p does not divide the batch, with
        the leaf; if `fun` communicates, with the source line.
    """

    def grads(params: PyTree, batch: PyTree, *rest: PyTree) -> PyTree:
        here = _mine("micro_batch_grads", micro_batches, axis)
        if jax.default_backend() == "gpu" and "xla_gpu_deterministic_ops" not in os.environ.get(
            "XLA_FLAGS", ""
        ):
            warnings.warn(
                "micro_batch_grads: on a GPU, XLA adds in any order. Set "
                "XLA_FLAGS=--xla_gpu_deterministic_ops=true for the "
                "same bits in each run.",
                stacklevel=2,
            )

        def split(path: KeyPath, x: ArrayLike) -> jax.Array:
            if jnp.ndim(x) == 0 or len(x) % here:
                raise (RankCountError if jnp.ndim(x) else ValueError)(
                    f"micro_batch_grads: leaf {leaf_name(path)} of the batch has shape "
                    f"{list(jnp.shape(x))}, which cannot "
                    f"be cut into {here} micro-batches. Choose a batch size that {micro_batches} "
                    "divides."
                )
            return jnp.reshape(x, (here, len(x) // here, *jnp.shape(x)[1:]))

        parts = jax.tree_util.tree_map_with_path(split, batch)
        return lax.map(in_one_order(lambda part: fun(params, part, *rest), _check_silent), parts)

    return compiled(grads, "micro_batch_grads")


def canonical_mean(stacks: PyTree, micro_batches: int, axis: Axis) -> PyTree:
    """The mean of the ranks' `[M/p, ...]` leaves over their first axes, in an order that the number of ranks does not change.

    Each rank adds up what is a whole branch of the tree; the rest travels: a part of every array to
    each rank (alltoall), which adds it to the end, and the result back (allgather).
    """
    size, here = (
        axis_size(axis, session.current("distributed")),
        _mine("distributed", micro_batches, axis),
    )
    # the largest power of two that divides it: whole branches of the tree
    branch = here & -here if size > 1 else here

    def check(path: KeyPath, x: jax.Array) -> None:
        if x.dtype != jax.dtypes.float0 and (x.ndim == 0 or len(x) != here):
            raise ValueError(
                f"distributed: leaf {leaf_name(path)} has shape {list(x.shape)}, and its first "
                f"axis must be the {here} "
                f"micro-batches of this rank. Make the gradients with jaxmpi.micro_batch_grads."
            )

    jax.tree_util.tree_map_with_path(check, stacks)

    def branches(x: jax.Array) -> jax.Array:
        x = x.astype(wide(x.dtype)).reshape(here // branch, branch, -1)
        return jax.vmap(_tree_sum)(x) if size > 1 else _tree_sum(x.reshape(here, -1))

    sums = map_floats(
        "distributed",
        branches,
        with_parameters(stacks, f"distributed micro_batches={micro_batches}"),
    )
    if size > 1:
        sums = Caller("micro_batch_grads").alltoall(
            map_floats("distributed", lambda x: _rows(x, size), sums), axis=axis
        )  # [p, here / branch, columns]
        sums = map_floats("distributed", lambda x: _tree_sum(x.reshape(-1, x.shape[-1])), sums)
        sums = Caller("micro_batch_grads").allgather(sums, axis=axis)

    def finish(x: jax.Array, total: jax.Array) -> jax.Array:
        n = x.size // here
        return (total.reshape(-1)[:n] / micro_batches).reshape(x.shape[1:]).astype(x.dtype)

    return _fusion_barrier(map_floats("distributed", finish, stacks, sums))


def invariant_update(
    inner: optax.GradientTransformationExtraArgs,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """`inner.update` with the same bits for any number of threads.

    Raises:
      ValueError: `inner` multiplies matrices, which has no order that does not depend on the
        threads of a rank.
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        return in_one_order(lambda *args: inner.update(*args, **extra_args), _check_orderable)(
            updates, state, params
        )

    return update


def _check_silent(jaxpr: ClosedJaxpr) -> None:
    for *callers, eqn in equations(jaxpr):
        if eqn.primitive.name in ("jaxmpi_collective", *BROADCASTS) or (
            not list(subjaxprs(eqn)) and communicates(eqn)
        ):
            line = next(
                filter(None, map(_jaxcompat.source_place, (eqn, *reversed(callers)))),
                "a line of a library",
            )
            raise ValueError(
                f"micro_batch_grads: fun communicates ({eqn.primitive.name} at {line}), so that "
                "its results depend on the "
                "number of ranks. Use BatchNorm without axis_name, and reduce what fun returns "
                "after the loop."
            )


def _check_orderable(jaxpr: ClosedJaxpr) -> None:
    for path in equations(jaxpr):
        if path[-1].primitive.name in MATRIX_PRODUCTS:
            names = (name for eqn in reversed(path) for name in _jaxcompat.function_names(eqn))
            transform = next(
                (name.split(".<locals>")[0] for name in names if ".<locals>.update" in name),
                "the optimizer",
            )
            raise ValueError(
                "distributed: micro_batches gives the same bits on any number of ranks, and "
                f"{transform} in inner multiplies "
                f"matrices ({path[-1].primitive.name}), whose sums depend on the threads of a "
                "rank. Use an optimizer without "
                "matrix products, such as Adam, LAMB or Adafactor, or leave micro_batches out."
            )


def _mine(function: str, micro_batches: int, axis: Axis) -> int:
    size = axis_size(axis, session.current(function))
    if micro_batches < 1 or micro_batches % size:
        raise (RankCountError if micro_batches > 0 else ValueError)(
            f"{function}: micro_batches is {micro_batches}, which {size} ranks cannot share "
            f"equally. Use a multiple of {size}."
        )
    return micro_batches // size


def _rows(x: jax.Array, size: int) -> jax.Array:
    """`[k, n]` as `[size, k, ⌈n/size⌉]`, with zeros at the end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return x.reshape(len(x), size, -1).swapaxes(0, 1)


def _tree_sum(x: jax.Array) -> jax.Array:
    """The sum of `[k, ...]` over its first axis: of neighbours, then of their sums."""
    while len(x) > 1:
        even = len(x) // 2 * 2
        x = jnp.concatenate([x[0:even:2] + x[1:even:2], x[even:]])
    return x[0]


def _fusion_barrier(tree: PyTree) -> PyTree:
    """The same numbers, behind what XLA cannot look through.

    Where it can, as on one rank, it fuses the sum with the optimizer's arithmetic, and then rounds
    elsewhere: a product and a sum become one operation. It drops an optimization_barrier before it
    fuses; but it does not know that n² + n is even.
    """
    leaves = [x for x in jax.tree.leaves(tree) if x.size and x.dtype != jax.dtypes.float0]
    if not leaves:
        return tree
    n = leaves[0].reshape(-1)[0].real.astype(jnp.int32)
    return lax.cond(
        (n * n + n) % 2 == 0,
        lambda tree: tree,
        partial(map_floats, "distributed", jnp.negative),
        tree,
    )
