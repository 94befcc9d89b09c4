"""The collectives in JAX's own words, over the bound axis: what stands in a traced function until it is differentiated."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends.base import Collective
from jaxmpi._backends.wire_dtypes import bits_of, reduce_rows

__all__ = ["bcast_p", "from_root", "run"]

bcast_p = Primitive("jaxmpi_bcast")

REDUCE: dict[str, Callable[..., tuple[jax.Array, ...]]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
}


def run(call: Collective, xs: Sequence[jax.Array], axis: Axis = AXIS) -> list[jax.Array]:
    """Carry out `call` on every array, where the axis, or axes, are bound; not over AXIS, `call` has no groups."""
    # lax.psum takes an array that no tracer stands for to be equal on all ranks, which in many
    # processes it need not be
    xs = [x if isinstance(x, jax.core.Tracer) else lax.optimization_barrier(x) for x in xs]
    if call.kind == "allreduce":
        return _allreduce(call, xs, axis)
    return [_ONE[call.kind](call, x, axis) for x in xs]


def _allreduce(call: Collective, xs: Sequence[jax.Array], axis: Axis) -> list[jax.Array]:
    op, groups = call.op, call.groups or None
    if op == "prod":  # XLA has none
        return [reduce_rows(lax.all_gather(x, axis, axis_index_groups=groups), op) for x in xs]
    carried = tuple(x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x for x in xs)
    sums = REDUCE[op](carried, axis, axis_index_groups=groups)
    return [y.astype(x.dtype) if x.dtype == jnp.bool_ else y for x, y in zip(xs, sums, strict=True)]


def _reduce_scatter(call: Collective, x: jax.Array, axis: Axis) -> jax.Array:
    if call.op == "sum":
        return lax.psum_scatter(x, axis, axis_index_groups=call.groups or None)
    return _allreduce(call, [x], axis)[0][_place(call, axis)]


def _place(call: Collective, axis: Axis) -> jax.Array:
    """This rank's number, in its group where there are some."""
    rank = lax.axis_index(axis)
    places = {r: i for group in call.groups for i, r in enumerate(group)}
    return jnp.array([places[r] for r in range(len(places))], jnp.int32)[rank] if places else rank


def _permute(call: Collective, x: jax.Array, axis: Axis) -> jax.Array:
    """`vmap` takes complete permutations only: complete it, and put zero where nobody sends to."""
    ranks = range(lax.axis_size(axis))
    sources, dests = {p for p, _ in call.pairs}, {q for _, q in call.pairs}
    others = zip(
        (r for r in ranks if r not in sources), (r for r in ranks if r not in dests), strict=True
    )
    moved = lax.ppermute(x, axis, [*call.pairs, *others])
    if len(call.pairs) == len(ranks):
        return moved
    received = jnp.isin(lax.axis_index(axis), jnp.array(sorted(dests), jnp.int32))
    return jnp.where(received, moved, jnp.zeros_like(moved))


def _alltoall(call: Collective, x: jax.Array, axis: Axis) -> jax.Array:
    # the same numbers, of which `vmap` no longer knows that they are equal on all ranks: its
    # all_to_all cannot take those
    own = jnp.where(lax.axis_index(axis) >= 0, x, x)
    return lax.all_to_all(own, axis, 0, 0, axis_index_groups=call.groups or None)


_ONE: dict[str, Callable[[Collective, jax.Array, Axis], jax.Array]] = {
    "bcast": lambda call, x, axis: bcast_p.bind(x, root=call.root, axis_name=axis),
    "allgather": lambda call, x, axis: lax.all_gather(
        x, axis, axis_index_groups=call.groups or None
    ),
    "reduce_scatter": _reduce_scatter,
    "alltoall": _alltoall,
    "permute": _permute,
}


# The broadcast is a primitive, as the sum of bits that carries it out has no derivative.
# (`lax.pbroadcast` has one for scalars only, and no code for CPUs.) `trace` puts `from_root` in its
# place once everything is differentiated.


def from_root(
    is_root: ArrayLike, total: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """The root's array: a sum of bits, which are zero on all other ranks. A sum of floats would make 0.0 of -0.0.

    Args:
      is_root: whether this rank is the root.
      total: the sum over the ranks.
      x: this rank's array.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = from_root(is_root, total, jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(from_root(is_root, total, x.real), from_root(is_root, total, x.imag))
    if x.dtype == jnp.bool_:
        return from_root(is_root, total, x.astype(jnp.uint8)).astype(jnp.bool_)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return total(jnp.where(is_root, x, 0))
    return lax.bitcast_convert_type(from_root(is_root, total, bits_of(x)), x.dtype)


def _abstract(x: ShapedArray, *, root: int, axis_name: Axis) -> tuple[ShapedArray, set[Hashable]]:
    return ShapedArray(x.shape, x.dtype, weak_type=x.weak_type), set(
        map(_jaxcompat.axis_effect, names(axis_name))
    )


def _transpose(ct: jax.Array, x: object, *, root: int, axis_name: Axis) -> list[jax.Array]:
    (total,) = run(Collective("allreduce", op="sum"), [ct], axis_name)
    return [jnp.where(lax.axis_index(axis_name) == root, total, jnp.zeros_like(total))]


def _batch(
    axis: Any, xs: Sequence[jax.Array], dims: Sequence[int | None], *, root: int, axis_name: Axis
) -> tuple[jax.Array, int | None]:
    (x,), (dim,), over = xs, dims, names(axis_name)
    if axis.name not in over:
        return bcast_p.bind(x, root=root, axis_name=axis_name), dim
    # the ranks themselves, or one of their axes: the root has a coordinate along it, and another
    # root along the others
    sizes = [axis.size if name == axis.name else int(lax.axis_size(name)) for name in over]
    at = dict(zip(over, map(int, np.unravel_index(root, sizes)), strict=True))
    if dim is not None:
        x = lax.index_in_dim(x, at[axis.name], dim, keepdims=False)
    if others := {name: size for name, size in zip(over, sizes, strict=True) if name != axis.name}:
        number = int(np.ravel_multi_index([at[name] for name in others], [*others.values()]))
        x = bcast_p.bind(x, root=number, axis_name=tuple(others))
    return x, None


def _lowered(x: jax.Array, *, root: int, axis_name: Axis) -> jax.Array:
    return from_root(lax.axis_index(axis_name) == root, lambda bits: lax.psum(bits, axis_name), x)


bcast_p.def_effectful_abstract_eval(_abstract)
ad.deflinear2(bcast_p, _transpose)
batching.fancy_primitive_batchers[bcast_p] = _batch
mlir.register_lowering(bcast_p, mlir.lower_fun(_lowered, multiple_results=False))
