"""The codec `topk`: the largest numbers of each array, with their places."""

import math

import jax
import jax.numpy as jnp

from jaxmpi._axis import AXIS, Axis, with_parameters
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._optim.compression import Codec, OneMessage
from jaxmpi._optim.float_leaves import floats

__all__ = ["topk"]


def topk(fraction: float, *, axis: Axis = AXIS) -> Codec:
    """Send the largest numbers of each array, with their places: 8 bytes for each of them.

    Of n numbers, ⌈fraction·n⌉ of the largest absolute value; the others are kept and added to the
    next gradient. (Stich et al. 2018, "Sparsified SGD with memory"; Lin et al. 2018, "Deep gradient
    compression".) All ranks' numbers are gathered: p · 8 bytes times fraction · n arrive, so it
    pays where fraction is well below 1/p.

    Args:
      fraction: above 0, at most 1.
      axis: as of `bf16`.

    Raises:
      ValueError: a fraction out of this range.
    """
    if not 0 < fraction <= 1:
        raise ValueError(
            f"codecs.topk: fraction is {fraction}. It is the share of the numbers that is sent: "
            "above 0, at most 1."
        )

    def init(params: PyTree) -> list[jax.Array]:
        return [jnp.zeros(x.size, jnp.float32) for x in floats("codecs.topk", params)[0]]

    def encode(updates: PyTree, state: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        leaves, _ = floats(
            "codecs.topk", with_parameters(updates, f"codecs.topk fraction={fraction}")
        )
        coded, kept = [], list(state)
        for i, x in enumerate(leaves):
            if x.size:  # of an empty array nothing is sent
                vector = x.astype(jnp.float32).reshape(-1) + state[i]
                places = jax.lax.top_k(jnp.abs(vector), math.ceil(fraction * x.size))[1].astype(
                    jnp.int32
                )
                coded.append(
                    jnp.stack([places, jax.lax.bitcast_convert_type(vector[places], jnp.int32)])
                )
                kept[i] = vector.at[places].set(0)
        return coded, kept

    def mean(updates: PyTree, state: list[jax.Array]) -> tuple[PyTree, list[jax.Array]]:
        coded, kept = encode(updates, state)
        return _decode(Caller("codecs.topk").allgather(coded, axis=axis), updates), kept

    return Codec(init, mean, OneMessage(init, encode, _decode, averages=False), axis)


def _decode(gathered: list[jax.Array], like: PyTree) -> PyTree:
    """The mean of all ranks' numbers, `[size, 2, numbers]` of each array."""
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
