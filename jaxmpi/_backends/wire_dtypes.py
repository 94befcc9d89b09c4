"""Convert each JAX dtype to one that MPI can send or reduce, and back: for mpi4jax, and for XLA on CPUs."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi._backends.base import Collective

__all__ = ["LOCAL_REDUCE", "from_carrier", "mean_as_sum", "reduce_rows", "to_carrier"]

Run = Callable[[Collective, Sequence[jax.Array]], list[jax.Array]]

LOCAL_REDUCE: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min, "prod": jnp.prod}


def to_carrier(x: jax.Array, call: Collective) -> jax.Array:
    """`x` in a dtype that MPI knows: widened where numbers are reduced, the same bits where they only move."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if _is_sub_byte(x.dtype):  # nothing below has a NaN, and nothing below has bytes of its own
        return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int8)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if call.kind == "allreduce":
        wide = x if x.dtype in (jnp.float32, jnp.float64) else x.astype(jnp.float32)
        return _to_ordered(wide, call.op) if call.op in ("max", "min") else wide
    if x.dtype in (jnp.float32, jnp.float64):
        return x
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8)


def from_carrier(x: jax.Array, dtype: np.dtype, call: Collective) -> jax.Array:
    """The inverse of `to_carrier`."""
    if x.dtype == dtype:
        return x
    if call.op in ("max", "min") and x.dtype in (jnp.int32, jnp.int64) and jnp.issubdtype(dtype, jnp.floating):
        return _from_ordered(x).astype(dtype)
    moved = x.dtype in (jnp.uint16, jnp.uint8) and jnp.issubdtype(dtype, jnp.floating) and not _is_sub_byte(dtype)
    return lax.bitcast_convert_type(x, dtype) if moved else x.astype(dtype)


def _to_ordered(x: jax.Array, op: str) -> jax.Array:
    """Floats as integers in the same order, with NaN beyond all others: MPI leaves it open what its MAX makes of a NaN."""
    nan = -jnp.nan if op == "min" else jnp.nan
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.asarray(nan, x.dtype), x), _integer_like(x))
    return _flip_negative(bits)


def _from_ordered(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(_flip_negative(key), jnp.float32 if key.dtype == jnp.int32 else jnp.float64)


def _flip_negative(bits: jax.Array) -> jax.Array:
    """Reverse the order of the negative floats' bits, which count away from zero; its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _integer_like(x: jax.Array) -> np.dtype:
    return np.dtype(f"int{8 * x.dtype.itemsize}")


def _is_sub_byte(dtype: np.dtype) -> bool:
    numbers = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else None
    return numbers is not None and numbers(dtype).bits < 8


def mean_as_sum(run: Run, call: Collective, xs: Sequence[jax.Array], size: int) -> list[jax.Array]:
    """Carry out a mean of floats with what only sums: short ones in float32, which the sum fits, divided, then rounded."""
    total = call._replace(op="sum")
    sums = run(total, [to_carrier(x, Collective("allreduce", op="sum")) for x in xs])
    return [(y / size).astype(x.dtype) for x, y in zip(xs, sums, strict=True)]


def reduce_rows(x: jax.Array, op: str) -> jax.Array:
    """Reduce `[size, ...]` over its first axis: short floats in float32, every dtype as itself otherwise."""
    wide = to_carrier(x, Collective("allreduce", op="sum"))
    if op in ("sum", "prod", "mean"):
        reduced = LOCAL_REDUCE["sum" if op == "mean" else op](wide, axis=0, dtype=wide.dtype)
        return (reduced / len(x) if op == "mean" else reduced).astype(x.dtype)
    return LOCAL_REDUCE[op](wide, axis=0).astype(x.dtype)
