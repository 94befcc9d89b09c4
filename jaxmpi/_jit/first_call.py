"""First call of a program: compare the values of its arguments, once.

This finds arguments that are named as equal on all ranks and are not; train state that is equal and
parts with this call, because a mean was forgotten; and a pmap whose ranks all got the same rows.
The last two are looked at in the monitors' threads: ranks whose program sends nothing may call it
at different times, or one alone.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from jaxmpi._analysis.forgotten_mean import DivergenceCheck
from jaxmpi._backends.interface import Processes
from jaxmpi._consistency import values
from jaxmpi._consistency.compare import check_consistent, has_run, note_run
from jaxmpi._consistency.mismatch import outliers, ranks_have
from jaxmpi._errors import RankMismatchError
from jaxmpi._jit.function import Leaf
from jaxmpi._jit.program import Program
from jaxmpi._world import session

__all__ = ["compare"]

Sums = Mapping[str, int]  # checksums of inputs by their names, those from outside first


def compare(backend: Processes, program: Program, leaves: Sequence[Leaf]) -> None:
    """Compare the arguments of the first call of a program.

    Args:
      backend: the ranks.
      program: theirs, if it sends anything; then all of them call this, but those that have run one
        with its fingerprint.
      leaves: the arrays of its arguments.

    Raises:
      RankMismatchError: on all ranks, an argument that `replicated_argnums` names is not equal on
        all of them.
    """
    if not program.statement and not program.divergence:
        return
    looked_at = bool(program.divergence or program.fed)
    title, (equal, _) = program.function.title, program.equal
    outside = [f"array {i} from outside" for i in range(len(program.captured))]
    inputs = dict(zip([*outside, *program.arguments], [*program.captured, *leaves], strict=True))
    named = [argument for argument, same in zip(program.arguments, equal, strict=True) if same]
    new = program.statement is not None and not has_run(backend, program.statement.fingerprint)
    sums = {
        name: values.checksum(inputs[name])
        for name in (inputs if looked_at else named if new else ())
    }
    if program.statement and new and named:  # of what the ranks agree on, which values are equal
        check_consistent(backend, program.statement, program.signature.details)
        note_run(backend, program.statement.fingerprint)
        _refuse_difference(title, backend.allgather_object({name: sums[name] for name in named}))
    if program.divergence and (watch := session.monitor()):
        watch.gathering.add(
            f"{title} {program.divergence.digest}",
            sums,
            partial(_divergence_warning, program.divergence, list(inputs)),
        )

    if program.fed and program.statement and (watch := session.monitor()):
        rows = [program.arguments[i] for i in program.fed]
        watch.gathering.add(
            f"{title} rows {program.statement.fingerprint}", sums, partial(_same_rows, title, rows)
        )


def _divergence_warning(
    divergence: DivergenceCheck, names: Sequence[str], everyone: Sequence[Sums]
) -> str:
    """Return the warning for a call, given all ranks' checksums; "" for none."""
    return divergence.warning(
        [len({of_rank.get(name) for of_rank in everyone}) == 1 for name in names]
    )


def _same_rows(title: str, rows: Sequence[str], everyone: Sequence[Sums]) -> str:
    """Return the warning for a call of a pmap, given all ranks' checksums; "" for none."""
    if any(of_rank != everyone[0] for of_rank in everyone):
        return ""
    return (
        f"{title}: all {len(everyone)} ranks have called this pmap with equal arguments, such as "
        f"{rows[0]}, so all compute the same. Pass each rank different rows, by jaxmpi.shard, "
        "jaxmpi.batches or jaxmpi.rank(): jax.process_index() may be 0 on every rank."
    )


def _refuse_difference(title: str, everyone: Sequence[Sums]) -> None:
    for argument in everyone[0]:
        differ = outliers([of_rank.get(argument) for of_rank in everyone])
        if differ:
            raise RankMismatchError(
                f"{title}: {argument} is named in replicated_argnums, and {ranks_have(differ)} "
                "other values than the other ranks.",
                advice="Make it equal before the first step (jaxmpi.synchronize, or for an "
                "nnx.BatchStat jaxmpi.tree_bcast), or do not name it.",
                function=title,
                leaf=argument,
                ranks=differ,
            )
