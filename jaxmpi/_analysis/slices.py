"""Slices: the equations of a program that some of its values, the roots, depend on.

`slice_of` goes through a jaxpr backward, from the roots to the inputs. A result is needed if a root
depends on it, and an equation is in the slice if one of its results is needed. Then needed, too:

    equation    all operands; none where the slice ends at the equation
    call        the operands that the slice of the callee reads
    barrier     operand i, if result i is needed
    cond        the predicate, and the operands that the slice of a branch reads
    scan        the operands that the slice of the body reads, and the carries that it reads in any
                iteration
    while       the same for the slices of the condition and of the body, and the initial carries
    reference   all equations that may write into one that is needed are in the slice

Which carries a loop needs is a fixed point, as in `dataflow`: a carry that the body reads is a
result of the iteration before.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = ["Needed", "Slice", "slice_of"]

# (jaxpr, equation of it) -> whether a slice ends at the equation
EndsAt: TypeAlias = Callable[[AnyJaxpr, JaxprEqn], bool]
# (jaxpr, which of its outputs are needed) -> the slice of these outputs
SliceOutputs: TypeAlias = Callable[[AnyJaxpr, Sequence[bool]], "Slice"]


class Needed(NamedTuple):
    """An equation of a slice.

    Attributes:
      eqn: the equation.
      operands: which of its operands the slice depends on.
      inside: the slices of its jaxprs, in their order.
    """

    eqn: JaxprEqn
    operands: Sequence[bool]
    inside: Sequence["Slice"]


class Slice(NamedTuple):
    """Equations of a jaxpr that some of its values, the roots, depend on.

    Attributes:
      jaxpr: the jaxpr.
      roots: the values.
      ins: which inputs of the jaxpr the roots depend on.
      equations: the equations, in the order of the jaxpr.
    """

    jaxpr: AnyJaxpr
    roots: Sequence[Atom]
    ins: Sequence[bool]
    equations: Sequence[Needed]


def slice_of(jaxpr: AnyJaxpr, roots: Sequence[Atom], ends_at: EndsAt) -> Slice:
    """Return the slice of some values of a jaxpr: the equations that they depend on.

    Args:
      jaxpr: the program, or one inside of it.
      roots: the values.
      ends_at: tells whether the slice ends at an equation: it has the equation then, but not those
        that the equation depends on.
    """
    inner, _ = _jaxcompat.parts(jaxpr)
    needed = {atom for atom in roots if not isinstance(atom, Literal)}
    while True:
        references = {v for v in needed if _jaxcompat.is_reference(v.aval)}
        equations: list[Needed] = []
        for eqn in reversed(inner.eqns):
            outs = [v in needed for v in eqn.outvars]
            if not any(outs) and not _writes_one_of(eqn, needed):
                continue
            if ends_at(jaxpr, eqn):
                found = Needed(eqn, [False] * len(eqn.invars), [])
            else:
                found = _needed_equation(eqn, outs, ends_at)
            equations.append(found)
            for atom, is_used in zip(eqn.invars, found.operands, strict=True):
                if is_used and not isinstance(atom, Literal):
                    needed.add(atom)
        # A reference that turned out to be needed may be written by an equation after the one that
        # needs it: if the jaxpr is the body of a loop, the next iteration reads that. So go through
        # the equations again, until no further reference is needed.
        if references == {v for v in needed if _jaxcompat.is_reference(v.aval)}:
            return Slice(jaxpr, roots, [v in needed for v in inner.invars], equations[::-1])


def _writes_one_of(eqn: JaxprEqn, needed: set[Var]) -> bool:
    """Return whether an equation may write into a reference that is needed."""
    if op_of(eqn) in (Op.GET, Op.FREEZE):
        return False
    for atom in eqn.invars:
        if isinstance(atom, Var) and atom in needed and _jaxcompat.is_reference(atom.aval):
            return True
    return False


def _needed_equation(eqn: JaxprEqn, outs: Sequence[bool], ends_at: EndsAt) -> Needed:
    """Return an equation as an element of a slice.

    Args:
      eqn: the equation.
      outs: which of its results the slice depends on.
      ends_at: as in `slice_of`.
    """

    def slice_outputs(jaxpr: AnyJaxpr, outs: Sequence[bool]) -> Slice:
        inner, _ = _jaxcompat.parts(jaxpr)
        roots = [atom for atom, is_used in zip(inner.outvars, outs, strict=True) if is_used]
        # What is written into a reference from outside may be read there.
        roots += [v for v in inner.invars if _jaxcompat.is_reference(v.aval)]
        return slice_of(jaxpr, roots, ends_at)

    op = op_of(eqn)
    if op is Op.SCAN:
        n_consts, n_carry = _jaxcompat.scan_counts(eqn)
        body, needed_carry = _body_slice(
            eqn.params["jaxpr"], outs, n_consts, n_carry, slice_outputs
        )
        ins = list(body.ins)
        if eqn.params["length"] == 0:  # no iteration: the result is the initial carry
            ins[n_consts : n_consts + n_carry] = needed_carry
        return Needed(eqn, ins, [body])
    if op is Op.WHILE:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        # How often the body runs depends on what the condition depends on.
        condition = slice_outputs(eqn.params["cond_jaxpr"], [True])
        carry = [a or b for a, b in zip(outs, condition.ins[n_cond:], strict=True)]
        body, needed_carry = _body_slice(
            eqn.params["body_jaxpr"], carry, n_body, len(carry), slice_outputs
        )
        # There may be no iteration, so the needed carries depend on their initial values.
        ins = [*condition.ins[:n_cond], *body.ins[:n_body], *needed_carry]
        return Needed(eqn, ins, [condition, body])
    if op is Op.COND:
        branches = [slice_outputs(branch, outs) for branch in eqn.params["branches"]]
        ins_of_branches = [branch.ins for branch in branches]
        ins = [any(needed) for needed in zip(*ins_of_branches, strict=True)]
        return Needed(eqn, [True, *ins], branches)
    if op is Op.BARRIER:  # result i is operand i
        return Needed(eqn, outs, [])
    # Calls, and any other equation. Its results are the outputs of its jaxpr if there are as many,
    # and its operands the inputs; otherwise, all outputs and all operands count as needed.
    inside = []
    for jaxpr in subjaxprs(eqn):
        outvars = _jaxcompat.parts(jaxpr)[0].outvars
        needed_outs = outs if len(outvars) == len(outs) else [True] * len(outvars)
        inside.append(slice_outputs(jaxpr, needed_outs))
    if len(inside) == 1 and len(inside[0].ins) == len(eqn.invars):
        return Needed(eqn, inside[0].ins, inside)
    return Needed(eqn, [True] * len(eqn.invars), inside)


def _body_slice(
    body: AnyJaxpr,
    outs: Sequence[bool],
    n_consts: int,
    n_carry: int,
    slice_outputs: SliceOutputs,
) -> tuple[Slice, list[bool]]:
    """Return (slice of a loop's body, which carries are needed after some iteration).

    A carry that the slice reads is a result of the iteration before, so it is needed as an output,
    too: that is repeated until no further carry is.

    Args:
      body: the body. Its inputs are constants, carries and rows, its outputs carries and rows.
      outs: which of its outputs are needed after the last iteration.
      n_consts: the number of constants.
      n_carry: the number of carries.
      slice_outputs: returns the slice of some outputs of a jaxpr.
    """
    while True:
        found = slice_outputs(body, outs)
        read = found.ins[n_consts : n_consts + n_carry]
        needed_carry = [a or b for a, b in zip(outs[:n_carry], read, strict=True)]
        if needed_carry == list(outs[:n_carry]):
            return found, needed_carry
        outs = [*needed_carry, *outs[n_carry:]]
