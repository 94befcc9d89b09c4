"""Replication: on which ranks a value is equal, as far as that follows from a program.

That finds a forgotten mean, and a collective that only some ranks would reach. A value may differ
when it depends on this rank's number, or on an argument that may, without a collective that makes
it equal again. (`shard_map` calls the same notion varying and replicated; here it is found on the
traced program afterwards.)

The fact of a value is a class for each rank, equal where the value is known to be: `(0, 0, 1, 1)`
after a sum over "member" of islands of two. `ALL` is a value that is equal on all ranks, `NONE` one
of which nothing is known.
"""

import warnings
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeAlias

from jax.extend.core import JaxprEqn, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import RANK_OPS, calls_python, is_computed_from, kind
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.inner_jaxprs import line
from jaxmpi._analysis.primitives import Op, is_sum, op_of
from jaxmpi._jaxcompat import AnyJaxpr, CallSite
from jaxmpi._marks import Differs, Equal, mark_of

__all__ = ["may_vary", "varying"]

Classes: TypeAlias = tuple[int, ...] | None

ALL: Classes = ()
NONE: Classes = None


# The lattice


def _join(values: Sequence[Classes]) -> Classes:
    """Return the classes of a value that is computed from all of these."""
    known: list[tuple[int, ...]] = []
    for value in values:
        if value is None:
            return NONE
        if value != ALL and value not in known:
            known.append(value)
    if len(known) < 2:
        return known[0] if known else ALL
    return _numbered(list(zip(*known, strict=True)))


def _numbered(keys: Sequence[Hashable]) -> Classes:
    """Return the classes of ranks that have these keys."""
    numbers: dict[Hashable, int] = {}
    classes = []
    for key in keys:
        classes.append(numbers.setdefault(key, len(numbers)))
    if len(numbers) == 1:
        return ALL
    return NONE if len(numbers) == len(keys) else tuple(classes)


# The rules


def _equalizes(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    """Return the classes after a reduction or a gather: equal on all ranks of a group."""
    if kind(eqn) != "collective":  # over an axis of a vmap inside
        return [_join(operands)] * len(eqn.outvars)
    groups, x = eqn.params.get("axis_index_groups"), operands[0]
    if not groups or x == ALL:
        return [ALL]
    before = tuple(range(sum(map(len, groups)))) if x is None else x
    is_reduction = op_of(eqn) is Op.ALLREDUCE
    contributions: dict[int, tuple[int, ...]] = {}  # of the group of each rank
    for group in groups:
        of_group = [before[rank] for rank in group]
        contributions.update(
            dict.fromkeys(group, tuple(sorted(of_group) if is_reduction else of_group))
        )
    return [_numbered([contributions[rank] for rank in range(len(before))])]


def _moves(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    """Return the classes after a collective that gives each rank something else."""
    over_ranks = kind(eqn) in ("collective", "index")
    return [NONE if over_ranks else _join(operands)] * len(eqn.outvars)


def _mark(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    return [ALL] if isinstance(mark_of(eqn), Equal) else operands


def _deliberate_mark(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    return [ALL] if isinstance(mark_of(eqn), Equal | Differs) else operands


def _local(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    """Return the classes after anything else; a Python function may return anything."""
    return [NONE if calls_python(eqn) else _join(operands)] * len(eqn.outvars)


REPLICATION: Analysis[Classes] = Analysis(
    bottom=ALL,
    join=_join,
    rules={
        Op.ALLREDUCE: _equalizes,
        Op.ALL_GATHER: _equalizes,
        Op.REDUCE_SCATTER: _moves,
        Op.ALL_TO_ALL: _moves,
        Op.PERMUTE: _moves,
        Op.AXIS_INDEX: _moves,
        Op.MARK: _mark,
    },
    otherwise=_local,
)
# What differs on purpose counts as equal: it is no sign of a forgotten mean.
DELIBERATE = replace(REPLICATION, rules={**REPLICATION.rules, Op.MARK: _deliberate_mark})


_CONSTANTS_VARY = {
    True: replace(REPLICATION, constants=NONE),
    False: replace(DELIBERATE, constants=NONE),
}


def may_vary(
    jaxpr: AnyJaxpr,
    ins: Sequence[bool],
    *,
    constants: bool = True,
    deliberately: bool = True,
) -> list[bool]:
    """Return which outputs of an opened program may differ between ranks, given which inputs may.

    Args:
      jaxpr: of `trace.trace`, or one inside of it.
      ins: for each input.
      constants: whether the arrays that the program itself holds may differ.
      deliberately: whether that counts what is marked as different on purpose.
    """
    analysis = REPLICATION if deliberately else DELIBERATE
    if constants:
        analysis = _CONSTANTS_VARY[deliberately]
    classes = [NONE if differs else ALL for differs in ins]
    return [out != ALL for out in propagate(analysis, jaxpr, classes)]


# The checks


def varying(
    jaxpr: AnyJaxpr,
    ins: Sequence[bool],
    *,
    constants: bool = True,
    warn: bool = True,
    api: str = "jaxmpi.jit",
) -> list[bool]:
    """Return what `may_vary` does, and check the program on the way.

    Args:
      jaxpr: as in `may_vary`.
      ins: as in `may_vary`.
      constants: as in `may_vary`.
      warn: whether to warn.
      api: the function of jaxmpi that the user called, for errors and warnings.

    Raises:
      ValueError: a collective in a branch or a loop whose predicate may differ: some ranks would
        wait in it for ever.

    Warns:
      UserWarning: a sum or mean of what is equal on all ranks already. The transpose of a sum is a
        sum, too, often of such values, and comes from the same call: it is the calls that are
        warned of, if all sums that come from one are such.
    """
    analysis = _CONSTANTS_VARY[True] if constants else REPLICATION
    # The sums that come from one call of the user's: each equation, and whether it is needed.
    sums: dict[CallSite, list[tuple[JaxprEqn, bool]]] = defaultdict(list)
    literal: set[Var] = set()  # values that follow from literals alone
    unreached: list[JaxprEqn] = []  # collectives that some ranks may not reach

    def visit(
        eqn: JaxprEqn, operands: list[Classes], results: list[Classes], control: Classes
    ) -> None:
        op = op_of(eqn)
        what = kind(eqn) if op in RANK_OPS else ""
        if what in ("collective", "ahead") and control != ALL:
            unreached.append(eqn)
        elif unreached and control == ALL:  # the outermost branch or loop around them
            _refuse(api, eqn, unreached[0])
        known = is_computed_from(literal, eqn)
        if known and not what:
            literal.update(eqn.outvars)
        if what == "collective" and is_sum(eqn):
            needed = known or _join(operands) != ALL
            sums[_jaxcompat.call_site(eqn)].append((eqn, needed))

    classes = [NONE if differs else ALL for differs in ins]
    outs = propagate(analysis, jaxpr, classes, visit)
    for of_call in sums.values():
        if warn and not any(needed for _, needed in of_call):
            _warn_of_reduction(api, of_call[0][0])
    return [out != ALL for out in outs]


def _refuse(api: str, eqn: JaxprEqn, collective: JaxprEqn) -> None:
    """Raise a ValueError about a collective in a branch or a loop that some ranks may not enter."""
    decided, name = "which branch is taken", eqn.primitive.name
    if op_of(eqn) is not Op.COND:
        decided, name = "whether the loop goes on", "while_loop"
    at = _jaxcompat.source_line(collective) or "a line of a library"
    raise ValueError(
        f"{api}: {name} at {line(eqn)} contains a collective ({collective.primitive.name} at "
        f"{at}), and {decided} may differ between the ranks: some ranks would wait for the others "
        "forever. Reduce the predicate over the ranks first (jaxmpi.tree_allreduce with op 'max' "
        "or 'min'; in a line search, use jaxmpi.average_loss for its value_fn), or name the "
        "arguments that are equal on all ranks in replicated_argnums."
    )


def _warn_of_reduction(api: str, eqn: JaxprEqn) -> None:
    warnings.warn(
        f"{api}: the value summed or averaged at {line(eqn)} is equal on all ranks already. "
        "Leave the mean out; a sum multiplies the value by the number of ranks.",
        stacklevel=3,
    )
