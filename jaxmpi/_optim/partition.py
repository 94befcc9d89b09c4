"""SPMD partitioning: evaluate a function of whole arrays on this rank's shards of them.

The function is traced on the shapes of the whole arrays, so what it decides in Python (a mask by
`ndim`, a factor that depends on `size`) it decides as without shards. Then each equation of its
jaxpr is evaluated:

| equation | evaluated | communication |
|---|---|---|
| no operand is a shard | as it is, on every rank | none |
| elementwise; a reshape | on this rank's shards | none |
| a reduction to one number; an inner product | on this rank's shards | allreduce of a number |
| anything else | as it is, on whole arrays | allgather of the operands that are shards |

So the result is the function's, whatever it does. Over an axis, groups of ranks may take different
branches of a `cond`, so all branches are evaluated.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import callee
from jaxmpi._analysis.primitives import Op, Trait, has, op_of, reduction_of
from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._marks import Equal, equal_on_all_ranks, mark_of
from jaxmpi._optim.sharded_array import (
    Shard,
    gather_shards,
    is_shard,
    mask_padding,
    shard_shape,
    shard_value,
    size_along,
)

__all__ = ["on_shards"]


class _Splat:
    """A scalar broadcast to a shape: each rank makes the shard, or the array, that it needs."""

    def __init__(self, number: Any, shape: tuple[int, ...]) -> None:
        self.number, self.shape = number, shape


Operand: TypeAlias = jax.Array | Shard | _Splat  # of an equation, or its result


def on_shards(fun: Callable[..., PyTree], *args: PyTree, axis: Axis = AXIS) -> PyTree:
    """Return `fun(*args)`, with leaves of `args` and of the result that may be shards.

    `fun` gets tracers of whole arrays for arrays and shards, and anything else as it
    is. All shards are over one axis.

    **Collective:** every rank calls it, with the same structure and shapes; arrays that are not
    shards are equal. **Communication:** see the table above.
    """
    if size_along(axis) == 1:
        return fun(*args)
    leaves, treedef = jax.tree.flatten(args, is_leaf=is_shard)
    traced = [i for i, x in enumerate(leaves) if isinstance(x, Shard | jax.Array | np.ndarray)]

    def flat(*xs: jax.Array) -> PyTree:
        full = list(leaves)
        for i, x in zip(traced, xs, strict=True):
            full[i] = x
        return fun(*treedef.unflatten(full))

    jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*(_type(leaves[i]) for i in traced))
    outs = _run(jaxpr, *(leaves[i] for i in traced))
    return jax.tree.structure(out).unflatten(_without_splats(outs))


def _run(jaxpr: Jaxpr | ClosedJaxpr, *args: Operand) -> list[Operand]:
    """Evaluate a jaxpr; its outputs are arrays, shards or splats."""
    inner, consts = _jaxcompat.parts(jaxpr)
    env = dict(zip((*inner.constvars, *inner.invars), (*consts, *args), strict=True))

    def read(v: Var | Literal) -> Operand:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in inner.eqns:
        env.update(zip(eqn.outvars, _equation(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in inner.outvars]


def _equation(eqn: JaxprEqn, xs: list[Operand]) -> list[Operand]:
    """Evaluate one equation, by the rows of the table in the module's docstring."""
    op, shape = op_of(eqn), _shape(eqn.outvars[0].aval) if eqn.outvars else ()
    if op is Op.BROADCAST_SHAPE and shape and _shape(xs[0]) == ():
        return [_Splat(xs[0], shape)]
    shards = [x for x in xs if is_shard(x)]
    if not shards:
        return _on_whole_arrays(eqn, xs)
    axis = shards[0].axis
    # calls, branches and identities
    if op in (Op.CALL, Op.LINEAR_SOLVE):
        jaxpr, operands = callee(eqn, xs)
        return _run(jaxpr, *operands)
    if op is Op.COND:
        return _cond(eqn, xs, axis)
    if op is Op.BARRIER:
        return _barrier(eqn, xs)
    if isinstance(mark_of(eqn), Equal):
        # `value_fn` or another function of the user's: it needs whole parameters
        return _on_whole_arrays(eqn, xs)
    # on this rank's shards
    if has(eqn, Trait.ELEMENTWISE) and all(_shape(x) in ((), shape) for x in xs):
        value = _jaxcompat.bind(eqn, [_shard_value(x, axis) for x in xs])[0]
        return [Shard(value, shape, _known_whole(eqn, xs), axis=axis)]
    keeps_order = has(eqn, Trait.RESHAPES) and not eqn.params.get("dimensions")
    if keeps_order and shape and prod(shape) == prod(shards[0].shape):
        value = shards[0].value.reshape(shard_shape(shape, size_along(axis)))
        return [Shard(value, shape, _known_whole(eqn, xs), axis=axis)]
    # Whole arrays that are known take no message; a reduction on shards would.
    if all(x.whole is not None for x in shards):
        return _on_whole_arrays(eqn, xs)
    # on this rank's shards, and an allreduce
    if op is Op.REDUCE and prod(shape) == 1:
        return [_reduced(eqn, shards[0]).reshape(shape)]
    if op is Op.INNER_PRODUCT and _is_inner_product(eqn, xs):
        return [_inner_product(eqn, xs, axis)]
    return _on_whole_arrays(eqn, xs)


def _on_whole_arrays(eqn: JaxprEqn, xs: list[Operand]) -> list[Operand]:
    """Evaluate the equation as it is; operands that are shards are gathered first."""
    gather_shards([x for x in xs if is_shard(x)])
    return [*_jaxcompat.bind(eqn, [_full(x) for x in xs])]


def _known_whole(eqn: JaxprEqn, xs: list[Operand]) -> jax.Array | None:
    """Return the whole result of an equation with one output; None if it takes communication."""
    if any(is_shard(x) and x.whole is None for x in xs):
        return None
    return _jaxcompat.bind(eqn, [_full(x) for x in xs])[0]


def _reduced(eqn: JaxprEqn, x: Shard) -> jax.Array:
    """Reduce all numbers of an array, those in other ranks' shards included."""
    op = reduction_of(eqn)
    numbers = mask_padding(x.value, x.shape, _neutral(op, x.dtype), axis=x.axis)
    (here,) = _jaxcompat.bind(eqn, [numbers], axes=tuple(range(len(x.shape))))
    return Caller("sharded").allreduce(here, op=op, axis=x.axis)


def _neutral(op: str, dtype: np.dtype) -> float:
    """Return the number that does not change the result of a reduction, for the padding."""
    if op in ("max", "min"):
        is_max = op == "max"
        if jnp.issubdtype(dtype, jnp.floating):
            return -jnp.inf if is_max else jnp.inf
        if dtype == jnp.bool_:
            return not is_max
        return jnp.iinfo(dtype).min if is_max else jnp.iinfo(dtype).max
    return 1.0 if op == "prod" else 0.0


def _is_inner_product(eqn: JaxprEqn, xs: list[Operand]) -> bool:
    """Return whether a dot_general multiplies two arrays of one shape elementwise and adds up."""
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    shape = _shape(xs[0])
    return (
        not batch
        and shape == _shape(xs[1])
        and len(left) == len(shape)
        and tuple(left) == tuple(right)
    )


def _inner_product(eqn: JaxprEqn, xs: list[Operand], axis: Axis) -> jax.Array:
    shape = _shape(xs[0])
    flat = [mask_padding(_shard_value(x, axis), shape, 0, axis=axis).reshape(-1) for x in xs]
    (here,) = _jaxcompat.bind(eqn, flat, dimension_numbers=(((0,), (0,)), ((), ())))
    return Caller("sharded").allreduce(here, op="sum", axis=axis)


def _barrier(eqn: JaxprEqn, xs: list[Operand]) -> list[Operand]:
    outs = _jaxcompat.bind(eqn, [x.value if is_shard(x) else _full(x) for x in xs])
    return [
        Shard(y, x.shape, axis=x.axis) if is_shard(x) else y for x, y in zip(xs, outs, strict=True)
    ]


def _cond(eqn: JaxprEqn, xs: list[Operand], axis: Axis) -> list[Operand]:
    """Evaluate a cond or switch with shards as operands and results.

    A result that is a shard in one branch is made a shard in all of them.
    """
    index: Any  # a scalar, and no shard
    index, *operands = (_full(x) if isinstance(x, _Splat) else x for x in xs)
    # Groups along an axis may take different branches, and a branch may communicate: evaluate all.
    if axis != AXIS:
        branches = [_run_branch(branch, *operands) for branch in eqn.params["branches"]]
        return _select(index, branches, axis)
    if not isinstance(index, jax.core.Tracer):  # called eagerly
        return _run(eqn.params["branches"][int(index)], *operands)
    # Trace all branches first, to see which results are shards in any of them.
    traced = [
        jax.make_jaxpr(partial(_run_branch, branch), return_shape=True)(*operands)
        for branch in eqn.params["branches"]
    ]
    is_sharded = [any(map(is_shard, xs)) for xs in zip(*(outs for _, outs in traced), strict=True)]

    def branch(jaxpr: ClosedJaxpr, out: list[Operand]) -> Callable[..., list[Operand]]:
        def run(*operands: Operand) -> list[Operand]:
            flat = _jaxcompat.as_function(jaxpr)(*jax.tree.leaves(operands))
            outs = jax.tree.structure(out).unflatten(flat)
            for i, x in enumerate(outs):
                if is_sharded[i]:
                    outs[i] = Shard(_shard_value(x, axis), _shape(x), axis=axis)
            return outs

        return run

    with _jaxcompat.at_source(eqn):
        return jax.lax.switch(
            equal_on_all_ranks(index), [branch(*pair) for pair in traced], *operands
        )


def _select(index: jax.Array, branches: list[list[Operand]], axis: Axis) -> list[Operand]:
    """Return the results of the branch with this index, all branches having been evaluated."""
    outs: list[Operand] = []
    for xs in zip(*branches, strict=True):
        if any(map(is_shard, xs)):
            value = jax.lax.select_n(index, *(_shard_value(x, axis) for x in xs))
            outs.append(Shard(value, _shape(xs[0]), axis=axis))
        else:
            outs.append(jax.lax.select_n(index, *xs))
    return outs


def _run_branch(jaxpr: ClosedJaxpr, *args: Operand) -> list[Operand]:
    return _without_splats(_run(jaxpr, *args))


def _without_splats(xs: list[Operand]) -> list[Operand]:
    return [_full(x) if isinstance(x, _Splat) else x for x in xs]


def _shard_value(x: Operand, axis: Axis) -> jax.Array:
    """Return this rank's shard of an operand."""
    if isinstance(x, _Splat):
        return jnp.broadcast_to(x.number, shard_shape(x.shape, size_along(axis)))
    return shard_value(x, axis)


def _full(x: Operand) -> jax.Array:
    """Return the whole array of an operand, which is known."""
    if isinstance(x, _Splat):
        return jnp.broadcast_to(x.number, x.shape)
    return x.whole if isinstance(x, Shard) else x


def _shape(x: object) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else ()


def _type(x: Shard | jax.Array | np.ndarray) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the whole array."""
    of = x.value if is_shard(x) else x
    return jax.ShapeDtypeStruct(x.shape, of.dtype, weak_type=getattr(of, "weak_type", False))
