"""Classify the equations of a traced function: local, collective, a loop or call with one."""

from collections.abc import Callable, Container, Iterator
from functools import cache
from typing import TypeVar

from jax.extend.core import JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS
from jaxmpi._backends.sent_ahead import SEND
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = [
    "BROADCASTS",
    "CALLS",
    "LOOPS",
    "MOVE",
    "REDUCE",
    "axis_names",
    "callee",
    "calls_python",
    "communicates",
    "equations",
    "follows_from",
    "has_collective",
    "kind",
    "kinds",
    "line",
    "map_subjaxprs",
    "other_effects",
    "subjaxprs",
]

T = TypeVar("T")

# Primitives that contain jaxprs, by the parameter that holds the one to open.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # jax 0.12
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_linear_solve": "jaxprs",
}
LOOPS = ("scan", "while", "cond")
REDUCE = {"psum": "sum", "pmax": "max", "pmin": "min"}
MOVE = ("all_gather", "reduce_scatter", "all_to_all", "ppermute")
# by the parameter that holds the rank; `trace` opens them
BROADCASTS = {"jaxmpi_bcast": "root", "pbroadcast": "source"}
MESHES = ("shard_map", "xla_pmap")  # with devices, and names of axes, of their own


def subjaxprs(eqn: JaxprEqn) -> Iterator[AnyJaxpr]:
    """The jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        if isinstance(value, tuple):
            yield from (item for item in value if hasattr(item, "eqns"))
        elif hasattr(value, "eqns"):
            yield value


def held(jaxpr: AnyJaxpr) -> Iterator[ArrayLike]:
    """The arrays that a jaxpr holds itself, in its loops and calls, too."""
    inner, constants = _jaxcompat.parts(jaxpr)
    yield from constants
    for eqn in inner.eqns:
        for part in subjaxprs(eqn):
            yield from held(part)


def callee(eqn: JaxprEqn, operands: list[T]) -> tuple[AnyJaxpr, list[T]]:
    """The jaxpr that one of `CALLS` runs, and those of the operands that it takes."""
    jaxpr = eqn.params[CALLS[eqn.primitive.name]]
    if eqn.primitive.name != "custom_linear_solve":
        return jaxpr, operands
    # of the constants of matvec, vecmat, solve, transpose_solve
    *counts, of_solve, of_transpose = eqn.params["const_lengths"]
    first = sum(counts)
    return jaxpr.solve, [
        *operands[first : first + of_solve],
        *operands[first + of_solve + of_transpose :],
    ]


def map_subjaxprs(
    eqn: JaxprEqn, function: Callable[[AnyJaxpr], AnyJaxpr]
) -> dict[str, AnyJaxpr | tuple[AnyJaxpr, ...]]:
    """Return the parameters that hold jaxprs, with `function` applied to each jaxpr."""
    changed: dict[str, AnyJaxpr | tuple[AnyJaxpr, ...]] = {}
    for name, value in eqn.params.items():
        if hasattr(value, "eqns"):
            changed[name] = function(value)
        elif isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
            changed[name] = tuple(function(item) for item in value)
    return changed


def kind(eqn: JaxprEqn) -> str:
    """Return the kind of an equation: "", "index", "collective", "ahead", "bcast", "call", "loop".

    "" is local; "ahead" starts a message for a later call; a call or a loop contains a collective.

    Raises:
      NotImplementedError: it communicates in a way that is not known here, with the primitive and
        the source line.
    """
    if not eqn.params and not eqn.effects:
        return ""
    name, inside = eqn.primitive.name, list(subjaxprs(eqn))
    if not inside:
        if not _over_ranks(eqn):
            return ""
        if name == "axis_index":
            return "index"
        if name in REDUCE or name in MOVE:
            return "collective"
        if name == SEND:
            return "ahead"
        if name in BROADCASTS:
            return "bcast"
    elif not _names_inside(eqn):
        return ""
    elif name in CALLS:
        return "call"
    elif name in LOOPS:
        return "loop"
    over = ", ".join(map(repr, sorted({*axis_names(eqn), *_names_inside(eqn)}))) or repr(AXIS)
    raise NotImplementedError(
        f"{name} at {line(eqn)} communicates over {over}, which is not supported. Move the "
        f"collective out of it, or use one of {', '.join((*REDUCE, *MOVE))}."
    )


@_jaxcompat.kept_with_jaxpr
def kinds(jaxpr: AnyJaxpr) -> dict[int, str]:
    """The kinds of those equations, by id, that have to do with the ranks: few of many."""
    return {id(eqn): what for eqn in _jaxcompat.parts(jaxpr)[0].eqns if (what := kind(eqn))}


def has_collective(jaxpr: AnyJaxpr) -> bool:
    """Return whether anything in it has to do with the ranks."""
    return bool(kinds(jaxpr))


def communicates(eqn: JaxprEqn) -> bool:
    """Return whether it sends something, or contains what does; this rank's number alone is no message."""
    return kind(eqn) in ("collective", "ahead") or any(map(_sends, subjaxprs(eqn)))


def calls_python(eqn: JaxprEqn) -> bool:
    """Return whether it asks the host, or contains what does."""
    return _is_of_host(eqn.primitive.name) or any(map(_asks_host, subjaxprs(eqn)))


@cache
def _is_of_host(name: str) -> bool:
    return "callback" in name or "ffi" in name


# A jaxpr does not change. What is known of one is kept as long as it lives: it is asked for by
# whatever holds it.


@_jaxcompat.kept_with_jaxpr
def _names(jaxpr: AnyJaxpr) -> frozenset[str]:
    """Return the names of the axes that are used in a jaxpr."""
    return frozenset(
        name
        for eqn in _jaxcompat.parts(jaxpr)[0].eqns
        for name in (*axis_names(eqn), *_names_inside(eqn))
    )


def _names_inside(eqn: JaxprEqn) -> frozenset[str]:
    """Return the names of the axes used inside an equation; a mesh binds its axes itself."""
    names = frozenset[str]().union(*map(_names, subjaxprs(eqn)))
    return names & {AXIS} if eqn.primitive.name in MESHES else names


@_jaxcompat.kept_with_jaxpr
def _sends(jaxpr: AnyJaxpr) -> bool:
    return any(map(communicates, _jaxcompat.parts(jaxpr)[0].eqns))


@_jaxcompat.kept_with_jaxpr
def _asks_host(jaxpr: AnyJaxpr) -> bool:
    return any(map(calls_python, _jaxcompat.parts(jaxpr)[0].eqns))


def equations(jaxpr: AnyJaxpr) -> Iterator[JaxprEqn]:
    """All equations, inner ones included."""
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from equations(inner)


def axis_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the named axes that an equation is over, in its order.

    They are axes of the ranks: an axis of a `vmap` inside is a number.
    """
    if eqn.primitive.name in MESHES:
        return ()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(
        axis
        for axis in (axes if isinstance(axes, tuple | list | frozenset) else (axes,))
        if isinstance(axis, str)
    )


def _over_ranks(eqn: JaxprEqn) -> bool:
    return bool(axis_names(eqn)) or any(map(_jaxcompat.is_axis_effect, eqn.effects))


def line(eqn: JaxprEqn) -> str:
    """The user's line that an equation comes from, in words."""
    return _jaxcompat.source_place(eqn) or "a line of a library"


def follows_from(known: Container[Var], eqn: JaxprEqn) -> bool:
    """Return whether an equation only computes, from literals and from variables that are `known`."""
    operands = all(isinstance(v, Literal) or v in known for v in eqn.invars)
    return operands and not other_effects(eqn) and not calls_python(eqn)


def other_effects(eqn: JaxprEqn) -> bool:
    """Return whether it has effects beyond the axis: callbacks, prints, references."""
    return any(not _jaxcompat.is_axis_effect(effect) for effect in eqn.effects)
