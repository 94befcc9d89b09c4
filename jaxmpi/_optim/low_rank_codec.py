"""The codec `powersgd`: each matrix as a product of two thin ones."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmpi._axis import AXIS, Axis, with_parameters
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._optim.compression import Codec, check_at_least_one
from jaxmpi._optim.float_leaves import floats

__all__ = ["powersgd"]


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

    An array of shape [.., m] is a matrix of m columns. With M = gradient + error: P = mean of M·Q,
    made orthonormal; Q = mean of Mᵀ·P; the mean is taken to be P·Qᵀ, and M - P·Qᵀ is the next
    error. Q starts random and is kept: one power iteration a step. (Vogels et al. 2019,
    "PowerSGD".) Vectors, and matrices that would not be smaller, are sent as they are. Two rounds.

    Args:
      rank: of the factors.
      axis: as of `bf16`.

    Raises:
      ValueError: rank is below 1.
    """
    check_at_least_one("powersgd", "rank", rank)

    def shapes(leaves: list[jax.Array]) -> dict[int, tuple[int, int]]:
        """Rows and columns of what is compressed, by the number of the leaf."""
        matrices = {
            i: (x.size // x.shape[-1], x.shape[-1])
            for i, x in enumerate(leaves)
            if x.ndim > 1 and x.size
        }
        return {i: (n, m) for i, (n, m) in matrices.items() if rank * (n + m) < n * m}

    def init(params: PyTree) -> LowRank:
        chosen = shapes(floats("codecs.powersgd", params)[0])
        qs = [
            jax.random.normal(jax.random.key(i), (m, rank), jnp.float32)
            for i, (_, m) in chosen.items()
        ]
        return LowRank(qs, [jnp.zeros(shape, jnp.float32) for shape in chosen.values()])

    def mean(updates: PyTree, state: LowRank) -> tuple[PyTree, LowRank]:
        leaves, put = floats(
            "codecs.powersgd", with_parameters(updates, f"codecs.powersgd rank={rank}")
        )
        chosen = shapes(leaves)
        ms = [
            leaves[i].astype(jnp.float32).reshape(chosen[i]) + e
            for i, e in zip(chosen, state.error, strict=True)
        ]
        whole = {i: x for i, x in enumerate(leaves) if i not in chosen}
        ps, outs = Caller("codecs.powersgd").allreduce(
            ([_product(m, q) for m, q in zip(ms, state.q, strict=True)], whole),
            op="mean",
            axis=axis,
        )
        ps = [jnp.linalg.qr(p)[0] for p in ps]
        products = [_product(m.T, p) for m, p in zip(ms, ps, strict=True)]
        qs = Caller("codecs.powersgd").allreduce(products, op="mean", axis=axis)
        found = [_product(p, q.T) for p, q in zip(ps, qs, strict=True)]
        outs |= {
            i: x.reshape(leaves[i].shape).astype(leaves[i].dtype)
            for i, x in zip(chosen, found, strict=True)
        }
        errors = [m - x for m, x in zip(ms, found, strict=True)]
        # a column that a gradient of zeros has made zero would stay zero
        kept = [
            jnp.where(jnp.any(q != 0, axis=0), q, old) for q, old in zip(qs, state.q, strict=True)
        ]
        return put([outs[i] for i in range(len(leaves))]), LowRank(kept, errors)

    return Codec(init, mean, axis=axis)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")
