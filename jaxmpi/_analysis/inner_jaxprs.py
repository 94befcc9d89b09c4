"""Jaxprs inside of equations: those of calls, loops and branches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.primitives import Op, is_arithmetic, properties
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = [
    "callee",
    "constants",
    "equations",
    "line",
    "map_subjaxprs",
    "state_start",
    "subjaxprs",
    "substituted",
    "transform_name",
]

T = TypeVar("T")


def subjaxprs(eqn: JaxprEqn) -> list[AnyJaxpr]:
    """Return the jaxprs among the parameters of an equation, in the order of the parameters.

    Some arithmetic has a jaxpr as a parameter, such as the `update_jaxpr` of a scatter-add. It is
    left out.
    """
    if is_arithmetic(eqn):  # most equations: skip the loop over the parameters
        return []
    found: list[AnyJaxpr] = []
    for value in eqn.params.values():
        if isinstance(value, tuple):
            found.extend(item for item in value if hasattr(item, "eqns"))
        elif hasattr(value, "eqns"):
            found.append(value)
    return found


def map_subjaxprs(
    eqn: JaxprEqn, function: Callable[[AnyJaxpr], AnyJaxpr]
) -> dict[str, AnyJaxpr | tuple[AnyJaxpr, ...]]:
    """Return the parameters that hold jaxprs, by name, with `function` applied to each jaxpr."""
    changed: dict[str, AnyJaxpr | tuple[AnyJaxpr, ...]] = {}
    for name, value in eqn.params.items():
        if hasattr(value, "eqns"):
            changed[name] = function(value)
        elif isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
            items = tuple(function(item) for item in value)
            # the jaxprs of a linear solve are a named tuple, whose names its rules ask for
            changed[name] = type(value)(*items) if hasattr(value, "_fields") else items
    return changed


def callee(eqn: JaxprEqn, operands: Sequence[T]) -> tuple[AnyJaxpr, list[T]]:
    """Return (jaxpr that a call runs, its arguments).

    Args:
      eqn: an equation of operation CALL or LINEAR_SOLVE.
      operands: anything that there is one of for each operand of `eqn`: values, or facts.
    """
    known = properties(eqn.primitive.name)
    jaxpr = eqn.params[known.jaxpr]
    if known.op is not Op.LINEAR_SOLVE:
        return jaxpr, list(operands)
    # A linear solve runs its `solve` alone; the other three are for its derivatives. The operands
    # are the constants of matvec, vecmat, solve and transpose_solve, then the right-hand sides.
    matvec, vecmat, solve, transpose_solve = eqn.params["const_lengths"]
    first = matvec + vecmat
    right_hand_sides = first + solve + transpose_solve
    return jaxpr.solve, [*operands[first : first + solve], *operands[right_hand_sides:]]


def state_start(eqn: JaxprEqn) -> int:
    """Return the index of the first operand of a while_loop that is state: constants precede it."""
    count: int = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return count


def equations(jaxpr: AnyJaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr at all depths, each followed by those it contains.

    Those of a jaxpr that several calls share come once. Whether JAX has traced them once may differ
    between ranks: do not compare these equations, or their number, between ranks.
    """
    return _equations(jaxpr, set())


def _equations(jaxpr: AnyJaxpr, seen: set[int]) -> Iterator[JaxprEqn]:
    """Yield `equations` of the jaxprs whose ids are not in `seen`, and add them to it."""
    open_jaxpr, _ = _jaxcompat.parts(jaxpr)
    if id(open_jaxpr) in seen:
        return
    seen.add(id(open_jaxpr))
    for eqn in open_jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from _equations(inner, seen)


def constants(jaxpr: AnyJaxpr) -> Iterator[ArrayLike]:
    """Yield the constant arrays of a jaxpr, and of the jaxprs inside of it.

    Those of a jaxpr that several calls share come once for each call: whether JAX has traced them
    once may differ between ranks.
    """
    if not _has_constants(jaxpr):
        return
    open_jaxpr, consts = _jaxcompat.parts(jaxpr)
    yield from consts
    for eqn in open_jaxpr.eqns:
        for inner in subjaxprs(eqn):
            yield from constants(inner)


@_jaxcompat.kept_with_jaxpr
def _has_constants(jaxpr: AnyJaxpr) -> bool:
    """Return whether a jaxpr has constant arrays, at any depth."""
    open_jaxpr, consts = _jaxcompat.parts(jaxpr)
    return bool(consts) or any(any(map(_has_constants, subjaxprs(eqn))) for eqn in open_jaxpr.eqns)


def line(eqn: JaxprEqn) -> str:
    """Return the user's line that an equation comes from, as "file:line", for an error text."""
    return _jaxcompat.source_place(eqn) or _jaxcompat.LIBRARY_LINE


def substituted(atoms: Sequence[Atom], replacements: Mapping[Var, Atom]) -> list[Atom]:
    """Return each operand of an equation, or what replaces it."""
    replaced = []
    for atom in atoms:
        replaced.append(atom if isinstance(atom, Literal) else replacements.get(atom, atom))
    return replaced


def transform_name(eqns: Iterable[JaxprEqn]) -> str:
    """Return the optax transform whose `update` has made one of these equations; "" if none has.

    It is that of the first equation that has one. The update of a transform is a function inside of
    the transform's, such as "scale_by_trust_ratio.<locals>.update_fn".
    """
    for eqn in eqns:
        for name in _jaxcompat.function_names(eqn):
            if ".<locals>.update" in name:
                return name.split(".<locals>")[0]
    return ""
