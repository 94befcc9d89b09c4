"""A function of pytrees and, for one kind of arguments and one backend, its program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from jaxmpi import _agreement, _jaxcompat
from jaxmpi._backends.simulate import PerRank
from jaxmpi._leaves import leaf_name
from jaxmpi._program import build
from jaxmpi._program.listing import Entry, digest, listing
from jaxmpi._program.trace import trace
from jaxmpi._program.variation import varying

__all__ = ["Function", "Program", "build_program"]

_aval = attrgetter("aval")


@dataclass(frozen=True)
class Function:
    """A Python function, and what is known of its arguments and outputs."""

    fun: Callable[..., Any]
    replicated: tuple[int, ...]  # positions of arguments that are equal on all ranks
    outputs: tuple[int, ...]  # positions of outputs that must be
    static_nums: frozenset[int]
    static_names: frozenset[str]

    @property
    def title(self) -> str:
        return getattr(self.fun, "__name__", None) or type(self.fun).__name__

    def dynamic(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with None in the place of static ones."""
        if not self.static_names and not self.static_nums:
            return tuple(args), kwargs
        return (
            tuple(None if i in self.static_nums else arg for i, arg in enumerate(args)),
            {name: None if name in self.static_names else arg for name, arg in kwargs.items()},
        )

    def leaves(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The arrays among the arguments."""
        return jax.tree.leaves(self.dynamic(args, kwargs), is_leaf=_is_per_rank)

    def key(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What two calls have in common if they run the same program. In the steady state all comparisons are of identity."""
        leaves, treedef = jax.tree.flatten(self.dynamic(args, kwargs))
        try:
            avals = list(map(_aval, leaves))
        except AttributeError:  # NumPy arrays and numbers
            avals = [x.aval if isinstance(x, jax.Array) else _kind(x) for x in leaves]
        static = [arg for i, arg in enumerate(args) if i in self.static_nums] if self.static_nums else []
        static += [(name, arg) for name, arg in sorted(kwargs.items()) if name in self.static_names]
        return treedef, avals, static


@dataclass(eq=False)
class Program:
    """What a function does for one kind of arguments."""

    title: str
    call: Callable[[Sequence[Any]], Any]  # of arrays, for `jax.jit`
    entries: list[Entry]  # what it sends
    arguments: list[str]  # in words
    key: Any = None
    shown: bool = False  # whether it was printed, under JAXMPI_EXPLAIN

    def __post_init__(self) -> None:
        self.statement = _agreement.Statement(digest(self.entries), self.title)

    def sides(self) -> tuple[list[str], list[str]]:
        """What it sends and what it takes, for an error."""
        return [str(entry) for entry in self.entries], self.arguments

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return self.call(leaves)


def build_program(function: Function, args: Sequence[Any], kwargs: dict[str, Any], backend: Any, *, hide: bool) -> Program:
    """Trace a function for arguments like these, check it and make it a program of `backend`."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(function.dynamic(args, kwargs), is_leaf=_is_per_rank)
    avals = [_struct(function, path, leaf) for path, leaf in paths]
    tree: Any = None

    def flat(*xs: Any) -> list[Any]:
        nonlocal tree
        some_args, some_kwargs = treedef.unflatten(xs)
        some_args = [
            arg if i in function.static_nums else new for i, (arg, new) in enumerate(zip(args, some_args, strict=True))
        ]
        some_kwargs = {name: kwargs[name] if name in function.static_names else new for name, new in some_kwargs.items()}
        outs, tree = jax.tree.flatten(function.fun(*some_args, **some_kwargs))
        return outs

    size = backend.place.size
    jaxpr, captured = trace(flat, size, avals)
    if size > 1:
        declared = [_is_replicated(function, path) for path, _ in paths]
        varies = varying(jaxpr, [True] * len(captured) + [not equal for equal in declared], warn=backend.place.rank == 0)
        _check_outputs(function, tree, varies)
    stacked = [False] * len(captured) + [_is_per_rank(leaf) for _, leaf in paths]
    program, finish = build.build(jaxpr, backend, stacked, hide=hide)

    def call(leaves: Sequence[Any]) -> Any:
        arrays = [leaf.stack if _is_per_rank(leaf) else leaf for leaf in leaves]
        return tree.unflatten(finish(program(*captured, *arrays)))

    entries = list(listing(jaxpr, size, together=build.together(backend))) if size > 1 else []
    entries = [entry if entry.source else entry._replace(source=(_jaxcompat.caller_line(),)) for entry in entries]
    arguments = [f"{_argument(path)}: {a.dtype.name}{list(a.shape)}" for (path, _), a in zip(paths, avals, strict=True)]
    return Program(function.title, call, entries, arguments)


def _is_per_rank(x: Any) -> bool:
    return isinstance(x, PerRank)


def _kind(x: Any) -> Any:
    return (x.shape, x.dtype) if isinstance(x, np.ndarray | np.generic) else type(x)


def _argument(path: Any) -> str:
    """The path of a leaf of (args, kwargs) in words."""
    (_, first, *rest) = path
    name = f"argument {first.idx}" if hasattr(first, "idx") else f"argument {first.key}"
    return name + jax.tree_util.keystr(tuple(rest))


def _is_replicated(function: Function, path: Any) -> bool:
    return hasattr(path[1], "idx") and path[0].idx == 0 and path[1].idx in function.replicated


def _struct(function: Function, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one rank's array."""
    try:
        aval = jax.typeof(leaf.stack if _is_per_rank(leaf) else leaf)
        shape = aval.shape[1:] if _is_per_rank(leaf) else aval.shape
    except (TypeError, AttributeError) as error:
        raise TypeError(
            f"jaxmpi.jit: {_argument(path)} of {function.title} is a {type(leaf).__name__}, and no array or number. "
            "Name the argument in static_argnames, or take it out."
        ) from error
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _check_outputs(function: Function, tree: Any, varies: Sequence[bool]) -> None:
    """Raise a ValueError that names an output that is to be equal on all ranks, and may not be."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree.unflatten(varies))
    for path, differs in paths:
        position = path[0].idx if path and hasattr(path[0], "idx") else 0
        if differs and position in function.outputs:
            raise ValueError(
                f"jaxmpi.jit: output {leaf_name(path)} of {function.title} is in replicated_outnums, and it may differ "
                "between the ranks. Average the gradients (jaxmpi.distributed, jaxmpi.tree_allreduce), and name in "
                "replicated_argnums the arguments that are equal on all ranks."
            )
