"""Classify the equations of a traced function by whether they involve the ranks.

An equation is local, communicates itself, or is a call, a loop or a branch with a collective inside
(`kind`). JAX does not say which primitives communicate: what counts are the named axes in an
equation's parameters and effects, and the table of `primitives`.
"""

from collections.abc import Container

from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import line, subjaxprs
from jaxmpi._analysis.primitives import PRIMITIVES, Op, Trait, has, is_arithmetic, op_of
from jaxmpi._axis import AXIS
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = [
    "BRANCHES_AND_LOOPS",
    "COLLECTIVES",
    "RANK_OPS",
    "axis_names",
    "calls_python",
    "communicates",
    "has_collective",
    "is_computed_from",
    "kind",
    "kinds",
    "other_effects",
]

COLLECTIVES = (Op.ALLREDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.PERMUTE)
BRANCHES_AND_LOOPS = (Op.SCAN, Op.WHILE, Op.COND)
# The operations for which `kind` may return something other than "". In a program that `kind` has
# accepted, an equation of any other operation is local, and need not be classified again.
RANK_OPS = frozenset(
    {
        *COLLECTIVES,
        *BRANCHES_AND_LOOPS,
        *(Op.AXIS_INDEX, Op.SEND_AHEAD, Op.BROADCAST, Op.CALL, Op.LINEAR_SOLVE),
    }
)


def kind(eqn: JaxprEqn) -> str:
    """Return how an equation involves the ranks.

    Returns:
      "" for an equation that does not: it is local;
      "index" for the rank's number along an axis;
      "collective" for one of COLLECTIVES over axes of the ranks;
      "ahead" for the start of a message that a later call of the program waits for;
      "bcast" for a broadcast, which `trace` replaces by other collectives;
      "call" or "loop" for a call, or a loop or branch, with any of the above inside.

    Raises:
      NotImplementedError: the equation communicates in a way that jaxmpi does not support, with the
        primitive and the source line.
    """
    if is_arithmetic(eqn) and not eqn.effects:  # most equations
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
    elif not _axis_names_inside(eqn):
        return ""
    elif op in (Op.CALL, Op.LINEAR_SOLVE):
        return "call"
    elif op in BRANCHES_AND_LOOPS:
        return "loop"
    axes = sorted({*axis_names(eqn), *_axis_names_inside(eqn)})
    over = ", ".join(map(repr, axes)) or repr(AXIS)
    known = [name for name, properties in PRIMITIVES.items() if properties.op in COLLECTIVES]
    raise NotImplementedError(
        f"{eqn.primitive.name} at {line(eqn)} communicates over {over}, which is not supported. "
        f"Move the collective out of it, or use one of {', '.join(known)}."
    )


@_jaxcompat.kept_with_jaxpr
def kinds(jaxpr: AnyJaxpr) -> dict[int, str]:
    """Return `kind` of each equation of a jaxpr that is not local, by the id of the equation.

    Equations inside of its calls, loops and branches are not included.
    """
    found: dict[int, str] = {}
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        kind_of_eqn = kind(eqn)
        if kind_of_eqn:
            found[id(eqn)] = kind_of_eqn
    return found


def has_collective(jaxpr: AnyJaxpr) -> bool:
    """Return whether a jaxpr, at any depth, communicates or asks for the rank's number."""
    return bool(kinds(jaxpr))


def communicates(eqn: JaxprEqn) -> bool:
    """Return whether an equation sends something, or contains one that does.

    A broadcast counts only after `trace` has replaced it by a collective.
    """
    return kind(eqn) in ("collective", "ahead") or any(map(_communicates_inside, subjaxprs(eqn)))


def calls_python(eqn: JaxprEqn) -> bool:
    """Return whether an equation calls Python or foreign code, or contains one that does."""
    if is_arithmetic(eqn):
        return False
    return has(eqn, Trait.CALLS_PYTHON) or any(map(_calls_python_inside, subjaxprs(eqn)))


# Every analysis asks these questions about the same jaxprs, and about each one again for every call
# or loop around it. A jaxpr does not change, so the answers are cached while it lives.


@_jaxcompat.kept_with_jaxpr
def _axis_names_in(jaxpr: AnyJaxpr) -> frozenset[str]:
    """Return the names of the axes that the equations of a jaxpr are over, at any depth."""
    found: set[str] = set()
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        found.update(axis_names(eqn))
        found.update(_axis_names_inside(eqn))
    return frozenset(found)


def _axis_names_inside(eqn: JaxprEqn) -> frozenset[str]:
    """Return the names of the axes that the equations in an equation's jaxprs are over.

    A `shard_map` binds the axes of its mesh itself, so that of these only AXIS counts.
    """
    names = frozenset[str]().union(*map(_axis_names_in, subjaxprs(eqn)))
    return names & {AXIS} if op_of(eqn) is Op.MESH else names


@_jaxcompat.kept_with_jaxpr
def _communicates_inside(jaxpr: AnyJaxpr) -> bool:
    return any(map(communicates, _jaxcompat.parts(jaxpr)[0].eqns))


@_jaxcompat.kept_with_jaxpr
def _calls_python_inside(jaxpr: AnyJaxpr) -> bool:
    return any(map(calls_python, _jaxcompat.parts(jaxpr)[0].eqns))


def axis_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the named axes that an equation is over, in the order of its parameter.

    In a traced program these are axes of the ranks: tracing has replaced the name of a `vmap`
    inside the function by the number of an array's axis.
    """
    if op_of(eqn) is Op.MESH:
        return ()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    if not isinstance(axes, tuple | list | frozenset):
        axes = (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _over_ranks(eqn: JaxprEqn) -> bool:
    """Return whether an equation itself is over a named axis, by its parameters or effects."""
    return bool(axis_names(eqn)) or any(map(_jaxcompat.is_axis_effect, eqn.effects))


def is_computed_from(known: Container[Var], eqn: JaxprEqn) -> bool:
    """Return whether literals and `known` variables alone determine an equation's results.

    The result of a Python function, or of an equation with effects, is not determined by them.
    """
    for atom in eqn.invars:
        if not isinstance(atom, Literal) and atom not in known:
            return False
    return not other_effects(eqn) and not calls_python(eqn)


def other_effects(eqn: JaxprEqn) -> bool:
    """Return whether an equation has an effect: a callback, a print, the use of a reference.

    The effect that only requires a bound axis, which JAX gives to collectives, does not count.
    """
    return bool(eqn.effects) and not all(map(_jaxcompat.is_axis_effect, eqn.effects))
