"""The arguments of a call: their arrays, in words and by shape and dtype; what no program can take is refused by name."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import jax
from jax.tree_util import KeyPath, PyTreeDef

from jaxmpi import _jaxcompat
from jaxmpi._backends.interface import Ranks
from jaxmpi._jit.function import Function, Leaf, is_per_rank
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._per_rank_state import flatten_with_path

__all__ = ["argument_name", "check_arguments", "checked", "kinds", "positions"]

Arrays: TypeAlias = tuple[list[tuple[KeyPath, Leaf]], PyTreeDef, list[jax.ShapeDtypeStruct]]


def check_arguments(function: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
    """Raise a TypeError or a ValueError that names an argument which no program can have."""
    kinds(function, args, kwargs)
    function.key(function.leaves(args, kwargs), args, kwargs)


def kinds(function: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Arrays:
    """The arrays among the arguments with their paths, the structure, and shape and dtype of each."""
    paths, treedef = flatten_with_path(function.dynamic(args, kwargs), is_leaf=is_per_rank)
    return paths, treedef, [_struct(function, path, leaf) for path, leaf in paths]


def wrapped(
    function: Function,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    leaves: list[Leaf],
    backend: Ranks,
) -> list[Leaf]:
    """Return the arrays of a call as programs of `backend` take them; what it cannot take is refused by name."""
    try:
        return backend.transport.arrays.wrap(leaves)
    except (TypeError, ValueError):
        check_arguments(function, args, kwargs)
        raise


def checked(
    function: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree], backend: Ranks
) -> Arrays:
    """Return `kinds` of the arguments, after checking that `backend` can take them.

    Raises:
      TypeError: an argument is no array, or holds values of simulated ranks where none are, with
        its name.
      ValueError: `replicated_argnums` names a position that is not there.
    """
    arrays = kinds(function, args, kwargs)
    check = backend.eager(alone=_refuse_per_rank, stacked=_allow, parallel=_refuse_per_rank)
    check(function, arrays[0])
    what = f"the positional arguments of {function.title} are"
    positions(function.api, "replicated_argnums", function.replicated.nums, max(len(args), 1), what)
    return arrays


def _allow(function: Function, paths: Sequence[tuple[KeyPath, Leaf]]) -> None:
    """Return: simulated ranks may have values of their own."""


def _refuse_per_rank(function: Function, paths: Sequence[tuple[KeyPath, Leaf]]) -> None:
    """Raise a TypeError that names the first value of simulated ranks among the arguments."""
    if stray := [path for path, leaf in paths if is_per_rank(leaf)]:
        raise TypeError(
            f"{function.api}: {argument_name(stray[0])} of {function.title} is a PerRank, which "
            "holds the values of simulated ranks, and the call is not in a `with "
            "jaxmpi.simulate(n)`. Pass this rank's array."
        )


def argument_name(path: KeyPath) -> str:
    """The path of a leaf of (args, kwargs) in words."""
    (_, first, *rest) = path
    name = f"argument {first.idx}" if hasattr(first, "idx") else f"argument {first.key}"
    return name + (leaf_name(tuple(rest)) if rest else "")


def _struct(function: Function, path: KeyPath, leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one rank's array."""
    try:
        aval = jax.typeof(leaf.stack if is_per_rank(leaf) else leaf)
        shape = aval.shape[1:] if is_per_rank(leaf) else aval.shape
    except (TypeError, AttributeError) as error:
        raise TypeError(
            f"{function.api}: {argument_name(path)} of {function.title} is a "
            f"{type(leaf).__name__}, and no array or number. Name the argument in "
            "static_argnames, or leave it out."
        ) from error
    if (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)  # which does not know its devices
        and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    ):
        raise ValueError(
            f"{function.api}: {argument_name(path)} of {function.title} is a global array of shape "
            f"{list(shape)}, of which each process holds a shard. Pass this rank's shard, "
            "x.addressable_data(0), or build the array over jax.local_devices()."
        )
    if _jaxcompat.is_reference(aval):
        raise TypeError(
            f"{function.api}: {argument_name(path)} of {function.title} is a reference, which "
            "cannot be an argument. Pass its value, ref[...], and return the new value."
        )
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def positions(api: str, option: str, numbers: Iterable[int], count: int, what: str) -> set[int]:
    """Positions below `count`, counted from the end where they are negative."""
    for i in numbers:
        if not -count <= i < count:
            raise ValueError(
                f"{api}: {option} has {i}, and {what} {count}. Name positions from 0 to "
                f"{count - 1}."
            )
    return {i % count for i in numbers}
