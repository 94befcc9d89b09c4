"""The collectives in JAX's own words, over the bound axis: what XLA's backends and simulated ranks run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi._axis import AXIS
from jaxmpi._backends import Collective

__all__ = ["run"]

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


def _bcast(call: Collective, x: jax.Array) -> jax.Array:
    return _from_root(call.root, x)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _from_root(root: int, x: jax.Array) -> jax.Array:
    """A sum of bits, which are zero on all ranks but root: a sum of floats would make 0.0 of -0.0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_from_root(root, x.real), _from_root(root, x.imag))
    if x.dtype == jnp.bool_:
        return _from_root(root, x.astype(jnp.uint8)).astype(jnp.bool_)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.psum(jnp.where(lax.axis_index(AXIS) == root, x, 0), AXIS)
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(_from_root(root, bits), x.dtype)


@_from_root.defjvp
def _from_root_jvp(root: int, primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _from_root(root, x), lax.psum(jnp.where(lax.axis_index(AXIS) == root, dx, 0), AXIS)


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
    "bcast": _bcast,
    "allgather": lambda call, x: lax.all_gather(x, AXIS),
    "reduce_scatter": _reduce_scatter,
    "alltoall": lambda call, x: lax.all_to_all(_each_ranks_own(x), AXIS, 0, 0),
    "permute": _permute,
}
