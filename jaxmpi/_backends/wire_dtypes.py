"""Conversions of JAX dtypes to those that a transport can send or reduce, and back."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi._backends.base import Collective

__all__ = [
    "LOCAL_REDUCE",
    "bits_of",
    "carried",
    "carried_shapes",
    "from_carrier",
    "is_sub_byte",
    "mean_as_sum",
    "received",
    "reduce_rows",
    "to_carrier",
]

Run = Callable[[Collective, Sequence[jax.Array]], list[jax.Array]]

LOCAL_REDUCE: dict[str, Callable[..., jax.Array]] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
}


def carried(
    call: Collective, xs: Sequence[jax.Array], fits: Callable[[np.dtype], bool]
) -> list[jax.Array]:
    """Return the arrays in dtypes that a transport takes; `fits` says whether it takes a dtype."""
    return [x if fits(x.dtype) else to_carrier(x, _purpose(call)) for x in xs]


def carried_shapes(
    call: Collective, arrays: Sequence[jax.ShapeDtypeStruct], fits: Callable[[np.dtype], bool]
) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of what `carried` returns for arrays of these shapes."""
    convert = partial(to_carrier, call=_purpose(call))
    return [x if fits(x.dtype) else jax.eval_shape(convert, x) for x in arrays]


def received(
    call: Collective, xs: Sequence[jax.Array], outs: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the results of `call` on what `carried` made of `xs`, in the dtypes of `xs`."""
    back = []
    for x, y in zip(xs, outs, strict=True):
        back.append(y if x.dtype == y.dtype else from_carrier(y, x.dtype, _purpose(call)))
    return back


def _purpose(call: Collective) -> Collective:
    """Return a collective that preserves what `call` needs: numbers if it reduces, else bits."""
    return Collective("allreduce", op="sum") if call.op else call


def to_carrier(x: jax.Array, call: Collective) -> jax.Array:
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


def from_carrier(x: jax.Array, dtype: np.dtype, call: Collective) -> jax.Array:
    """Invert `to_carrier`."""
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
    sums = run(total, [to_carrier(x, Collective("allreduce", op="sum")) for x in xs])
    return [(y / size).astype(x.dtype) for x, y in zip(xs, sums, strict=True)]


def reduce_rows(x: jax.Array, op: str) -> jax.Array:
    """Reduce `[size, ...]` over its first axis, short floats in float32."""
    wide = to_carrier(x, Collective("allreduce", op="sum"))
    if op in ("sum", "prod", "mean"):
        reduced = LOCAL_REDUCE["sum" if op == "mean" else op](wide, axis=0, dtype=wide.dtype)
        return (reduced / len(x) if op == "mean" else reduced).astype(x.dtype)
    return LOCAL_REDUCE[op](wide, axis=0).astype(x.dtype)
