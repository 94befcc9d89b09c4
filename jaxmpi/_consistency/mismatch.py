"""Errors of ranks that disagree: from what each rank reports, the first difference and its advice.

The ranks exchange records, `Report`, and every rank makes the same error of them. The text is made
here alone; `RankMismatchError` has its parts as attributes.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from jaxmpi._backends.base import fingerprint_of
from jaxmpi._errors import MismatchSide, RankMismatchError

__all__ = [
    "Call",
    "CallDetails",
    "Report",
    "facts_of",
    "in_words",
    "mismatch_of",
    "outliers",
    "ranks_have",
]

F = TypeVar("F")

# For each field of `CallDetails` that an error shows: its verb, as in "sent by rank 1".
VERBS = {
    "collectives": "sent",
    "arguments": "taken",
    "parameters": "given",
    "primitive_parameters": "called",
    "order": "ordered",
    "control": "decided",
    "equations": "computed",
    "module": "compiled",
}
CALLS = ("collectives", "arguments", "parameters")  # always shown
# shown if the ranks send the same with other parameters
CAUSES = ("primitive_parameters", "order", "control")
# a difference in one line changes the lines after it, so only the first one is shown
WHOLE = ("equations", "module")
SHOWN = 3  # differences
SAME_CALLS = "Every rank must make the same calls in the same order."
SAME_ARGUMENTS = "Every rank must call it with the same arguments."
SAME_ARRAYS = "Every rank must send the same arrays in the same order."
SAME_LENGTHS = (
    "A gather takes arrays of one shape. Where the lengths differ between the ranks, use "
    "jaxmpi.allgather_object outside of a step, or pad the arrays to one length and gather the "
    "true lengths beside them."
)
SAME_TYPES = (
    "Their arguments differ in weak type, which numbers of Python have: such a value takes the "
    "dtype of what it meets. Pass arrays with a dtype on every rank, such as "
    "jnp.asarray(x, jnp.float32)."
)
SAME_SHAPES = (
    "On the xla backend all ranks run one compiled program, so the shapes of their arguments must "
    "be equal, too."
)
BRANCH = (
    "An `if` on the rank makes different programs: use jnp.where. What each rank has of its own "
    "must be an argument of the function, or follow from jaxmpi.rank()."
)
PLACES = (
    "The ranks took different branches, or different numbers of turns of a loop, with a collective "
    "inside: the predicate must be equal on all ranks. Or one of them has caught an error of a "
    "step that the others go on with: let it end the job."
)


class Call(NamedTuple):
    """Identity of a call or program: ranks with equal fingerprints send the same messages in order.

    Attributes:
      fingerprint: 62 bits of everything that must be equal on all ranks.
      title: the name of the function, such as "tree_allreduce" or "train_step".
      program: the fingerprint of the program, if that of this call of it is another one; else 0.
    """

    fingerprint: int
    title: str
    program: int = 0

    @staticmethod
    def of(title: str, content: str | None = None) -> "Call":
        """Return the call with the fingerprint of `content`, which is the title by default."""
        return Call(fingerprint_of(title if content is None else content), title)


class CallDetails(NamedTuple):
    """Lines of text about a call or program, for the error; a field without lines shows nothing.

    Attributes:
      collectives: each collective, with its arrays and source lines.
      arguments: the shape and dtype of each array that a program takes.
      parameters: the parameters of functions of jaxmpi, which must be equal.
      primitive_parameters: the parameters of the collectives' equations.
      typed_arguments: `arguments`, with a note where one is of weak type.
      gathers: the collectives without lengths, if one of them gathers.
      order: the position of each collective in the function.
      control: the equations on which it depends whether and how often collectives run.
      equations: the traced program, where all ranks must run the same module.
      module: that module.
    """

    collectives: Sequence[str] = ()
    arguments: Sequence[str] = ()
    parameters: Sequence[str] = ()
    primitive_parameters: Sequence[str] = ()
    typed_arguments: Sequence[str] = ()
    gathers: Sequence[str] = ()
    order: Sequence[str] = ()
    control: Sequence[str] = ()
    equations: Sequence[str] = ()
    module: Sequence[str] = ()


class Report(NamedTuple):
    """Facts about one rank that the ranks exchange after their fingerprints have differed.

    Attributes:
      call: the call that the rank makes, or the program that it runs.
      details: what it does, in words.
      message: in a program, the message that it is about to send.
      facts: a record of the function that the rank has called, which reads it by `facts_of`.
      called_at: the user's line of a call that is no program; "" if it is not known.
      shard_hint: a sentence about a `shard` that may be the cause; or "".
      raising: the error that the rank is about to raise on all ranks.
    """

    call: Call
    details: CallDetails = CallDetails()
    message: str = ""
    facts: object = None
    called_at: str = ""
    shard_hint: str = ""
    raising: RankMismatchError | None = None


def facts_of(reports: Sequence[Report], kind: type[F]) -> list[F] | None:
    """Return the facts of all ranks; None if a rank has reported facts of another kind, or none."""
    facts = []
    for report in reports:
        if not isinstance(report.facts, kind):
            return None
        facts.append(report.facts)
    return facts


def mismatch_of(reports: Sequence[Report], ranks: Sequence[int] = ()) -> RankMismatchError:
    """Return the error for reports that differ.

    Args:
      reports: one of each rank, in the order of the ranks.
      ranks: the ranks that have sent them, if these are a group; all by default.
    """
    ranks = ranks or range(len(reports))
    # A rank that raises what it has found about the ranks, where others are in a collective.
    for report in reports:
        if report.raising is not None:
            return report.raising
    if len({report.call for report in reports}) > 1:
        return _error(ranks, reports)
    # All ranks run one program, and have met in different messages of it.
    title = reports[0].call.title
    at_messages = []
    for report in reports:
        call = Call.of(report.message)._replace(title=title)
        at_messages.append(Report(call, CallDetails(collectives=[report.message])))
    return _error(ranks, at_messages, PLACES)


def _error(ranks: Sequence[int], reports: Sequence[Report], advice: str = "") -> RankMismatchError:
    """Return the error that shows the first rank beside the first rank that differs from it."""
    mine = reports[0]
    theirs = next(x for x in reports if x.call.fingerprint != mine.call.fingerprint)
    differences = {}
    for field, ours, others in zip(CallDetails._fields, mine.details, theirs.details, strict=True):
        differences[field] = _differences(ours, others)
    advice = advice or _advice(mine, theirs, differences)
    # Weak types count if all else is equal.
    if not (differences["arguments"] or differences["parameters"]):
        differences["arguments"] = differences["typed_arguments"]
    pairs = _shown(differences)
    sides = []
    for i, report in enumerate((mine, theirs)):
        group = []
        for rank, other in zip(ranks, reports, strict=True):
            if other.call.fingerprint == report.call.fingerprint:
                group.append(rank)
        lines = [(VERBS[field], pair[i]) for field, pair in pairs]
        called_at = (report.called_at,) if report.called_at else ()
        sides.append(MismatchSide(tuple(group), report.call.title, tuple(lines), called_at))
    return _put_into_words(sides, advice, mine.shard_hint)


def _differences(mine: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of lines that differ; "" for a line that one of them does not have."""
    return [(a, b) for a, b in zip_longest(mine, theirs, fillvalue="") if a != b]


def _advice(
    mine: Report, theirs: Report, differences: Mapping[str, Sequence[tuple[str, str]]]
) -> str:
    """Return what to do about ranks that call one function."""
    if differences["parameters"]:
        return SAME_ARGUMENTS
    if differences["typed_arguments"] and not differences["arguments"]:
        return SAME_TYPES
    if mine.details.gathers and not differences["gathers"] and differences["collectives"]:
        return SAME_LENGTHS
    if differences["arguments"] and differences["collectives"]:
        return SAME_ARRAYS
    return SAME_SHAPES if differences["arguments"] and differences["equations"] else BRANCH


def _shown(
    differences: Mapping[str, Sequence[tuple[str, str]]],
) -> list[tuple[str, tuple[str, str]]]:
    """Return the differences that tell most, as pairs of lines with their fields."""
    is_enough = differences["collectives"] or differences["parameters"]
    fields = CALLS if is_enough else (*CALLS, *CAUSES)
    pairs = []
    for field in fields:
        for pair in differences[field]:
            pairs.append((field, pair))
    if pairs:
        return pairs
    for field in WHOLE:
        if differences[field]:
            return [(field, differences[field][0])]
    return []


def _put_into_words(
    sides: Sequence[MismatchSide], advice: str, shard_hint: str
) -> RankMismatchError:
    """Return the error with its text: a sentence, the advice, and the lines that differ."""
    names = [in_words(side.ranks) for side in sides]
    at = ["".join(f" at {line}" for line in side.called_at) for side in sides]
    one_function = sides[0].function == sides[1].function
    if one_function:
        what = f"{sides[0].function}: {names[0]} and {names[1]} do not agree."
    else:
        what = (
            f"{names[0]} called {sides[0].function}{at[0]}, "
            f"and {names[1]} called {sides[1].function}{at[1]}."
        )
        advice = f"{SAME_CALLS} {shard_hint}" if shard_hint else SAME_CALLS
    lines = []
    for pair in list(zip(sides[0].lines, sides[1].lines, strict=True))[:SHOWN]:
        for name, (verb, line) in zip(names, pair, strict=True):
            lines.append(f"\n  {verb} by {name}: {line or 'nothing more'}")
    hidden = len(sides[0].lines) - SHOWN
    if hidden > 0:
        lines.append(f"\n  ... and {hidden} more differences")
    for name, where in zip(names, at, strict=True):
        if one_function and where:
            lines.append(f"\n  called by {name}{where}")
    return RankMismatchError(
        what,
        advice=advice,
        details="".join(lines),
        function=sides[0].function if one_function else "",
        sides=tuple(sides),
    )


def in_words(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "rank 1" or "ranks 0, 2"."""
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {', '.join(map(str, ranks))}"


def ranks_have(ranks: Sequence[int]) -> str:
    """Return ranks as the subject of a sentence, such as "rank 1 has" or "ranks 1, 2 have"."""
    return f"{in_words(ranks)} {'have' if len(ranks) > 1 else 'has'}"


def outliers(values: Sequence[object]) -> list[int]:
    """Return the ranks whose value is not the most frequent one."""
    usual = max(values, key=list(values).count)
    return [rank for rank, value in enumerate(values) if value != usual]
