"""Dataflow: facts about the values of a program, propagated through its jaxpr.

A fact is about one value, such as "equal on all ranks" or "computed from inputs 0 and 3". An
analysis is a lattice of facts, and rules by operation. Calls, loops, branches and references are
handled here, once, for every analysis. `propagate` goes through a program in the order of its
equations:

    equation    outs  = rule(equation, operands)
    call        outs  = callee(operands)
    barrier     outs  = operands
    cond        outs  = join(predicate, branch(operands) for each branch)
    scan        carry = least fixed point of  carry = join(carry, body(carry)),  outs = body(carry)
    while       carry = least fixed point of  carry = join(carry, body(carry), predicate(carry))
    reference   contents = join of all that may have been written last, and of the predicates that
                decide whether it was written

The fixed points start with the initial carry. A while may end before its first iteration, so its
results are the carry itself; a scan of one or more iterations returns what its body does. Facts
only grow, and a lattice has a finite height, so each fixed point is reached after a few iterations.

State of Python that callbacks read and write is not followed.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import callee, state_start
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = ["Analysis", "propagate"]

Fact = TypeVar("Fact")
# (equation, facts of its operands) -> facts of its results
Rule: TypeAlias = Callable[[JaxprEqn, list[Fact]], list[Fact]]
# (equation, facts of its operands, facts of its results, fact of what decides whether it runs)
Visit: TypeAlias = Callable[[JaxprEqn, list[Fact], list[Fact], Fact], None]


@dataclass(frozen=True)
class Analysis(Generic[Fact]):
    """A lattice of facts, and how equations change them.

    Attributes:
      bottom: the fact of a literal; `join` with it changes nothing.
      join: returns the least fact that covers all of these: that of a value which may be any of
        them, or is computed from them. `join([])` is `bottom`.
      rules: the rules by operation. A rule for calls, loops or branches replaces the propagation
        through their jaxprs.
      otherwise: the rule of all other operations; None where each result has the join of all
        operands.
      after_inner: called as (equation, facts of operands, facts of results) once the propagation
        has gone through the jaxprs of an equation; returns the facts of its results.
      constants: the fact of an array that the program, or a function inside of it, has captured.

    Facts are hashable, and are compared by `==`. The operand fact of a reference is that of its
    contents. A rule must not return a smaller fact for larger operands; otherwise a fixed point
    need not be the least.
    """

    bottom: Fact
    join: Callable[[Sequence[Fact]], Fact]
    rules: Mapping[Op, Rule[Fact]] = field(default_factory=dict)
    otherwise: Rule[Fact] | None = None
    after_inner: Callable[[JaxprEqn, list[Fact], list[Fact]], list[Fact]] | None = None
    constants: Fact = field(kw_only=True)


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
      ins: the fact of each input; for a reference, that of its contents.
      visit: called for each equation after those that it contains, once its facts are final: with
        the facts of its operands, of its results, and of the predicates of all branches and loops
        around it. The equations of a jaxpr that several calls share are visited once for all calls
        with the same facts. An analysis that raises errors or warns does so here.
    """
    return _Forward(analysis).run(jaxpr, ins, [], visit, analysis.bottom)


class _Contents(Generic[Fact]):
    """The fact of a reference's contents, up to the equation that the propagation has reached."""

    def __init__(self, fact: Fact) -> None:
        self.fact = fact


class _Forward(Generic[Fact]):
    """The forward propagation of one analysis.

    The methods return the facts of the results of a jaxpr or an equation, and update the contents
    of the references that it writes into. Their arguments are:

    - operands: the fact of each operand;
    - references: for each operand the contents of the reference that it is, or None; [] if no
      operand is a reference;
    - visit: as in `propagate`. It is None while a fixed point is computed, as the facts are not
      final yet: the loop's jaxprs are run once more with it afterwards;
    - control: the join of the predicates of all branches and loops around.
    """

    def __init__(self, analysis: Analysis[Fact]) -> None:
        self._analysis, self._join = analysis, analysis.join
        # the results of the jaxprs that `run` has gone through
        self._known: dict[Hashable, list[Fact]] = {}

    def run(
        self,
        jaxpr: AnyJaxpr,
        ins: Sequence[Fact],
        references: Sequence[_Contents[Fact] | None],
        visit: Visit[Fact] | None,
        control: Fact,
    ) -> list[Fact]:
        """Propagate through a jaxpr; its inputs have the facts `ins`."""
        if any(references):
            return self._run(jaxpr, ins, references, visit, control)
        # Calls of one function share a jaxpr. If each of d functions calls the next one twice, the
        # last one is called 2^d times: with the same facts, its results are the same. Nested loops
        # go through their innermost body as often, for the fixed points.
        key = id(_jaxcompat.parts(jaxpr)[0]), tuple(ins), control, visit is None
        if key not in self._known:
            self._known[key] = self._run(jaxpr, ins, references, visit, control)
        return self._known[key]

    def _run(
        self,
        jaxpr: AnyJaxpr,
        ins: Sequence[Fact],
        references: Sequence[_Contents[Fact] | None],
        visit: Visit[Fact] | None,
        control: Fact,
    ) -> list[Fact]:
        """Do what `run` does, for facts that are new."""
        analysis, inner = self._analysis, _jaxcompat.parts(jaxpr)[0]
        bottom = analysis.bottom
        facts: dict[Var, Fact] = dict.fromkeys(inner.constvars, analysis.constants)
        facts.update(zip(inner.invars, ins, strict=True))
        # Contents are shared with the caller: what is written here is read there, too.
        contents_of: dict[Var, _Contents[Fact]] = {}
        for v, contents in zip(inner.invars, references, strict=False):
            if contents is not None:
                contents_of[v] = contents
        for v, fact in facts.items():
            if v not in contents_of and _jaxcompat.is_reference(v.aval):
                contents_of[v] = _Contents(fact)

        def facts_of(atoms: Sequence[Atom]) -> list[Fact]:
            if not contents_of:  # as in most programs
                return [bottom if isinstance(atom, Literal) else facts[atom] for atom in atoms]
            found = []
            for atom in atoms:
                if isinstance(atom, Literal):
                    found.append(bottom)
                elif atom in contents_of:
                    found.append(contents_of[atom].fact)
                else:
                    found.append(facts[atom])
            return found

        for eqn in inner.eqns:
            operands = facts_of(eqn.invars)
            op = op_of(eqn)
            if op is Op.NEW_REFERENCE:
                contents_of[eqn.outvars[0]] = _Contents(self._join(operands))
                results = [self._join(operands)]
            else:
                of_operands: list[_Contents[Fact] | None] = []
                if contents_of:
                    for atom in eqn.invars:
                        is_literal = isinstance(atom, Literal)
                        of_operands.append(None if is_literal else contents_of.get(atom))
                results = self._results(eqn, op, operands, of_operands, visit, control)
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
        """Propagate through an equation."""
        analysis = self._analysis
        # By a rule of the analysis
        if op in analysis.rules:
            results = analysis.rules[op](eqn, operands)
            if references:
                self._write(eqn, op, operands, references, control)
            return results
        # Through the jaxprs of the equation
        if op is Op.SCAN:
            results = self._scan(eqn, operands, references, visit, control)
        elif op is Op.WHILE:
            results = self._while(eqn, operands, references, visit, control)
        elif op is Op.COND:
            results = self._cond(eqn, operands, references, visit, control)
        elif op in (Op.CALL, Op.LINEAR_SOLVE):
            jaxpr, arguments = callee(eqn, operands)
            of_arguments = callee(eqn, references)[1] if references else []
            results = self.run(jaxpr, arguments, of_arguments, visit, control)
        # Result i of a barrier is operand i: it joins nothing.
        elif op is Op.BARRIER:
            return operands
        # By the rule for all others
        else:
            if analysis.otherwise is None:
                results = [self._join(operands)] * len(eqn.outvars)
            else:
                results = analysis.otherwise(eqn, operands)
            if references:
                self._write(eqn, op, operands, references, control)
            return results
        if analysis.after_inner is not None:
            results = analysis.after_inner(eqn, operands, results)
        return results

    def _write(
        self,
        eqn: JaxprEqn,
        op: Op,
        operands: list[Fact],
        references: list[_Contents[Fact] | None],
        control: Fact,
    ) -> None:
        """Update the contents of the references that an equation may write into.

        What is written depends on the operands, the indices among them. Whether it is written
        depends on the predicates around the equation.
        """
        if op in (Op.GET, Op.FREEZE) or not any(references):
            return
        # A swap of all elements leaves nothing of the old contents, which are operand 0. Any other
        # equation may write a part of the elements, or into one of several references. A swap with
        # indices is not one of all elements, even if the shapes agree: it may write one element
        # twice and another never.
        has_indices = len(eqn.invars) > 2
        if op is Op.SWAP and not has_indices and _have_one_shape(eqn.invars):
            written = self._join([control, *operands[1:]])
            for contents in references:
                if contents is not None:
                    contents.fact = written
            return
        written = self._join([control, *operands])
        for contents in references:
            if contents is not None:
                contents.fact = self._join([contents.fact, written])

    def _cond(
        self,
        eqn: JaxprEqn,
        operands: list[Fact],
        references: list[_Contents[Fact] | None],
        visit: Visit[Fact] | None,
        control: Fact,
    ) -> list[Fact]:
        """Propagate through a cond: any of its branches may be taken."""
        predicate, *arguments = operands
        control_inside = self._join([control, predicate])
        before = _saved(references)
        results, after = [], []
        for branch in eqn.params["branches"]:
            _restore(references, before)
            results.append(self.run(branch, arguments, references[1:], visit, control_inside))
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
        """Propagate through a scan: its operands are constants, the carry, and stacked rows."""
        body = eqn.params["jaxpr"]
        n_consts, n_carry = _jaxcompat.scan_counts(eqn)
        consts = operands[:n_consts]
        initial = operands[n_consts : n_consts + n_carry]
        rows = operands[n_consts + n_carry :]

        def run(carry: list[Fact], visit: Visit[Fact] | None) -> list[Fact]:
            return self.run(body, [*consts, *carry, *rows], references, visit, control)

        before = _saved(references)
        carry = self._fixed_point(initial, references, lambda carry: run(carry, None)[:n_carry])
        outs = run(carry, visit)
        if eqn.params["length"] == 0:  # no iteration: nothing is written, the carry is returned
            _restore(references, before)
            return [*initial, *outs[n_carry:]]
        return outs  # of the last iteration

    def _while(
        self,
        eqn: JaxprEqn,
        operands: list[Fact],
        references: list[_Contents[Fact] | None],
        visit: Visit[Fact] | None,
        control: Fact,
    ) -> list[Fact]:
        """Propagate through a while_loop.

        Its operands are the constants of the condition, those of the body, and the initial carry.
        """
        n_cond, first_carry = eqn.params["cond_nconsts"], state_start(eqn)
        cond_consts, body_consts = operands[:n_cond], operands[n_cond:first_carry]

        def condition(carry: list[Fact], visit: Visit[Fact] | None, control: Fact) -> Fact:
            (goes_on,) = self.run(
                eqn.params["cond_jaxpr"],
                [*cond_consts, *carry],
                references[:n_cond],
                visit,
                control,
            )
            return goes_on

        def decide(carry: list[Fact], visit: Visit[Fact] | None) -> tuple[Fact, Fact]:
            """Run the condition; return its result, and the control of an iteration."""
            # The condition runs again after each iteration. So whether its equations run depends on
            # its own result: they run once more when that is known.
            goes_on = condition(carry, None, control)
            control_inside = self._join([control, goes_on])
            if visit is not None or any(references[:n_cond]):
                condition(carry, visit, control_inside)
            return goes_on, control_inside

        def run(carry: list[Fact], visit: Visit[Fact] | None) -> list[Fact]:
            goes_on, control_inside = decide(carry, visit)
            outs = self.run(
                eqn.params["body_jaxpr"],
                [*body_consts, *carry],
                references[n_cond:first_carry],
                visit,
                control_inside,
            )
            # How often the body runs depends on the predicate, and so does the whole carry.
            return [self._join([out, goes_on]) for out in outs]

        initial = operands[first_carry:]
        carry = self._fixed_point(initial, references, lambda carry: run(carry, None))
        # The contents are now those before any iteration, the one that does not happen included.
        at_condition = _saved(references)
        if visit is not None:
            run(carry, visit)
        _restore(references, at_condition)
        if any(references[:n_cond]):
            decide(carry, None)  # the condition may write, too, and is what runs last
        return carry

    def _fixed_point(
        self,
        carry: list[Fact],
        references: list[_Contents[Fact] | None],
        iterate: Callable[[list[Fact]], list[Fact]],
    ) -> list[Fact]:
        """Return the least carry that covers the initial one and what an iteration makes of it.

        References are carried from one iteration to the next, too: afterwards, their contents are
        those at the beginning of any iteration.

        Args:
          carry: the facts of the initial carry.
          references: those that an iteration may write into.
          iterate: returns the carry after an iteration, and updates the references.
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


def _have_one_shape(atoms: Sequence[Atom]) -> bool:
    return len({atom.aval.shape for atom in atoms}) == 1


def _saved(references: Iterable[_Contents[Fact] | None]) -> list[Fact]:
    """Return the facts of the references' contents, for `_restore`."""
    return [contents.fact for contents in references if contents is not None]


def _restore(references: Iterable[_Contents[Fact] | None], facts: Sequence[Fact]) -> None:
    """Set the facts of the references' contents to those of `_saved`."""
    present = [contents for contents in references if contents is not None]
    for contents, fact in zip(present, facts, strict=True):
        contents.fact = fact
