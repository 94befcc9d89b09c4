"""Dataflow: facts about the values of a program, propagated through its jaxpr.

A fact says one thing about one value, such as "equal on all ranks" or "computed from inputs 0 and
3". An analysis is a lattice of facts and rules by primitive. Calls, loops, branches and references
are handled here, once, for every analysis. Forward (`propagate`):

    equation    outs  = rule(equation, operands)
    call        outs  = the callee's outs
    cond        outs  = join(predicate, outs of each branch)
    scan        carry = least fixed point of  carry = join(carry, body(carry))
    while       carry = least fixed point of  carry = join(carry, body(carry), predicate(carry))
    reference   what is read = join of what may have been written last

The initial carry is part of the join, so a loop without an iteration is right. Facts only grow, and
a lattice has a finite height, so each fixed point is reached after a few iterations.

Backward (`slice_of`), a slice has the equations that some values depend on, with the same fixed
points.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import callee, state_start, subjaxprs
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = ["Analysis", "Needed", "Slice", "propagate", "slice_of"]

Fact = TypeVar("Fact")
# facts of the operands -> facts of the results
Rule: TypeAlias = Callable[[JaxprEqn, list[Fact]], list[Fact]]
# facts of the operands, of the results, and of what decides whether the equation runs
Visit: TypeAlias = Callable[[JaxprEqn, list[Fact], list[Fact], Fact], None]


# Forward


@dataclass(frozen=True)
class Analysis(Generic[Fact]):
    """A lattice of facts, and how primitives change them.

    Attributes:
      bottom: the fact of a literal; `join` with it changes nothing.
      join: returns the fact of a value that may be any of these.
      rules: the facts of results, by operation. One for calls, loops or branches keeps the
        propagation out of their jaxprs.
      otherwise: the rule of all other operations. By default each result has the join of all
        operands.
      constants: the fact of an array that the program itself holds; `bottom` by default.
      returned: the last word on the results of an equation that contains jaxprs, whose facts it
        gets behind those of the operands.
    """

    bottom: Fact
    join: Callable[[Sequence[Fact]], Fact]
    rules: Mapping[Op, Rule[Fact]] = field(default_factory=dict)
    otherwise: Rule[Fact] | None = None
    constants: Fact | None = None
    returned: Callable[[JaxprEqn, list[Fact], list[Fact]], list[Fact]] | None = None


def propagate(
    analysis: Analysis[Fact],
    jaxpr: AnyJaxpr,
    ins: Sequence[Fact],
    visit: Visit[Fact] | None = None,
) -> list[Fact]:
    """Return the facts of a program's outputs, given those of its inputs.

    Args:
      analysis: the lattice and its rules.
      jaxpr: the program, or one inside of it.
      ins: for each input; of a reference, the fact of what it holds.
      visit: called once for each equation, inner ones first, with the final facts of its operands,
        of its results, and of the predicates of the branches and loops around it: where checks and
        warnings belong.
    """
    return _Forward(analysis).run(jaxpr, ins, [], visit, analysis.bottom)


class _Contents(Generic[Fact]):
    """The fact of what a reference holds, at the equation that the propagation has reached."""

    def __init__(self, fact: Fact) -> None:
        self.fact = fact


class _Forward(Generic[Fact]):
    def __init__(self, analysis: Analysis[Fact]) -> None:
        self._analysis, self._join = analysis, analysis.join

    def run(
        self,
        jaxpr: AnyJaxpr,
        ins: Sequence[Fact],
        references: Sequence[_Contents[Fact] | None],
        visit: Visit[Fact] | None,
        control: Fact,
    ) -> list[Fact]:
        """Propagate through a jaxpr.

        Args:
          jaxpr: the jaxpr.
          ins: the facts of its inputs.
          references: the contents of references from outside, None for all other inputs; [] if none
            is a reference.
          visit: as in `propagate`.
          control: the fact of what decides whether, or how often, the jaxpr runs.
        """
        analysis, inner = self._analysis, _jaxcompat.parts(jaxpr)[0]
        constant = analysis.bottom if analysis.constants is None else analysis.constants
        facts: dict[Var, Fact] = dict.fromkeys(inner.constvars, constant)
        facts.update(zip(inner.invars, ins, strict=True))
        held: dict[Var, _Contents[Fact]] = {}
        for v, contents in zip(inner.invars, references, strict=False):
            if contents is not None:
                held[v] = contents
        for v, fact in facts.items():
            if v not in held and _jaxcompat.is_reference(v.aval):
                held[v] = _Contents(fact)

        bottom = analysis.bottom

        def facts_of(atoms: Sequence[Atom]) -> list[Fact]:
            if not held:  # as in most programs
                return [bottom if isinstance(atom, Literal) else facts[atom] for atom in atoms]
            found = []
            for atom in atoms:
                if isinstance(atom, Literal):
                    found.append(bottom)
                else:
                    found.append(held[atom].fact if atom in held else facts[atom])
            return found

        for eqn in inner.eqns:
            operands = facts_of(eqn.invars)
            op = op_of(eqn)
            if op is Op.NEW_REFERENCE:
                held[eqn.outvars[0]] = _Contents(self._join(operands))
                results = [self._join(operands)]
            else:
                mine: list[_Contents[Fact] | None] = []
                if held:
                    for atom in eqn.invars:
                        mine.append(None if isinstance(atom, Literal) else held.get(atom))
                results = self._results(eqn, op, operands, mine, visit, control)
            if visit is not None:
                visit(eqn, operands, results, control)
            facts.update(zip(eqn.outvars, results, strict=True))
        return facts_of(inner.outvars)

    def _results(
        self,
        eqn: JaxprEqn,
        op: Op,
        operands: list[Fact],
        references: list[_Contents[Fact] | None],
        visit: Visit[Fact] | None,
        control: Fact,
    ) -> list[Fact]:
        analysis = self._analysis
        if op in analysis.rules:
            results = analysis.rules[op](eqn, operands)
            self._write(eqn, op, operands, references, control)
            return results
        if op is Op.SCAN:
            results = self._scan(eqn, operands, references, visit, control)
        elif op is Op.WHILE:
            results = self._while(eqn, operands, references, visit, control)
        elif op is Op.COND:
            results = self._cond(eqn, operands, references, visit, control)
        elif op in (Op.CALL, Op.LINEAR_SOLVE):
            jaxpr, taken = callee(eqn, operands)
            inside = callee(eqn, references)[1] if references else []
            results = self.run(jaxpr, taken, inside, visit, control)
        else:
            if analysis.otherwise is None:
                results = [self._join(operands)] * len(eqn.outvars)
            else:
                results = analysis.otherwise(eqn, operands)
            self._write(eqn, op, operands, references, control)
            return results
        return results if analysis.returned is None else analysis.returned(eqn, operands, results)

    def _write(
        self,
        eqn: JaxprEqn,
        op: Op,
        operands: list[Fact],
        references: list[_Contents[Fact] | None],
        control: Fact,
    ) -> None:
        """Update the contents of the references that an equation may write into."""
        if op in (Op.GET, Op.FREEZE) or not any(references):
            return
        # A swap of all elements leaves nothing of what was there.
        overwrites = op is Op.SWAP and eqn.invars[1].aval.shape == eqn.invars[0].aval.shape
        written = self._join([control, *operands[1 if overwrites else 0 :]])
        for held in references:
            if held is not None:
                held.fact = written if overwrites else self._join([held.fact, written])

    def _cond(
        self,
        eqn: JaxprEqn,
        operands: list[Fact],
        references: list[_Contents[Fact] | None],
        visit: Visit[Fact] | None,
        control: Fact,
    ) -> list[Fact]:
        predicate, *rest = operands
        inside = self._join([control, predicate])
        before = _saved(references)
        results, after = [], []
        for branch in eqn.params["branches"]:
            _restore(references, before)
            results.append(self.run(branch, rest, references[1:], visit, inside))
            after.append(_saved(references))
        _restore(references, [self._join(facts) for facts in zip(*after, strict=True)])
        return [self._join([predicate, *outs]) for outs in zip(*results, strict=True)]

    def _scan(
        self,
        eqn: JaxprEqn,
        operands: list[Fact],
        references: list[_Contents[Fact] | None],
        visit: Visit[Fact] | None,
        control: Fact,
    ) -> list[Fact]:
        body = eqn.params["jaxpr"]
        first, n_carry = _jaxcompat.scan_counts(eqn)
        start = operands[first : first + n_carry]

        def run(carry: list[Fact], visit: Visit[Fact] | None) -> list[Fact]:
            ins = [*operands[:first], *carry, *operands[first + n_carry :]]
            return self.run(body, ins, references, visit, control)

        before = _saved(references)
        carry = self._fixed_point(start, references, lambda carry: run(carry, None)[:n_carry])
        outs = run(carry, visit)
        if eqn.params["length"] == 0:
            _restore(references, before)
            return [*start, *outs[n_carry:]]
        return outs  # at least one iteration: those of the last one

    def _while(
        self,
        eqn: JaxprEqn,
        operands: list[Fact],
        references: list[_Contents[Fact] | None],
        visit: Visit[Fact] | None,
        control: Fact,
    ) -> list[Fact]:
        n_cond, first = eqn.params["cond_nconsts"], state_start(eqn)

        def condition(carry: list[Fact], visit: Visit[Fact] | None, control: Fact) -> Fact:
            ins, held = [*operands[:n_cond], *carry], references[:n_cond]
            (goes_on,) = self.run(eqn.params["cond_jaxpr"], ins, held, visit, control)
            return goes_on

        def run(carry: list[Fact], visit: Visit[Fact] | None) -> list[Fact]:
            goes_on = condition(carry, None, control)
            inside = self._join([control, goes_on])
            if visit is not None:  # the condition is computed again after each iteration
                condition(carry, visit, inside)
            ins, held = [*operands[n_cond:first], *carry], references[n_cond:first]
            outs = self.run(eqn.params["body_jaxpr"], ins, held, visit, inside)
            # How often the body runs depends on the predicate, and so does the whole state.
            return [self._join([out, goes_on]) for out in outs]

        carry = self._fixed_point(operands[first:], references, lambda carry: run(carry, None))
        head = _saved(references)
        if visit is not None:
            run(carry, visit)
        _restore(references, head)  # which includes what each iteration may have written
        return carry

    def _fixed_point(
        self,
        carry: list[Fact],
        references: list[_Contents[Fact] | None],
        iterate: Callable[[list[Fact]], list[Fact]],
    ) -> list[Fact]:
        """Return the least carry that contains the initial one, and that an iteration keeps.

        The contents of the references become those at the beginning of any iteration.
        """
        while True:
            before = _saved(references)
            outs = iterate(carry)
            grown = [self._join(pair) for pair in zip(carry, outs, strict=True)]
            after = [self._join(pair) for pair in zip(before, _saved(references), strict=True)]
            _restore(references, after)
            if grown == carry and after == before:
                return carry
            carry = grown


def _saved(references: Iterable[_Contents[Fact] | None]) -> list[Fact]:
    return [held.fact for held in references if held is not None]


def _restore(references: Iterable[_Contents[Fact] | None], facts: Sequence[Fact]) -> None:
    present = [held for held in references if held is not None]
    for held, fact in zip(present, facts, strict=True):
        held.fact = fact


# Backward

Ends: TypeAlias = Callable[[AnyJaxpr, JaxprEqn], bool]


class Needed(NamedTuple):
    """An equation of a slice.

    Attributes:
      eqn: the equation.
      operands: which of its operands the slice depends on.
      inside: the slices of its jaxprs.
    """

    eqn: JaxprEqn
    operands: Sequence[bool]
    inside: Sequence["Slice"]


class Slice(NamedTuple):
    """Equations of a jaxpr that some of its values depend on.

    Attributes:
      jaxpr: the jaxpr.
      roots: the values.
      ins: which inputs they depend on.
      equations: in the order of the jaxpr.
    """

    jaxpr: AnyJaxpr
    roots: Sequence[Atom]
    ins: Sequence[bool]
    equations: Sequence[Needed]


def slice_of(jaxpr: AnyJaxpr, roots: Sequence[Atom], ends: Ends) -> Slice:
    """Return the equations that values of a jaxpr depend on.

    Args:
      jaxpr: the program, or one inside of it.
      roots: the values.
      ends: tells, for a jaxpr and an equation of it, whether the slice ends there, without what the
        equation depends on.
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
            if ends(jaxpr, eqn):
                found = Needed(eqn, [False] * len(eqn.invars), [])
            else:
                found = _needed(eqn, outs, ends)
            equations.append(found)
            for atom, used in zip(eqn.invars, found.operands, strict=True):
                if used and not isinstance(atom, Literal):
                    needed.add(atom)
        # In a loop, what is written at the end of the body is read at its beginning.
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


def _needed(eqn: JaxprEqn, outs: Sequence[bool], ends: Ends) -> Needed:
    """Return an equation of a slice that depends on these of its results."""

    def behind(jaxpr: AnyJaxpr, outs: Sequence[bool]) -> Slice:
        inner, _ = _jaxcompat.parts(jaxpr)
        roots = [atom for atom, used in zip(inner.outvars, outs, strict=True) if used]
        # What is written into a reference from outside may be read there.
        roots += [v for v in inner.invars if _jaxcompat.is_reference(v.aval)]
        return slice_of(jaxpr, roots, ends)

    op = op_of(eqn)
    if op is Op.SCAN:
        first, count = _jaxcompat.scan_counts(eqn)
        body, carry = _body_slice(eqn.params["jaxpr"], outs, first, count, behind)
        ins = list(body.ins)
        if eqn.params["length"] == 0:  # the initial carry is the result
            ins[first : first + count] = carry
        return Needed(eqn, ins, [body])
    if op is Op.WHILE:
        n_cond = eqn.params["cond_nconsts"]
        condition = behind(eqn.params["cond_jaxpr"], [True])
        state = [a or b for a, b in zip(outs, condition.ins[n_cond:], strict=True)]
        n_body = eqn.params["body_nconsts"]
        body, carry = _body_slice(eqn.params["body_jaxpr"], state, n_body, len(state), behind)
        # Without an iteration, the initial state is the result.
        return Needed(eqn, [*condition.ins[:n_cond], *body.ins[:n_body], *carry], [condition, body])
    if op is Op.COND:
        branches = [behind(branch, outs) for branch in eqn.params["branches"]]
        used = [any(of_branches) for of_branches in zip(*(b.ins for b in branches), strict=True)]
        return Needed(eqn, [True, *used], branches)
    inside = []
    for jaxpr in subjaxprs(eqn):
        outvars = _jaxcompat.parts(jaxpr)[0].outvars
        inside.append(behind(jaxpr, outs if len(outvars) == len(outs) else [True] * len(outvars)))
    if len(inside) == 1 and len(inside[0].ins) == len(eqn.invars):
        return Needed(eqn, inside[0].ins, inside)
    return Needed(eqn, [True] * len(eqn.invars), inside)


def _body_slice(
    body: AnyJaxpr,
    outs: Sequence[bool],
    first: int,
    count: int,
    behind: Callable[[AnyJaxpr, Sequence[bool]], Slice],
) -> tuple[Slice, list[bool]]:
    """Return the slice of a loop's body, and which carries it needs.

    Args:
      body: the body.
      outs: which of its outputs are needed in the end.
      first: the number of inputs before the carries.
      count: the number of carries, each of which depends on the iteration before.
      behind: as `slice_of`, for outputs.
    """
    while True:
        found = behind(body, outs)
        carried = found.ins[first : first + count]
        after = [a or b for a, b in zip(outs[:count], carried, strict=True)]
        if after == list(outs[:count]):
            return found, after
        outs = [*after, *outs[count:]]
