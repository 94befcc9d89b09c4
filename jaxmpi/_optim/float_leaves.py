"""Leaves of floats in trees: maps over them, their sums and their dtypes."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike, DTypeLike

from jaxmpi._leaves import PyTree, leaf_name, widest

__all__ = ["equal_types", "floats", "map_floats", "squared_norm", "sum_of", "wide"]


def wide(dtype: DTypeLike) -> np.dtype:
    """Return the dtype in which numbers of `dtype` are added up: 32 bits at least."""
    with jax.numpy_dtype_promotion("standard"):  # as in `widest`
        return jnp.promote_types(dtype, jnp.float32)


def sum_of(squares: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of real scalars, in the widest of their dtypes, 32 bits at least."""
    total = jnp.zeros((), jnp.float32)
    for x in squares:
        dtype = widest(total, x)
        total = total.astype(dtype) + x.astype(dtype)
    return total


def squared_norm(x: jax.Array) -> jax.Array:
    """Return the sum of the squared absolute values of an array, in 32 bits at least."""
    size = jnp.abs(x)  # of complex numbers, too
    return jnp.sum(jnp.square(size.astype(wide(size.dtype))))


def map_floats(function: str, work: Callable[..., PyTree], tree: PyTree, *others: PyTree) -> PyTree:
    """Apply `work` to the leaves of real or complex numbers, as `jax.tree.map` does.

    A leaf of float0, the gradient of an integer, stays as it is. `work` gets arrays, also of
    Python numbers.

    Raises:
      TypeError: a leaf of integers or booleans, with its path.
    """

    def one(path: KeyPath, x: ArrayLike, *ys: PyTree) -> PyTree:
        dtype = jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype
        if dtype == jax.dtypes.float0:
            return x
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"{function}: leaf {leaf_name(path)} is {dtype}, which has no gradient. Take it "
                "out of the tree, or hide it with optax.masked."
            )
        return work(*map(_number_as_array, (x, *ys)))

    return jax.tree_util.tree_map_with_path(one, tree, *others)


def _number_as_array(x: PyTree) -> PyTree:
    """Return a Python number as an array, and anything else as it is."""
    return jnp.asarray(x) if isinstance(x, int | float | complex) else x


def floats(
    function: str, tree: PyTree
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
    """Return the leaves of real numbers, and a function that makes the tree of new ones.

    Leaves of float0 are left out, and stay in the tree. Python numbers become arrays.

    Raises:
      TypeError: a leaf of anything else, with its path.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [_number_as_array(x) for _, x in paths]
    chosen = []
    for i, (x, (path, _)) in enumerate(zip(leaves, paths, strict=True)):
        if x.dtype == jax.dtypes.float0:
            continue
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{function}: leaf {leaf_name(path)} is {x.dtype}, and must be of real numbers. "
                "Leave it out of the tree."
            )
        chosen.append(i)

    def put(new: list[jax.Array]) -> PyTree:
        changed = list(leaves)
        for i, x in zip(chosen, new, strict=True):
            changed[i] = x
        return treedef.unflatten(changed)

    return [leaves[i] for i in chosen], put


def equal_types(new: PyTree, old: PyTree) -> PyTree:
    """Return `new` in the dtypes of `old`: both branches of a `cond` must have the same."""
    return jax.tree.map(
        lambda x, y: x if isinstance(x, np.ndarray) else jnp.asarray(x, jnp.result_type(y)),
        new,
        old,
    )
