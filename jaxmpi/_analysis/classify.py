"""Classify the equations of a traced function by whether they involve the ranks.

An equation is local, communicates itself, or is a call, a loop or a branch with a collective inside
(`Role`). JAX does not say which primitives communicate: what counts are the named axes in an
equation's parameters and effects, and the table of `primitives`.
"""

from collections.abc import Container
from enum import Enum, auto

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
    "Role",
    "axis_names",
    "calls_python",
    "communicates",
    "involves_ranks",
    "is_computed_from",
    "other_effects",
    "role",
    "roles",
]

COLLECTIVES = (Op.ALLREDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.PERMUTE)
BRANCHES_AND_LOOPS = (Op.SCAN, Op.WHILE, Op.COND)
# The operations for which `role` may return something other than LOCAL. In a program that `role`
# has accepted, an equation of any other operation is local, and need not be classified again.
RANK_OPS = frozenset(
    {
        *COLLECTIVES,
        *BRANCHES_AND_LOOPS,
        *(Op.AXIS_INDEX, Op.SEND_AHEAD, Op.BROADCAST, Op.CALL, Op.LINEAR_SOLVE),
    }
)


class Role(Enum):
    """Role of an equation: how it involves the ranks."""

    LOCAL = auto()  # not at all
    RANK = auto()  # it is the rank's number along an axis
    COLLECTIVE = auto()  # it is one of COLLECTIVES over axes of the ranks
    SEND_AHEAD = auto()  # it starts a message that a later call of the program waits for
    BROADCAST = auto()  # it is a broadcast, which `trace` replaces by other collectives
    CALL = auto()  # a call with any of the above inside
    CONTROL_FLOW = auto()  # a loop or a branch with any of the above inside


def role(eqn: JaxprEqn) -> Role:
    """Return how an equation involves the ranks.

    Raises:
      NotImplementedError: the equation communicates in a way that jaxmpi does not support, with the
        primitive and the source line.
    """
    if is_arithmetic(eqn) and not eqn.effects:  # most equations
        return Role.LOCAL
    op = op_of(eqn)
    if not subjaxprs(eqn):
        if not _over_ranks(eqn):
            return Role.LOCAL
        if op is Op.AXIS_INDEX:
            return Role.RANK
        if op in COLLECTIVES:
            return Role.COLLECTIVE
        if op is Op.SEND_AHEAD:
            return Role.SEND_AHEAD
        if op is Op.BROADCAST:
            return Role.BROADCAST
    elif not _axis_names_inside(eqn):
        return Role.LOCAL
    elif op in (Op.CALL, Op.LINEAR_SOLVE):
        return Role.CALL
    elif op in BRANCHES_AND_LOOPS:
        return Role.CONTROL_FLOW
    axes = sorted({*axis_names(eqn), *_axis_names_inside(eqn)})
    over = ", ".join(map(repr, axes)) or repr(AXIS)
    known = [name for name, properties in PRIMITIVES.items() if properties.op in COLLECTIVES]
    raise NotImplementedError(
        f"{eqn.primitive.name} at {line(eqn)} communicates over {over}, which is not supported. "
        f"Move the collective out of it, or use one of {', '.join(known)}."
    )


@_jaxcompat.kept_with_jaxpr
def roles(jaxpr: AnyJaxpr) -> dict[int, Role]:
    """Return the role of each equation of a jaxpr that is not local, by the id of the equation.

    Equations inside of its calls, loops and branches are not included.
    """
    found: dict[int, Role] = {}
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        role_of_eqn = role(eqn)
        if role_of_eqn is not Role.LOCAL:
            found[id(eqn)] = role_of_eqn
    return found


def involves_ranks(jaxpr: AnyJaxpr) -> bool:
    """Return whether a jaxpr, at any depth, communicates or asks for the rank's number."""
    return bool(roles(jaxpr))


def communicates(eqn: JaxprEqn) -> bool:
    """Return whether an equation sends something, or contains one that does.

    A broadcast counts only after `trace` has replaced it by a collective.
    """
    return role(eqn) in (Role.COLLECTIVE, Role.SEND_AHEAD) or any(
        map(_communicates_inside, subjaxprs(eqn))
    )


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
