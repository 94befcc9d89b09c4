"""The ranks find out whether they are about to do the same thing, before any of them waits for another in vain.

A rank that is about to communicate says a number: what it is about to do. One short message tells
the smallest and the largest of all ranks' numbers to everyone; only when these differ do the ranks
say more. It happens in Python between programs, or, where the transport compares what it carries,
with the messages of the program itself; never while tracing, and so a rank that has to trace and
compile first is waited for.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, cast

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Backend, ProcessGroup, fingerprint_of
from jaxmpi._backends.process_group import MpiProcessGroup
from jaxmpi._errors import RankMismatchError

if TYPE_CHECKING:
    from jaxmpi._backends.native import Native

__all__ = [
    "Statement",
    "check_consistent",
    "describe",
    "gather_sides",
    "has_run",
    "in_words",
    "is_program",
    "mismatch_of",
    "note_run",
    "outliers",
    "raise_mismatch",
    "raise_on_all",
    "raising_on_all",
    "register_program",
    "set_mismatch_handler",
    "uneven_shard",
]

Details = Mapping[str, Sequence[str]]  # what a rank does, line by line, by one of the verbs below
# of one rank: its statement, details and, in a program, its message
Side = tuple[tuple[int, str, int], Details, str]
CALLS = ("sent", "taken", "given")
DETAILS = ("called", "ordered", "decided")
WHOLE = ("computed", "compiled")  # of which all that follows from the first difference differs, too
SHOWN = 3  # differences
SAME_CALLS = "Every rank must make the same calls in the same order."
SAME_ARGUMENTS = "Every rank must call it with the same arguments."
SAME_ARRAYS = "Every rank must send the same arrays in the same order."
SAME_LENGTHS = (
    "A gather takes arrays of one shape. Where the lengths differ between the ranks, use "
    "jaxmpi.allgather_object outside of "
    "a step, or pad the arrays to one length and gather the true lengths beside them."
)
SAME_TYPES = (
    "Their arguments differ in weak type, which numbers of Python have: such a value takes the "
    "dtype of what it meets. Pass "
    "arrays with a dtype on every rank, such as jnp.asarray(x, jnp.float32)."
)
SAME_SHAPES = "On the xla backend all ranks run one compiled program, so the shapes of their arguments must be equal, too."
BRANCH = (
    "An `if` on the rank makes different programs: use jnp.where. What each rank has of its own "
    "must be an argument of the "
    "function, or follow from jaxmpi.rank()."
)
PLACES = (
    "The ranks took different branches, or different numbers of turns of a loop, with a collective "
    "inside: the predicate must "
    "be equal on all ranks. Or one of them has caught an error of a step that the others go on "
    "with: let it end the job."
)


class Statement(NamedTuple):
    """What a rank is about to send: equal fingerprints mean the same messages in the same order."""

    fingerprint: int
    title: str  # such as "tree_allreduce" or "train_step"
    program: int = 0  # the word of the program, where this call of it has another

    @staticmethod
    def of(title: str, content: str | None = None) -> "Statement":
        """The statement with a word that differs where `content` does; by default it is the title."""
        return Statement(fingerprint_of(title if content is None else content), title)


class Sent(Protocol):
    """What a program sends, in words; the lines are those of its call that runs, or with `lately` of its last calls."""

    def __call__(self, *, lately: bool = False) -> list[str]: ...


def check_consistent(
    backend: Backend, statement: Statement, details: Callable[[], Details] = dict
) -> None:
    """Go on if all ranks make the same statement; raise on all of them otherwise.

    **Communication:** 16 bytes.

    Args:
      backend: the ranks.
      statement: what this rank is about to do.
      details: what it will do, in words, for the message where the ranks differ.

    Raises:
      RankMismatchError: on every rank, with both sides.
    """
    smallest, largest = backend.extremes(*statement)
    if smallest != largest:
        raise _mismatch(cast(ProcessGroup, backend), statement, details())


def raise_on_all(backend: Backend, function: str, error: Exception) -> NoReturn:
    """Raise the error of one rank's arguments; ranks that have none raise a RankMismatchError with its text.

    Otherwise they would wait for this rank in a collective that it never calls.
    """
    if backend.place.size > 1 and not backend.simulates:
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RankMismatchError):  # which is for the others
            check_consistent(
                backend,
                Statement.of(function, f"{function} {text}"),
                lambda: {"sent": [f"nothing: {text}"]},
            )
    raise error


@contextlib.contextmanager
def raising_on_all(backend: Backend, function: str) -> Iterator[None]:
    """Check the arguments of a collective in a `with` block, before anything is sent.

    A rank that refuses its arguments must not go on alone: if it catches the error, its next
    collective would meet the one that the others are in. So it takes part in their comparison, with
    a fingerprint that no call has.

    Args:
      backend: the ranks.
      function: the collective, which all of them call outside of traced code.
    """
    try:
        yield
    except RuntimeError:  # of the ranks or of XLA: this rank has taken part
        raise
    except Exception as error:
        if backend.forked:
            raise
        raise_on_all(backend, function, error)


def describe(
    backend: ProcessGroup | MpiProcessGroup, fingerprint: int, *, lately: bool = False
) -> str:
    """The message or program with this fingerprint, in words; `lately` is as in `Sent`."""
    program, what = backend.described(fingerprint)
    if not is_program(backend, fingerprint):
        return what or "a collective"
    statement, sent, _ = backend.registry.programs[program]
    lines = sent(lately=lately)
    if what in ("", statement.title):
        more = f", and {len(lines) - 1} more" if len(lines) > 1 else ""
        return f"{statement.title} ({lines[0]}{more})" if lines else statement.title
    same = [
        line for line in lines if what.startswith(re.split(", and [0-9]+ more| at | in ", line)[0])
    ]
    return f"{same[0] if same else what} of {statement.title}"


def is_program(backend: ProcessGroup | MpiProcessGroup, fingerprint: int) -> bool:
    """Whether a fingerprint is that of a program, or of one of its messages."""
    return backend.described(fingerprint)[0] in backend.registry.programs


def uneven_shard(backend: ProcessGroup | MpiProcessGroup) -> str:
    """What to say of a `shard` that gave the ranks parts of different lengths, where ranks make different calls; or ""."""
    if not backend.registry.uneven_shard:
        return ""
    return (
        f"jaxmpi.shard at {backend.registry.uneven_shard} has more samples on some ranks than on "
        "others: loop over "
        "jaxmpi.batches, which has as many steps on all."
    )


# where the transport compares


def register_program(
    backend: ProcessGroup, statement: Statement, sent: Sent, details: Callable[[], Details]
) -> None:
    """Keep what a program sends, in words, and what tells all of it, for an error."""
    backend.registry.programs[statement.fingerprint] = statement, sent, details


def set_mismatch_handler(backend: ProcessGroup) -> None:
    """Have the ranks of a transport that compares explain their differences."""
    if backend.compares_inline:
        cast("Native", backend).set_mismatch_handler(partial(_explain, backend))


def has_run(backend: ProcessGroup, fingerprint: int) -> bool:
    """Whether the ranks have run the program with this fingerprint: the same on all of them, as they run it together."""
    return fingerprint in backend.registry.run


def note_run(backend: ProcessGroup, fingerprint: int) -> None:
    """Remember that the ranks have agreed on a program with this fingerprint."""
    backend.registry.run.add(fingerprint)


def raise_mismatch(backend: ProcessGroup, error: Exception) -> None:
    """Raise the RankMismatchError behind the JaxRuntimeError of a program, if there is one."""
    found = backend.registry.found
    if found and str(found[0]) in str(error):
        raise found.pop() from None


def _explain(backend: ProcessGroup, fingerprint: int, message: str, ranks: Sequence[int]) -> str:
    statement, _, details = backend.registry.programs.get(
        fingerprint, (Statement.of(message), (), dict)
    )
    backend.registry.found[:] = [_mismatch(backend, statement, details(), message, ranks)]
    return f"RankMismatchError: {backend.registry.found[0]}"


def _mismatch(
    backend: ProcessGroup,
    statement: Statement,
    details: Details,
    message: str = "",
    ranks: Sequence[int] = (),
) -> RankMismatchError:
    """The error that all ranks raise, of what each of them says; or all of a group, whose `ranks` are given then."""
    return mismatch_of(gather_sides(backend, statement, details, message, ranks), ranks)


def gather_sides(
    backend: ProcessGroup,
    statement: Statement,
    details: Details,
    message: str = "",
    ranks: Sequence[int] = (),
) -> list[Side]:
    """Return what each rank is about to do, once their fingerprints have differed: in the order of the ranks."""
    details = dict(details)
    no_program = (statement.program or statement.fingerprint) not in backend.registry.programs
    if no_program and (line := _jaxcompat.called_at()):  # this call has not returned yet
        details["at"] = [line]
    details["shard"] = [*filter(None, [uneven_shard(backend)])]
    return backend.gather_details((tuple(statement), details, message), ranks)


def mismatch_of(everyone: Sequence[Side], ranks: Sequence[int] = ()) -> RankMismatchError:
    """Return the error for sides of `gather_sides` that differ."""
    ranks = ranks or range(len(everyone))
    said = [Statement(*statement) for statement, _, _ in everyone]
    if len(set(said)) > 1:
        return RankMismatchError(_compare(ranks, said, [details for _, details, _ in everyone]))
    messages = [message for _, _, message in everyone]  # the same program, at different places
    at = [Statement.of(m)._replace(title=said[0].title) for m in messages]
    return RankMismatchError(_compare(ranks, at, [{"sent": [m]} for m in messages], PLACES))


def _compare(
    ranks: Sequence[int],
    everyone: Sequence[Statement],
    details: Sequence[Details],
    advice: str = "",
) -> str:
    """The first rank's side and that of the first one that differs, down to the first lines that do."""
    other = next(
        i for i, said in enumerate(everyone) if said.fingerprint != everyone[0].fingerprint
    )
    names = [
        in_words(
            [
                r
                for r, said in zip(ranks, everyone, strict=True)
                if said.fingerprint == everyone[k].fingerprint
            ]
        )
        for k in (0, other)
    ]
    titles = everyone[0].title, everyone[other].title
    differences = {
        verb: _differences(details[0].get(verb, ()), details[other].get(verb, ()))
        for verb in (*CALLS, *DETAILS, *WHOLE)
    }
    weak = _differences(details[0].get("typed", ()), details[other].get("typed", ()))
    if weak and not (differences["taken"] or differences["given"]):
        differences["taken"], advice = weak, advice or SAME_TYPES
    gathered = details[0].get("gathered", ())
    if (
        gathered
        and gathered == details[other].get("gathered")
        and differences["sent"]
        and not differences["given"]
    ):
        advice = advice or SAME_LENGTHS
    head = f"{titles[0]}: {names[0]} and {names[1]} do not agree. {advice or _advice(differences)}"
    at = ["".join(f" at {line}" for line in details[k].get("at", ())) for k in (0, other)]
    if titles[0] != titles[1]:
        head = f"{names[0]} called {titles[0]}{at[0]}, and {names[1]} called {titles[1]}{at[1]}. {SAME_CALLS}"
        head = " ".join([head, *details[0].get("shard", ())])
    shown = () if differences["sent"] or differences["given"] else DETAILS
    pairs = [(verb, *pair) for verb in (*CALLS, *shown) for pair in differences[verb]]
    pairs = pairs or [(verb, *differences[verb][0]) for verb in WHOLE if differences[verb]][:1]
    lines = [
        f"\n  {verb} by {name}: {line or 'nothing more'}"
        for verb, *both in pairs
        for name, line in zip(names, both, strict=True)
    ]
    lines, hidden = lines[: 2 * SHOWN], len(pairs) - SHOWN
    if hidden > 0:
        lines.append(f"\n  ... and {hidden} more differences")
    if titles[0] == titles[1]:
        lines += [
            f"\n  called by {name}{where}" for name, where in zip(names, at, strict=True) if where
        ]
    return head + "".join(lines)


def _advice(differences: Mapping[str, Sequence[object]]) -> str:
    """What to do about differences of calls of one function."""
    if differences["given"]:
        return SAME_ARGUMENTS
    if differences["taken"] and differences["sent"]:
        return SAME_ARRAYS
    return SAME_SHAPES if differences["taken"] and differences["computed"] else BRANCH


def _differences(mine: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in zip_longest(mine, theirs, fillvalue="") if a != b]


def in_words(ranks: Sequence[int]) -> str:
    """Such as "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def outliers(values: Sequence[object]) -> tuple[list[int], str]:
    """The ranks that hold another value than most, and them as the subject of a sentence: "rank 1 has", "ranks 1, 2 have"."""
    usual = max(values, key=list(values).count)
    ranks = [rank for rank, value in enumerate(values) if value != usual]
    return ranks, f"{in_words(ranks)} {'have' if len(ranks) > 1 else 'has'}"
