"""Collectives by a transport that lacks a dtype, an operation, groups, or long messages.

Dtypes that a transport does not know travel as others (`to_wire`), a mean as a sum
(`mean_as_sum`), a collective within groups as one of all ranks (`through_all`), and many leaves in
a few messages (`messages`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi._backends.base import Collective

__all__ = [
    "LOCAL_REDUCE",
    "MAX_ITEMS",
    "SMALL_BYTES",
    "Piece",
    "bits_of",
    "from_wire",
    "is_sub_byte",
    "mean_as_sum",
    "messages",
    "of_all",
    "off_wire",
    "on_wire",
    "reduce_rows",
    "through_all",
    "to_wire",
    "wire_shapes",
]

Run = Callable[[Collective, Sequence[jax.Array]], list[jax.Array]]

SMALL_BYTES = 64 * 1024  # below this a leaf shares a message: latency costs more than the copy
MAX_ITEMS = 2**30  # per message and rank: MPI counts are C ints

LOCAL_REDUCE: dict[str, Callable[..., jax.Array]] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
}


def on_wire(
    call: Collective, xs: Sequence[jax.Array], fits: Callable[[np.dtype], bool]
) -> list[jax.Array]:
    """Return the arrays in dtypes that a transport takes; `fits` says whether it takes a dtype."""
    return [x if fits(x.dtype) else to_wire(x, _purpose(call)) for x in xs]


def wire_shapes(
    call: Collective, arrays: Sequence[jax.ShapeDtypeStruct], fits: Callable[[np.dtype], bool]
) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of what `on_wire` returns for arrays of these shapes."""
    convert = partial(to_wire, call=_purpose(call))
    return [x if fits(x.dtype) else jax.eval_shape(convert, x) for x in arrays]


def off_wire(
    call: Collective, xs: Sequence[jax.Array], outs: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the results of `call` on what `on_wire` made of `xs`, in the dtypes of `xs`."""
    back = []
    for x, y in zip(xs, outs, strict=True):
        back.append(y if x.dtype == y.dtype else from_wire(y, x.dtype, _purpose(call)))
    return back


def _purpose(call: Collective) -> Collective:
    """Return a collective that preserves what `call` needs: numbers if it reduces, else bits."""
    return Collective("allreduce", op="sum") if call.op else call


def to_wire(x: jax.Array, call: Collective) -> jax.Array:
    """Return `x` in a dtype that MPI knows.

    Numbers that are reduced are widened; numbers that only move keep their bits.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if is_sub_byte(x.dtype) and (not call.op or jnp.issubdtype(x.dtype, jnp.integer)):
        # One byte for each number: of these dtypes several numbers share a byte, in which a row may
        # end. A sum of integers wraps in 8 bits, which leaves its lower bits right.
        return bits_of(x).astype(jnp.int8)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if call.kind == "allreduce":
        wide = x if x.dtype in (jnp.float32, jnp.float64) else x.astype(jnp.float32)
        return _to_ordered(wide, call.op) if call.op in ("max", "min") else wide
    if x.dtype in (jnp.float32, jnp.float64):
        return x
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8)


def from_wire(x: jax.Array, dtype: np.dtype, call: Collective) -> jax.Array:
    """Invert `to_wire`."""
    if x.dtype == dtype:
        return x
    if is_sub_byte(dtype) and x.dtype == jnp.int8:
        narrow = x.astype(_unsigned(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype)
        return lax.bitcast_convert_type(narrow, dtype) if narrow.dtype != dtype else narrow
    if (
        call.op in ("max", "min")
        and x.dtype in (jnp.int32, jnp.int64)
        and jnp.issubdtype(dtype, jnp.floating)
    ):
        return _from_ordered(x).astype(dtype)
    moved = x.dtype in (jnp.uint16, jnp.uint8) and jnp.issubdtype(dtype, jnp.floating)
    return lax.bitcast_convert_type(x, dtype) if moved else x.astype(dtype)


def _to_ordered(x: jax.Array, op: str) -> jax.Array:
    """Return floats as integers in the same order, with NaN beyond all others.

    MPI does not define the MAX of a NaN.
    """
    nan = -jnp.nan if op == "min" else jnp.nan
    bits = lax.bitcast_convert_type(
        jnp.where(jnp.isnan(x), jnp.asarray(nan, x.dtype), x), _integer_like(x)
    )
    return _flip_negative(bits)


def _from_ordered(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(
        _flip_negative(key), jnp.float32 if key.dtype == jnp.int32 else jnp.float64
    )


def _flip_negative(bits: jax.Array) -> jax.Array:
    """Reverse the order of negative floats, whose bits count away from zero; its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _integer_like(x: jax.Array) -> np.dtype:
    return np.dtype(f"int{8 * x.dtype.itemsize}")


def bits_of(x: jax.Array) -> jax.Array:
    """Return floats as unsigned integers of the same bits, and integers as they are."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, _unsigned(x.dtype))


def _unsigned(dtype: np.dtype) -> np.dtype:
    """Return the unsigned integer dtype of as many bits as a float dtype has."""
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def is_sub_byte(dtype: np.dtype) -> bool:
    """Return whether several numbers of a dtype may share a byte."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8


def mean_as_sum(run: Run, call: Collective, xs: Sequence[jax.Array], size: int) -> list[jax.Array]:
    """Carry out a mean of floats by a transport that only sums.

    Short floats are summed in float32, where no sum overflows, divided, and then rounded.
    """
    total = call._replace(op="sum")
    sums = run(total, [to_wire(x, Collective("allreduce", op="sum")) for x in xs])
    return [(y / size).astype(x.dtype) for x, y in zip(xs, sums, strict=True)]


def reduce_rows(x: jax.Array, op: str) -> jax.Array:
    """Reduce `[size, ...]` over its first axis, short floats in float32."""
    wide = to_wire(x, Collective("allreduce", op="sum"))
    if op in ("sum", "prod", "mean"):
        reduced = LOCAL_REDUCE["sum" if op == "mean" else op](wide, axis=0, dtype=wide.dtype)
        return (reduced / len(x) if op == "mean" else reduced).astype(x.dtype)
    return LOCAL_REDUCE[op](wide, axis=0).astype(x.dtype)


# Messages. Every collective sees a leaf as a matrix of columns, `[rows, columns]`: one row for what
# a rank sends to all, `size` rows for what it sends to each. Leaves of one dtype are laid side by
# side as columns, so packing, splitting and unpacking are the same for all collectives, by
# arithmetic on shapes without arrays.


class Piece(NamedTuple):
    """Columns `start` to `stop` of leaf number `leaf`."""

    leaf: int
    start: int
    stop: int


def messages(
    columns: Sequence[int],
    itemsize: int,
    *,
    small_bytes: int = SMALL_BYTES,
    max_items: int = MAX_ITEMS,
) -> list[list[Piece]]:
    """Group the leaves of one dtype into messages.

    Small leaves are packed, in order, until a message holds `small_bytes`; a larger leaf travels
    alone and uncopied, in pieces of at most `max_items` columns. Empty leaves travel in no message.

    >>> messages([2, 100_000, 3, 0], itemsize=4)
    [[Piece(leaf=1, start=0, stop=100000)], [Piece(leaf=0, start=0, stop=2), Piece(leaf=2, start=0,
    stop=3)]]
    """
    alone: list[list[Piece]] = []
    packed: list[list[Piece]] = []
    packed_bytes = 0
    for leaf, count in enumerate(columns):
        if count * itemsize >= small_bytes or count > max_items:
            alone.extend([piece] for piece in _split(leaf, count, max_items))
        elif count:
            if not packed or packed_bytes + count * itemsize > small_bytes:
                packed.append([])
                packed_bytes = 0
            packed[-1].append(Piece(leaf, 0, count))
            packed_bytes += count * itemsize
    return alone + packed


def _split(leaf: int, count: int, max_items: int) -> Iterator[Piece]:
    for start in range(0, count, max_items):
        yield Piece(leaf, start, min(start + max_items, count))


# groups


def through_all(
    run: Run, call: Collective, xs: Sequence[jax.Array], rank: jax.Array | np.int32
) -> list[jax.Array]:
    """Carry out `call`, in groups, by collectives of all ranks.

    Each group takes its part. It is for what knows no groups, such as `jax.vmap`, and for groups
    that have no communicator.

    It sends more than the group needs: with p ranks in groups of g, p/g times as much as an
    allgather, or an alltoall, of the group.

    Args:
      run: carries out a collective of all ranks, in traced code.
      call: the collective.
      xs: the arrays.
      rank: this rank's number.
    """
    size = sum(map(len, call.groups))
    members = jnp.asarray(_members(call.groups, size))[rank]  # of this rank's group
    if call.kind in ("alltoall", "reduce_scatter"):
        spread = [jnp.zeros((size, *x.shape[1:]), x.dtype).at[members].set(x) for x in xs]
        rows = [y[members] for y in run(_over_all(call), spread)]
        return [reduce_rows(y, call.op) for y in rows] if call.op else rows
    rows = [y[members] for y in run(_over_all(call), xs)]
    if call.kind == "bcast":
        return [y[call.root] for y in rows]
    return [reduce_rows(y, call.op) for y in rows] if call.op else rows


def of_all(
    call: Collective, arrays: Sequence[jax.ShapeDtypeStruct], size: int
) -> tuple[Collective, list[jax.ShapeDtypeStruct]]:
    """Return the collective that `through_all` sends for arrays like these, and its arrays."""
    sent = _over_all(call)
    if sent.kind == "allgather":
        return sent, list(arrays)
    return sent, [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in arrays]


def _over_all(call: Collective) -> Collective:
    """Return the collective of all ranks that stands for one in groups.

    It is the same message of the same program, so it keeps the fingerprint and the index.
    """
    kind = "alltoall" if call.kind in ("alltoall", "reduce_scatter") else "allgather"
    return Collective(kind, fingerprint=call.fingerprint, message_index=call.message_index)


def _members(groups: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """Return the group of each rank, `[size, ranks of a group]`."""
    table = np.zeros((size, len(groups[0])), np.int32)
    for group in groups:
        table[list(group)] = group
    return table
