"""Arguments and calls of the transforms: their checks, a branch, and fields of states."""

import operator
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._world import session

__all__ = [
    "check_in_step",
    "check_shapes",
    "check_transform",
    "checked_count",
    "cond_or_call",
    "hidden_from_map_params",
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


def cond_or_call(which: ArrayLike, yes: Callable[..., T], no: Callable[..., T], *args: PyTree) -> T:
    """Return `yes(*args)` or `no(*args)`: by `lax.cond` in traced code, else by a plain call.

    The function may communicate, which an eager call must do outside of `lax.cond`.
    """
    if isinstance(which, jax.core.Tracer):
        return lax.cond(which, yes, no, *args)
    return (yes if which else no)(*args)


def hidden_from_map_params(params: PyTree, make: Callable[[PyTree], PyTree]) -> PyTree:
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
