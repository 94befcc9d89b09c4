"""Adasum: the sum of gradients that are orthogonal, and the mean of gradients that are equal."""

import jax
import jax.numpy as jnp

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import floats, wide
from jaxmpi._world import session

__all__ = ["adasum", "coefficients"]


def adasum(tree: PyTree, axis: Axis = AXIS) -> PyTree:
    """Combine the trees of the ranks along an axis, leaf by leaf; each rank gets the result.

    a ⊕ b = (1 - a·b / 2a²)·a + (1 - a·b / 2b²)·b (Maleki et al. 2020, eq. 5), in a binary tree of
    the ranks, for any number of them: neighbors first; a rank without a neighbor waits for the next
    round. The result is Σ_r c_r·g_r, and the coefficients c follow from the inner products g_r·g_s
    of the gradients.

    **Communication:** three messages: shards of the gradients to the ranks that combine them
    (alltoall), the inner products (allreduce of p² numbers for each leaf), the result (allgather).
    On two ranks that is twice the bytes of a mean; on many, about the bytes of a mean.
    """
    leaves, put = floats("distributed", tree)
    size = axis_size(axis, session.current("distributed"))
    if size == 1 or not leaves:
        return tree
    # this rank's shard of all ranks' gradients, [size, columns] for each leaf
    padded = []
    for x in leaves:
        flat = x.astype(wide(x.dtype)).reshape(-1)
        padded.append(jnp.pad(flat, (0, -flat.size % size)).reshape(size, -1))
    shards = Caller("distributed").alltoall(padded, axis=axis)
    # g_r·g_s: the sum over ranks of the products of the shards, [size, size]
    products = [jnp.matmul(x, x.T, precision="highest") for x in shards]
    products = Caller("distributed").allreduce(products, op="sum", axis=axis)
    # Σ_r c_r·g_r, of this rank's shard, and of all shards
    combined = []
    for g, x in zip(products, shards, strict=True):
        combined.append(jnp.matmul(coefficients(g), x, precision="highest"))
    gathered = Caller("distributed").allgather(combined, axis=axis)
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
