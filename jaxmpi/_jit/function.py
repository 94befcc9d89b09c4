"""A Python function with the properties of its arguments and outputs, and the arrays of a call.

A `Function` is one function of the user with the options of `jaxmpi.jit`. The leaves of a call are
the arrays among its arguments, in the order of the flattened `(args, kwargs)`.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np
from jax.tree_util import KeyPath, PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._backends.interface import Ranks
from jaxmpi._backends.one_process import PerRank
from jaxmpi._consistency.eager_calls import EagerCalls
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._per_rank_state import flatten_with_path

__all__ = [
    "Arguments",
    "Function",
    "Leaf",
    "argument_name",
    "check_arguments",
    "checked",
    "choose_arguments",
    "described_arrays",
    "is_per_rank",
    "positions",
    "title_of",
]


Leaf: TypeAlias = ArrayLike | PerRank  # of the arguments or the outputs of a call

_aval = attrgetter("aval")


class Arguments(NamedTuple):
    """Some of a function's arguments, by position and by name.

    A position may be negative if the function takes `*args`, and counts from the end of a call's.
    """

    nums: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def of_call(self, count: int) -> "Arguments":
        """Return the same arguments of a call with `count` positional ones: none is negative."""
        if not any(i < 0 for i in self.nums):
            return self
        nums = {i + count if i < 0 else i for i in self.nums}
        return Arguments(frozenset(nums), self.names)

    def contain(self, path: KeyPath) -> bool:
        """Return whether the leaf of (args, kwargs) at this path is in one of these arguments."""
        is_keyword, first = path[0].idx == 1, path[1]
        return first.key in self.names if is_keyword else first.idx in self.nums


def _never(path: KeyPath) -> bool:
    """Return False, for any path."""
    return False


@dataclass(frozen=True)
class Function:
    """A Python function, and the properties of its arguments and outputs.

    Attributes:
      fun: the function.
      static: arguments that are no arrays, and compared by value.
      donated: arguments whose memory the outputs may reuse.
      replicated: arguments that are equal on all ranks.
      outputs: positions of outputs that must be equal on all ranks.
      equal_leaf: returns whether the leaf of (args, kwargs) at a path is equal on all ranks, too.
      equal_output: returns whether the leaf of the outputs at a path must be equal, too.
      calls: the eager calls of a function of jaxmpi; None for a function of the user.
      api: the function of jaxmpi that the user has called, for errors.
      feeds_rows: whether each rank should pass different rows, as in a pmap.
      allowed: names of the assumptions in `findings` that are not checked.
    """

    fun: Callable[..., PyTree]
    static: Arguments
    donated: Arguments
    replicated: Arguments
    outputs: tuple[int, ...]
    equal_leaf: Callable[[KeyPath], bool] = _never
    equal_output: Callable[[KeyPath], bool] = _never
    calls: EagerCalls | None = None
    api: str = "jaxmpi.jit"
    feeds_rows: bool = False
    allowed: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        """Name of the function in errors."""
        return title_of(self.fun)

    def replicates(self, path: KeyPath) -> bool:
        """Return whether the leaf of (args, kwargs) at this path is equal on all ranks."""
        return self.replicated.contain(path) or self.equal_leaf(path)

    def dynamic(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> tuple[Sequence[PyTree], dict[str, PyTree]]:
        """Return the arguments with None instead of static ones."""
        if not self.static.names and not self.static.nums:
            return args, kwargs
        nums, names = self.static.of_call(len(args))
        return (
            tuple(None if i in nums else arg for i, arg in enumerate(args)),
            {name: None if name in names else arg for name, arg in kwargs.items()},
        )

    def with_arrays(
        self,
        dynamic: tuple[Sequence[PyTree], dict[str, PyTree]],
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Return `(args, kwargs)` with those that are not static replaced by `dynamic`."""
        arrays, named_arrays = dynamic
        both = enumerate(zip(args, arrays, strict=True))
        nums, names = self.static.of_call(len(args))
        return (
            tuple(old if i in nums else new for i, (old, new) in both),
            {name: kwargs[name] if name in names else new for name, new in named_arrays.items()},
        )

    def leaves(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> list[Leaf]:
        """Return the arrays among the arguments."""
        return jax.tree.leaves(self.dynamic(args, kwargs), is_leaf=is_per_rank)

    def key(
        self, leaves: Sequence[Leaf], args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> tuple[object, ...]:
        """Return a key that is equal for two calls with the same structure and the same program.

        It has the shapes, dtypes and weak types of the leaves, the configuration of JAX on which a
        trace depends, such as the default precision, and the values of static arguments.
        JAX returns the same `aval` object for arrays of one type, so comparing two keys is usually
        comparing identities.

        Raises:
          ValueError: a static argument is not hashable.
        """
        try:
            avals = list(map(_aval, leaves))
        except AttributeError:  # NumPy arrays and numbers
            avals = [x.aval if isinstance(x, jax.Array) else _host_type(x) for x in leaves]
        context = _jaxcompat.trace_context()
        if not self.static.names and not self.static.nums:
            return avals, context
        nums, names = self.static.of_call(len(args))
        values: list[tuple[int | str, object]] = [
            (i, arg) for i, arg in enumerate(args) if i in nums
        ]
        values += [(name, arg) for name, arg in sorted(kwargs.items()) if name in names]
        for which, value in values:
            try:
                hash(value)
            except TypeError as error:
                raise ValueError(
                    f"{self.api}: static argument {which} of {self.title} is a "
                    f"{type(value).__name__}, which is not hashable. Pass a tuple, or make it an "
                    "array argument."
                ) from error
        return avals, context, [(which, type(value), value) for which, value in values]


def title_of(fun: Callable[..., object]) -> str:
    """Return the name of a function, also in a `functools.partial`, or of a callable's class."""
    while isinstance(fun, partial):
        fun = fun.func
    return getattr(fun, "__name__", None) or type(fun).__name__


def choose_arguments(
    fun: Callable[..., PyTree], nums: int | Iterable[int] | None, names: str | Iterable[str] | None
) -> Arguments:
    """Return arguments by position and by name, each inferred from the other as in `jax.jit`.

    Negative positions are counted from the end of the parameters; of a function that takes `*args`
    they remain, as only a call tells how many there are.
    """
    nums = {nums} if isinstance(nums, int) else set(nums or ())
    names = {names} if isinstance(names, str) else set(names or ())
    if not nums and not names:
        return Arguments()
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return Arguments(frozenset(nums), frozenset(names))
    either = {
        i: p.name
        for i, p in enumerate(parameters)
        if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        nums = {i + positional if i < 0 else i for i in nums}
    names |= {either[i] for i in nums if i in either}
    nums |= {i for i, name in either.items() if name in names}
    return Arguments(frozenset(nums), frozenset(names))


def is_per_rank(x: object) -> TypeGuard[PerRank]:
    """Return whether a leaf holds one value for each simulated rank."""
    return isinstance(x, PerRank)


def _host_type(x: Leaf) -> object:
    """Return what decides the type of a NumPy array or a Python number in a program."""
    return (x.shape, x.dtype) if isinstance(x, np.ndarray | np.generic) else type(x)


# The arguments of a call: their arrays, by shape and dtype, and their names in errors


Arrays: TypeAlias = tuple[list[tuple[KeyPath, Leaf]], PyTreeDef, list[jax.ShapeDtypeStruct]]


def check_arguments(function: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
    """Raise a TypeError or a ValueError that names an argument that no program can have."""
    described_arrays(function, args, kwargs)
    function.key(function.leaves(args, kwargs), args, kwargs)


def described_arrays(
    function: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]
) -> Arrays:
    """Return the leaves with their paths, the structure, and the shape and dtype of each leaf.

    Raises:
      TypeError, ValueError: an argument is no array of this rank, with its name.
    """
    paths, treedef = flatten_with_path(function.dynamic(args, kwargs), is_leaf=is_per_rank)
    return paths, treedef, [_struct(function, path, leaf) for path, leaf in paths]


def wrapped(
    function: Function,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    leaves: list[Leaf],
    backend: Ranks,
) -> list[Leaf]:
    """Return the arrays of a call as programs of `backend` take them.

    Raises:
      TypeError, ValueError: an argument that no program can have, with its name.
    """
    try:
        return backend.transport.arrays.wrap(leaves)
    except (TypeError, ValueError):
        check_arguments(function, args, kwargs)
        raise


def checked(
    function: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree], backend: Ranks
) -> Arrays:
    """Return `described_arrays` of the arguments, after checking that `backend` can take them.

    Raises:
      TypeError: an argument is no array, or holds values of simulated ranks where none are, with
        its name.
      ValueError: `replicated_argnums` names a position that is not there.
    """
    arrays = described_arrays(function, args, kwargs)
    check = backend.eager(alone=_refuse_per_rank, stacked=_allow, parallel=_refuse_per_rank)
    check(function, arrays[0])
    # An argument that is named by its position may be passed by its name.
    what, count = f"the arguments of {function.title} are", max(len(args) + len(kwargs), 1)
    positions(function.api, "replicated_argnums", function.replicated.nums, count, what)
    return arrays


def _allow(function: Function, paths: Sequence[tuple[KeyPath, Leaf]]) -> None:
    """Do nothing: simulated ranks may have different values."""


def _refuse_per_rank(function: Function, paths: Sequence[tuple[KeyPath, Leaf]]) -> None:
    """Raise a TypeError that names the first value of simulated ranks among the arguments."""
    if stray := [path for path, leaf in paths if is_per_rank(leaf)]:
        raise TypeError(
            f"{function.api}: {argument_name(stray[0])} of {function.title} is a PerRank, which "
            "holds the values of simulated ranks, and the call is not in a `with "
            "jaxmpi.simulate(n)`. Pass this rank's array."
        )


def argument_name(path: KeyPath) -> str:
    """Return the path of a leaf of (args, kwargs) as text: "argument 0['w']"."""
    (_, first, *rest) = path
    name = f"argument {first.idx}" if hasattr(first, "idx") else f"argument {first.key}"
    return name + (leaf_name(tuple(rest)) if rest else "")


def _struct(function: Function, path: KeyPath, leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf, on one rank.

    Raises:
      TypeError: it is no array or number, or a reference.
      ValueError: it is a global array of which this process holds a shard.
    """
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
        and not isinstance(leaf, jax.core.Tracer)  # a tracer does not know its devices
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
    """Return positions below `count`, with negative ones counted from the end.

    Args:
      api: the function of jaxmpi, for the error.
      option: the argument with the positions, for the error.
      numbers: the positions.
      count: the number of elements.
      what: the elements and a verb, for the error: "train_step returns".

    Raises:
      ValueError: there is no element at one of the positions.
    """
    for i in numbers:
        if not -count <= i < count:
            raise ValueError(
                f"{api}: {option} has {i}, and {what} {count}. Name positions from 0 to "
                f"{count - 1}."
            )
    return {i % count for i in numbers}
