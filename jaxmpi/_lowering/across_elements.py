"""Shards whose next value depends on all numbers of an array, of which this rank has a part: an optimizer that cannot work so.

An elementwise optimizer, such as Adam, does with shards what it does with arrays. One that forms a norm, or looks at rows, gets
the norm of a shard, and would be wrong without an error. A value mixes elements from the first reduction of a shard until it
goes through a collective.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from jaxmpi import _jaxcompat
from jaxmpi._axis import EQUAL, SHARD
from jaxmpi._leaves import in_shard, leaf_name
from jaxmpi._lowering.classify import CALLS, callee, kind, subjaxprs

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
    """What is known of a value."""

    shard: bool = False  # whether it is made of shards, element by element
    mixed: tuple[JaxprEqn, ...] = ()  # what has mixed the elements of a shard that it depends on, and the calls around that


NOTHING = Value()


def check_shards(title: str, jaxpr: Any, ins: Sequence[Any], outs: Sequence[Any], captured: int) -> None:
    """Raise a ValueError if the shard of an output depends on all elements of this rank's shard of some array.

    Args:
      title: of the program.
      jaxpr: of `trace.trace`, whose first `captured` inputs are arrays from outside.
      ins: the paths of the arguments' arrays.
      outs: those of the outputs.
      captured: how many there are.
    """
    if not any(map(in_shard, outs)):
        return
    values = _follow(jaxpr, [NOTHING] * captured + [Value(in_shard(path)) for path in ins])
    for path, value in zip(outs, values, strict=True):
        if in_shard(path) and value.mixed:
            where = next(filter(None, map(_jaxcompat.source_line, value.mixed)), "a line of a library")
            raise ValueError(
                f"jaxmpi.jit: output {leaf_name(path[:-1])} of {title} is a shard, and depends on {_name(value.mixed)}, which "
                f"looks at more than one element of an array ({value.mixed[0].primitive.name} at {where}) and sees this rank's "
                "shard only. Use an elementwise optimizer, such as Adam, AdamW, Lion or SGD, and jaxmpi.clip_by_global_norm in "
                "the place of optax's; or keep whole parameters with jaxmpi.sharded(inner), which takes any optimizer."
            )


def _name(eqns: Sequence[JaxprEqn]) -> str:
    """The transform that an equation comes from, in words."""
    names = (name for eqn in eqns for name in _jaxcompat.function_names(eqn) if ".<locals>.update" in name)
    return next(names, "a function").split(".<locals>")[0]


def _follow(jaxpr: Any, ins: Sequence[Value]) -> list[Value]:
    inner, _ = _jaxcompat.parts(jaxpr)
    known = dict(zip(inner.invars, ins, strict=True))

    def read(v: Any) -> Value:
        return NOTHING if isinstance(v, Literal) else known.get(v, NOTHING)

    for eqn in inner.eqns:
        xs = [read(v) for v in eqn.invars]
        makes_shards = eqn.primitive.name == "name" or any(True for _ in subjaxprs(eqn))
        if makes_shards or any(x != NOTHING for x in xs):
            known.update(zip(eqn.outvars, _outs(eqn, xs), strict=True))
    return [read(v) for v in inner.outvars]


def _outs(eqn: JaxprEqn, xs: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    if kind(eqn) == "collective" or (name == "name" and eqn.params["name"] == EQUAL):
        return [NOTHING] * len(eqn.outvars)
    if name == "name" and eqn.params["name"] == SHARD:
        return [Value(True, xs[0].mixed)]
    if name in CALLS:
        return _called(eqn, xs, _follow(*callee(eqn, xs)))
    if name == "cond":
        branches = [_follow(branch, xs[1:]) for branch in eqn.params["branches"]]
        outs = [_joined([xs[0]._replace(shard=False), *outs]) for outs in zip(*branches, strict=True)]
        return _called(eqn, xs, outs)
    if name == "scan":
        consts, carry = _jaxcompat.scan_counts(eqn)
        return _called(eqn, xs, _loop(eqn.params["jaxpr"], xs[:consts], xs[consts : consts + carry], xs[consts + carry :]))
    if name == "while":
        first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return _called(eqn, xs, _loop(eqn.params["body_jaxpr"], xs[first:last], xs[last:], []))
    value = _joined(xs)
    if name not in ELEMENTWISE and name not in MOVES and value.shard:
        value = Value(False, value.mixed or (eqn,))
    return [value] * len(eqn.outvars)


def _called(eqn: JaxprEqn, xs: list[Value], outs: list[Value]) -> list[Value]:
    """The results of what an equation contains; what has mixed elements there, it has done within this equation."""
    before = [x.mixed for x in xs]
    return [y if not y.mixed or y.mixed in before else y._replace(mixed=(*y.mixed, eqn)) for y in outs]


def _loop(body: Any, consts: list[Value], state: list[Value], scanned: list[Value]) -> list[Value]:
    while True:
        outs = _follow(body, [*consts, *state, *scanned])
        after = [_joined([a, b]) for a, b in zip(state, outs[: len(state)], strict=True)]
        if after == state:
            return outs
        state = after


def _joined(values: Sequence[Value]) -> Value:
    """What is known of a value that follows from these, element by element."""
    return Value(any(x.shard for x in values), next((x.mixed for x in values if x.mixed), ()))
