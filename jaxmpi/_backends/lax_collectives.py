"""The collectives in JAX's own words, over the bound axis: what stands in a traced function until it is differentiated."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS
from jaxmpi._backends.base import Collective

__all__ = ["bcast_p", "from_root", "run"]

bcast_p = Primitive("jaxmpi_bcast")

REDUCE: dict[str, Callable[[Any, str], Any]] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


def run(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Carry out `call` on every array, where the axis is bound."""
    # lax.psum takes an array that no tracer stands for to be equal on all ranks, which in many processes it need not be
    xs = [x if isinstance(x, jax.core.Tracer) else lax.optimization_barrier(x) for x in xs]
    if call.kind == "allreduce":
        return _allreduce(call.op, xs)
    return [_ONE[call.kind](call, x) for x in xs]


def _allreduce(op: str, xs: Sequence[jax.Array]) -> list[jax.Array]:
    if op == "prod":  # XLA has none
        return [jnp.prod(lax.all_gather(x, AXIS), axis=0, dtype=x.dtype) for x in xs]
    carried = tuple(x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x for x in xs)
    sums = REDUCE[op](carried, AXIS)
    return [y.astype(x.dtype) if x.dtype == jnp.bool_ else y for x, y in zip(xs, sums, strict=True)]


def _reduce_scatter(call: Collective, x: jax.Array) -> jax.Array:
    if call.op == "sum":
        return lax.psum_scatter(x, AXIS)
    return _allreduce(call.op, [x])[0][lax.axis_index(AXIS)]


def _permute(call: Collective, x: jax.Array) -> jax.Array:
    """`vmap` takes complete permutations only: complete it, and put zero where nobody sends to."""
    ranks = range(lax.axis_size(AXIS))
    sources, dests = {p for p, _ in call.pairs}, {q for _, q in call.pairs}
    others = zip((r for r in ranks if r not in sources), (r for r in ranks if r not in dests), strict=True)
    moved = lax.ppermute(x, AXIS, [*call.pairs, *others])
    if len(call.pairs) == len(ranks):
        return moved
    received = jnp.isin(lax.axis_index(AXIS), jnp.array(sorted(dests), jnp.int32))
    return jnp.where(received, moved, jnp.zeros_like(moved))


def _each_ranks_own(x: jax.Array) -> jax.Array:
    """The same numbers, of which `vmap` no longer knows that they are equal on all ranks: its all_to_all cannot take those."""
    return jnp.where(lax.axis_index(AXIS) >= 0, x, x)


_ONE: dict[str, Callable[[Collective, jax.Array], jax.Array]] = {
    "bcast": lambda call, x: bcast_p.bind(x, root=call.root),
    "allgather": lambda call, x: lax.all_gather(x, AXIS),
    "reduce_scatter": _reduce_scatter,
    "alltoall": lambda call, x: lax.all_to_all(_each_ranks_own(x), AXIS, 0, 0),
    "permute": _permute,
}


# The broadcast is a primitive, as the sum of bits that carries it out has no derivative. (`lax.pbroadcast` has one for scalars
# only, and no code for CPUs.) `trace` puts `from_root` in its place once everything is differentiated.


def from_root(root: int, x: jax.Array) -> jax.Array:
    """The array of rank `root`: a sum of bits, which are zero on all other ranks. A sum of floats would make 0.0 of -0.0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(from_root(root, x.real), from_root(root, x.imag))
    if x.dtype == jnp.bool_:
        return from_root(root, x.astype(jnp.uint8)).astype(jnp.bool_)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.psum(jnp.where(lax.axis_index(AXIS) == root, x, 0), AXIS)
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(from_root(root, bits), x.dtype)


def _abstract(x: Any, *, root: int) -> tuple[ShapedArray, Any]:
    return ShapedArray(x.shape, x.dtype, weak_type=x.weak_type), {_jaxcompat.axis_effect(AXIS)}


def _transpose(ct: Any, x: Any, *, root: int) -> list[jax.Array]:
    (total,) = run(Collective("allreduce", op="sum"), [ct])
    return [jnp.where(lax.axis_index(AXIS) == root, total, jnp.zeros_like(total))]


def _batch(axis: Any, xs: Any, dims: Any, *, root: int) -> tuple[jax.Array, int | None]:
    (x,), (dim,) = xs, dims
    if axis.name == AXIS:  # the ranks themselves
        return (x, None) if dim is None else (lax.index_in_dim(x, root, dim, keepdims=False), None)
    return bcast_p.bind(x, root=root), dim


bcast_p.def_effectful_abstract_eval(_abstract)
ad.deflinear2(bcast_p, _transpose)
batching.fancy_primitive_batchers[bcast_p] = _batch
mlir.register_lowering(bcast_p, mlir.lower_fun(lambda x, *, root: from_root(root, x), multiple_results=False))
