"""First call of a program: compare the values of its arguments, once.

This finds
1. arguments that are declared replicated and differ between ranks (an error on all ranks),
2. train state that differs between the ranks, and to which all add the same updates (an error on
   all ranks),
3. train state that is equal before this call and may differ after it, because a mean was forgotten,
4. a pmap whose ranks all got the same rows.

The first two are compared before each new program with collectives, and again after a restore
(`compare_arguments`). The last two are warnings, which the monitors' threads make of the checksums
of all ranks: a program without collectives may be called by the ranks at different times, or by one
rank alone.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from jaxmpi._analysis.forgotten_mean import DivergenceCheck
from jaxmpi._backends.base import fingerprint_of
from jaxmpi._backends.interface import Processes, Ranks
from jaxmpi._consistency import values
from jaxmpi._consistency.compare import (
    continue_after_reports,
    gather_reports,
    has_compared_values,
    note_compared_values,
)
from jaxmpi._consistency.findings import Finding, is_checked
from jaxmpi._consistency.mismatch import Call, Report, facts_of, mismatch_of, outliers, ranks_have
from jaxmpi._errors import RankMismatchError
from jaxmpi._jit.function import Leaf
from jaxmpi._jit.program import Argument, ComparedState, Program
from jaxmpi._world import session

__all__ = ["compare_again", "compare_arguments", "compare_first_call", "must_compare_arguments"]

Checksums = Mapping[str, int]  # of inputs by their text, captured arrays first


def compare_first_call(backend: Processes, program: Program, leaves: Sequence[Leaf]) -> None:
    """Compare the arguments of the first call of a program.

    **Collective:** if the program has collectives, all ranks that have not run a program with its
    fingerprint.
    **Communication:** as in `compare_arguments`; other checksums travel between the monitors.

    Args:
      backend: the ranks.
      program: the program of the call.
      leaves: the arrays of its arguments.

    Raises:
      RankMismatchError: as in `compare_arguments`.
    """
    call = program.compared_call
    sums: dict[str, int] = {}
    if call and has_compared_values(backend, call.fingerprint):
        _compare_without_waiting(program, leaves)
    elif call:
        sums = compare_arguments(backend, program, leaves)
    if not program.forgotten_mean and not (program.batch and call):
        return
    title, inputs = program.function.title, program.inputs(leaves)
    for name, x in inputs.items():
        if name not in sums:
            sums[name] = values.checksum(x)
    monitor = session.monitor()
    if program.forgotten_mean and monitor:
        monitor.gathering.add(
            f"{title} {program.forgotten_mean.digest}",
            sums,
            partial(_divergence, program.forgotten_mean, list(inputs)),
        )
    if program.batch and call and monitor:
        rows = [str(program.arguments[i]) for i in program.batch]
        monitor.gathering.add(
            f"{title} rows {call.fingerprint}", sums, partial(_same_rows, title, rows)
        )


def must_compare_arguments(backend: Ranks, program: Program) -> bool:
    """Return whether the ranks still have to compare the arguments that must be equal on all."""
    call = program.compared_call
    if call is None or program.compared_state is None:
        return False
    return not has_compared_values(backend, call.fingerprint)


def compare_arguments(
    backend: Processes, program: Program, leaves: Sequence[Leaf]
) -> dict[str, int]:
    """Compare the arguments that must be equal on all ranks, unless that was done before.

    **Collective:** all ranks that have not compared the values before a program with its
    fingerprint.
    **Communication:** 16 bytes; where state differs, an allgather of a checksum for each array of
    it. If there are replicated arguments, an allgather of a dict with their checksums.

    Args:
      backend: the ranks.
      program: the program, with collectives.
      leaves: the arrays of its arguments.

    Returns:
      The checksums of the inputs that were compared, by the texts of these.

    Raises:
      RankMismatchError: on all ranks, an argument that `replicated_argnums` names, or state to
        which all ranks add the same updates, is not equal on all of them.
    """
    call, title = program.compared_call, program.function.title
    assert call is not None
    if not must_compare_arguments(backend, program):
        return {}
    compared = program.compared_state
    assert compared is not None
    equal, _ = program.equal
    replicated = {str(x): x for x, same in zip(program.arguments, equal, strict=True) if same}
    # Checksums take time, so compute only those that are compared below.
    inputs = program.inputs(leaves)
    sums: dict[str, int] = {}
    for text in (*replicated, *compared.texts):
        if text not in sums:
            sums[text] = values.checksum(inputs[text])
    # The ranks must agree on the program before they gather checksums of its arguments.
    found = _compare_state(backend, program, call, compared, sums)
    if replicated:
        everyone = backend.allgather_object({text: sums[text] for text in replicated})
        _refuse_difference(title, replicated, everyone)
    if found is not None:
        raise found.error()
    note_compared_values(backend, call.fingerprint)
    return sums


def compare_again(backend: Processes, program: Program, leaves: Sequence[Leaf]) -> None:
    """Compare the arguments of a program that the ranks have run, after a restore.

    **Collective:** as `compare_arguments`. Where another function with the same program has been
    compared since, no rank waits: the monitors compare.
    """
    call = program.compared_call
    assert call is not None
    if has_compared_values(backend, call.fingerprint):
        _compare_without_waiting(program, leaves)
    else:
        compare_arguments(backend, program, leaves)


def _compare_state(
    backend: Processes, program: Program, call: Call, compared: ComparedState, sums: Checksums
) -> Finding | None:
    """Compare a program, and the state before it, by one fingerprint of both.

    Returns:
      The finding about the state that differs, on all ranks; None if all is equal.

    Raises:
      RankMismatchError: on all ranks, they are about to run other programs or to call something
        else.
    """
    of_state = [(text, sums[text]) for text in compared.texts]
    with_state = Call(
        fingerprint_of(f"{call.fingerprint} {of_state}"), call.title, call.fingerprint
    )
    smallest, largest = backend.extremes(*with_state)
    if smallest == largest:
        return None
    # All ranks get here; those that have called something else report that.
    report = Report(with_state, program.signature.details(), facts=_StateChecksums(of_state))
    reports = gather_reports(backend, report)
    states = facts_of(reports, _StateChecksums)
    if states is None:
        raise mismatch_of(reports)
    programs = [
        report._replace(call=Call(report.call.program, report.call.title)) for report in reports
    ]
    if len({report.call for report in programs}) > 1:
        raise mismatch_of(programs)
    # All ranks are about to run this program.
    everyone = [dict(state.of_inputs) for state in states]
    names, ranks = _unequal_state(compared, everyone)
    if not names:  # only keys differ, which they may
        continue_after_reports(backend)
        return None
    return Finding("unequal_start", program.function.title, names, ranks)


class _StateChecksums(NamedTuple):
    """State before a call, of one rank: the facts of its report."""

    of_inputs: Sequence[tuple[str, int]]  # (text of the input, checksum)


class _State(NamedTuple):
    """State before a call, which the monitors compare with that of the next rank: a `Stream`."""

    title: str
    compared: ComparedState

    def difference(self, mine: Checksums, theirs: Checksums, rank: int) -> Finding | None:
        """Return the finding for the checksums of this rank and of rank `rank`."""
        names, _ = _unequal_state(self.compared, [mine, theirs])
        # Of two ranks that differ, nobody here knows which one differs from the others, too.
        return Finding("unequal_start", self.title, names) if names else None

    def send_last(self) -> None:
        """Do nothing: it is about one call."""


def _compare_without_waiting(program: Program, leaves: Sequence[Leaf]) -> None:
    """Send the state's checksums to the neighbors' monitors.

    Another rank may have called this function before, so no rank waits.
    """
    exchange, compared = session.neighbors(), program.compared_state
    is_wanted = is_checked("unequal_start", program.function.allowed)
    if exchange is None or compared is None or not is_wanted:
        return
    inputs, sums = program.inputs(leaves), {}
    for text in compared.texts:
        sums[text] = values.checksum(inputs[text])
    title = program.function.title
    exchange.add(_State(title, compared), exchange.next_call(title), sums)


def _unequal_state(
    compared: ComparedState, everyone: Sequence[Checksums]
) -> tuple[list[str], list[int]]:
    """Return the names of inputs that must be equal and are not, and the ranks that differ."""
    arguments = compared.state
    if not any(_outliers(everyone, key) for key in compared.keys):
        arguments = (*arguments, *compared.with_equal_keys)
    names: list[str] = []
    ranks: set[int] = set()
    for argument in arguments:
        if differ := _outliers(everyone, argument):
            names.append(argument.name)
            ranks.update(differ)
    return names, sorted(ranks)


def _outliers(everyone: Sequence[Checksums], argument: Argument) -> list[int]:
    """Return the ranks whose checksum of an input differs; none if some rank has no such input."""
    of_ranks = [of_rank.get(str(argument)) for of_rank in everyone]
    return [] if None in of_ranks else outliers(of_ranks)


def _divergence(
    forgotten_mean: DivergenceCheck, names: Sequence[str], everyone: Sequence[Checksums]
) -> str:
    """Return the warning for a call, given all ranks' checksums; "" for none."""
    return forgotten_mean.warning(
        [len({of_rank.get(name) for of_rank in everyone}) == 1 for name in names]
    )


def _same_rows(title: str, rows: Sequence[str], everyone: Sequence[Checksums]) -> str:
    """Return the warning for a call of a pmap, given all ranks' checksums; "" for none."""
    if any(of_rank != everyone[0] for of_rank in everyone):
        return ""
    return (
        f"{title}: all {len(everyone)} ranks have called this pmap with equal arguments, such as "
        f"{rows[0]}, so all compute the same. Pass each rank different rows, by jaxmpi.shard, "
        "jaxmpi.batches or jaxmpi.rank(): jax.process_index() may be 0 on every rank."
    )


def _refuse_difference(
    title: str, replicated: Mapping[str, Argument], everyone: Sequence[Checksums]
) -> None:
    """Raise a RankMismatchError, on all ranks, for the first replicated argument that differs.

    Args:
      title: of the program.
      replicated: the arguments that must be equal, by their texts.
      everyone: the checksums of all ranks.
    """
    difference = values.first_difference(everyone)
    if difference is not None:
        text, ranks = difference
        raise RankMismatchError(
            f"{title}: {text} is named in replicated_argnums, and {ranks_have(ranks)} "
            "other values than the other ranks.",
            advice="Make it equal before the first step (jaxmpi.synchronize, or for an "
            "nnx.BatchStat jaxmpi.tree_bcast), or do not name it.",
            function=title,
            leaf=replicated[text].name,
            ranks=ranks,
        )
