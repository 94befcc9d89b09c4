"""The first call of a program: its arguments are compared by value, once.

That finds arguments that are named as equal on all ranks and are not, and train state that is equal and parts with this call,
because a mean was forgotten. The latter is looked at in the guards' threads: ranks whose program sends nothing may call it at
different times, or one alone.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxmpi._consistency import values as _check
from jaxmpi._consistency.compare import check_consistent, has_run, in_words, note_run
from jaxmpi._errors import RankMismatchError
from jaxmpi._jit.program import Program
from jaxmpi._lowering.carried_state import Carried
from jaxmpi._monitor import monitor

__all__ = ["compare"]

Sums = Mapping[int, int]  # checksums of inputs, those from outside first, by their numbers


def compare(backend: Any, program: Program, leaves: Sequence[Any]) -> None:
    """Compare what a program is called with for the first time.

    It is rank 0's guard that says, on standard error, which outputs may differ from now on. So it does with arguments that
    `replicated_argnums` names, where the program sends nothing, or is like one that the ranks have run before.

    Args:
      backend: the ranks.
      program: theirs, if it sends anything.
      leaves: the arrays of its arguments.

    Raises:
      RankMismatchError: on all ranks, an argument that `replicated_argnums` names is not equal on all of them.
    """
    inputs, captured = [*program.captured, *leaves], len(program.captured)
    equal, _ = program.equal
    named = {i: program.arguments[i - captured] for i, same in enumerate(equal, captured) if same}
    sums = {i: _check.checksum(inputs[i]) for i in (range(len(inputs)) if program.carried else named)}
    if named and program.statement and not has_run(program.statement.fingerprint):
        check_consistent(backend, program.statement, program.signature.details)
        note_run(program.statement.fingerprint)
        if difference := _difference(program.function.title, named, backend.allgather_object(sums)):
            raise RankMismatchError(difference)
        named = {}
    if (named or program.carried) and (watch := monitor.active()):
        key = f"{program.function.title} {program.arguments} {program.outputs}"
        watch.gathering.add(key, sums, partial(_judge, program.function.title, named, program.carried))


def _judge(title: str, named: Mapping[int, str], carried: Carried | None, everyone: Sequence[Sums]) -> str:
    """What to say of a call, given all ranks' checksums; "" for nothing."""
    equal = {i: all(of_rank.get(i) == value for of_rank in everyone) for i, value in everyone[0].items()}
    return _difference(title, named, everyone) or (carried.parting([equal[i] for i in sorted(equal)]) if carried else "")


def _difference(title: str, named: Mapping[int, str], everyone: Sequence[Sums]) -> str:
    """The first of the arguments named as equal that is not; "" for none."""
    for i, argument in named.items():
        values = [of_rank.get(i) for of_rank in everyone]
        usual = max(values, key=values.count)
        if other := [rank for rank, value in enumerate(values) if value != usual]:
            return (
                f"{title}: {argument} is named in replicated_argnums, and {in_words(other)} "
                f"{'have' if len(other) > 1 else 'has'} other values than the rest. Make it equal before the first step "
                "(jaxmpi.synchronize), or do not name it."
            )
    return ""
