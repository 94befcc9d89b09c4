"""Blocks of 8-bit numbers with a scale each: the arithmetic of `codecs.int8`.

    s = max|x| · (1/127) over a block;    q = round(x · (1/s));    decode(encode(x)) = s·q

A row of k float32 numbers, in whole blocks, becomes `[k + 4·k/block]` int8: the numbers, and behind
them the bytes of the scales, so that there is one message.

Each function has two forms. The one in JAX is for every backend, and is a dozen passes over the
numbers. A primitive is the other one: in a program that is compiled for a CPU it calls the loops of
native/int8.h, which pass over the numbers once. Both give the same bits in every program, because
each operation is rounded by itself, in the order in which it is written here.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmpi._world import session

__all__ = ["decode", "encode", "encode_mean", "rows"]

Parameter: TypeAlias = int | tuple[tuple[int, ...], ...]  # a block, or the shapes of arrays

SCALE_BYTES = 4
SMALLEST = jnp.finfo(jnp.float32).tiny  # the smallest normal number


def encode(xs: Sequence[jax.Array], residual: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Encode m = x + e, and return what the code lacks.

    Args:
      xs: arrays of floats, which are one vector of numbers; zeros are behind it.
      residual: e, float32 `[..., k]`, of the shape in which m is cut.
      block: how many numbers share a scale.

    Returns:
      (encode(m) `[..., k + 4·k/block]`, m - decode(encode(m)) `[..., k]`).
    """
    numbers = [x.astype(jnp.float32) for x in xs]
    coded, kept = _call(encode_form, residual, *numbers, block=block)
    return coded, kept


def encode_mean(
    received: jax.Array, residual: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """Encode y = (1/p) · Σ_r decode(received[r]) + e, and return what the code lacks.

    Args:
      received: the codes of all ranks, `[size, k + 4·k/block]`.
      residual: e, float32 `[k]`.
      block: how many numbers share a scale.

    Returns:
      (encode(y) `[k + 4·k/block]`, y - decode(encode(y)) `[k]`).
    """
    coded, kept = _call(encode_mean_form, residual, received, block=block)
    return coded, kept


def decode(coded: jax.Array, like: Sequence[jax.Array], block: int) -> list[jax.Array]:
    """Decode rows, which are one vector of numbers, into arrays of the shapes and dtypes of `like`.

    Args:
      coded: the codes, `[rows, k + 4·k/block]`.
      like: the arrays; all of them together have at most rows · k numbers.
      block: how many numbers share a scale.
    """
    shapes = tuple(x.shape for x in like)
    numbers = _call(decode_form, coded, block=block, shapes=shapes)
    return [y.astype(x.dtype) for x, y in zip(like, numbers, strict=True)]


def rows(coded: jax.Array, block: int) -> jax.Array:
    """Decode each row: float32 `[..., k]` of int8 `[..., k + 4·k/block]`."""
    k = coded.shape[-1] // (block + SCALE_BYTES) * block
    q, scales = coded[..., :k], coded[..., k:].reshape(*coded.shape[:-1], k // block, SCALE_BYTES)
    scale = jax.lax.bitcast_convert_type(scales, jnp.float32)[..., None]
    numbers = q.reshape(*q.shape[:-1], -1, block).astype(jnp.float32) * scale
    return _rounded(numbers.reshape(q.shape))


# --- in JAX --------------------------------------------------------------------------------------


def _rounded(x: jax.Array) -> jax.Array:
    """Return the same numbers, such that XLA rounds them.

    In some programs XLA makes one operation (FMA) of a product and the sum that it is added to, and
    rounds once. It does not know that this choice is none, so it makes both operations.
    """
    return jnp.where(x == x, x, jnp.nan)


def _code(x: jax.Array, block: int) -> jax.Array:
    """Encode each row: int8 `[..., k + 4·k/block]` of float32 `[..., k]`."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    # by their bits, as XLA's maximum of floats misses a NaN in some programs
    magnitudes = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    largest = jnp.max(magnitudes, axis=-1, keepdims=True)
    scale = jax.lax.bitcast_convert_type(largest, jnp.float32) * np.float32(1 / 127)
    # numbers so small that a scale has few bits are not sent: q = 0
    inverse = 1 / jnp.where(scale < SMALLEST, 1, scale)
    q = jnp.round(blocks * inverse).astype(jnp.int8)
    scales = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)
    return jnp.concatenate([q.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)], axis=-1)


def _encode_in_jax(residual: jax.Array, *xs: jax.Array, block: int) -> list[jax.Array]:
    flat = jnp.concatenate([x.reshape(-1) for x in xs] or [jnp.zeros(0, jnp.float32)])
    padded = jnp.pad(_rounded(flat), (0, residual.size - flat.size))
    m = padded.reshape(residual.shape) + residual
    coded = _code(m, block)
    return [coded, m - rows(coded, block)]


def _encode_mean_in_jax(residual: jax.Array, received: jax.Array, *, block: int) -> list[jax.Array]:
    # in the order of the ranks, which that of `jnp.sum` is not in every program
    first, *others = rows(received, block)
    total = sum(others, first)
    y = _rounded(total * np.float32(1 / len(received))) + residual
    coded = _code(y, block)
    return [coded, y - rows(coded, block)]


def _decode_in_jax(
    coded: jax.Array, *, block: int, shapes: tuple[tuple[int, ...], ...]
) -> list[jax.Array]:
    flat, outs, start = rows(coded, block).reshape(-1), [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        outs.append(flat[start:end].reshape(shape))
        start = end
    return outs


# --- both forms as a primitive -------------------------------------------------------------------


class Form(NamedTuple):
    """A function of this file.

    Attributes:
      in_jax: (arrays, block and shapes by name) -> arrays.
      primitive: the primitive, which is `in_jax` or, on the CPU, a call of the extension.
    """

    in_jax: Callable[..., list[jax.Array]]
    primitive: Primitive


def _call(form: Form, *xs: jax.Array, **parameters: Parameter) -> list[jax.Array]:
    """Call a function, in the form that the transport takes."""
    transport = session.current("codecs").transport
    call = transport.loops(xla=form.in_jax, native=form.primitive.bind)
    return call(*xs, **parameters)


def _form(name: str, in_jax: Callable[..., list[jax.Array]], *, in_place: bool) -> Form:
    """Make a function of its form in JAX and of the FFI target `name`.

    Args:
      name: the name of the primitive and of the target.
      in_jax: the function in JAX.
      in_place: whether result 1 has the memory of operand 0.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract(*xs: ShapedArray, **parameters: Parameter) -> list[ShapedArray]:
        outs = jax.eval_shape(partial(in_jax, **parameters), *xs)
        return [ShapedArray(x.shape, x.dtype) for x in outs]

    def lower(
        ctx: mlir.LoweringRuleContext, *xs: mlir.ir.Value, block: int, **_: Parameter
    ) -> Sequence[mlir.ir.Value]:
        aliases = {0: 1} if in_place else {}
        call = jax.ffi.ffi_lowering(name, operand_output_aliases=aliases)
        return call(ctx, *xs, block=np.int64(block))

    def batch(
        xs: Sequence[jax.Array], dims: Sequence[int | None], **parameters: Parameter
    ) -> tuple[list[jax.Array], list[int]]:
        outs = jax.vmap(partial(in_jax, **parameters), in_axes=tuple(dims))(*xs)
        return outs, [0] * len(outs)

    def jvp(
        xs: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], **parameters: Parameter
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        whole = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(partial(in_jax, **parameters), tuple(xs), tuple(whole))

    primitive.def_impl(in_jax)
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    mlir.register_lowering(primitive, mlir.lower_fun(in_jax, multiple_results=True))
    mlir.register_lowering(primitive, lower, platform="cpu")
    return Form(in_jax, primitive)


encode_form = _form("jaxmpi_int8_encode", _encode_in_jax, in_place=True)
encode_mean_form = _form("jaxmpi_int8_encode_mean", _encode_mean_in_jax, in_place=True)
decode_form = _form("jaxmpi_int8_decode", _decode_in_jax, in_place=False)
