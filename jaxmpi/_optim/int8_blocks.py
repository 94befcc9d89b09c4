"""Blocks of 8-bit numbers with a scale each: the arithmetic of `codecs.int8`.

    s = max|x| · (1/127) over a block;    q = round(x · (1/s));    decode(encode(x)) = s·q

A row of k float32 numbers, in whole blocks, is encoded as `[k + 4·k/block]` int8: the k numbers q,
and after them the 4 bytes of each float32 scale s. So both are in one message.

Each function has two implementations. The one in JAX works on every backend, and passes over the
numbers a dozen times. The other one is a primitive: in a program that is compiled for a CPU it
calls the loops of native/int8.h, which pass over the numbers once. Both give the same bits in every
program, because each operation is rounded by itself, in the order in which it is written here. A
`Form` holds both.
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

from jaxmpi._barriers import rounded
from jaxmpi._world import session

__all__ = ["decode", "encode", "encode_mean", "rows"]

Parameter: TypeAlias = int | tuple[tuple[int, ...], ...]  # a block, or the shapes of arrays

SCALE_BYTES = 4
SMALLEST_SCALE = jnp.finfo(jnp.float32).tiny  # the smallest normal number


def encode(xs: Sequence[jax.Array], residual: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Encode m = x + e, and return the code and the new residual.

    Args:
      xs: arrays of floats; x is all their numbers as one vector, padded with zeros to the size of
        e, and cut into its shape.
      residual: e, float32 `[..., k]`; k is a multiple of `block`.
      block: the number of numbers that share a scale.

    Returns:
      (encode(m), int8 `[..., k + 4·k/block]`; m - decode(encode(m)), float32 `[..., k]`).
    """
    numbers = [x.astype(jnp.float32) for x in xs]
    coded, new_residual = _call(encode_form, residual, *numbers, block=block)
    return coded, new_residual


def encode_mean(
    received: jax.Array, residual: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """Encode y = (1/p) · Σ_r decode(received[r]) + e, and return the code and the new residual.

    Args:
      received: the codes of all p ranks, int8 `[size, k + 4·k/block]`.
      residual: e, float32 `[k]`.
      block: the number of numbers that share a scale.

    Returns:
      (encode(y), int8 `[k + 4·k/block]`; y - decode(encode(y)), float32 `[k]`).
    """
    coded, new_residual = _call(encode_mean_form, residual, received, block=block)
    return coded, new_residual


def decode(coded: jax.Array, like: Sequence[jax.Array], block: int) -> list[jax.Array]:
    """Decode rows into arrays with the shapes and dtypes of `like`; the inverse of `encode`.

    Args:
      coded: the codes, int8 `[rows, k + 4·k/block]`. All rows together are one vector of numbers,
        and the arrays have its first numbers.
      like: the arrays, with at most rows · k numbers together.
      block: the number of numbers that share a scale.
    """
    shapes = tuple(x.shape for x in like)
    numbers = _call(decode_form, coded, block=block, shapes=shapes)
    return [y.astype(x.dtype) for x, y in zip(like, numbers, strict=True)]


def rows(coded: jax.Array, block: int) -> jax.Array:
    """Decode each row: return float32 `[..., k]` for int8 `[..., k + 4·k/block]`."""
    k = coded.shape[-1] // (block + SCALE_BYTES) * block
    q, scales = coded[..., :k], coded[..., k:].reshape(*coded.shape[:-1], k // block, SCALE_BYTES)
    scale = jax.lax.bitcast_convert_type(scales, jnp.float32)[..., None]
    numbers = q.reshape(*q.shape[:-1], -1, block).astype(jnp.float32) * scale
    return rounded(numbers.reshape(q.shape))


# --- in JAX --------------------------------------------------------------------------------------


def _code(x: jax.Array, block: int) -> jax.Array:
    """Encode each row: return int8 `[..., k + 4·k/block]` for float32 `[..., k]`."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    # max|x| of a block, as an integer: XLA's maximum of floats misses a NaN in some programs. The
    # bits of floats that are 0 or more, read as integers, have the same order, with NaN above all.
    magnitudes = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    largest = jnp.max(magnitudes, axis=-1, keepdims=True)
    scale = jax.lax.bitcast_convert_type(largest, jnp.float32) * np.float32(1 / 127)
    # A scale below the normal numbers has few bits. The numbers of its block are not sent: with the
    # inverse 1, all q are 0.
    inverse = 1 / jnp.where(scale < SMALLEST_SCALE, 1, scale)
    q = jnp.round(blocks * inverse).astype(jnp.int8)
    scales = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)
    return jnp.concatenate([q.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)], axis=-1)


def _encode_in_jax(residual: jax.Array, *xs: jax.Array, block: int) -> list[jax.Array]:
    flat = jnp.concatenate([x.reshape(-1) for x in xs] or [jnp.zeros(0, jnp.float32)])
    padded = jnp.pad(rounded(flat), (0, residual.size - flat.size))
    m = padded.reshape(residual.shape) + residual
    coded = _code(m, block)
    return [coded, m - rows(coded, block)]


def _encode_mean_in_jax(residual: jax.Array, received: jax.Array, *, block: int) -> list[jax.Array]:
    # Add in the order of the ranks: `jnp.sum` has another order in some programs.
    first, *others = rows(received, block)
    total = sum(others, first)
    y = rounded(total * np.float32(1 / len(received))) + residual
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


# --- the primitives ------------------------------------------------------------------------------


class Form(NamedTuple):
    """The two implementations of a function of this file, which give the same bits.

    Both are functions (*arrays, block=..., shapes=...) -> list of arrays; `shapes` is for decoding.

    Attributes:
      in_jax: the function in JAX.
      primitive: a primitive, which is `in_jax`, or, compiled for a CPU, a call of the extension.
    """

    in_jax: Callable[..., list[jax.Array]]
    primitive: Primitive


def _call(form: Form, *xs: jax.Array, **parameters: Parameter) -> list[jax.Array]:
    """Call the implementation that the transport selects: the primitive on arrays of the host."""
    transport = session.current("codecs").transport
    call = transport.loops(xla=form.in_jax, native=form.primitive.bind)
    return call(*xs, **parameters)


def _form(name: str, in_jax: Callable[..., list[jax.Array]], *, in_place: bool) -> Form:
    """Return a function with its primitive, from its form in JAX and the FFI target `name`.

    Shapes, derivatives and batches of the primitive are those of `in_jax`.

    Args:
      name: the name of the primitive, and of the FFI target in the extension.
      in_jax: the function in JAX.
      in_place: whether result 1, the new residual, has the memory of operand 0, the residual.
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
        instantiated = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(partial(in_jax, **parameters), tuple(xs), tuple(instantiated))

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
