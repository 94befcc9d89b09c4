"""What decides which collectives of a program are carried out, and what all ranks take for known.

A Python number in a traced function is a literal, and may be another one on each rank. Where the turns of a loop, the branch of
a cond or a sum that is not sent follow from one, the ranks must have the same: its text is part of what they compare. Shapes
are not, as batches may be uneven.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jaxmpi import _jaxcompat
from jaxmpi._program.reading import communicates, subjaxprs
from jaxmpi._program.schedule import folded

__all__ = ["steering"]


def steering(jaxpr: Any) -> str:
    """The operations and literals behind predicates of loops and branches that communicate, and behind `folded` sums."""
    known = folded(jaxpr)
    inner, _ = _jaxcompat.parts(jaxpr)
    loops = [eqn for eqn in inner.eqns if communicates(eqn) and any(True for _ in subjaxprs(eqn))]
    roots = [v for eqn in loops for v in _deciding(eqn)]
    roots += [eqn.invars[0] for eqn in inner.eqns if id(eqn) in known]
    insides = [part for eqn in loops for part in _inside(eqn)]
    return "\n".join([*_behind(inner, roots), *insides])


def _deciding(eqn: Any) -> Sequence[Any]:
    """The operands that a predicate, of the equation or inside of it, may depend on."""
    if any(_inside(eqn)):
        return eqn.invars
    return eqn.invars[:1] if eqn.primitive.name == "cond" else ()


def _inside(eqn: Any) -> Iterator[str]:
    for jaxpr in subjaxprs(eqn):
        if eqn.primitive.name == "while":
            inner, _ = _jaxcompat.parts(jaxpr)
            yield from _behind(inner, inner.outvars)
        elif text := steering(jaxpr):
            yield text


def _behind(jaxpr: Any, roots: Sequence[Any]) -> list[str]:
    """The equations that `roots` depend on, as text without shapes: names of primitives, literals, and what feeds what."""
    needed = {v for v in roots if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    names: dict[Any, str] = {}
    for v in (*jaxpr.constvars, *jaxpr.invars):
        names[v] = f"in{len(names)}"

    def text(v: Any) -> str:
        return repr(np.asarray(v.val).tolist()) if isinstance(v, Literal) else names.setdefault(v, f"v{len(names)}")

    lines = [str([text(v) for v in roots])] if roots else []
    for eqn in kept:
        lines.append(f"{[text(v) for v in eqn.outvars]} {eqn.primitive.name} {[text(v) for v in eqn.invars]}")
        for inner in subjaxprs(eqn):
            lines.extend(_behind(_jaxcompat.parts(inner)[0], _jaxcompat.parts(inner)[0].outvars))
    return lines
