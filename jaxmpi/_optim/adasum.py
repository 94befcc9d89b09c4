"""Adasum: the sum of gradients that are orthogonal, and the mean of gradients that are equal.

Two gradients a and b are combined into (Maleki et al. 2020, "Scaling distributed training with
adaptive summation", eq. 5)

    a ⊕ b = (1 - a·b / 2a²)·a + (1 - a·b / 2b²)·b

More gradients are combined in a binary tree of the ranks, for any number of them: neighbors first;
a rank without a neighbor waits for the next round. All gradients in the tree are sums Σ_r c_r·g_r,
and their inner products follow from those of the g_r. So the ranks form the matrix of the g_r·g_s
once, and each computes the coefficients c_r of the result from it (`coefficients`).
"""

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

    Σ_r c_r·g_r, in float32 at least, rounded to the dtype of the leaf. `extra` is averaged. On one
    rank the updates stay as they are.

    **Communication:** three messages: shards of the gradients to the ranks that combine them
    (alltoall), the inner products (allreduce of p² numbers for each leaf), the result (allgather);
    and an allreduce of `extra`. Floats below 32 bits travel as float32. On two ranks that is twice
    the bytes of a mean; on many, about the bytes of a mean.
    """

    function: str
    axis: Axis = AXIS

    @property
    def traits(self) -> Traits:
        # No shards of `fully_shard`: an inner product of shards is not that of their arrays.
        return Traits("op 'adasum'", weights=False, functions=False, shards=False)

    def init(self, params: PyTree) -> PyTree:
        return ()

    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        combined = self._adasum(updates)
        extra, _, _ = Allreduce(self.function, axis=self.axis).mean(extra, (), ())
        return combined, extra, state

    def _adasum(self, updates: PyTree) -> PyTree:
        leaves, put = floats(self.function, updates)
        caller = Caller(self.function)
        size = axis_size(self.axis, session.current(self.function))
        if size == 1 or not leaves:
            return updates
        # Each rank gets its shard of the gradients of all ranks: `[size, columns]` for each leaf,
        # row r of rank r.
        padded = []
        for x in leaves:
            flat = x.astype(wide(x.dtype)).reshape(-1)
            padded.append(jnp.pad(flat, (0, -flat.size % size)).reshape(size, -1))
        shards = caller.alltoall(padded, axis=self.axis)
        # g_r·g_s, `[size, size]`: the sum over the shards of their inner products
        products = [jnp.matmul(x, x.T, precision="highest") for x in shards]
        products = caller.allreduce(products, op="sum", axis=self.axis)
        # Σ_r c_r·g_r: this rank's shard, `[columns]`, then all shards, `[size, columns]`
        combined = []
        for c, x in zip(_coefficients_of_leaves(products), shards, strict=True):
            combined.append(jnp.matmul(c, x, precision="highest"))
        gathered = caller.allgather(combined, axis=self.axis)
        outs = []
        for x, y in zip(leaves, gathered, strict=True):
            outs.append(y.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype))
        return put(outs)


def _coefficients_of_leaves(products: list[jax.Array]) -> list[jax.Array]:
    """Return `coefficients` for each leaf.

    The leaves of one dtype are a batch: the tree of the ranks is in the program once, and not once
    for each leaf.
    """
    found: dict[int, jax.Array] = {}  # by the index of the leaf
    for dtype in dict.fromkeys(x.dtype for x in products):
        alike = [i for i, x in enumerate(products) if x.dtype == dtype]
        batch = jax.vmap(coefficients)(jnp.stack([products[i] for i in alike]))
        found.update(zip(alike, batch, strict=True))
    return [found[i] for i in range(len(products))]


def coefficients(products: jax.Array) -> jax.Array:
    """Return the coefficients c of the result Σ_r c_r·g_r.

    Args:
      products: the inner products g_r·g_s of the ranks' gradients, `[size, size]`.

    Returns:
      c, `[size]`, in the dtype of `products`.
    """
    # A node of the tree is the vector of coefficients of its gradient. The leaves of the tree are
    # the gradients of the ranks: unit vectors.
    nodes = list(jnp.eye(len(products), dtype=products.dtype))
    while len(nodes) > 1:
        combined = []
        for i in range(0, len(nodes) - 1, 2):
            combined.append(_combined_pair(products, nodes[i], nodes[i + 1]))
        nodes = combined + nodes[2 * len(combined) :]  # the last one may have no neighbor
    return nodes[0]


def _combined_pair(products: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the coefficients of a ⊕ b, for the vectors of coefficients of a and b."""
    aa, ab, bb = a @ products @ a, a @ products @ b, b @ products @ b

    def factor(xx: jax.Array) -> jax.Array:
        # 1 - a·b / 2x²; a gradient of zeros has the factor 1, and adds nothing
        return jnp.where(xx > 0, 1 - ab / (2 * jnp.where(xx > 0, xx, 1)), 1)

    return factor(aa) * a + factor(bb) * b
