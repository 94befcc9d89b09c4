"""Equations as lines of text, which are equal on two ranks if the equations are."""

from collections.abc import Iterator

import numpy as np
from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._marks import Parameters, mark_of

__all__ = ["Text", "equations", "is_note", "parameters"]

SIZES = ("length", "unroll")  # parameters that follow from shapes, or change no result


class Text:
    """Names the variables of one jaxpr in the order in which they are met."""

    def __init__(self, jaxpr: AnyJaxpr) -> None:
        inner, _ = _jaxcompat.parts(jaxpr)
        self._names = {v: f"in{i}" for i, v in enumerate((*inner.constvars, *inner.invars))}

    def atom(self, v: Atom) -> str:
        """A literal's value, or a variable's name."""
        return (
            repr(np.asarray(v.val).tolist())
            if isinstance(v, Literal)
            else self._names.setdefault(v, f"v{len(self._names)}")
        )

    def equation(self, eqn: JaxprEqn, *, shapes: bool = False, operands: str | None = None) -> str:
        """Return an equation as text: "v3 = mul(in0, 2.0)".

        With `shapes` it is "v3: float32[4] = ...", with the parameters that may follow from shapes.
        With `operands` that text stands in the place of the operands.
        """
        given = [*map(self.atom, eqn.invars)] if operands is None else [operands]
        outs = ", ".join(
            self.atom(v) + (f": {v.aval.str_short()}" if shapes else "") for v in eqn.outvars
        )
        params = [
            f"{name}={value}"
            for name, value in sorted(eqn.params.items())
            if _is_plain(name, value, shapes)
        ]
        return f"{outs} = {eqn.primitive.name}({', '.join([*given, *params])})"


def equations(jaxpr: AnyJaxpr) -> Iterator[str]:
    """All equations with shapes and source lines, inner ones behind the one that holds them."""
    text = Text(jaxpr)
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        yield " at ".join(
            filter(None, (text.equation(eqn, shapes=True), _jaxcompat.source_line(eqn)))
        )
        for inner in subjaxprs(eqn):
            yield from equations(inner)
    yield f"returns {', '.join(map(text.atom, _jaxcompat.parts(jaxpr)[0].outvars))}"


def parameters(jaxpr: AnyJaxpr) -> Iterator[tuple[str, str]]:
    """The parameters that `with_parameters` has noted, in order, each with its source line."""
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
    return any(
        is_note(eqn) or any(map(_has_notes, subjaxprs(eqn)))
        for eqn in _jaxcompat.parts(jaxpr)[0].eqns
    )


def is_note(eqn: JaxprEqn) -> bool:
    """Return whether it is an identity of `with_parameters`."""
    return isinstance(mark_of(eqn), Parameters)


def _is_plain(name: str, value: object, shapes: bool) -> bool:
    """Return whether a parameter is shown: numbers and text.

    With `shapes` it is anything but objects of Python, such as functions.
    """
    if name in SIZES or not shapes:
        return isinstance(value, bool | int | float | str) and name not in SIZES
    return value is not None and not hasattr(value, "eqns") and " at 0x" not in repr(value)
