"""Errors of ranks that disagree: from what each rank reports, the first difference and its advice.

The ranks exchange records, `Report`, and every rank makes the same error of them. The text is made
here alone; `RankMismatchError` has its parts as attributes.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from jaxmpi._backends.base import fingerprint_of
from jaxmpi._errors import MismatchSide, RankMismatchError

__all__ = ["Call", "Details", "Report", "in_words", "mismatch_of", "outliers", "ranks_have"]

# what a rank does: lines of text by the verbs below, and facts of one function under other names;
# "found" has the parts of the error that a rank raises
Details = Mapping[str, Sequence[Any]]
CALLS = ("sent", "taken", "given")  # always shown
CAUSES = ("called", "ordered", "decided")  # shown if the ranks send the same with other parameters
# a difference in one line changes the lines after it, so only the first one is shown
WHOLE = ("computed", "compiled")
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


class Report(NamedTuple):
    """Facts about one rank that the ranks exchange after their fingerprints have differed.

    Attributes:
      call: the call that the rank makes, or the program that it runs.
      details: what it does, line by line.
      message: in a program, the message that it is about to send.
    """

    call: Call
    details: Details
    message: str = ""


def mismatch_of(reports: Sequence[Report], ranks: Sequence[int] = ()) -> RankMismatchError:
    """Return the error for reports that differ.

    Args:
      reports: one of each rank, in the order of the ranks.
      ranks: the ranks that have sent them, if these are a group; all by default.
    """
    ranks = ranks or range(len(reports))
    # A rank that raises what it has found about the ranks, where others are in a collective.
    for report in reports:
        for what, advice, function, leaf, differ in report.details.get("found", ()):
            return RankMismatchError(
                what, advice=advice, function=function, leaf=leaf, ranks=differ
            )
    if len({report.call for report in reports}) > 1:
        return _error(ranks, reports)
    # All ranks run one program, and have met in different messages of it.
    title = reports[0].call.title
    at_messages = []
    for report in reports:
        call = Call.of(report.message)._replace(title=title)
        at_messages.append(Report(call, {"sent": [report.message]}))
    return _error(ranks, at_messages, PLACES)


def _error(ranks: Sequence[int], reports: Sequence[Report], advice: str = "") -> RankMismatchError:
    """Return the error that shows the first rank beside the first rank that differs from it."""
    mine = reports[0]
    theirs = next(x for x in reports if x.call.fingerprint != mine.call.fingerprint)
    differences = {}
    for verb in (*CALLS, *CAUSES, *WHOLE, "typed"):
        differences[verb] = _differences(mine.details.get(verb, ()), theirs.details.get(verb, ()))
    advice = advice or _advice(mine, theirs, differences)
    # The lines of "typed" are those of "taken" with weak types, which count if all else is equal.
    if not (differences["taken"] or differences["given"]):
        differences["taken"] = differences["typed"]
    pairs = _shown(differences)
    sides = []
    for i, report in enumerate((mine, theirs)):
        group = []
        for rank, other in zip(ranks, reports, strict=True):
            if other.call.fingerprint == report.call.fingerprint:
                group.append(rank)
        lines = [(verb, pair[i]) for verb, pair in pairs]
        sides.append(
            MismatchSide(
                tuple(group), report.call.title, tuple(lines), tuple(report.details.get("at", ()))
            )
        )
    return _put_into_words(sides, advice, mine.details.get("shard", ()))


def _differences(mine: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of lines that differ; "" for a line that one of them does not have."""
    return [(a, b) for a, b in zip_longest(mine, theirs, fillvalue="") if a != b]


def _advice(
    mine: Report, theirs: Report, differences: Mapping[str, Sequence[tuple[str, str]]]
) -> str:
    """Return what to do about ranks that call one function."""
    if differences["given"]:
        return SAME_ARGUMENTS
    if differences["typed"] and not differences["taken"]:
        return SAME_TYPES
    gathered = mine.details.get("gathered", ())
    if gathered and gathered == theirs.details.get("gathered") and differences["sent"]:
        return SAME_LENGTHS
    if differences["taken"] and differences["sent"]:
        return SAME_ARRAYS
    return SAME_SHAPES if differences["taken"] and differences["computed"] else BRANCH


def _shown(
    differences: Mapping[str, Sequence[tuple[str, str]]],
) -> list[tuple[str, tuple[str, str]]]:
    """Return the differences that tell most, as pairs of lines with their verbs."""
    verbs = CALLS if differences["sent"] or differences["given"] else (*CALLS, *CAUSES)
    pairs = []
    for verb in verbs:
        for pair in differences[verb]:
            pairs.append((verb, pair))
    if pairs:
        return pairs
    for verb in WHOLE:
        if differences[verb]:
            return [(verb, differences[verb][0])]
    return []


def _put_into_words(
    sides: Sequence[MismatchSide], advice: str, hints: Sequence[str]
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
        advice = " ".join([SAME_CALLS, *hints])
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
