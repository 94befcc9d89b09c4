"""Marks: facts about arrays that jaxmpi's own functions know and the analyses cannot derive.

A mark is an identity equation in the traced program, with a `Mark` as its parameter. The analyses
of `_analysis` read it (`mark_of`); it lowers to nothing, and no derivative has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax import lax
from jax.core import AbstractValue
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jaxmpi._axis import AXIS, Axis, bound, names
from jaxmpi._leaves import PyTree

__all__ = [
    "Differs",
    "Equal",
    "Mark",
    "Parameters",
    "Shard",
    "Whole",
    "as_shard",
    "as_whole",
    "equal_along",
    "equal_on_all_ranks",
    "mark_of",
    "may_differ",
    "with_parameters",
]


@dataclass(frozen=True)
class Equal:
    """The array is equal on all ranks."""


@dataclass(frozen=True)
class Differs:
    """The array differs between the ranks on purpose."""


@dataclass(frozen=True)
class Whole:
    """The array is no shard, although it was computed from shards."""


@dataclass(frozen=True)
class Shard:
    """The array is this rank's shard of an array that is sharded over an axis.

    Attributes:
      axis: the names of the axis.
    """

    axis: tuple[str, ...]


@dataclass(frozen=True)
class Parameters:
    """The array is the first one of a call whose Python parameters must be equal on all ranks.

    It is a note for the ranks' comparison of the program, and no fact about the array.

    Attributes:
      text: the parameters, such as the root of a broadcast.
    """

    text: str


Mark: TypeAlias = Equal | Differs | Whole | Shard | Parameters


mark_p = Primitive("jaxmpi_mark")
mark_p.def_impl(lambda x, *, mark: x)
mark_p.def_abstract_eval(lambda x, *, mark: x)


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], *, mark: Mark
) -> tuple[jax.Array, jax.Array]:
    """Mark the array, but not its derivative: a gradient is not equal because the array is."""
    return mark_p.bind(primals[0], mark=mark), tangents[0]


def _transpose(cotangent: jax.Array, x: AbstractValue, *, mark: Mark) -> list[jax.Array]:
    return [cotangent]


def _batch(
    xs: Sequence[jax.Array], dims: Sequence[int | None], *, mark: Mark
) -> tuple[jax.Array, int | None]:
    return mark_p.bind(xs[0], mark=mark), dims[0]


ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = _transpose
batching.primitive_batchers[mark_p] = _batch
mlir.register_lowering(mark_p, lambda ctx, x, *, mark: [x])


def mark_of(eqn: JaxprEqn) -> Mark | None:
    """Return the mark that an equation makes; None if it makes none."""
    if eqn.primitive is not mark_p:
        return None
    mark: Mark = eqn.params["mark"]
    return mark


def equal_on_all_ranks(tree: PyTree) -> PyTree:
    """Return a tree whose arrays are marked as equal on all ranks.

    An example is a counter that all ranks increment together. A branch with a collective may depend
    on such an array.
    """
    return jax.tree.map(lambda x: mark_p.bind(x, mark=Equal()), tree)


def equal_along(tree: PyTree, axis: Axis) -> PyTree:
    """Return a tree whose arrays are marked as equal on all ranks, if the axis has all of them.

    Along any other axis they are equal within each group only, and get no mark.
    """
    return equal_on_all_ranks(tree) if axis == AXIS else tree


def may_differ(tree: PyTree) -> PyTree:
    """Return a tree whose arrays are marked as different on each rank on purpose.

    Examples are the updates of `local_sgd` between two means. Train state that such an array is
    added to is no sign of a forgotten mean. On one rank, or outside of `jaxmpi.jit`, the tree is
    returned unmarked.
    """
    if not bound() or lax.axis_size(AXIS) == 1:
        return tree
    return jax.tree.map(lambda x: mark_p.bind(x, mark=Differs()), tree)


def as_shard(x: jax.Array, axis: Axis = AXIS) -> jax.Array:
    """Return `x`, marked as this rank's shard of an array that is sharded over an axis."""
    return mark_p.bind(x, mark=Shard(names(axis)))


def as_whole(x: jax.Array, axis: Axis = AXIS) -> jax.Array:
    """Return `x`, marked as a whole array that is equal on the ranks along an axis.

    Along AXIS that is all ranks, so it is marked as equal on all ranks then.
    """
    return equal_on_all_ranks(x) if axis == AXIS else mark_p.bind(x, mark=Whole())


def with_parameters(tree: PyTree, text: str) -> PyTree:
    """Return the arrays of a call with a note of parameters that must be equal on all ranks.

    The ranks compare the text with the program, before they run it. The note is a mark on the first
    array that is not float0: those have no elements. There is none on one rank, outside of
    `jaxmpi.jit`, and in a tree without such an array.

    Args:
      tree: the arrays.
      text: the call and its parameters, such as the root of a broadcast.
    """
    leaves, treedef = jax.tree.flatten(tree)
    first = None
    for i, x in enumerate(leaves):
        if getattr(x, "dtype", None) != jax.dtypes.float0:
            first = i
            break
    if first is None or not bound() or lax.axis_size(AXIS) == 1:
        return tree
    leaves[first] = mark_p.bind(leaves[first], mark=Parameters(text))
    return treedef.unflatten(leaves)
