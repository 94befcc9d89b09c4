"""The leaves that the transforms of this folder compute with."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike, DTypeLike

from jaxmpi import _jaxcompat
from jaxmpi._leaves import PyTree, leaf_name, widest
from jaxmpi._world import session

__all__ = [
    "check_in_step",
    "check_shapes",
    "check_transform",
    "computed_once",
    "either",
    "equal_types",
    "floats",
    "made_of",
    "map_floats",
    "sum_of",
    "wide",
]

T = TypeVar("T")


def check_in_step(function: str) -> None:
    """Raise a RuntimeError where simulated ranks are to have something of their own outside of a step."""
    if session.current(function).simulates and not _jaxcompat.tracing():
        raise RuntimeError(
            f"{function}: update was called outside of a step, where simulated ranks have no "
            "arrays of their own. "
            "Use jaxmpi.jit."
        )


def check_transform(function: str, name: str, transform: object) -> None:
    """Raise a TypeError unless `transform` is one of optax."""
    if not isinstance(transform, optax.GradientTransformation):
        raise TypeError(
            f"{function}: {name} is a {type(transform).__name__}. Pass an optax transform, such as "
            "optax.adam(1e-3)."
        )


def made_of(params: PyTree, make: Callable[[PyTree], PyTree]) -> PyTree:
    """Return `make(params)`, a part of a state that is no tree like the parameters, such as a list of arrays.

    `optax.tree.map_params` calls `init` with a placeholder for all parameters, to see which parts
    of a state are like them, and maps over the result as a prefix of the state. This part is one
    leaf then.
    """
    return jnp.zeros(()) if isinstance(params, _placeholder()) else make(params)


@cache
def _placeholder() -> type:
    """The type of what `optax.tree.map_params` calls `init` with, which has no public name."""
    found: list[type] = []

    def init(params: PyTree) -> PyTree:
        found.append(type(params))
        return params

    optax.tree.map_params(init, lambda x: x, 0)
    return found[0]


def check_shapes(function: str, gradients: PyTree, like: PyTree) -> None:
    """Raise a ValueError if the gradients have one axis more than `like`: the parameters, or what `inner` makes of them."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(gradients)
    if treedef != jax.tree.structure(like):
        return
    for (path, x), y in zip(leaves, jax.tree.leaves(like), strict=True):
        if jnp.ndim(x) > jnp.ndim(y) and jnp.shape(x)[1:] == jnp.shape(y):
            raise ValueError(
                f"{function}: leaf {leaf_name(path)} of the gradients has shape "
                f"{list(jnp.shape(x))}, and its update "
                f"{list(jnp.shape(y))}: gradients of single samples, of which each rank has "
                "others. Combine them first, with "
                "optax.contrib.differentially_private_aggregate before jaxmpi.average_gradients() "
                "in a chain; its "
                "noise_multiplier divided by the number of ranks."
            )


def wide(dtype: DTypeLike) -> np.dtype:
    """The dtype that sums of numbers of this one are formed in: 32 bits at least."""
    with jax.numpy_dtype_promotion("standard"):  # as in `widest`
        return jnp.promote_types(dtype, jnp.float32)


def sum_of(squares: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of real scalars, in the widest of their dtypes, 32 bits at least."""
    total = jnp.zeros((), jnp.float32)
    for x in squares:
        dtype = widest(total, x)
        total = total.astype(dtype) + x.astype(dtype)
    return total


def map_floats(function: str, work: Callable[..., PyTree], tree: PyTree, *others: PyTree) -> PyTree:
    """`jax.tree.map` over the leaves that hold real or complex numbers; float0, the gradient of an integer, stays as it is.

    Raises:
      TypeError: a leaf of integers or booleans, with its path.
    """

    def one(path: KeyPath, x: ArrayLike, *ys: PyTree) -> PyTree:
        dtype = jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype
        if dtype == jax.dtypes.float0:
            return x
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"{function}: leaf {leaf_name(path)} is {dtype}, which has no gradient to work "
                "with. Take it out of the tree, "
                "or hide it with optax.masked."
            )
        return work(x, *ys)

    return jax.tree_util.tree_map_with_path(one, tree, *others)


def floats(
    function: str, tree: PyTree
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
    """The leaves of real numbers, and a function that puts others in their places.

    Raises:
      TypeError: a leaf of anything else, but float0, with its path.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [x for _, x in paths]
    chosen = []
    for i, (path, x) in enumerate(paths):
        if x.dtype == jax.dtypes.float0:
            continue
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{function}: leaf {leaf_name(path)} is {x.dtype}, and must be of real numbers. "
                "Leave it out."
            )
        chosen.append(i)

    def put(new: list[jax.Array]) -> PyTree:
        changed = list(leaves)
        for i, x in zip(chosen, new, strict=True):
            changed[i] = x
        return treedef.unflatten(changed)

    return [leaves[i] for i in chosen], put


def equal_types(new: PyTree, old: PyTree) -> PyTree:
    """`new` in the dtypes of `old`, as both branches of a `cond` must have the same."""
    return jax.tree.map(
        lambda x, y: x if isinstance(x, np.ndarray) else jnp.asarray(x, jnp.result_type(y)),
        new,
        old,
    )


def computed_once(flag: jax.Array) -> jax.Array:
    """A boolean that follows from all leaves, for use on every leaf: XLA computes it once.

    Otherwise XLA fuses the whole computation of the flag into the loop of every leaf, and n leaves
    take n² instructions to compile. It does not fuse a sort; an `optimization_barrier` is gone
    before it fuses.
    """
    return lax.sort(jnp.stack([flag, flag]).astype(jnp.uint8))[0] > 0


def either(which: ArrayLike, yes: Callable[..., T], no: Callable[..., T], *args: PyTree) -> T:
    """`lax.cond`; called eagerly, one of the two functions is called eagerly, as it may communicate."""
    if isinstance(which, jax.core.Tracer):
        return lax.cond(which, yes, no, *args)
    return (yes if which else no)(*args)
