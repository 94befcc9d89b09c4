"""Control slice: the equations and literals that must be equal on all ranks, as text.

A Python number in a traced function is a literal, and may be another one on each rank. Three kinds
of values must follow from the same computation on every rank: the predicates of loops and branches
that communicate, the sums of `folded`, which are not sent, and the outputs that are declared
replicated. The text has no shapes, as batches may be uneven, and it ends at collectives whose
results are equal on all ranks whatever they reduce.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal

from jaxmpi import _jaxcompat
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.classify import communicates, kind, subjaxprs
from jaxmpi._lowering.combine import folded
from jaxmpi._lowering.rank_classes import EQUALIZING
from jaxmpi._lowering.text import Text

__all__ = ["Line", "control_equations"]


class Line(NamedTuple):
    """An equation as text, and JAX's record of where it comes from."""

    text: str
    source_info: object = None

    def __str__(self) -> str:
        return " at ".join(
            filter(None, (self.text, _jaxcompat.source_line(self) if self.source_info else ""))
        )


# which inputs some values depend on, and the equations between them
Slice = tuple[list[bool], list[Line]]


def control_equations(jaxpr: AnyJaxpr, outputs: Sequence[bool] = ()) -> list[Line]:
    """The equations that must be the same on all ranks.

    Args:
      jaxpr: an opened program.
      outputs: which of its outputs are declared replicated.
    """
    known = folded(jaxpr)
    inner, _ = _jaxcompat.parts(jaxpr)
    loops = [eqn for eqn in inner.eqns if communicates(eqn) and any(True for _ in subjaxprs(eqn))]
    roots = [v for eqn in loops for v in _deciding(eqn)]
    roots += [eqn.invars[0] for eqn in inner.eqns if id(eqn) in known]
    roots += [v for v, declared in zip(inner.outvars, outputs, strict=False) if declared]
    return _behind(jaxpr, roots)[1] + [line for eqn in loops for line in _inside(eqn)]


def _deciding(eqn: JaxprEqn) -> Sequence[Atom]:
    """The operands that a predicate, of the equation or inside of it, may depend on."""
    if _inside(eqn):
        return eqn.invars
    return eqn.invars[:1] if eqn.primitive.name == "cond" else ()


def _inside(eqn: JaxprEqn) -> list[Line]:
    if eqn.primitive.name == "while":
        return [
            line
            for part in subjaxprs(eqn)
            for line in _behind_outputs(part, [True] * _outputs(part))[1]
        ]
    return [line for part in subjaxprs(eqn) for line in control_equations(part)]


def _behind(jaxpr: AnyJaxpr, roots: Sequence[Atom]) -> Slice:
    """The equations that `roots` depend on."""
    inner, _ = _jaxcompat.parts(jaxpr)
    text, known = Text(jaxpr), None
    lines = [Line(f"decides: {', '.join(map(text.atom, roots))}")] if roots else []
    needed = {v for v in roots if not isinstance(v, Literal)}
    for eqn in reversed(inner.eqns):
        outs = [v in needed for v in eqn.outvars]
        if not any(outs):
            continue
        lines.append(Line(text.equation(eqn, shapes=False), eqn.source_info))
        if (
            eqn.primitive.name in EQUALIZING
            and kind(eqn) == "collective"
            and not eqn.params["axis_index_groups"]
        ):
            known = folded(jaxpr) if known is None else known
            if id(eqn) not in known:
                continue
        ins, more = _through(eqn, outs)
        lines += more
        needed.update(
            v
            for v, used in zip(eqn.invars, ins, strict=True)
            if used and not isinstance(v, Literal)
        )
    return [v in needed for v in inner.invars], lines


def _behind_outputs(jaxpr: AnyJaxpr, outs: Sequence[bool]) -> Slice:
    outvars = _jaxcompat.parts(jaxpr)[0].outvars
    return _behind(jaxpr, [v for v, used in zip(outvars, outs, strict=True) if used])


def _outputs(jaxpr: AnyJaxpr) -> int:
    return len(_jaxcompat.parts(jaxpr)[0].outvars)


def _through(eqn: JaxprEqn, outs: list[bool]) -> Slice:
    """From outputs of an equation to the operands that they depend on."""
    parts = list(subjaxprs(eqn))
    everything = [True] * len(eqn.invars)
    match eqn.primitive.name:
        case "scan":
            consts, carry = _jaxcompat.scan_counts(eqn)
            return _turns(parts[0], outs, consts, carry)
        case "while":
            n = eqn.params["cond_nconsts"]
            of_cond, lines = _behind_outputs(eqn.params["cond_jaxpr"], [True])
            state = [a or b for a, b in zip(outs, of_cond[n:], strict=True)]
            ins, more = _turns(
                eqn.params["body_jaxpr"], state, eqn.params["body_nconsts"], len(state)
            )
            return of_cond[:n] + ins, lines + more
        case "cond":
            slices = [_behind_outputs(part, outs) for part in parts]
            lines = [line for _, of_branch in slices for line in of_branch]
            return [True, *map(any, zip(*(ins for ins, _ in slices), strict=True))], lines
    if len(parts) == 1 and _outputs(parts[0]) == len(outs):
        ins, lines = _behind_outputs(parts[0], outs)
        return (ins if len(ins) == len(everything) else everything), lines
    return everything, [
        line for part in parts for line in _behind_outputs(part, [True] * _outputs(part))[1]
    ]


def _turns(body: AnyJaxpr, outs: list[bool], consts: int, carry: int) -> Slice:
    """Return the control slice of a loop, whose state depends on the iteration before."""
    while True:
        ins, lines = _behind_outputs(body, outs)
        after = [a or b for a, b in zip(outs[:carry], ins[consts : consts + carry], strict=True)]
        if after == outs[:carry]:
            return ins, lines
        outs = after + outs[carry:]
