"""Codecs: a mean over ranks in fewer bytes.

    tx = jaxmpi.distributed(optax.adam(1e-3), codec=jaxmpi.codecs.int8())

A codec is a pair of functions, see `Codec`. `init(params)` returns the first state.
`mean(updates, state)` communicates, with the collectives of `jaxmpi`, and returns the mean and the
new state. The mean must be equal on all ranks; the state may differ between ranks.

The codecs that drop more than a rounding error use error feedback (Seide et al. 2014, "1-bit
stochastic gradient descent"; Karimireddy et al. 2019, "Error feedback fixes SignSGD"). Each rank
keeps what it did not send, the residual e, and adds it to its next gradient g:

    m = g + e;    send encode(m);    e ← m - decode(encode(m))

So all of a gradient arrives in the end, some of it in later steps. The codecs take trees of real
floats, of any shapes, and return means in the same shapes and dtypes; residuals are float32. A leaf
of another dtype is a TypeError with its path, from `init` and `mean`.

Each docstring below has the bytes of a tree of n numbers, sent per rank, for p ranks.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._marks import with_parameters
from jaxmpi._optim import int8_blocks
from jaxmpi._optim.codec import Codec, OneMessage, check_codec
from jaxmpi._optim.float_leaves import floats, wide
from jaxmpi._optim.transform_arguments import checked_count
from jaxmpi._world import session

__all__ = ["Codec", "OneMessage", "bf16", "check_codec", "f16", "int8", "powersgd", "topk"]


# --- bf16 and f16: cast --------------------------------------------------------------------------


def bf16(*, axis: Axis = AXIS) -> Codec:
    """Send bfloat16: half of float32's bytes, 8 bits of precision, the same range.

    The sum is formed in float32 and rounded to bfloat16 once more. NaN and infinities arrive as
    such. No state, no error feedback.

    **Communication:** an allreduce: about 2 (p-1)/p · 2n bytes on the native transport. The other
    backends send floats below 32 bits as float32, 4 bytes each.

    Args:
      axis: the axis of the ranks that the mean is over, as in `tree_allreduce`: the same as that of
        the transform that gets the codec.

    Returns:
      A `Codec` with a `one_message`.
    """
    return _cast("codecs.bf16", jnp.bfloat16, axis)


def f16(*, axis: Axis = AXIS) -> Codec:
    """Send float16: half of float32's bytes, 11 bits of precision, a small range.

    Finite numbers beyond ±65504 are sent as ±65504, and numbers below 3e-8 as zero. Otherwise like
    `bf16`.

    **Communication:** as `bf16`; with a weight, a message before it with the means of the weights
    and of the loss, so that large weights do not leave the range.

    Args:
      axis: as in `bf16`.

    Returns:
      A `Codec` with a `one_message`.
    """
    return _cast("codecs.f16", jnp.float16, axis)


def _cast(name: str, dtype: DTypeLike, axis: Axis) -> Codec:
    """Return the codec that sends each number in `dtype`; `name` is the public function."""
    largest = float(jnp.finfo(dtype).max)

    def cast(x: jax.Array) -> jax.Array:
        # A cast of a larger number would give an infinity. Those that are there must stay, so that
        # a later check finds them. A short float may not hold the bound.
        x = x.astype(wide(x.dtype))
        return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)

    def encode(updates: PyTree, state: PyTree) -> tuple[list[jax.Array], PyTree]:
        leaves, _ = floats(name, with_parameters(updates, name))
        return [cast(x) for x in leaves], state

    def decode(means: list[jax.Array], like: PyTree) -> PyTree:
        leaves, put = floats(name, like)
        return put([y.astype(x.dtype) for x, y in zip(leaves, means, strict=True)])

    def mean(updates: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        coded, state = encode(updates, state)
        return decode(Caller(name).allreduce(coded, op="mean", axis=axis), updates), state

    one_message = OneMessage(lambda params: (), encode, decode, averages=True)
    is_narrow = largest < float(jnp.finfo(jnp.float32).max) / 2  # bfloat16's range is float32's
    return Codec(lambda params: (), mean, one_message, axis, is_narrow)


# --- int8: blocks of 8-bit numbers with a scale each ---------------------------------------------


class Residual(NamedTuple):
    """The state of `int8`: the residuals of its two roundings, on this rank.

    All numbers of a tree are one vector, cut into a row for each rank: `columns` is the length of a
    row, in whole blocks.

    Attributes:
      sent: the residual of this rank's gradients, float32 `[size, columns]`.
      summed: the residual of the means that this rank forms for all ranks, those of its row,
        float32 `[columns]`.
    """

    sent: jax.Array
    summed: jax.Array


def int8(block: int = 256, *, axis: Axis = AXIS) -> Codec:
    """Send 8 bits for each number, and one float32 for each block of numbers.

        s = max|x| / 127 over a block;    q = x / s, rounded to an int8;    x ≈ s·q

    That is about a quarter of float32's bytes. Each rank receives its shard of all ranks' numbers
    (alltoall), forms their mean in float32, rounds it in the same way and sends it to all
    (allgather). The residuals of both roundings are added to the next mean (Tang et al. 2019,
    "DoubleSqueeze"). The state has 4 bytes for each number, and 4/p more.

    **Communication:** an alltoall and an allgather, each about (p-1)/p · (1 + 4/block) · n bytes.
    For `local_sgd` with fragments or a delay, one allgather and one rounding: every rank sends its
    (1 + 4/block) · n bytes to all, and receives (p-1) times as many, on many ranks more bytes.

    Args:
      block: the number of numbers that share a scale.
      axis: as in `bf16`.

    Returns:
      A `Codec` with a `one_message`. Its state is a `Residual`.

    Raises:
      ValueError: block is below 1.
      TypeError: block is no integer.
    """
    block = checked_count("codecs.int8", "block", block, "the number of numbers of a block")
    label = f"codecs.int8 block={block}"

    def init(params: PyTree) -> Residual:
        leaves, _ = floats("codecs.int8", params)
        size = axis_size(axis, session.current("codecs"))
        # Each rank has a shard of the numbers, padded to whole blocks.
        columns = _round_up(-(-_count(leaves) // size), block)
        return Residual(jnp.zeros((size, columns), jnp.float32), jnp.zeros(columns, jnp.float32))

    def mean(updates: PyTree, state: Residual) -> tuple[PyTree, Residual]:
        leaves, put = floats("codecs.int8", with_parameters(updates, label))
        # Round 1: all leaves are one vector, cut into a row for each rank. Row q goes to rank q, so
        # that this rank gets its row from all ranks.
        rows, residual = int8_blocks.encode(leaves, state.sent, block)
        received = Caller("codecs.int8").alltoall(rows, axis=axis)
        # Round 2: this rank forms the mean of its row, rounds it as the gradients, and sends it to
        # all ranks.
        mean_row, residual_of_mean = int8_blocks.encode_mean(received, state.summed, block)
        mean_rows = Caller("codecs.int8").allgather(mean_row, axis=axis)
        means = int8_blocks.decode(mean_rows, leaves, block)
        return put(means), Residual(residual, residual_of_mean)

    # The same in one message: the state is the residual of the gradients, `[numbers]`.

    def init_one(params: PyTree) -> jax.Array:
        leaves, _ = floats("codecs.int8", params)
        return jnp.zeros(_round_up(_count(leaves), block), jnp.float32)

    def encode_one(updates: PyTree, state: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        leaves, _ = floats("codecs.int8", with_parameters(updates, label))
        row, residual = int8_blocks.encode(leaves, state, block)
        return [row], residual

    def decode_one(gathered: list[jax.Array], like: PyTree) -> PyTree:
        leaves, put = floats("codecs.int8", like)
        rows_of_ranks = int8_blocks.rows(gathered[0], block)  # `[size, numbers]`
        return put(_unflatten(jnp.mean(rows_of_ranks, axis=0), leaves))

    return Codec(init, mean, OneMessage(init_one, encode_one, decode_one, averages=False), axis)


def _count(leaves: list[jax.Array]) -> int:
    """Return the number of numbers in all leaves together."""
    return sum(x.size for x in leaves)


def _round_up(n: int, block: int) -> int:
    """Round n up to a multiple of the block length."""
    return -(-n // block) * block


def _unflatten(flat: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
    """Return arrays in the shapes and dtypes of `leaves`, with the first numbers of a vector."""
    outs, start = [], 0
    for x in leaves:
        outs.append(flat[start : start + x.size].reshape(x.shape).astype(x.dtype))
        start += x.size
    return outs


# --- topk: the largest numbers with their positions ----------------------------------------------


def topk(fraction: float, *, axis: Axis = AXIS) -> Codec:
    """Send the largest numbers of each array with their positions: 8 bytes for each of them.

    Of the n numbers of an array, the ⌈fraction·n⌉ with the largest absolute value are sent; the
    others are kept and added to the next gradient. (Stich et al. 2018, "Sparsified SGD with
    memory"; Lin et al. 2018, "Deep gradient compression".) The state has 4 bytes for each number.

    **Communication:** an allgather: each rank sends 8 · fraction · n bytes, and receives as many
    from each other rank. So `topk` saves bytes where fraction is well below 1/p.

    Args:
      fraction: the share of the numbers that is sent, above 0, at most 1.
      axis: as in `bf16`.

    Returns:
      A `Codec` with a `one_message`. Its state is a list of residuals, float32 `[n]` for each
      array.

    Raises:
      ValueError: fraction is not in this range.
    """
    if not 0 < fraction <= 1:
        raise ValueError(
            f"codecs.topk: fraction is {fraction}. It is the share of the numbers that is sent: "
            "above 0, at most 1."
        )

    def init(params: PyTree) -> list[jax.Array]:
        return [jnp.zeros(x.size, jnp.float32) for x in floats("codecs.topk", params)[0]]

    def encode(updates: PyTree, state: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        label = f"codecs.topk fraction={fraction}"
        leaves, _ = floats("codecs.topk", with_parameters(updates, label))
        coded, residuals = [], list(state)
        for i, x in enumerate(leaves):
            if not x.size:  # an empty array sends nothing
                continue
            # m = g + e
            m = x.astype(jnp.float32).reshape(-1) + state[i]
            count = math.ceil(fraction * x.size)
            positions = jax.lax.top_k(jnp.abs(m), count)[1].astype(jnp.int32)
            # Positions and numbers travel as one int32 array, `[2, count]`, so that they share a
            # message.
            numbers = jax.lax.bitcast_convert_type(m[positions], jnp.int32)
            coded.append(jnp.stack([positions, numbers]))
            # e ← m without what is sent
            residuals[i] = m.at[positions].set(0)
        return coded, residuals

    def mean(updates: PyTree, state: list[jax.Array]) -> tuple[PyTree, list[jax.Array]]:
        coded, residuals = encode(updates, state)
        gathered = Caller("codecs.topk").allgather(coded, axis=axis)
        return _decode_topk(gathered, updates), residuals

    return Codec(init, mean, OneMessage(init, encode, _decode_topk, averages=False), axis)


def _decode_topk(gathered: list[jax.Array], like: PyTree) -> PyTree:
    """Return the mean over ranks of the numbers that they sent, in the shapes and dtypes of `like`.

    Args:
      gathered: what all ranks sent, int32 `[size, 2, count]`, for each array that is not empty.
      like: a tree like the updates.
    """
    leaves, put = floats("codecs.topk", like)
    outs = [jnp.zeros_like(x) for x in leaves]
    rows_of_arrays = iter(gathered)
    for i, x in enumerate(leaves):
        if not x.size:
            continue
        rows = next(rows_of_arrays)
        # One scatter for each rank, in the order of the ranks. A GPU adds several numbers for one
        # position in any order. The positions of one rank are unique, so the order of all sums is
        # fixed, and all ranks get the same bits. A loop: the program has one size for any number of
        # ranks.
        total, _ = jax.lax.scan(_add_row, jnp.zeros(x.size, jnp.float32), rows)
        outs[i] = (total / len(rows)).reshape(x.shape).astype(x.dtype)
    return put(outs)


def _add_row(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
    """Add the numbers of one rank, int32 `[2, count]`, to `total`; for `lax.scan`."""
    numbers = jax.lax.bitcast_convert_type(row[1], jnp.float32)
    return total.at[row[0]].add(numbers, unique_indices=True), None


# --- powersgd: matrices as products of two thin ones ---------------------------------------------


class LowRank(NamedTuple):
    """The state of `powersgd`: lists with an entry for each array that it compresses.

    Attributes:
      q: the right factors Q, float32 `[columns, rank]`, equal on all ranks.
      error: the residuals E_r of this rank, float32 `[rows, columns]`.
    """

    q: list[jax.Array]
    error: list[jax.Array]


def powersgd(rank: int = 4, *, axis: Axis = AXIS) -> Codec:
    """Send each matrix as two thin ones: rank · (rows + columns) numbers, not rows · columns.

    An array of shape `[..., m]` is a matrix of m columns. With the gradient G_r of rank r and its
    residual E_r (Vogels et al. 2019, "PowerSGD"):

        M_r = G_r + E_r
        P = orthonormal columns of (1/p) · Σ_r M_r·Q
        Q ← (1/p) · Σ_r M_rᵀ·P
        mean ≈ P·Qᵀ
        E_r ← M_r - P·Qᵀ

    Q starts random and is kept from step to step: each step is one power iteration. Vectors, and
    matrices that would not become smaller, are sent as they are.

    **Communication:** two allreduces of float32 numbers: 4 · rank · rows bytes for each matrix,
    together with the arrays that are sent as they are; then 4 · rank · columns bytes for each
    matrix. Each rank sends about 2 (p-1)/p times these bytes.

    Args:
      rank: the number of columns of P and Q.
      axis: as in `bf16`.

    Returns:
      A `Codec` without a `one_message`: the second round needs the result of the first. Its state
      is a `LowRank`.

    Raises:
      ValueError: rank is below 1.
      TypeError: rank is no integer.
    """
    rank = checked_count("codecs.powersgd", "rank", rank, "the number of columns of P and Q")

    def matrix_shapes(leaves: list[jax.Array]) -> dict[int, tuple[int, int]]:
        """Return (rows, columns) of each array to compress, by the index of its leaf."""
        shapes = {}
        for i, x in enumerate(leaves):
            if x.ndim > 1 and x.size:
                n, m = x.size // x.shape[-1], x.shape[-1]
                if rank * (n + m) < n * m:
                    shapes[i] = n, m
        return shapes

    def init(params: PyTree) -> LowRank:
        leaves, _ = floats("codecs.powersgd", params)
        qs, errors = [], []
        for i, (n, m) in matrix_shapes(leaves).items():
            # The key is the index of the leaf, so that all ranks start with the same Q.
            qs.append(jax.random.normal(jax.random.key(i), (m, rank), jnp.float32))
            errors.append(jnp.zeros((n, m), jnp.float32))
        return LowRank(qs, errors)

    def mean(updates: PyTree, state: LowRank) -> tuple[PyTree, LowRank]:
        label = f"codecs.powersgd rank={rank}"
        leaves, put = floats("codecs.powersgd", with_parameters(updates, label))
        shapes = matrix_shapes(leaves)
        uncompressed = {i: x for i, x in enumerate(leaves) if i not in shapes}
        # M = G + E
        ms = [
            leaves[i].astype(jnp.float32).reshape(shapes[i]) + e
            for i, e in zip(shapes, state.error, strict=True)
        ]
        # Round 1: the mean of M·Q, in one message with the arrays that are not compressed.
        products = [_matmul(m, q) for m, q in zip(ms, state.q, strict=True)]
        ps, outs = Caller("codecs.powersgd").allreduce(
            (products, uncompressed), op="mean", axis=axis
        )
        # All ranks have the same mean, so they find the same orthonormal P.
        ps = [jnp.linalg.qr(p)[0] for p in ps]
        # Round 2: Q ← the mean of Mᵀ·P
        products = [_matmul(m.T, p) for m, p in zip(ms, ps, strict=True)]
        qs = Caller("codecs.powersgd").allreduce(products, op="mean", axis=axis)
        # mean ≈ P·Qᵀ, and E ← M - P·Qᵀ
        means = [_matmul(p, q.T) for p, q in zip(ps, qs, strict=True)]
        for i, x in zip(shapes, means, strict=True):
            outs[i] = x.reshape(leaves[i].shape).astype(leaves[i].dtype)
        errors = [m - x for m, x in zip(ms, means, strict=True)]
        # A gradient of zeros makes columns of Q zero. They would stay zero, since P is made of M·Q:
        # keep the old ones.
        next_qs = [
            jnp.where(jnp.any(q != 0, axis=0), q, old) for q, old in zip(qs, state.q, strict=True)
        ]
        return put([outs[i] for i in range(len(leaves))]), LowRank(next_qs, errors)

    return Codec(init, mean, axis=axis)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply in full float32: the default precision of GPUs and TPUs has fewer bits."""
    return jnp.matmul(a, b, precision="highest")
