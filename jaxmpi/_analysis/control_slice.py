"""Control slice: the equations and literals that must be equal on all ranks, as text.

Each rank traces the function itself, and a Python number in it becomes a literal, which may differ
between ranks. That is allowed, except where it changes one of these values, the roots of the slice.
They must be computed in the same way on every rank:

- predicates of loops and branches that communicate: they control the messages;
- operands of the sums that are not sent (`constant_sums`);
- outputs that are declared replicated.

The slice is all equations that the roots depend on (`slices.slice_of`). It ends at a collective
whose result is equal on all ranks whatever they put in. The ranks compare its text before they run
the program. The text has no shapes, because batches may be uneven.

Its lines, and the names of its variables, are in the order of the dataflow, and not of the trace:
two ranks may trace independent equations in different orders, such as those of a Python set.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import Role, communicates, role, roles
from jaxmpi._analysis.constant_sums import constant_sums
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._analysis.slices import Needed, Slice, slice_of
from jaxmpi._analysis.text import Text
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = ["Line", "control_equations"]


class Line(NamedTuple):
    """A line of the text: an equation, and JAX's record of where it comes from.

    Attributes:
      text: the line.
      source_info: of the equation; None for a line that is not an equation. `_jaxcompat` reads it
        from this tuple as it does from an equation.
    """

    text: str
    source_info: object = None

    def __str__(self) -> str:
        at = _jaxcompat.source_line(self) if self.source_info else ""
        return f"{self.text} at {at}" if at else self.text


def control_equations(jaxpr: AnyJaxpr, outputs: Sequence[bool] = ()) -> list[Line]:
    """Return the text of the control slice: the lines must be equal on all ranks.

    Args:
      jaxpr: an inlined program, or the jaxpr of a scan or of a branch.
      outputs: which of its outputs are declared replicated; () for none.

    Returns:
      The slice at the top of the jaxpr, then those inside of its loops and branches.
    """
    controlled = _Controlled.find(jaxpr)
    outvars = _jaxcompat.parts(jaxpr)[0].outvars
    declared = [v for v, is_declared in zip(outvars, outputs, strict=False) if is_declared]
    return controlled.lines(declared)


class _Controlled(NamedTuple):
    """Roots of the slice of one jaxpr, and the text of those inside of its loops and branches."""

    jaxpr: AnyJaxpr
    roots: list[Atom]
    inside: list[Line]

    @classmethod
    def find(cls, jaxpr: AnyJaxpr) -> "_Controlled":
        """Find what controls the messages of a jaxpr."""
        inner, _ = _jaxcompat.parts(jaxpr)
        roots: list[Atom] = []
        inside: list[Line] = []
        # predicates of loops and branches that communicate
        for eqn in inner.eqns:
            if not (communicates(eqn) and subjaxprs(eqn)):
                continue
            lines = _lines_inside(eqn)
            if lines:  # what controls messages inside may depend on any operand
                roots += eqn.invars
            elif op_of(eqn) is Op.COND:
                roots.append(eqn.invars[0])
            inside += lines
        # operands of the sums that are not sent
        not_sent = constant_sums(jaxpr)
        roots += [eqn.invars[0] for eqn in inner.eqns if id(eqn) in not_sent]
        return cls(jaxpr, roots, inside)

    def lines(self, more_roots: Sequence[Atom] = ()) -> list[Line]:
        """Return the text: the slice at the top of the jaxpr, then those inside."""
        sliced = slice_of(self.jaxpr, [*self.roots, *more_roots], _makes_equal)
        return _lines(sliced) + self.inside


def _lines_inside(eqn: JaxprEqn) -> list[Line]:
    """Return the text of the control slices inside of a loop or a branch that communicates."""
    found: list[Line] = []
    op = op_of(eqn)
    for inner in subjaxprs(eqn):
        controlled = _Controlled.find(inner)
        if op is Op.WHILE:
            # The predicate may depend, over the iterations, on the whole carry: so all outputs of
            # the condition and of the body are roots.
            found += controlled.lines(_jaxcompat.parts(inner)[0].outvars)
        elif op is Op.SCAN:
            found += _lines_of_scan(eqn, controlled)
        else:
            found += controlled.lines()
    return found


def _lines_of_scan(eqn: JaxprEqn, body: _Controlled) -> list[Line]:
    """Return the text for the body of a scan.

    What controls messages may depend on a carry, and that on the iteration before: the outputs that
    become such carries are roots, too.
    """
    n_consts, n_carry = _jaxcompat.scan_counts(eqn)
    outvars = _jaxcompat.parts(body.jaxpr)[0].outvars
    carried: list[int] = []
    while True:
        roots = [outvars[i] for i in carried]
        ins = slice_of(body.jaxpr, [*body.roots, *roots], _makes_equal).ins
        needed = [i for i in range(n_carry) if ins[n_consts + i] or i in carried]
        if needed == carried:
            return body.lines(roots)
        carried = needed


def _makes_equal(jaxpr: AnyJaxpr, eqn: JaxprEqn) -> bool:
    """Return whether an equation's result is equal on all ranks, whatever they put in.

    A sum of constants is not one of these: it is not sent, and equal only if the constants are.
    """
    return (
        op_of(eqn) in (Op.ALLREDUCE, Op.ALL_GATHER)
        and role(eqn) is Role.COLLECTIVE
        and not eqn.params["axis_index_groups"]
        and id(eqn) not in constant_sums(jaxpr)
    )


# Text


def _lines(sliced: Slice) -> list[Line]:
    """Return a slice as text: each equation after those that it depends on, then the roots."""
    if not sliced.roots:
        return []
    inner, _ = _jaxcompat.parts(sliced.jaxpr)
    text, lines = Text(sliced.jaxpr), []
    role_by_id = roles(sliced.jaxpr)
    index_of: dict[int, int] = {}  # of a collective among those of the jaxpr, by its id
    for eqn in inner.eqns:
        if role_by_id.get(id(eqn)) is Role.COLLECTIVE:
            index_of[id(eqn)] = len(index_of)
    for needed in _in_dataflow_order(sliced):
        eqn = needed.eqn
        if _makes_equal(sliced.jaxpr, eqn):
            # Its operand may be computed differently on each rank, and is not in the slice. Its
            # index tells which collective of the program it is.
            operands = f"operand of collective {index_of[id(eqn)]}"
            lines.append(Line(text.equation(eqn, operands=operands), eqn.source_info))
            continue
        # An operand on which the slice does not depend may be another one on each rank.
        names: list[str] = []
        for atom, is_used in zip(eqn.invars, needed.operands, strict=True):
            names.append(text.atom(atom) if is_used else "_")
        lines.append(Line(text.equation(eqn, operands=", ".join(names)), eqn.source_info))
        for inside in needed.inside:
            lines += _lines(inside)
    lines.append(Line(f"decides: {', '.join(map(text.atom, sliced.roots))}"))
    return lines


def _in_dataflow_order(sliced: Slice) -> list[Needed]:
    """Return the equations of a slice in an order that depends on its dataflow alone.

    It is the post-order of a depth-first search from the roots, through the operands from left to
    right. The search has a stack of its own: a slice may be deeper than Python's recursion limit.
    """
    # Equations are identified by their index in `sliced.equations`.
    maker: dict[Var, int] = {}  # the equation whose result a variable is
    users: dict[Var, list[int]] = {}  # the equations that read or write a reference
    for i, needed in enumerate(sliced.equations):
        for v in needed.eqn.outvars:
            maker[v] = i
        for atom in needed.eqn.invars:
            if not isinstance(atom, Literal) and _jaxcompat.is_reference(atom.aval):
                users.setdefault(atom, []).append(i)

    def dependencies(atoms: Sequence[Atom], reader: int) -> list[int]:
        """Return the equations that make these values, or use a reference before its reader."""
        found: list[int] = []
        for atom in atoms:
            if not isinstance(atom, Literal):
                if atom in maker:
                    found.append(maker[atom])
                found.extend(i for i in users.get(atom, []) if i < reader)
        return found

    order: list[Needed] = []
    done: set[int] = set()
    # Each entry is an equation, and whether what it depends on is in the order already.
    stack = [(i, False) for i in reversed(dependencies(sliced.roots, len(sliced.equations)))]
    while stack:
        i, is_ready = stack.pop()
        if i in done:
            continue
        needed = sliced.equations[i]
        if is_ready:
            done.add(i)
            order.append(needed)
            continue
        used: list[Atom] = []
        for atom, is_used in zip(needed.eqn.invars, needed.operands, strict=True):
            if is_used:
                used.append(atom)
        stack.append((i, True))
        stack.extend((j, False) for j in reversed(dependencies(used, i)) if j not in done)
    return order
