"""Replication: find the values of a program that may differ between the ranks.

That finds a forgotten mean, and a collective that only some ranks would reach. A value varies when
it depends on this rank's number, or on an argument that varies, without a collective that makes it
equal on all ranks. (`shard_map` calls the same notion varying and replicated; here it is found on
the traced program afterwards.)
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._axis import EQUAL
from jaxmpi._jaxcompat import AnyJaxpr, CallSite
from jaxmpi._lowering.classify import (
    CALLS,
    callee,
    calls_python,
    communicates,
    follows_from,
    kind,
    kinds,
    line,
    subjaxprs,
)
from jaxmpi._lowering.rank_classes import ALL, OWN, Classes, after_collective, joined

__all__ = ["varying"]

# each: the equation, and whether it changes anything
Sums = dict[CallSite, list[tuple[JaxprEqn, bool]]]
Inside = Callable[..., list[Classes]]  # `_varying` of a jaxpr inside


def varying(
    jaxpr: AnyJaxpr,
    ins: Sequence[bool],
    *,
    constants: bool = True,
    check: bool = True,
    warn: bool = True,
    equal_names: Sequence[str] = (EQUAL,),
    api: str = "jaxmpi.jit",
) -> list[bool]:
    """Return which outputs of an opened program vary, given which inputs do.

    Args:
      jaxpr: of `trace.trace`, or one inside of it.
      ins: for each input.
      constants: whether the arrays that the program itself holds vary.
      check: whether to raise and warn.
      warn: whether to warn.
      equal_names: identities with such a name mark values that are equal on all ranks.
      api: the function of jaxmpi that the user called, for errors and warnings.

    Raises:
      ValueError: a collective in a branch or a loop whose predicate varies: some ranks would wait
        in it for ever.

    Warns:
      UserWarning: a sum or mean of what is equal on all ranks already. The transpose of a sum is a
        sum, too, often of such values, and comes from the same call: it is the calls that are
        warned of, if all sums that come from one are such.
    """
    sums: Sums = defaultdict(list)
    classes: list[Classes] = [OWN if differs else ALL for differs in ins]
    outs = _varying(jaxpr, classes, OWN if constants else ALL, check, sums, equal_names, api)
    for of_call in sums.values():
        if check and warn and not any(needed for _, needed in of_call):
            _warn_of_reduction(api, of_call[0][0])
    return [out != ALL for out in outs]


def _varying(
    jaxpr: AnyJaxpr,
    ins: Sequence[Classes],
    constants: Classes,
    check: bool,
    sums: Sums,
    equal_names: Sequence[str],
    api: str,
) -> list[Classes]:
    """Return the classes of ranks of the outputs; all sums go into `sums`."""
    inner, _ = _jaxcompat.parts(jaxpr)
    varies: dict[Var, Classes] = dict.fromkeys(inner.constvars, constants)
    varies.update(zip(inner.invars, ins, strict=True))
    literal: set[Var] = set()
    what = kinds(jaxpr)
    inside = partial(
        _varying, constants=constants, check=check, sums=sums, equal_names=equal_names, api=api
    )
    for eqn in inner.eqns:
        xs = [ALL if isinstance(v, Literal) else varies[v] for v in eqn.invars]
        known = check and follows_from(literal, eqn)
        if known and id(eqn) not in what:
            literal.update(eqn.outvars)
        if check and eqn.primitive.name == "psum" and what.get(id(eqn)) == "collective":
            sums[_jaxcompat.call_site(eqn)].append((eqn, known or joined(xs) != ALL))
        named_equal = eqn.primitive.name == "name" and eqn.params["name"] in equal_names
        outs = [ALL] if named_equal else _outs(eqn, what.get(id(eqn), ""), xs, inside, check, api)
        varies.update(zip(eqn.outvars, outs, strict=True))
    return [ALL if isinstance(v, Literal) else varies[v] for v in inner.outvars]


def _outs(
    eqn: JaxprEqn, what: str, xs: list[Classes], inside: Inside, check: bool, api: str
) -> list[Classes]:
    name = eqn.primitive.name
    if what == "index":
        return [OWN]
    if what == "collective":
        return [after_collective(eqn, xs[0])]
    if name == "scan":
        return _scan(eqn, xs, inside)
    if name == "while":
        return _while(eqn, xs, inside, check, api)
    if name == "cond":
        return _cond(eqn, xs, inside, check, api)
    if name in CALLS:
        return inside(*callee(eqn, xs))
    return [OWN if OWN in xs or calls_python(eqn) else joined(xs)] * len(eqn.outvars)


def _scan(eqn: JaxprEqn, xs: list[Classes], inside: Inside) -> list[Classes]:
    consts, carry = _jaxcompat.scan_counts(eqn)
    state = xs[consts : consts + carry]
    while True:
        ins = xs[:consts] + state + xs[consts + carry :]
        outs = inside(eqn.params["jaxpr"], ins, check=False)
        if (after := [*map(joined, zip(state, outs[:carry], strict=True))]) == state:
            return inside(eqn.params["jaxpr"], ins)
        state = after


def _while(
    eqn: JaxprEqn, xs: list[Classes], inside: Inside, check: bool, api: str
) -> list[Classes]:
    of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts, state = (
        xs[:of_cond],
        xs[of_cond : of_cond + of_body],
        xs[of_cond + of_body :],
    )
    while True:
        (goes_on,) = inside(eqn.params["cond_jaxpr"], cond_consts + state, check=False)
        outs = inside(eqn.params["body_jaxpr"], body_consts + state, check=False)
        if (after := [joined([a, b, goes_on]) for a, b in zip(state, outs, strict=True)]) == state:
            break
        state = after
    if check:
        if goes_on != ALL and communicates(eqn):
            _refuse(api, eqn, "while_loop", "whether the loop goes on")
        inside(eqn.params["cond_jaxpr"], cond_consts + state)
        inside(eqn.params["body_jaxpr"], body_consts + state)
    return state


def _cond(eqn: JaxprEqn, xs: list[Classes], inside: Inside, check: bool, api: str) -> list[Classes]:
    if check and xs[0] != ALL and communicates(eqn):
        _refuse(api, eqn, "cond", "which branch is taken")
    outs = [inside(branch, xs[1:]) for branch in eqn.params["branches"]]
    return [joined([xs[0], *of_branches]) for of_branches in zip(*outs, strict=True)]


def _refuse(api: str, eqn: JaxprEqn, name: str, what: str) -> None:
    inside = next(found for jaxpr in subjaxprs(eqn) for found in _collective_lines(jaxpr))
    raise ValueError(
        f"{api}: {name} at {line(eqn)} contains a collective ({inside}), and {what} may differ "
        "between the ranks: some ranks would wait for the others forever. Reduce the predicate "
        "over the ranks first (jaxmpi.tree_allreduce with op 'max' or 'min'; in a line search, use "
        "jaxmpi.average_loss for its value_fn), or name the arguments that are equal on all ranks "
        "in replicated_argnums."
    )


def _collective_lines(jaxpr: AnyJaxpr) -> list[str]:
    lines = []
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        if kind(eqn) == "collective":
            lines.append(
                f"{eqn.primitive.name} at {_jaxcompat.source_line(eqn) or 'a line of a library'}"
            )
        lines.extend(found for inner in subjaxprs(eqn) for found in _collective_lines(inner))
    return lines


def _warn_of_reduction(api: str, eqn: JaxprEqn) -> None:
    warnings.warn(
        f"{api}: the value summed or averaged at {line(eqn)} is equal on all ranks already. "
        "Leave the mean out; a sum multiplies the value by the number of ranks.",
        stacklevel=3,
    )
