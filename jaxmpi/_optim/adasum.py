"""Adasum: between the sum of gradients that have nothing in common, and the mean of equal ones."""

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
    """Combine the trees of the ranks along an axis leaf by leaf, in a binary tree of the ranks; each of them gets the result.

    a ⊕ b = (1 - a·b / 2a²)·a + (1 - a·b / 2b²)·b (Maleki et al. 2020, eq. 5), for any number of
    ranks: neighbours first, and one that has none waits for the next round. All of it follows from
    the inner products of the ranks' gradients, so it takes three messages: parts to the ranks that
    combine them, their inner products, and the result back; twice the bytes of a mean on two ranks,
    as much as a mean and p² numbers for a leaf on many.
    """
    leaves, put = floats("distributed", tree)
    size = axis_size(axis, session.current("distributed"))
    if size == 1 or not leaves:
        return tree
    flat = [x.astype(wide(x.dtype)).reshape(-1) for x in leaves]
    parts = Caller("distributed").alltoall(
        [jnp.pad(x, (0, -x.size % size)).reshape(size, -1) for x in flat], axis=axis
    )  # [ranks, columns]
    products = Caller("distributed").allreduce(
        [jnp.matmul(x, x.T, precision="highest") for x in parts], op="sum", axis=axis
    )
    combined = [
        jnp.matmul(coefficients(g), x, precision="highest")
        for g, x in zip(products, parts, strict=True)
    ]
    outs = Caller("distributed").allgather(combined, axis=axis)
    return put(
        [
            y.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)
            for x, y in zip(leaves, outs, strict=True)
        ]
    )


def coefficients(products: jax.Array) -> jax.Array:
    """How much of each rank's gradient is in the result, `[p]`, from their inner products, `[p, p]`."""
    size = len(products)
    groups = list(jnp.eye(size, dtype=products.dtype))  # each a combination of the ranks' gradients
    while len(groups) > 1:
        pairs = [groups[i : i + 2] for i in range(0, len(groups), 2)]
        groups = [_pair(products, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return groups[0]


def _pair(products: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    aa, ab, bb = a @ products @ a, a @ products @ b, b @ products @ b
    of_a, of_b = (jnp.where(x > 0, 1 - ab / (2 * jnp.where(x > 0, x, 1)), 1) for x in (aa, bb))
    return of_a * a + of_b * b
