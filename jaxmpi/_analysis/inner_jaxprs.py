"""Jaxprs inside of equations: those of calls, loops and branches."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.primitives import Op, is_arithmetic, properties
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = ["callee", "constants", "equations", "line", "map_subjaxprs", "state_start", "subjaxprs"]

T = TypeVar("T")


def subjaxprs(eqn: JaxprEqn) -> list[AnyJaxpr]:
    """Return the jaxprs among the parameters of an equation.

    Some arithmetic has one, too, such as the sum of a scatter. It is left out.
    """
    if is_arithmetic(eqn):  # most equations, and this is asked often
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
    """Return the parameters that hold jaxprs, with `function` applied to each jaxpr."""
    changed: dict[str, AnyJaxpr | tuple[AnyJaxpr, ...]] = {}
    for name, value in eqn.params.items():
        if hasattr(value, "eqns"):
            changed[name] = function(value)
        elif isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
            changed[name] = tuple(function(item) for item in value)
    return changed


def callee(eqn: JaxprEqn, operands: Sequence[T]) -> tuple[AnyJaxpr, list[T]]:
    """Return the jaxpr that a call runs, and those of the operands that it takes."""
    known = properties(eqn.primitive.name)
    jaxpr = eqn.params[known.jaxpr]
    if known.op is not Op.LINEAR_SOLVE:
        return jaxpr, list(operands)
    # The operands begin with the constants of matvec, vecmat, solve and transpose_solve.
    *counts, of_solve, of_transpose = eqn.params["const_lengths"]
    first = sum(counts)
    after = first + of_solve + of_transpose
    return jaxpr.solve, [*operands[first : first + of_solve], *operands[after:]]


def state_start(eqn: JaxprEqn) -> int:
    """Return how many constants stand before the state among the operands of a while_loop."""
    count: int = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return count


def equations(jaxpr: AnyJaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations, inner ones behind the one that contains them."""
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from equations(inner)


def constants(jaxpr: AnyJaxpr) -> Iterator[ArrayLike]:
    """Yield the arrays that a jaxpr holds itself, in its loops and calls, too."""
    inner, held = _jaxcompat.parts(jaxpr)
    yield from held
    for eqn in inner.eqns:
        for part in subjaxprs(eqn):
            yield from constants(part)


def line(eqn: JaxprEqn) -> str:
    """Return the user's line that an equation comes from, in words."""
    return _jaxcompat.source_place(eqn) or "a line of a library"
