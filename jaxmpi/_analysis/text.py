"""Equations as lines of text: equal equations have equal text, in any process.

A jaxpr as JAX prints it is not that: it may have addresses of Python objects in it. Ranks compare
these lines, with or without shapes.
"""

from collections.abc import Iterator

import numpy as np
from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._marks import Parameters, mark_of

__all__ = ["Text", "equations", "is_note", "parameters"]

OMITTED = ("length", "unroll")  # parameters that follow from shapes, or change no result
# Parameters that are tuples, and do not follow from shapes.
POSITIONS = ("axes", "dimensions", "permutation", "start_indices", "strides")


class Text:
    """Text of the equations of one jaxpr.

    Constants and inputs are named in0, in1, ... Other variables are named v2, v3, ... in the order
    in which they first occur in the text; the numbers go on from those of the inputs.
    """

    def __init__(self, jaxpr: AnyJaxpr) -> None:
        inner, _ = _jaxcompat.parts(jaxpr)
        self._names = {v: f"in{i}" for i, v in enumerate((*inner.constvars, *inner.invars))}

    def atom(self, v: Atom) -> str:
        """Return a literal's value, or a variable's name."""
        if isinstance(v, Literal):
            return repr(np.asarray(v.val).tolist())
        return self._names.setdefault(v, f"v{len(self._names)}")

    def equation(self, eqn: JaxprEqn, *, shapes: bool = False, operands: str | None = None) -> str:
        """Return an equation as text, such as "v3 = mul(in0, 2.0)".

        Args:
          eqn: the equation.
          shapes: whether to show the types of the results, as in "v3: float32[4] = ...", and the
            parameters that may follow from shapes.
          operands: a text to show instead of the operands.
        """
        # Name the operands before the results: the order of these calls decides the names.
        arguments = [*map(self.atom, eqn.invars)] if operands is None else [operands]
        outs = []
        for v in eqn.outvars:
            outs.append(f"{self.atom(v)}: {v.aval.str_short()}" if shapes else self.atom(v))
        for name, value in sorted(eqn.params.items()):
            if _is_shown(name, value, shapes):
                arguments.append(f"{name}={value}")
        return f"{', '.join(outs)} = {eqn.primitive.name}({', '.join(arguments)})"


def equations(jaxpr: AnyJaxpr) -> Iterator[str]:
    """Yield a line for each equation at any depth, with shapes and the source line.

    An equation is followed by those that it contains. Each jaxpr ends with a line "returns ...".
    """
    text = Text(jaxpr)
    open_jaxpr, _ = _jaxcompat.parts(jaxpr)
    for eqn in open_jaxpr.eqns:
        at = _jaxcompat.source_line(eqn)
        yield text.equation(eqn, shapes=True) + (f" at {at}" if at else "")
        for inner in subjaxprs(eqn):
            yield from equations(inner)
    yield f"returns {', '.join(map(text.atom, open_jaxpr.outvars))}"


def parameters(jaxpr: AnyJaxpr) -> Iterator[tuple[str, str]]:
    """Yield (parameters as text, source line) of each note of `with_parameters`, at any depth.

    A note is an identity with a `Parameters` mark. The ranks compare these texts.
    """
    if not _has_notes(jaxpr):
        return
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        mark = mark_of(eqn)
        if isinstance(mark, Parameters):
            yield mark.text, _jaxcompat.source_line(eqn)
        for inner in subjaxprs(eqn):
            yield from parameters(inner)


@_jaxcompat.kept_with_jaxpr
def _has_notes(jaxpr: AnyJaxpr) -> bool:
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        if is_note(eqn) or any(map(_has_notes, subjaxprs(eqn))):
            return True
    return False


def is_note(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a note of `with_parameters`: an identity with parameters."""
    return isinstance(mark_of(eqn), Parameters)


def _is_shown(name: str, value: object, shapes: bool) -> bool:
    """Return whether a parameter of an equation is part of its text.

    Without `shapes`, numbers, strings and positions are. With `shapes`, all tuples and dtypes
    are, too: all but jaxprs and Python objects that print their address.
    """
    if name in OMITTED:
        return False
    if not shapes:
        return name in POSITIONS or isinstance(value, bool | int | float | str)
    return value is not None and not hasattr(value, "eqns") and " at 0x" not in repr(value)
