"""Control slice: the equations and literals that must be equal on all ranks, as text.

A Python number in a traced function is a literal, and may be another one on each rank. Three kinds
of values must follow from the same computation on every rank: the predicates of loops and branches
that communicate, the sums of `constant_sums`, which are not sent, and the outputs that are declared
replicated. The text has no shapes, as batches may be uneven, and it ends at collectives whose
results are equal on all ranks whatever they reduce.

Values are numbered along the dataflow from these, not in the order in which they were traced: two
ranks may trace independent equations in two orders, as those of a Python set.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import communicates, kind, kinds
from jaxmpi._analysis.constant_sums import constant_sums
from jaxmpi._analysis.dataflow import Needed, Slice, slice_of
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._analysis.text import Text
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = ["Line", "control_equations"]


class Line(NamedTuple):
    """An equation as text, and JAX's record of where it comes from."""

    text: str
    source_info: object = None

    def __str__(self) -> str:
        at = _jaxcompat.source_line(self) if self.source_info else ""
        return f"{self.text} at {at}" if at else self.text


def control_equations(jaxpr: AnyJaxpr, outputs: Sequence[bool] = ()) -> list[Line]:
    """Return the equations that must be the same on all ranks.

    Args:
      jaxpr: an opened program.
      outputs: which of its outputs are declared replicated.
    """
    inner, _ = _jaxcompat.parts(jaxpr)
    not_sent = constant_sums(jaxpr)
    loops = [eqn for eqn in inner.eqns if communicates(eqn) and subjaxprs(eqn)]
    lines_inside = [_inside(eqn) for eqn in loops]
    roots: list[Atom] = []
    for eqn, inside in zip(loops, lines_inside, strict=True):
        if inside:  # a predicate inside of it may depend on any operand
            roots += eqn.invars
        elif op_of(eqn) is Op.COND:
            roots.append(eqn.invars[0])
    roots += [eqn.invars[0] for eqn in inner.eqns if id(eqn) in not_sent]
    roots += [v for v, declared in zip(inner.outvars, outputs, strict=False) if declared]
    lines = _lines(slice_of(jaxpr, roots, _is_equal_after))
    for inside in lines_inside:
        lines += inside
    return lines


def _inside(eqn: JaxprEqn) -> list[Line]:
    """Return the control equations of what a loop or a branch contains."""
    lines: list[Line] = []
    for part in subjaxprs(eqn):
        if op_of(eqn) is Op.WHILE:
            outvars = _jaxcompat.parts(part)[0].outvars
            lines += _lines(slice_of(part, outvars, _is_equal_after))
        else:
            lines += control_equations(part)
    return lines


def _is_equal_after(jaxpr: AnyJaxpr, eqn: JaxprEqn) -> bool:
    """Return whether a result is equal on all ranks, whatever they put in.

    The sum of constants is not sent, and equal only if the constants are.
    """
    return (
        op_of(eqn) in (Op.ALLREDUCE, Op.ALL_GATHER)
        and kind(eqn) == "collective"
        and not eqn.params["axis_index_groups"]
        and id(eqn) not in constant_sums(jaxpr)
    )


# Text


def _lines(found: Slice) -> list[Line]:
    """Return a slice as text: each equation behind those that it depends on, then the roots."""
    if not found.roots:
        return []
    inner, _ = _jaxcompat.parts(found.jaxpr)
    text, lines = Text(found.jaxpr), []
    what = kinds(found.jaxpr)
    collectives = [id(eqn) for eqn in inner.eqns if what.get(id(eqn)) == "collective"]
    for needed in _along_the_dataflow(found):
        eqn = needed.eqn
        if _is_equal_after(found.jaxpr, eqn):
            # Ranks may put other numbers in, and compute them in another way.
            operands = f"operand of collective {collectives.index(id(eqn))}"
            lines.append(Line(text.equation(eqn, operands=operands), eqn.source_info))
            continue
        lines.append(Line(text.equation(eqn), eqn.source_info))
        for inside in needed.inside:
            lines += _lines(inside)
    lines.append(Line(f"decides: {', '.join(map(text.atom, found.roots))}"))
    return lines


def _along_the_dataflow(found: Slice) -> list[Needed]:
    """Return the equations of a slice in an order that depends on its dataflow alone.

    It is the order of a depth-first search from the roots, through the operands from left to right.
    """
    makers: dict[Var, int] = {}
    users: dict[Var, list[int]] = {}  # of each reference
    for i, needed in enumerate(found.equations):
        makers.update(dict.fromkeys(needed.eqn.outvars, i))
        for atom in needed.eqn.invars:
            if not isinstance(atom, Literal) and _jaxcompat.is_reference(atom.aval):
                users.setdefault(atom, []).append(i)

    def dependencies(atoms: Sequence[Atom], before: int) -> list[int]:
        """Return the equations that make values, or that write into references before another."""
        numbers: list[int] = []
        for atom in atoms:
            if not isinstance(atom, Literal):
                if atom in makers:
                    numbers.append(makers[atom])
                numbers.extend(i for i in users.get(atom, []) if i < before)
        return numbers

    order: list[Needed] = []
    done: set[int] = set()
    # Each entry is an equation, and whether what it depends on is in the order already.
    stack = [(i, False) for i in reversed(dependencies(found.roots, len(found.equations)))]
    while stack:
        i, is_ready = stack.pop()
        if i in done:
            continue
        needed = found.equations[i]
        if is_ready:
            done.add(i)
            order.append(needed)
            continue
        used = [
            atom
            for atom, is_used in zip(needed.eqn.invars, needed.operands, strict=True)
            if is_used
        ]
        stack.append((i, True))
        stack.extend((j, False) for j in reversed(dependencies(used, i)) if j not in done)
    return order
