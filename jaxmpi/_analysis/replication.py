"""Replication: on which ranks a value is equal, as far as that follows from a program.

A value may differ between ranks if it depends on the rank's number, or on an argument that may
differ, and no collective on the way has made it equal again. This finds outputs that are declared
replicated and are not, a forgotten mean, and a collective that only some ranks would reach.
(`shard_map` tracks the same while it traces, and calls it varying and replicated.)

The fact about a value is a class number for each rank. Two ranks of one class are known to have
equal values. On four ranks in two islands, the sum over each island has `(0, 0, 1, 1)`. Two facts
are written differently:

    ALL     the value is equal on all ranks
    NONE    the value may differ between any two ranks
"""

import warnings
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import RANK_OPS, Role, calls_python, is_computed_from, role
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.inner_jaxprs import line
from jaxmpi._analysis.primitives import Op, is_sum, op_of
from jaxmpi._consistency.findings import Finding
from jaxmpi._jaxcompat import AnyJaxpr, CallSite
from jaxmpi._marks import Differs, Equal, mark_of

__all__ = ["check_replication", "may_vary"]

Classes: TypeAlias = tuple[int, ...] | None  # the class of each rank, in the order of the ranks

ALL: Classes = ()
NONE: Classes = None


# The lattice


def _join(values: Sequence[Classes]) -> Classes:
    """Return the classes of a value that is computed from values with these classes.

    Two ranks are in one class if they are in one class of every value.
    """
    known: list[tuple[int, ...]] = []
    for value in values:
        if value is None:
            return NONE
        if value != ALL and value not in known:
            known.append(value)
    if len(known) < 2:
        return known[0] if known else ALL
    return _classes_by_key(list(zip(*known, strict=True)))


def _classes_by_key(keys: Sequence[Hashable]) -> Classes:
    """Return the classes in which ranks with equal keys are together.

    Args:
      keys: one for each rank.
    """
    class_of_key: dict[Hashable, int] = {}
    classes = []
    for key in keys:
        classes.append(class_of_key.setdefault(key, len(class_of_key)))
    if len(class_of_key) == 1:
        return ALL
    if len(class_of_key) == len(keys):
        return NONE
    return tuple(classes)


# The rules


def _same_on_group(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    """Return the classes after an allreduce or an all_gather: equal within each group of ranks.

    Two groups have equal results if their ranks contribute equal values: in any order for an
    allreduce, in the same order for an all_gather.
    """
    if role(eqn) is not Role.COLLECTIVE:  # over array axes: those of a vmap inside
        return [_join(operands)] * len(eqn.outvars)
    groups, operand = eqn.params.get("axis_index_groups"), operands[0]
    if not groups or operand == ALL:  # all groups have the same number of ranks
        return [ALL]
    size = sum(map(len, groups))
    classes = tuple(range(size)) if operand is None else operand
    contributions: dict[int, tuple[int, ...]] = {}  # by rank: the classes in the rank's group
    for group in groups:
        in_group = [classes[rank] for rank in group]
        if op_of(eqn) is Op.ALLREDUCE:
            in_group.sort()
        for rank in group:
            contributions[rank] = tuple(in_group)
    return [_classes_by_key([contributions[rank] for rank in range(size)])]


def _different_on_each_rank(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    """Return the classes after an equation that gives each rank another result."""
    over_ranks = role(eqn) in (Role.COLLECTIVE, Role.RANK)
    return [NONE if over_ranks else _join(operands)] * len(eqn.outvars)


def _mark(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    return [ALL] if isinstance(mark_of(eqn), Equal) else operands


def _mark_differing_as_equal(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    return [ALL] if isinstance(mark_of(eqn), Equal | Differs) else operands


def _local(eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
    """Return the classes after any other equation; a Python function may return anything."""
    return [NONE if calls_python(eqn) else _join(operands)] * len(eqn.outvars)


REPLICATION: Analysis[Classes] = Analysis(
    bottom=ALL,
    join=_join,
    rules={
        Op.ALLREDUCE: _same_on_group,
        Op.ALL_GATHER: _same_on_group,
        Op.REDUCE_SCATTER: _different_on_each_rank,
        Op.ALL_TO_ALL: _different_on_each_rank,
        Op.PERMUTE: _different_on_each_rank,
        Op.AXIS_INDEX: _different_on_each_rank,
        Op.MARK: _mark,
    },
    otherwise=_local,
    constants=ALL,
)
# A value that is marked as different on purpose counts as equal: it is no sign of a forgotten mean.
DELIBERATE_AS_EQUAL = replace(
    REPLICATION, rules={**REPLICATION.rules, Op.MARK: _mark_differing_as_equal}
)


def may_vary(
    jaxpr: AnyJaxpr,
    ins: Sequence[bool],
    *,
    constants: bool = True,
    marked: bool = True,
) -> list[bool]:
    """Return which outputs of an inlined program may differ between ranks, given which inputs may.

    Args:
      jaxpr: of `trace.trace`, or one inside of it.
      ins: which inputs may differ.
      constants: whether the constant arrays of the program may differ.
      marked: whether a value that `may_differ` marks as different on purpose may differ; if not, it
        counts as equal.
    """
    analysis = REPLICATION if marked else DELIBERATE_AS_EQUAL
    if constants:
        analysis = replace(analysis, constants=NONE)
    classes = [NONE if differs else ALL for differs in ins]
    return [out != ALL for out in propagate(analysis, jaxpr, classes)]


# The checks


def check_replication(
    jaxpr: AnyJaxpr,
    ins: Sequence[bool],
    *,
    constants: bool,
    warn: bool,
    api: str,
    title: str,
) -> list[bool]:
    """Check where a program communicates, and return which outputs may differ, as `may_vary`.

    Args:
      jaxpr: as in `may_vary`.
      ins: as in `may_vary`.
      constants: as in `may_vary`.
      warn: whether to warn.
      api: the function of jaxmpi that the user called, for errors.
      title: the name of the program, for warnings.

    Raises:
      ValueError: a collective is in a branch or a loop whose predicate may differ: some ranks would
        wait in it forever.

    Warns:
      UserWarning: a sum or mean is over values that are equal on all ranks already. One call of the
        user's may become several sums: the transpose of a sum is a sum, too, often of equal values.
        So there is one warning for a call, and only if none of its sums is needed.
    """
    analysis = replace(REPLICATION, constants=NONE) if constants else REPLICATION
    # The sums that come from one call of the user's: each equation, and whether it is needed.
    sums: dict[CallSite, list[tuple[JaxprEqn, bool]]] = defaultdict(list)
    from_literals: set[Var] = set()  # values that are computed from literals alone
    unreached: list[JaxprEqn] = []  # collectives that some ranks may not reach

    def visit(
        eqn: JaxprEqn, operands: list[Classes], results: list[Classes], control: Classes
    ) -> None:
        role_of_eqn = role(eqn) if op_of(eqn) in RANK_OPS else Role.LOCAL
        # Inner equations are visited first. So the next equation that all ranks reach is the branch
        # or loop around the unreached collectives whose predicate may differ.
        if role_of_eqn in (Role.COLLECTIVE, Role.SEND_AHEAD) and control != ALL:
            unreached.append(eqn)
        elif unreached and control == ALL:
            _refuse(api, eqn, unreached[0])
        if op_of(eqn) is Op.BARRIER:  # result i is operand i
            for atom, v in zip(eqn.invars, eqn.outvars, strict=True):
                if isinstance(atom, Literal) or atom in from_literals:
                    from_literals.add(v)
        is_from_literals = is_computed_from(from_literals, eqn)
        if is_from_literals and role_of_eqn is Role.LOCAL:
            from_literals.update(eqn.outvars)
        if role_of_eqn is Role.COLLECTIVE and is_sum(eqn):
            # A sum of literals is needed, too: `psum(1)` counts the ranks.
            is_needed = is_from_literals or _join(operands) != ALL
            sums[_jaxcompat.call_site(eqn)].append((eqn, is_needed))

    classes = [NONE if differs else ALL for differs in ins]
    outs = propagate(analysis, jaxpr, classes, visit)
    for sums_of_call in sums.values():
        if warn and not any(is_needed for _, is_needed in sums_of_call):
            twice = Finding("repeated_mean", title, detail=line(sums_of_call[0][0]))
            warnings.warn(twice.warning(), stacklevel=2)
    return [out != ALL for out in outs]


def _refuse(api: str, eqn: JaxprEqn, collective: JaxprEqn) -> None:
    """Raise a ValueError about a collective in a branch or a loop that some ranks may not enter.

    Args:
      api: the function of jaxmpi that the user called.
      eqn: the branch or loop.
      collective: the collective inside of it.
    """
    decided, name = "which branch is taken", eqn.primitive.name
    if op_of(eqn) is not Op.COND:
        decided, name = "whether the loop goes on", "while_loop"
    at = _jaxcompat.source_line(collective) or _jaxcompat.LIBRARY_LINE
    raise ValueError(
        f"{api}: {name} at {line(eqn)} contains a collective ({collective.primitive.name} at "
        f"{at}), and {decided} may differ between the ranks: some ranks would wait for the others "
        "forever. Reduce the predicate over the ranks first (jaxmpi.tree_allreduce with op 'max' "
        "or 'min'; in a line search, use jaxmpi.average_loss for its value_fn), or name the "
        "arguments that are equal on all ranks in replicated_argnums. A transformation that skips "
        "updates, such as optax.apply_if_finite, goes inside: "
        "jaxmpi.distributed(optax.apply_if_finite(...)); or use jaxmpi.skip_nonfinite."
    )
