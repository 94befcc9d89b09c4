"""Means over ranks in fewer bytes: the codecs behind the public name `jaxmpi.codecs`."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmpi._axis import AXIS, Axis, names, with_parameters
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import tree_allgather, tree_allreduce, tree_alltoall
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import floats
from jaxmpi._world import session

__all__ = ["Codec", "bf16", "check_codec", "f16", "int8", "powersgd", "topk"]


class OneMessage(NamedTuple):
    """A mean that takes one message: what a rank sends follows from its own updates alone.

    Attributes:
      init: params -> state, of arrays like them.
      encode: (updates, state) -> (arrays to send, state).
      decode: (arrays, like) -> the mean over ranks, in the structure and dtypes of `like`. The arrays are the means of what was
        sent, or, if not `averages`, those of all ranks, `[size, ...]` each.
      averages: whether the arrays are averaged on the way.
    """

    init: Callable[[PyTree], PyTree]
    encode: Callable[[PyTree, PyTree], tuple[list[jax.Array], PyTree]]
    decode: Callable[[list[jax.Array], PyTree], PyTree]
    averages: bool


class Codec(NamedTuple):
    """What is sent for a mean.

    Attributes:
      init: params -> state, of arrays like them.
      mean: (updates, state) -> (mean over ranks in the dtypes of updates, state). Called in traced code, on all ranks.
      one_message: the same in one message, for `local_sgd` with a delay; None where there is no such way.
      axis: of the ranks that the mean is over.
    """

    init: Callable[[PyTree], PyTree]
    mean: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    one_message: OneMessage | None = None
    axis: Axis = AXIS


def check_codec(function: str, codec: object, axis: Axis = AXIS) -> None:
    """Raise unless it is a codec for means along an axis.

    Raises:
      TypeError: it is none.
      ValueError: it is one for another axis.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f"{function}: codec is a {type(codec).__name__}. Use one of jaxmpi.codecs, such as codecs.bf16().")
    if names(codec.axis) != names(axis):
        raise ValueError(
            f"{function}: the mean is along axis {axis!r}, and the codec's along {codec.axis!r}. Give the codec the axis, too, "
            f"as in codecs.bf16(axis={axis!r})."
        )


def bf16(*, axis: Axis = AXIS) -> Codec:
    """Send bfloat16: half of float32's bytes, 8 bits of precision, its whole range.

    The sum is formed in float32 and rounded once more. On the native transport half of the bytes travel; the others carry
    short floats as float32. No state.

    Args:
      axis: of the ranks that the mean is over, as in `tree_allreduce`: that of the transform that gets the codec.
    """
    return _cast("codecs.bf16", jnp.bfloat16, axis)


def f16(*, axis: Axis = AXIS) -> Codec:
    """Send float16: 11 bits of precision; what is beyond ±65504 is sent as that, and what is below 3e-8 as zero.

    As `bf16` otherwise.
    """
    return _cast("codecs.f16", jnp.float16, axis)


def _cast(name: str, dtype: DTypeLike, axis: Axis) -> Codec:
    largest = float(jnp.finfo(dtype).max)

    def encode(updates: PyTree, state: PyTree) -> tuple[list[jax.Array], PyTree]:
        leaves, _ = floats(name, with_parameters(updates, name))
        return [jnp.clip(x, -largest, largest).astype(dtype) for x in leaves], state

    def decode(means: list[jax.Array], like: PyTree) -> PyTree:
        leaves, put = floats(name, like)
        return put([y.astype(x.dtype) for x, y in zip(leaves, means, strict=True)])

    def mean(updates: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        coded, state = encode(updates, state)
        return decode(tree_allreduce(coded, op="mean", axis=axis), updates), state

    return Codec(lambda params: (), mean, OneMessage(lambda params: (), encode, decode, averages=True), axis)


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

    x ≈ s·q with s = max|x| / 127 over a block and q rounded to an int8. Every rank receives its part of all ranks' numbers
    (alltoall), adds them in float32, rounds the mean in the same way and gives it to all (allgather). What both roundings
    leave is kept and added to the next mean. (Tang et al. 2019, "DoubleSqueeze".) In one message, for `local_sgd` with a delay,
    every rank gets all ranks' numbers and there is one rounding: on many ranks, more bytes.

    Args:
      block: how many numbers share a scale.
      axis: as of `bf16`.

    Raises:
      ValueError: block is below 1.
    """
    _at_least_one("int8", "block", block)

    def columns(leaves: list[jax.Array]) -> int:
        """How many numbers of each rank's part, in whole blocks."""
        return -(-sum(x.size for x in leaves) // (_size(axis) * block)) * block

    def init(params: PyTree) -> Residual:
        leaves, _ = floats("codecs.int8", params)
        k = columns(leaves)
        return Residual(jnp.zeros((_size(axis), k), jnp.float32), jnp.zeros(k, jnp.float32))

    def encode(x: jax.Array) -> jax.Array:
        """`[.., k]` float32 as `[.., k + 4·k/block]` int8: the numbers, then the bytes of the scales."""
        blocks = x.reshape(*x.shape[:-1], -1, block)
        scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
        q = jnp.round(blocks / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
        scales = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)
        return jnp.concatenate([q.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)], axis=-1)

    def decode(coded: jax.Array, k: int) -> jax.Array:
        q, scales = coded[..., :k], coded[..., k:].reshape(*coded.shape[:-1], k // block, 4)
        scale = jax.lax.bitcast_convert_type(scales, jnp.float32)[..., None]
        return (q.reshape(*q.shape[:-1], -1, block).astype(jnp.float32) * scale).reshape(q.shape)

    def mean(updates: PyTree, state: Residual) -> tuple[PyTree, Residual]:
        leaves, put = floats("codecs.int8", with_parameters(updates, f"codecs.int8 block={block}"))
        size, k = _size(axis), columns(leaves)
        flat = _flat(leaves)
        mine = jnp.pad(flat, (0, size * k - flat.size)).reshape(size, k) + state.sent
        coded = encode(mine)
        part = jnp.sum(decode(tree_alltoall(coded, axis=axis), k), axis=0) / size + state.summed
        answer = encode(part)
        whole = decode(tree_allgather(answer, axis=axis), k).reshape(-1)
        return put(_cut(whole, leaves)), Residual(mine - decode(coded, k), part - decode(answer, k))

    def blocks_of(leaves: list[jax.Array]) -> int:
        return -(-sum(x.size for x in leaves) // block) * block

    def encode_all(updates: PyTree, state: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        leaves, _ = floats("codecs.int8", with_parameters(updates, f"codecs.int8 block={block}"))
        mine = jnp.pad(_flat(leaves), (0, state.size - sum(x.size for x in leaves))) + state
        coded = encode(mine)
        return [coded], mine - decode(coded, state.size)

    def decode_all(rows: list[jax.Array], like: PyTree) -> PyTree:
        leaves, put = floats("codecs.int8", like)
        return put(_cut(jnp.mean(decode(rows[0], blocks_of(leaves)), axis=0), leaves))

    def init_all(params: PyTree) -> jax.Array:
        return jnp.zeros(blocks_of(floats("codecs.int8", params)[0]), jnp.float32)

    return Codec(init, mean, OneMessage(init_all, encode_all, decode_all, averages=False), axis)


def _flat(leaves: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in leaves] or [jnp.zeros(0)])


def _cut(flat: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
    """Arrays like `leaves`, of the numbers of all of them."""
    ends = [sum(x.size for x in leaves[: i + 1]) for i in range(len(leaves))]
    return [flat[end - x.size : end].reshape(x.shape).astype(x.dtype) for x, end in zip(leaves, ends, strict=True)]


def topk(fraction: float, *, axis: Axis = AXIS) -> Codec:
    """Send the largest numbers of each array, with their places: 8 bytes for each of them.

    Of n numbers, ⌈fraction·n⌉ of the largest absolute value; the others are kept and added to the next gradient. (Stich et al.
    2018, "Sparsified SGD with memory"; Lin et al. 2018, "Deep gradient compression".) All ranks' numbers are gathered: p · 8
    bytes times fraction · n arrive, so it pays where fraction is well below 1/p.

    Args:
      fraction: above 0, at most 1.
      axis: as of `bf16`.

    Raises:
      ValueError: a fraction out of this range.
    """
    if not 0 < fraction <= 1:
        raise ValueError(
            f"codecs.topk: fraction is {fraction}. It is the share of the numbers that is sent: above 0, at most 1."
        )

    def init(params: PyTree) -> list[jax.Array]:
        return [jnp.zeros(x.size, jnp.float32) for x in floats("codecs.topk", params)[0]]

    def encode(updates: PyTree, state: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        leaves, _ = floats("codecs.topk", with_parameters(updates, f"codecs.topk fraction={fraction}"))
        coded, kept = [], list(state)
        for i, x in enumerate(leaves):
            if x.size:  # of an empty array nothing is sent
                vector = x.astype(jnp.float32).reshape(-1) + state[i]
                places = jax.lax.top_k(jnp.abs(vector), math.ceil(fraction * x.size))[1].astype(jnp.int32)
                coded.append(jnp.stack([places, jax.lax.bitcast_convert_type(vector[places], jnp.int32)]))
                kept[i] = vector.at[places].set(0)
        return coded, kept

    def decode(gathered: list[jax.Array], like: PyTree) -> PyTree:
        leaves, put = floats("codecs.topk", like)
        of_leaf, outs = iter(gathered), [jnp.zeros_like(x) for x in leaves]
        for i, x in enumerate(leaves):
            if x.size:
                rows = next(of_leaf)
                total = jnp.zeros(x.size, jnp.float32)
                for row in rows:  # in the order of the ranks, on GPUs, too
                    numbers = jax.lax.bitcast_convert_type(row[1], jnp.float32)
                    total = total.at[row[0]].add(numbers, unique_indices=True)
                outs[i] = (total / len(rows)).reshape(x.shape).astype(x.dtype)
        return put(outs)

    def mean(updates: PyTree, state: list[jax.Array]) -> tuple[PyTree, list[jax.Array]]:
        coded, kept = encode(updates, state)
        return decode(tree_allgather(coded, axis=axis), updates), kept

    return Codec(init, mean, OneMessage(init, encode, decode, averages=False), axis)


class LowRank(NamedTuple):
    """The state of PowerSGD, for each array that it compresses.

    Attributes:
      q: the right factors, `[columns, rank]`, equal on all ranks.
      error: what was not sent, `[rows, columns]`.
    """

    q: list[jax.Array]
    error: list[jax.Array]


def powersgd(rank: int = 4, *, axis: Axis = AXIS) -> Codec:
    """Send each matrix as two thin ones: rank · (rows + columns) numbers in the place of rows · columns.

    An array of shape [.., m] is a matrix of m columns. With M = gradient + error: P = mean of M·Q, made orthonormal; Q = mean
    of Mᵀ·P; the mean is taken to be P·Qᵀ, and M - P·Qᵀ is the next error. Q starts random and is kept: one power iteration a
    step. (Vogels et al. 2019, "PowerSGD".) Vectors, and matrices that would not be smaller, are sent as they are. Two rounds.

    Args:
      rank: of the factors.
      axis: as of `bf16`.

    Raises:
      ValueError: rank is below 1.
    """
    _at_least_one("powersgd", "rank", rank)

    def shapes(leaves: list[jax.Array]) -> dict[int, tuple[int, int]]:
        """Rows and columns of what is compressed, by the number of the leaf."""
        matrices = {i: (x.size // x.shape[-1], x.shape[-1]) for i, x in enumerate(leaves) if x.ndim > 1 and x.size}
        return {i: (n, m) for i, (n, m) in matrices.items() if rank * (n + m) < n * m}

    def init(params: PyTree) -> LowRank:
        chosen = shapes(floats("codecs.powersgd", params)[0])
        qs = [jax.random.normal(jax.random.key(i), (m, rank), jnp.float32) for i, (_, m) in chosen.items()]
        return LowRank(qs, [jnp.zeros(shape, jnp.float32) for shape in chosen.values()])

    def mean(updates: PyTree, state: LowRank) -> tuple[PyTree, LowRank]:
        leaves, put = floats("codecs.powersgd", with_parameters(updates, f"codecs.powersgd rank={rank}"))
        chosen = shapes(leaves)
        ms = [leaves[i].astype(jnp.float32).reshape(chosen[i]) + e for i, e in zip(chosen, state.error, strict=True)]
        whole = {i: x for i, x in enumerate(leaves) if i not in chosen}
        ps, outs = tree_allreduce(([_product(m, q) for m, q in zip(ms, state.q, strict=True)], whole), op="mean", axis=axis)
        ps = [jnp.linalg.qr(p)[0] for p in ps]
        qs = tree_allreduce([_product(m.T, p) for m, p in zip(ms, ps, strict=True)], op="mean", axis=axis)
        found = [_product(p, q.T) for p, q in zip(ps, qs, strict=True)]
        outs |= {i: x.reshape(leaves[i].shape).astype(leaves[i].dtype) for i, x in zip(chosen, found, strict=True)}
        errors = [m - x for m, x in zip(ms, found, strict=True)]
        # a column that a gradient of zeros has made zero would stay zero
        kept = [jnp.where(jnp.any(q != 0, axis=0), q, old) for q, old in zip(qs, state.q, strict=True)]
        return put([outs[i] for i in range(len(leaves))]), LowRank(kept, errors)

    return Codec(init, mean, axis=axis)


def _size(axis: Axis) -> int:
    return axis_size(axis, session.current("codecs"))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _at_least_one(codec: str, name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"codecs.{codec}: {name} is {value}, and must be 1 or more.")
