"""Floats in trees, and what the transforms share: checks of arguments, branches, dtypes."""

import operator
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
    "checked_count",
    "either",
    "equal_types",
    "floats",
    "made_of",
    "map_floats",
    "squared_norm",
    "sum_of",
    "wide",
]

T = TypeVar("T")


def check_in_step(function: str) -> None:
    """Raise a RuntimeError outside of a step under `simulate`.

    Simulated ranks have different values only inside of a traced function.
    """
    backend = session.current(function)
    if not _jaxcompat.tracing():
        backend.check_one_rank_here(
            f"{function}: update was called outside of a step, where simulated ranks cannot have "
            "different arrays. Call it in a function under jaxmpi.jit."
        )


def check_transform(function: str, name: str, transform: object) -> None:
    """Raise a TypeError unless `transform` is an optax transform."""
    if not isinstance(transform, optax.GradientTransformation):
        raise TypeError(
            f"{function}: {name} is a {type(transform).__name__}. Pass an optax transform, such as "
            "optax.adam(1e-3)."
        )


def checked_count(function: str, name: str, value: object, what: str, *, least: int = 1) -> int:
    """Return an argument that counts something as an int.

    Args:
      function: for the error.
      name: of the argument.
      value: the argument: an integer of Python, NumPy or JAX. A boolean is none.
      what: what it counts, for the error: it ends "It is {what}: {least} or more."
      least: the smallest number that is allowed.

    Raises:
      TypeError: it is no integer.
      ValueError: it is below `least`.
    """
    advice = f"It is {what}: {least} or more."
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{function}: {name} is {value!r}, not an integer. {advice}") from None
    if number < least:
        raise ValueError(f"{function}: {name} is {number}. {advice}")
    return number


def made_of(params: PyTree, make: Callable[[PyTree], PyTree]) -> PyTree:
    """Return `make(params)`, a field of a state that is not a tree like the parameters.

    `optax.tree.map_params` calls `init` with a placeholder for all parameters, to see which fields
    of a state are trees like them, and maps over the result as a prefix of the state. For the
    placeholder this returns one leaf, so the field, such as a list of arrays, is not one of them.
    """
    return jnp.zeros(()) if isinstance(params, _placeholder()) else make(params)


@cache
def _placeholder() -> type:
    """Return the type of the placeholder of `optax.tree.map_params`, which has no public name."""
    found: list[type] = []

    def init(params: PyTree) -> PyTree:
        found.append(type(params))
        return params

    optax.tree.map_params(init, lambda x: x, 0)
    return found[0]


def check_shapes(function: str, gradients: PyTree, like: PyTree) -> None:
    """Raise a ValueError if the gradients have one axis more than the parameters or updates.

    Such gradients are those of single samples: a mean over ranks would average different samples.

    Args:
      function: for the error.
      gradients: the gradients.
      like: the parameters, or the updates that `inner` makes of the gradients.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(gradients)
    if treedef != jax.tree.structure(like):
        return
    for (path, x), y in zip(leaves, jax.tree.leaves(like), strict=True):
        if jnp.ndim(x) > jnp.ndim(y) and jnp.shape(x)[1:] == jnp.shape(y):
            raise ValueError(
                f"{function}: leaf {leaf_name(path)} of the gradients has shape "
                f"{list(jnp.shape(x))}, and its update {list(jnp.shape(y))}: these are gradients "
                "of single samples, and each rank has other samples. Combine them first: chain "
                "optax.contrib.differentially_private_aggregate, with noise_multiplier divided by "
                "the number of ranks, before jaxmpi.average_gradients()."
            )


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


def either(which: ArrayLike, yes: Callable[..., T], no: Callable[..., T], *args: PyTree) -> T:
    """Return `yes(*args)` or `no(*args)`: by `lax.cond` in traced code, else by a plain call.

    The function may communicate, which an eager call must do outside of `lax.cond`.
    """
    if isinstance(which, jax.core.Tracer):
        return lax.cond(which, yes, no, *args)
    return (yes if which else no)(*args)
