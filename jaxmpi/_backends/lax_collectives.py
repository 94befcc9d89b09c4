"""Collectives by JAX's own, over bound axes: plain, widened, and packed.

`run` stands in a traced function until it is differentiated. `run_widened` and `run_packed` take
its place in the programs of simulated ranks and of backend "xla".
"""

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Protocol

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
from jaxmpi._backends.wire import (
    bits_of,
    from_wire,
    is_sub_byte,
    mean_as_sum,
    messages,
    off_wire,
    on_wire,
    reduce_rows,
    to_wire,
    wire_shapes,
)

__all__ = ["bcast_p", "from_root", "packed_messages", "run", "run_packed", "run_widened"]

bcast_p = Primitive("jaxmpi_bcast")

REDUCE: dict[str, Callable[..., tuple[jax.Array, ...]]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
}


def run(call: Collective, xs: Sequence[jax.Array], axis: Axis = AXIS) -> list[jax.Array]:
    """Carry out `call` on every array, where the axis, or axes, are bound.

    Over other axes than AXIS, `call` has no groups.
    """
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
    sent = tuple(x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x for x in xs)
    sums = REDUCE[op](sent, axis, axis_index_groups=groups)
    return [y.astype(x.dtype) if x.dtype == jnp.bool_ else y for x, y in zip(xs, sums, strict=True)]


def _reduce_scatter(call: Collective, x: jax.Array, axis: Axis) -> jax.Array:
    if call.op == "sum":
        return lax.psum_scatter(x, axis, axis_index_groups=call.groups or None)
    return _allreduce(call, [x], axis)[0][_index_in_group(call, axis)]


def _index_in_group(call: Collective, axis: Axis) -> jax.Array:
    """Return this rank's number, in its group where there are some."""
    rank = lax.axis_index(axis)
    places = {r: i for group in call.groups for i, r in enumerate(group)}
    return jnp.array([places[r] for r in range(len(places))], jnp.int32)[rank] if places else rank


def _permute(call: Collective, x: jax.Array, axis: Axis) -> jax.Array:
    """Carry out a permutation, which `vmap` takes complete only.

    It is completed, and zero put where nobody sends to.
    """
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
    varying = jnp.where(lax.axis_index(axis) >= 0, x, x)
    return lax.all_to_all(varying, axis, 0, 0, axis_index_groups=call.groups or None)


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
    """Return the root's array: a sum of bits, which are zero on all other ranks.

    A sum of floats would make 0.0 of -0.0.

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


class _MappedAxis(Protocol):
    """Axis of a `vmap`, as JAX passes it to a rule for batching."""

    name: Hashable
    size: int


def _batch(
    axis: _MappedAxis,
    xs: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    root: int,
    axis_name: Axis,
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


# widened: the numbers of the other transports


def run_widened(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Carry out `call` on every array, in numbers that are those of the other transports.

    The axis is bound, and nothing is differentiated any more. Short floats are summed in float32
    and rounded once, and a NaN wins every max and min. On CPUs, reduce_scatter is an all_to_all and
    a sum: that of JAX's gloo gives wrong numbers now and then for shares of 4 MB and more
    (https://github.com/jax-ml/jax/issues/40830), and its other collectives do not.
    """
    if call.kind == "reduce_scatter" and jax.default_backend() == "cpu":
        return [
            reduce_rows(rows, call.op)
            for rows in run(Collective("alltoall", groups=call.groups), xs)
        ]
    if call.op == "mean":
        return mean_as_sum(run_widened, call, xs, call.count(lax.axis_size(AXIS)))
    if call.kind == "allreduce":
        sums = run(call, [to_wire(x, call) for x in xs])
        return [from_wire(y, x.dtype, call) for x, y in zip(xs, sums, strict=True)]
    if call.kind == "reduce_scatter":
        wide = Collective("allreduce", op="sum")
        return [
            y.astype(x.dtype)
            for x, y in zip(xs, run(call, [to_wire(x, wide) for x in xs]), strict=True)
        ]
    return run(call, xs)


# packed: a few arrays at a time

# of an array in one collective between CPUs, of all its rows
LARGEST_BYTES = 1 << 30
# whether an operand has a row for each rank, and whether a result has
ROWS = {"reduce_scatter": (True, False), "alltoall": (True, True), "allgather": (False, True)}


def run_packed(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Carry out `call` on every array as `run_widened`, small ones of a dtype together.

    Each of XLA's collectives costs a round between the processes. An allreduce of several arrays is
    one of them; the others take one array. Dtypes below 8 bits travel as bytes: between CPUs, the
    all_gather of int2 of JAX 0.10 gives wrong rows and writes beyond its memory.
    """
    xs = [jnp.asarray(x) for x in xs]
    return off_wire(call, xs, _in_pieces(call, on_wire(call, xs, _fits)))


def _fits(dtype: np.dtype) -> bool:
    """Return whether XLA's collectives can take a dtype.

    Those on CPUs over MPI take no float16, and XLA makes float16 of the floats of 8 bits.
    """
    if is_sub_byte(dtype):
        return False
    is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return not is_short or dtype == jnp.bfloat16 or jax.default_backend() != "cpu"


def _in_pieces(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Carry out `call` as `_packed`, between CPUs with large arrays in pieces of LARGEST_BYTES.

    On CPUs, XLA passes 64-bit counts, of bytes for a permute and an all_to_all, to MPI, whose
    counts have 32 bits: what is more is left out without an error.
    """
    size = call.count(int(lax.axis_size(AXIS)))
    has_rows_in, has_rows_out = ROWS.get(call.kind, (False, False))
    rows_in, rows_out = [size] * has_rows_in, [size] * has_rows_out
    pieces: list[jax.Array] = []
    counts: list[int] = []  # of the pieces of each array
    for x in xs:
        columns = _columns_of_piece(x, size if has_rows_in else 1)
        if prod(x.shape) <= columns * prod(rows_in):
            parts = [x]
        else:
            flat = x.reshape(*rows_in, -1)
            parts = jnp.split(flat, [*range(columns, flat.shape[-1], columns)], axis=-1)
        pieces += parts
        counts.append(len(parts))
    received = iter(_packed(call, pieces))
    outs = []
    for x, count in zip(xs, counts, strict=True):
        parts = [next(received) for _ in range(count)]
        if count > 1:
            flat = jnp.concatenate([part.reshape(*rows_out, -1) for part in parts], axis=-1)
            parts = [flat.reshape(call.out_shape(x.shape, size))]
        outs += parts
    return outs


def _columns_of_piece(x: jax.Array | jax.ShapeDtypeStruct, rows: int) -> int:
    """Return how many columns of so many rows a piece of an array has at most."""
    if jax.default_backend() != "cpu":
        return max(1, prod(x.shape))
    return max(1, LARGEST_BYTES // (rows * x.dtype.itemsize))


def _packed(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Carry out `call`, with the small arrays of each dtype in one."""
    if call.kind not in ROWS:
        return run_widened(call, xs)
    size = call.count(int(lax.axis_size(AXIS)))
    rows_in, rows_out = ([size] if by_rank else [] for by_rank in ROWS[call.kind])
    outs = [jnp.zeros(call.out_shape(x.shape, size), x.dtype) for x in xs]
    for leaves in _packs(call, xs, size):
        if len(leaves) == 1:
            (outs[leaves[0]],) = run_widened(call, [xs[leaves[0]]])
            continue
        parts = [xs[i].reshape(*rows_in, -1) for i in leaves]
        (got,) = run_widened(call, [jnp.concatenate(parts, axis=-1)])
        ends = np.cumsum([part.shape[-1] for part in parts])[:-1]
        for i, part in zip(
            leaves, jnp.split(got.reshape(*rows_out, -1), ends, axis=-1), strict=True
        ):
            outs[i] = part.reshape(outs[i].shape)
    return outs


def packed_messages(
    call: Collective, arrays: Sequence[jax.ShapeDtypeStruct], size: int
) -> list[int]:
    """Return the bytes of each of XLA's collectives that `run_packed` makes for arrays."""
    size = call.count(size)
    has_rows_in, _ = ROWS.get(call.kind, (False, False))
    rows = size if has_rows_in else 1
    shapes = []
    for x in wire_shapes(call, arrays, _fits):
        columns, most = prod(x.shape) // rows, _columns_of_piece(x, rows)
        if columns <= most:
            shapes.append(x)
            continue
        for start in range(0, columns, most):
            shapes.append(jax.ShapeDtypeStruct((rows, min(most, columns - start)), x.dtype))
    each = [prod(x.shape) * x.dtype.itemsize for x in shapes]
    if call.kind == "allreduce":
        return [sum(each)]
    if call.kind not in ROWS:
        return each
    return [sum(each[i] for i in leaves) for leaves in _packs(call, shapes, size)]


def _packs(
    call: Collective, arrays: Sequence[jax.Array] | Sequence[jax.ShapeDtypeStruct], size: int
) -> list[list[int]]:
    """Return the indices of the arrays of each message; empty arrays are in none."""
    rows = size if ROWS[call.kind][0] else 1
    packs: list[list[int]] = []
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        columns = [prod(x.shape) // rows if x.dtype == dtype else 0 for x in arrays]
        for pieces in messages(columns, dtype.itemsize, max_items=max(columns)):
            packs.append([piece.leaf for piece in pieces])
    return packs
