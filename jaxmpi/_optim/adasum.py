"""Adasum: the sum of gradients that are orthogonal, and the mean of gradients that are equal."""

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import floats, wide
from jaxmpi._optim.mean import Allreduce, Mean, Traits
from jaxmpi._world import session

__all__ = ["Adasum", "coefficients"]


@final
@dataclass(frozen=True)
class Adasum(Mean):
    """Adasum of the ranks' trees along an axis, leaf by leaf; each rank gets the result.

    a ⊕ b = (1 - a·b / 2a²)·a + (1 - a·b / 2b²)·b (Maleki et al. 2020, eq. 5), in a binary tree of
    the ranks, for any number of them: neighbors first; a rank without a neighbor waits for the next
    round. The result is Σ_r c_r·g_r, and the coefficients c follow from the inner products g_r·g_s
    of the gradients. `extra` is averaged.

    **Communication:** three messages: shards of the gradients to the ranks that combine them
    (alltoall), the inner products (allreduce of p² numbers for each leaf), the result (allgather).
    On two ranks that is twice the bytes of a mean; on many, about the bytes of a mean.
    """

    function: str
    axis: Axis = AXIS

    @property
    def traits(self) -> Traits:
        # An inner product of shards is not that of their arrays.
        return Traits("op 'adasum'", weights=False, functions=False, shards=False)

    def init(self, params: PyTree) -> PyTree:
        return ()

    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        combined = self._combine(updates)
        extra, _, _ = Allreduce(self.function, axis=self.axis).mean(extra, (), ())
        return combined, extra, state

    def _combine(self, updates: PyTree) -> PyTree:
        leaves, put = floats(self.function, updates)
        caller, size = Caller(self.function), axis_size(self.axis, session.current(self.function))
        if size == 1 or not leaves:
            return updates
        # this rank's shard of all ranks' gradients, [size, columns] for each leaf
        padded = []
        for x in leaves:
            flat = x.astype(wide(x.dtype)).reshape(-1)
            padded.append(jnp.pad(flat, (0, -flat.size % size)).reshape(size, -1))
        shards = caller.alltoall(padded, axis=self.axis)
        # g_r·g_s: the sum over ranks of the products of the shards, [size, size]
        products = [jnp.matmul(x, x.T, precision="highest") for x in shards]
        products = caller.allreduce(products, op="sum", axis=self.axis)
        # Σ_r c_r·g_r, of this rank's shard, and of all shards
        combined = []
        for g, x in zip(products, shards, strict=True):
            combined.append(jnp.matmul(coefficients(g), x, precision="highest"))
        gathered = caller.allgather(combined, axis=self.axis)
        outs = []
        for x, y in zip(leaves, gathered, strict=True):
            outs.append(y.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype))
        return put(outs)


def coefficients(products: jax.Array) -> jax.Array:
    """Return the coefficient of each rank's gradient in the result.

    Args:
      products: the inner products of the ranks' gradients, `[size, size]`.

    Returns:
      `[size]`.
    """
    # Each node of the tree is the vector of its coefficients: at first, one rank's gradient.
    nodes = list(jnp.eye(len(products), dtype=products.dtype))
    while len(nodes) > 1:
        combined = [_combine(products, *nodes[i : i + 2]) for i in range(0, len(nodes) - 1, 2)]
        nodes = combined + nodes[2 * len(combined) :]
    return nodes[0]


def _combine(products: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the coefficients of a ⊕ b; a gradient of zeros adds nothing."""
    aa, ab, bb = a @ products @ a, a @ products @ b, b @ products @ b
    of_a, of_b = (jnp.where(x > 0, 1 - ab / (2 * jnp.where(x > 0, x, 1)), 1) for x in (aa, bb))
    return of_a * a + of_b * b
