"""First call of a program: compare the values of its arguments, once.

This finds
1. arguments that are declared replicated and differ between ranks (an error on all ranks),
2. train state that is equal before this call and may differ after it, because a mean was forgotten,
3. a pmap whose ranks all got the same rows.

The last two are warnings, which the monitors' threads make of the checksums of all ranks: a program
without collectives may be called by the ranks at different times, or by one rank alone.
"""

from collections.abc import Iterable, Mapping, Sequence
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

Checksums = Mapping[str, int]  # of inputs by their names, captured arrays first


def compare(backend: Processes, program: Program, leaves: Sequence[Leaf]) -> None:
    """Compare the arguments of the first call of a program.

    **Collective:** if the program has collectives and replicated arguments, all ranks that have not
    run a program with its fingerprint.
    **Communication:** the comparison of the fingerprint, and an allgather of a dict with a checksum
    for each replicated argument; other checksums travel between the monitors.

    Args:
      backend: the ranks.
      program: the program of the call.
      leaves: the arrays of its arguments.

    Raises:
      RankMismatchError: on all ranks, an argument that `replicated_argnums` names is not equal on
        all of them.
    """
    call = program.compared_call
    if not call and not program.forgotten_mean:
        return
    title, (equal, _) = program.function.title, program.equal
    outside = [f"array {i} from outside" for i in range(len(program.captured))]
    inputs = dict(zip([*outside, *program.arguments], [*program.captured, *leaves], strict=True))
    replicated = [name for name, same in zip(program.arguments, equal, strict=True) if same]
    is_new = call is not None and not has_run(backend, call.fingerprint)
    # Checksums take time, so compute only those that are compared below.
    summed: Iterable[str] = ()
    if program.forgotten_mean or program.batch:
        summed = inputs
    elif is_new:
        summed = replicated
    sums = {name: values.checksum(inputs[name]) for name in summed}
    # The ranks must agree on the program before they gather checksums of its arguments.
    if call and is_new and replicated:
        check_consistent(backend, call, program.signature.details)
        note_run(backend, call.fingerprint)
        everyone = backend.allgather_object({name: sums[name] for name in replicated})
        _refuse_difference(title, everyone)
    monitor = session.monitor()
    if program.forgotten_mean and monitor:
        monitor.gathering.add(
            f"{title} {program.forgotten_mean.digest}",
            sums,
            partial(_divergence, program.forgotten_mean, list(inputs)),
        )
    if program.batch and call and monitor:
        rows = [program.arguments[i] for i in program.batch]
        monitor.gathering.add(
            f"{title} rows {call.fingerprint}", sums, partial(_same_rows, title, rows)
        )


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


def _refuse_difference(title: str, everyone: Sequence[Checksums]) -> None:
    """Raise a RankMismatchError, on all ranks, for the first replicated argument that differs."""
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
