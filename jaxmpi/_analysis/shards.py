"""Find optimizers that combine several elements of an array, which is wrong on a shard.

An elementwise optimizer, such as Adam, computes the same on a shard as on the whole array. One that
computes a norm would get the norm of the shard, and be wrong without an error. So no shard among a
program's outputs may depend on such a value:

- a value is a shard if it is one element by element: an input, or computed elementwise from one;
- an equation that is neither elementwise nor a rearrangement mixes the elements of a shard, and
  what depends on its result is mixed;
- a collective among all ranks that have the shards of the array makes its result whole: it is no
  shard, and not mixed. A collective over other axes changes nothing.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import COLLECTIVES, Role, role
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.inner_jaxprs import transform_name
from jaxmpi._analysis.primitives import Op, Trait, has
from jaxmpi._analysis.traced_program import TracedProgram
from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._backends.groups import Groups, groups_along
from jaxmpi._leaves import output_name
from jaxmpi._marks import Equal, Shard, Whole, mark_of
from jaxmpi._per_rank_state import in_shard, shard_axis

__all__ = ["check_shards"]


class Value(NamedTuple):
    """Facts about a value.

    Attributes:
      shard: whether it is a shard.
      mixed: the first equation that has mixed elements of a shard that the value depends on, then
        the calls and loops around that equation, innermost first; () if there is none.
      over: the groups of ranks that have the shards of the arrays that it depends on.
    """

    shard: bool = False
    mixed: tuple[JaxprEqn, ...] = ()
    over: frozenset[Groups] = frozenset()


NOTHING = Value()  # the value depends on no shard
Sizes: TypeAlias = tuple[tuple[str, int], ...]  # (name, number of ranks) of each axis


def check_shards(traced: TracedProgram, axes: Mapping[str, int], *, api: str, title: str) -> None:
    """Raise a ValueError if a shard in an output depends on several elements of a shard.

    Args:
      traced: the program.
      axes: the names of the axes of the ranks, and their sizes.
      api: the function of jaxmpi that the user called, for the error.
      title: the name of the program, for the error.
    """
    if not any(map(in_shard, traced.outs)):
        return
    sizes = tuple(axes.items())
    facts = [NOTHING] * traced.captured_count
    for path in traced.ins:
        axis = shard_axis(path)
        facts.append(NOTHING if axis is None else _shard_over(axis, sizes))
    values = propagate(_analysis(sizes), traced.jaxpr, facts)
    for path, value in zip(traced.outs, values, strict=True):
        if in_shard(path) and value.mixed:
            # An equation inside of a call of optax may have no line of the user's; a caller has.
            where = _jaxcompat.LIBRARY_LINE
            for eqn in value.mixed:
                line = _jaxcompat.source_place(eqn)
                if line:
                    where = line
                    break
            transform = transform_name(value.mixed) or "a function"
            raise ValueError(
                f"{api}: {output_name(path[:-1])} of {title} is a shard, and depends on "
                f"{transform}, which combines several elements of an array "
                f"({value.mixed[0].primitive.name} at {where}) but gets this rank's shard only. "
                "Use an elementwise optimizer, such as Adam, AdamW, Lion or SGD, and "
                "jaxmpi.clip_by_global_norm instead of optax's; or keep whole parameters with "
                "jaxmpi.sharded(inner), which takes any optimizer."
            )


def _shard_over(axis: Axis, sizes: Sizes) -> Value:
    """Return the facts about a shard of an array that is sharded over an axis."""
    return Value(True, (), frozenset({_groups(names(axis), sizes)}))


@cache
def _groups(axis: tuple[str, ...], sizes: Sizes) -> Groups:
    """Return the groups of ranks along an axis; one group of all ranks if there is no such axis."""
    axes = dict(sizes)
    return groups_along(axes, axis if {*axis} <= {*axes} else (AXIS,))


@cache
def _covers(groups: Sequence[Sequence[int]] | None, shard_groups: Groups) -> bool:
    """Return whether a collective within `groups` combines all shards of an array.

    Args:
      groups: of the collective; None for one group of all ranks.
      shard_groups: the groups of ranks that have the shards of one array.
    """
    if not groups:
        return True
    group_of: dict[int, int] = {}
    for i, group in enumerate(groups):
        for rank in group:
            group_of[rank] = i
    return all(len({group_of[rank] for rank in ranks}) == 1 for ranks in shard_groups)


# The lattice and the rules


def _join(values: Sequence[Value]) -> Value:
    """Return the facts about a value that is computed elementwise from these values."""
    known = [x for x in values if x is not NOTHING]
    if len(known) < 2:
        return known[0] if known else NOTHING
    over = frozenset[Groups]().union(*(x.over for x in known))
    mixed = next((x.mixed for x in known if x.mixed), ())
    return Value(any(x.shard for x in known), mixed, over)


def _local(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Return the facts after an equation that does not communicate."""
    value = _join(operands)
    if value.shard and not has(eqn, Trait.ELEMENTWISE) and not has(eqn, Trait.REARRANGES):
        value = Value(False, value.mixed or (eqn,), value.over)
    return [value] * len(eqn.outvars)


def _collective(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Return the facts after a collective.

    The result depends on shards no longer if the collective combines all shards of each array.
    """
    if role(eqn) is not Role.COLLECTIVE:  # over array axes: those of a vmap inside
        return _local(eqn, operands)
    value = _join(operands)
    groups = eqn.params.get("axis_index_groups")
    not_combined = frozenset(over for over in value.over if not _covers(groups, over))
    result = value._replace(over=not_combined) if not_combined else NOTHING
    return [result] * len(eqn.outvars)


def _add_caller(eqn: JaxprEqn, operands: list[Value], results: list[Value]) -> list[Value]:
    """Add a call or a loop to `mixed` of the results whose elements were mixed inside of it."""
    mixed_before = [value.mixed for value in operands]
    found = []
    for value in results:
        if value.mixed and value.mixed not in mixed_before:
            value = value._replace(mixed=(*value.mixed, eqn))
        found.append(value)
    return found


@cache
def _analysis(sizes: Sizes) -> Analysis[Value]:
    """Return the analysis for ranks with axes of these sizes."""

    def mark(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        match mark_of(eqn):
            case Equal() | Whole():
                return [NOTHING]
            case Shard(axis):
                made, before = _shard_over(axis, sizes), operands[0]
                return [Value(True, before.mixed, made.over | before.over)]
        return operands

    rules = dict.fromkeys(COLLECTIVES, _collective)
    rules = {**rules, Op.MARK: mark}
    return Analysis(NOTHING, _join, rules, _local, _add_caller, constants=NOTHING)
