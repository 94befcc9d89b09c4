"""Classify the equations of a traced function: local, collective, a loop or call with one."""

from collections.abc import Container

from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import line, subjaxprs
from jaxmpi._analysis.primitives import PRIMITIVES, Op, Trait, has, is_arithmetic, op_of
from jaxmpi._axis import AXIS
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = [
    "ABOUT_RANKS",
    "BRANCHES_AND_LOOPS",
    "COLLECTIVES",
    "axis_names",
    "calls_python",
    "communicates",
    "follows_from",
    "has_collective",
    "kind",
    "kinds",
    "other_effects",
]

COLLECTIVES = (Op.ALLREDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.PERMUTE)
BRANCHES_AND_LOOPS = (Op.SCAN, Op.WHILE, Op.COND)
# What may have to do with the ranks: all else is local, whatever its parameters are.
ABOUT_RANKS = frozenset(
    {
        *COLLECTIVES,
        *BRANCHES_AND_LOOPS,
        *(Op.AXIS_INDEX, Op.SEND_AHEAD, Op.BROADCAST, Op.CALL, Op.LINEAR_SOLVE),
    }
)


def kind(eqn: JaxprEqn) -> str:
    """Return the kind of an equation: "", "index", "collective", "ahead", "bcast", "call", "loop".

    "" is local; "ahead" starts a message for a later call; a call or a loop contains a collective.

    Raises:
      NotImplementedError: it communicates in a way that is not known here, with the primitive and
        the source line.
    """
    if is_arithmetic(eqn) and not eqn.effects:
        return ""
    op = op_of(eqn)
    if not subjaxprs(eqn):
        if not _over_ranks(eqn):
            return ""
        if op is Op.AXIS_INDEX:
            return "index"
        if op in COLLECTIVES:
            return "collective"
        if op is Op.SEND_AHEAD:
            return "ahead"
        if op is Op.BROADCAST:
            return "bcast"
    elif not _names_inside(eqn):
        return ""
    elif op in (Op.CALL, Op.LINEAR_SOLVE):
        return "call"
    elif op in BRANCHES_AND_LOOPS:
        return "loop"
    over = ", ".join(map(repr, sorted({*axis_names(eqn), *_names_inside(eqn)}))) or repr(AXIS)
    known = [name for name, properties in PRIMITIVES.items() if properties.op in COLLECTIVES]
    raise NotImplementedError(
        f"{eqn.primitive.name} at {line(eqn)} communicates over {over}, which is not supported. "
        f"Move the collective out of it, or use one of {', '.join(known)}."
    )


@_jaxcompat.kept_with_jaxpr
def kinds(jaxpr: AnyJaxpr) -> dict[int, str]:
    """Return the kinds of the equations that have to do with the ranks, by their ids."""
    return {id(eqn): what for eqn in _jaxcompat.parts(jaxpr)[0].eqns if (what := kind(eqn))}


def has_collective(jaxpr: AnyJaxpr) -> bool:
    """Return whether anything in it has to do with the ranks."""
    return bool(kinds(jaxpr))


def communicates(eqn: JaxprEqn) -> bool:
    """Return whether an equation sends something, or contains one that does."""
    return kind(eqn) in ("collective", "ahead") or any(map(_sends, subjaxprs(eqn)))


def calls_python(eqn: JaxprEqn) -> bool:
    """Return whether an equation calls Python, or contains one that does."""
    if is_arithmetic(eqn):
        return False
    return has(eqn, Trait.CALLS_PYTHON) or any(map(_asks_host, subjaxprs(eqn)))


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
    return names & {AXIS} if op_of(eqn) is Op.MESH else names


@_jaxcompat.kept_with_jaxpr
def _sends(jaxpr: AnyJaxpr) -> bool:
    return any(map(communicates, _jaxcompat.parts(jaxpr)[0].eqns))


@_jaxcompat.kept_with_jaxpr
def _asks_host(jaxpr: AnyJaxpr) -> bool:
    return any(map(calls_python, _jaxcompat.parts(jaxpr)[0].eqns))


def axis_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the named axes that an equation is over, in its order.

    They are axes of the ranks: an axis of a `vmap` inside is a number.
    """
    if op_of(eqn) is Op.MESH:
        return ()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(
        axis
        for axis in (axes if isinstance(axes, tuple | list | frozenset) else (axes,))
        if isinstance(axis, str)
    )


def _over_ranks(eqn: JaxprEqn) -> bool:
    return bool(axis_names(eqn)) or any(map(_jaxcompat.is_axis_effect, eqn.effects))


def follows_from(known: Container[Var], eqn: JaxprEqn) -> bool:
    """Return whether an equation only computes, from literals and `known` variables."""
    operands = all(isinstance(v, Literal) or v in known for v in eqn.invars)
    return operands and not other_effects(eqn) and not calls_python(eqn)


def other_effects(eqn: JaxprEqn) -> bool:
    """Return whether an equation has effects beyond the axis: callbacks, prints, references."""
    return bool(eqn.effects) and not all(map(_jaxcompat.is_axis_effect, eqn.effects))
