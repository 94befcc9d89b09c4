"""Find optimizers that combine several elements of an array, which is wrong on a shard.

An elementwise optimizer, such as Adam, does with shards what it does with arrays. One that forms a
norm, or looks at rows, gets the norm of a shard, and would be wrong without an error. A value mixes
elements from the first reduction of a shard until it goes through a collective of the ranks that
have the shards; one over other axes leaves it as it is.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn
from jax.tree_util import KeyPath

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import COLLECTIVES, kind
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.primitives import Op, Trait, has
from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends.groups import Groups, groups_along
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._leaves import output_name
from jaxmpi._marks import Equal, Shard, Whole, mark_of
from jaxmpi._per_rank_state import in_shard, shard_axis

__all__ = ["check_shards"]


class Value(NamedTuple):
    """Facts about a value."""

    shard: bool = False  # whether it is made of shards, element by element
    # what has mixed the elements of a shard that it depends on, and the calls around that
    mixed: tuple[JaxprEqn, ...] = ()
    over: frozenset[Groups] = frozenset()  # the groups of ranks that have the shards


NOTHING = Value()
Sizes: TypeAlias = tuple[tuple[str, int], ...]  # of the axes


def check_shards(
    title: str,
    jaxpr: AnyJaxpr,
    ins: Sequence[KeyPath],
    outs: Sequence[KeyPath],
    captured: int,
    axes: Mapping[str, int],
    api: str,
) -> None:
    """Raise a ValueError if a shard in an output depends on several elements of a shard.

    Args:
      title: the name of the program.
      jaxpr: of `trace.trace`, whose first `captured` inputs are arrays from outside.
      ins: the paths of the arguments' arrays.
      outs: those of the outputs.
      captured: how many there are.
      axes: the names of the ranks and their sizes.
      api: the function of jaxmpi that the user called, for the error.
    """
    if not any(map(in_shard, outs)):
        return
    sizes = tuple(axes.items())
    given = [
        NOTHING if (axis := shard_axis(path)) is None else _of_shard(axis, sizes) for path in ins
    ]
    values = propagate(_analysis(sizes), jaxpr, [NOTHING] * captured + given)
    for path, value in zip(outs, values, strict=True):
        if in_shard(path) and value.mixed:
            where = next(
                filter(None, map(_jaxcompat.source_place, value.mixed)), "a line of a library"
            )
            raise ValueError(
                f"{api}: {output_name(path[:-1])} of {title} is a shard, and depends on "
                f"{_name(value.mixed)}, which combines several elements of an array "
                f"({value.mixed[0].primitive.name} at {where}) but gets this rank's shard only. "
                "Use an elementwise optimizer, such as Adam, AdamW, Lion or SGD, and "
                "jaxmpi.clip_by_global_norm instead of optax's; or keep whole parameters with "
                "jaxmpi.sharded(inner), which takes any optimizer."
            )


def _of_shard(axis: Axis, sizes: Sizes) -> Value:
    return Value(True, (), frozenset({_groups(names(axis), sizes)}))


@cache
def _groups(axis: tuple[str, ...], sizes: Sizes) -> Groups:
    """Return the groups along an axis; one group of all ranks if they do not have the axis."""
    axes = dict(sizes)
    return groups_along(axes, axis if {*axis} <= {*axes} else (AXIS,))


@cache
def _covers(groups: Sequence[Sequence[int]] | None, parts: Groups) -> bool:
    """Return whether each of `parts` is within a group; no groups are one group of all ranks."""
    if not groups:
        return True
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    return all(len({group_of[rank] for rank in part}) == 1 for part in parts)


def _name(eqns: Sequence[JaxprEqn]) -> str:
    """The transform that an equation comes from, in words."""
    names = (
        name
        for eqn in eqns
        for name in _jaxcompat.function_names(eqn)
        if ".<locals>.update" in name
    )
    return next(names, "a function").split(".<locals>")[0]


# The lattice and the rules


def _join(values: Sequence[Value]) -> Value:
    """Return the facts about a value that is computed from these, element by element."""
    known = [x for x in values if x is not NOTHING]
    if len(known) < 2:
        return known[0] if known else NOTHING
    over = frozenset[Groups]().union(*(x.over for x in known))
    mixed = next((x.mixed for x in known if x.mixed), ())
    return Value(any(x.shard for x in known), mixed, over)


def _local(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    value = _join(operands)
    if value.shard and not has(eqn, Trait.ELEMENTWISE) and not has(eqn, Trait.REARRANGES):
        value = Value(False, value.mixed or (eqn,), value.over)
    return [value] * len(eqn.outvars)


def _collective(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Return the facts after a collective: nothing, where it is over all ranks of each shard."""
    if kind(eqn) != "collective":
        return _local(eqn, operands)
    left, over = _join(operands), set()
    for group in left.over:
        if not _covers(eqn.params.get("axis_index_groups"), group):
            over.add(group)
    return [left._replace(over=frozenset(over)) if over else NOTHING] * len(eqn.outvars)


def _returned(eqn: JaxprEqn, operands: list[Value], results: list[Value]) -> list[Value]:
    """Add an equation to the callers of those that have mixed elements inside of it."""
    before = [x.mixed for x in operands]
    return [
        y if not y.mixed or y.mixed in before else y._replace(mixed=(*y.mixed, eqn))
        for y in results
    ]


@cache
def _analysis(sizes: Sizes) -> Analysis[Value]:
    """Return the analysis for ranks with axes of these sizes."""

    def mark(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        match mark_of(eqn):
            case Equal() | Whole():
                return [NOTHING]
            case Shard(axis):
                made, x = _of_shard(axis, sizes), operands[0]
                return [Value(True, x.mixed, made.over | x.over)]
        return operands

    rules = dict.fromkeys(COLLECTIVES, _collective)
    return Analysis(NOTHING, _join, {**rules, Op.MARK: mark}, _local, after_inner=_returned)
