"""The codec `int8`: 8 bits for a number, with a scale for each block of them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmpi._axis import AXIS, Axis, with_parameters
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._optim.compression import Codec, OneMessage, check_at_least_one, ranks_along
from jaxmpi._optim.float_leaves import floats

__all__ = ["int8"]


class Residual(NamedTuple):
    """What a rank has not sent yet.

    Attributes:
      sent: of its own gradients, float32.
      summed: of the means that it forms for others, float32.
    """

    sent: jax.Array
    summed: jax.Array


def int8(block: int = 256, *, axis: Axis = AXIS) -> Codec:
    """Send 8 bits for a number, and one float32 for each block of them: about a quarter of float32's bytes.

    x ≈ s·q with s = max|x| / 127 over a block and q rounded to an int8. Every rank receives its
    part of all ranks' numbers (alltoall), adds them in float32, rounds the mean in the same way and
    gives it to all (allgather). What both roundings leave is kept and added to the next mean. (Tang
    et al. 2019, "DoubleSqueeze".) In one message, for `local_sgd` with a delay, every rank gets all
    ranks' numbers and there is one rounding: on many ranks, more bytes.

    Args:
      block: how many numbers share a scale.
      axis: as of `bf16`.

    Raises:
      ValueError: block is below 1.
    """
    check_at_least_one("int8", "block", block)
    init, mean = _in_two_rounds(block, axis)
    return Codec(init, mean, _in_one_message(block), axis)


def _in_two_rounds(
    block: int, axis: Axis
) -> tuple[Callable[[PyTree], Residual], Callable[[PyTree, Residual], tuple[PyTree, Residual]]]:
    """`init` and `mean` of a codec: each rank forms the mean of its part of the numbers."""

    def columns(leaves: list[jax.Array]) -> int:
        """How many numbers of each rank's part, in whole blocks."""
        return _in_blocks(-(-_count(leaves) // ranks_along(axis)), block)

    def init(params: PyTree) -> Residual:
        leaves, _ = floats("codecs.int8", params)
        k = columns(leaves)
        return Residual(jnp.zeros((ranks_along(axis), k), jnp.float32), jnp.zeros(k, jnp.float32))

    def mean(updates: PyTree, state: Residual) -> tuple[PyTree, Residual]:
        leaves, put = floats("codecs.int8", with_parameters(updates, f"codecs.int8 block={block}"))
        size, k = ranks_along(axis), columns(leaves)
        flat = _flat(leaves)
        mine = jnp.pad(flat, (0, size * k - flat.size)).reshape(size, k) + state.sent
        coded = _encode(mine, block)
        part = (
            jnp.sum(_decode(Caller("codecs.int8").alltoall(coded, axis=axis), block, k), axis=0)
            / size
            + state.summed
        )
        answer = _encode(part, block)
        whole = _decode(Caller("codecs.int8").allgather(answer, axis=axis), block, k).reshape(-1)
        return put(_cut(whole, leaves)), Residual(
            mine - _decode(coded, block, k), part - _decode(answer, block, k)
        )

    return init, mean


def _in_one_message(block: int) -> OneMessage:
    """Every rank gets all ranks' numbers, rounded once."""

    def init(params: PyTree) -> jax.Array:
        leaves, _ = floats("codecs.int8", params)
        return jnp.zeros(_in_blocks(_count(leaves), block), jnp.float32)

    def encode(updates: PyTree, state: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        leaves, _ = floats("codecs.int8", with_parameters(updates, f"codecs.int8 block={block}"))
        mine = jnp.pad(_flat(leaves), (0, state.size - _count(leaves))) + state
        coded = _encode(mine, block)
        return [coded], mine - _decode(coded, block, state.size)

    def decode(rows: list[jax.Array], like: PyTree) -> PyTree:
        leaves, put = floats("codecs.int8", like)
        return put(
            _cut(
                jnp.mean(_decode(rows[0], block, _in_blocks(_count(leaves), block)), axis=0), leaves
            )
        )

    return OneMessage(init, encode, decode, averages=False)


def _encode(x: jax.Array, block: int) -> jax.Array:
    """`[.., k]` float32 as `[.., k + 4·k/block]` int8: the numbers, then the bytes of the scales."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
    q = jnp.round(blocks / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    scales = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)
    return jnp.concatenate([q.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)], axis=-1)


def _decode(coded: jax.Array, block: int, k: int) -> jax.Array:
    """The k numbers of each row that `_encode` has made."""
    q, scales = coded[..., :k], coded[..., k:].reshape(*coded.shape[:-1], k // block, 4)
    scale = jax.lax.bitcast_convert_type(scales, jnp.float32)[..., None]
    return (q.reshape(*q.shape[:-1], -1, block).astype(jnp.float32) * scale).reshape(q.shape)


def _count(leaves: list[jax.Array]) -> int:
    return sum(x.size for x in leaves)


def _in_blocks(n: int, block: int) -> int:
    """How many numbers the blocks of n numbers have, the last one filled up."""
    return -(-n // block) * block


def _flat(leaves: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in leaves] or [jnp.zeros(0)])


def _cut(flat: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
    """Arrays like `leaves`, of the numbers of all of them."""
    ends = [sum(x.size for x in leaves[: i + 1]) for i in range(len(leaves))]
    return [
        flat[end - x.size : end].reshape(x.shape).astype(x.dtype)
        for x, end in zip(leaves, ends, strict=True)
    ]
