"""Find optimizers that combine several elements of an array, which is wrong on a shard.

An elementwise optimizer, such as Adam, does with shards what it does with arrays. One that forms a
norm, or looks at rows, gets the norm of a shard, and would be wrong without an error. A value mixes
elements from the first reduction of a shard until it goes through a collective of the ranks that
have the shards; one over other axes leaves it as it is.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal
from jax.tree_util import KeyPath

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS, EQUAL, WHOLE, Axis, names, sharded_axis
from jaxmpi._backends.groups import Groups, groups_along
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._leaves import output_name
from jaxmpi._lowering.classify import CALLS, callee, kind, subjaxprs
from jaxmpi._per_rank_state import in_shard, shard_axis

__all__ = ["ELEMENTWISE", "check_shards"]

# fmt: off
ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p",
    "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "name", "ne", "neg", "nextafter", "not", "or", "polygamma", "population_count", "pow", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}
# fmt: on
MOVES = {
    "broadcast_in_dim",
    "concatenate",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "optimization_barrier",
    "pad",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "transpose",
}


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
    values = _follow(jaxpr, [NOTHING] * captured + given, sizes)
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
    """Return whether each of `parts` is within one of the groups; without groups, all ranks are one."""
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


def _follow(jaxpr: AnyJaxpr, ins: Sequence[Value], sizes: Sizes) -> list[Value]:
    inner, _ = _jaxcompat.parts(jaxpr)
    known = dict(zip(inner.invars, ins, strict=True))

    def read(v: Atom) -> Value:
        return NOTHING if isinstance(v, Literal) else known.get(v, NOTHING)

    for eqn in inner.eqns:
        xs = [read(v) for v in eqn.invars]
        makes_shards = eqn.primitive.name == "name" or any(True for _ in subjaxprs(eqn))
        if makes_shards or any(x != NOTHING for x in xs):
            known.update(zip(eqn.outvars, _outs(eqn, xs, sizes), strict=True))
    return [read(v) for v in inner.outvars]


def _outs(eqn: JaxprEqn, xs: list[Value], sizes: Sizes) -> list[Value]:
    name = eqn.primitive.name
    if name == "name" and eqn.params["name"] in (EQUAL, WHOLE):
        return [NOTHING] * len(eqn.outvars)
    if name == "name" and (axis := sharded_axis(eqn.params["name"])) is not None:
        made = _of_shard(axis, sizes)
        return [Value(True, xs[0].mixed, made.over | xs[0].over)]
    if kind(eqn) == "collective":
        left = _joined(xs)
        over = frozenset(
            parts for parts in left.over if not _covers(eqn.params.get("axis_index_groups"), parts)
        )
        return [left._replace(over=over) if over else NOTHING] * len(eqn.outvars)
    if name in CALLS:
        return _called(eqn, xs, _follow(*callee(eqn, xs), sizes))
    if name == "cond":
        branches = [_follow(branch, xs[1:], sizes) for branch in eqn.params["branches"]]
        outs = [
            _joined([xs[0]._replace(shard=False), *outs]) for outs in zip(*branches, strict=True)
        ]
        return _called(eqn, xs, outs)
    if name == "scan":
        consts, carry = _jaxcompat.scan_counts(eqn)
        outs = _loop(
            eqn.params["jaxpr"],
            xs[:consts],
            xs[consts : consts + carry],
            xs[consts + carry :],
            sizes,
        )
        return _called(eqn, xs, outs)
    if name == "while":
        first, last = (
            eqn.params["cond_nconsts"],
            eqn.params["cond_nconsts"] + eqn.params["body_nconsts"],
        )
        return _called(
            eqn, xs, _loop(eqn.params["body_jaxpr"], xs[first:last], xs[last:], [], sizes)
        )
    value = _joined(xs)
    if name not in ELEMENTWISE and name not in MOVES and value.shard:
        value = Value(False, value.mixed or (eqn,), value.over)
    return [value] * len(eqn.outvars)


def _called(eqn: JaxprEqn, xs: list[Value], outs: list[Value]) -> list[Value]:
    """Return the results of an equation's inner program, with the equation as the caller."""
    before = [x.mixed for x in xs]
    return [
        y if not y.mixed or y.mixed in before else y._replace(mixed=(*y.mixed, eqn)) for y in outs
    ]


def _loop(
    body: AnyJaxpr, consts: list[Value], state: list[Value], scanned: list[Value], sizes: Sizes
) -> list[Value]:
    while True:
        outs = _follow(body, [*consts, *state, *scanned], sizes)
        after = [_joined([a, b]) for a, b in zip(state, outs[: len(state)], strict=True)]
        if after == state:
            return outs
        state = after


def _joined(values: Sequence[Value]) -> Value:
    """Return the facts about a value that is computed from these, element by element."""
    over = frozenset[Groups]().union(*(x.over for x in values))
    return Value(any(x.shard for x in values), next((x.mixed for x in values if x.mixed), ()), over)
