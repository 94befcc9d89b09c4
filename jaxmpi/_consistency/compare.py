"""Comparison of the ranks before they communicate, so that none waits in vain for another.

Before communicating, each rank shares a 62-bit fingerprint of its next call or program. One short
message tells all ranks the smallest and the largest fingerprint; only if these differ do the ranks
exchange what they are about to do, and raise a RankMismatchError. The comparison happens in Python
between programs, or, if the transport compares what it carries, with the messages of the program
itself. It never happens while tracing, so the ranks wait for one that has to trace and compile
first.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import ArrayType, Branch, Message, Taken
from jaxmpi._backends.interface import Processes, Ranks
from jaxmpi._consistency.findings import Finding
from jaxmpi._consistency.mismatch import Call, CallDetails, Report, mismatch_of
from jaxmpi._errors import RankMismatchError
from jaxmpi._job.process.communicating_thread import ForkedError

__all__ = [
    "check_consistent",
    "compare_values_again",
    "continue_after_reports",
    "describe",
    "gather_reports",
    "has_agreed",
    "has_compared_values",
    "is_program",
    "note_agreed",
    "note_compared_values",
    "raise_found",
    "raise_mismatch",
    "raise_on_all",
    "raising_on_all",
    "register_program",
    "set_mismatch_handler",
    "uneven_shard",
]


def check_consistent(
    backend: Ranks, call: Call, details: Callable[[], CallDetails] = CallDetails
) -> None:
    """Return if all ranks are about to make the same call; otherwise raise on all of them.

    **Communication:** 16 bytes.

    Args:
      backend: the ranks.
      call: the call that this rank is about to make.
      details: returns what the call does, in words, for the error.

    Raises:
      RankMismatchError: on every rank, with both sides.
    """
    smallest, largest = backend.extremes(*call)
    if smallest != largest:
        raise mismatch_of(gather_reports(backend, Report(call, details())))


def raise_on_all(backend: Ranks, function: str, error: Exception) -> NoReturn:
    """Raise the error of this rank's arguments; the other ranks raise a RankMismatchError.

    Otherwise they would wait for this rank in a collective that it never calls. Their error has the
    text of this one.
    """
    text = f"{type(error).__name__}: {error}"
    # The mismatch is for the others. A forked child cannot tell them, and raises its own error.
    with contextlib.suppress(RankMismatchError, ForkedError):
        check_consistent(
            backend,
            Call.of(function, f"{function} {text}"),
            lambda: CallDetails(collectives=[f"nothing: {text}"]),
        )
    raise error


def raise_found(backend: Ranks, error: RankMismatchError) -> NoReturn:
    """Raise what this rank has found about the ranks, on all of them.

    Those that are in a collective get the same error there, in whichever message they are.
    """
    backend.registry.raising = error
    try:
        # If all ranks raise the same, this returns; otherwise it raises what the first one does.
        check_consistent(backend, Call.of(error.function, f"{error.function} {error}"))
    finally:
        backend.registry.raising = None
    backend.registry.mismatches += 1
    raise error


@contextlib.contextmanager
def raising_on_all(backend: Ranks, function: str, *, sends: bool = True) -> Iterator[None]:
    """Check the arguments of a collective in a `with` block, before anything is sent.

    A rank that refuses its arguments must not continue alone: if it catches the error, its next
    collective would meet the one in which the other ranks are. So it takes part in their
    comparison, with a fingerprint that no call has.

    Args:
      backend: the ranks.
      function: the collective, which all of them call outside of traced code.
      sends: whether the block may send something. Then this rank has taken part in what raises a
        RuntimeError, and raises it alone.
    """
    try:
        yield
    except RuntimeError as error:
        if sends:
            raise
        raise_on_all(backend, function, error)
    except Exception as error:
        raise_on_all(backend, function, error)


def gather_reports(backend: Ranks, report: Report, ranks: Sequence[int] = ()) -> list[Report]:
    """Return what each rank is about to do, once their fingerprints have differed.

    Args:
      backend: the ranks.
      report: of this rank: its call, what that does, and the facts of its function. What does not
        depend on the function is added here.
      ranks: the group that exchanges reports; all ranks by default.
    """
    if not ranks:  # all ranks raise, or call `continue_after_reports`
        backend.registry.mismatches += 1
    in_program = (report.call.program or report.call.fingerprint) in backend.registry.programs
    report = report._replace(
        # A program has source lines of its own. Any other call has not returned yet.
        called_at="" if in_program else _jaxcompat.called_at(),
        shard_hint=uneven_shard(backend),
        raising=backend.registry.raising,
    )
    return backend.gather_details(report, ranks)


def continue_after_reports(backend: Ranks) -> None:
    """Note, on all ranks, that none of them raises an error after `gather_reports`."""
    backend.registry.mismatches -= 1


def uneven_shard(backend: Ranks) -> str:
    """Return a hint for ranks that make different calls: a `shard` with uneven lengths; or ""."""
    if not backend.registry.uneven_shard:
        return ""
    return (
        f"jaxmpi.shard at {backend.registry.uneven_shard} has more samples on some ranks than on "
        "others: loop over jaxmpi.batches, which has as many steps on all."
    )


# programs, which a transport may compare while they run


class SentArrays(Protocol):
    """One collective of a program, whose text has its source lines."""

    @property
    def name(self) -> str:
        """Return the title of the collective, such as "allreduce sum"."""

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """Return the shape and dtype of each array that it carries."""


class Sent(Protocol):
    """Returns the collectives of a program.

    The source lines are those of the call that runs; with `lately`, of the last calls.
    """

    def __call__(self, *, lately: bool = False) -> Sequence[SentArrays]: ...


class Registered(NamedTuple):
    """A program that was traced: its identity, its collectives, and all that is compared of it."""

    call: Call
    sent: Sent
    details: Callable[[], CallDetails]


def register_program(
    backend: Ranks, call: Call, sent: Sent, details: Callable[[], CallDetails]
) -> None:
    """Keep what a program sends, for errors and for the monitor."""
    backend.registry.programs[call.fingerprint] = Registered(call, sent, details)


def _registered(backend: Ranks, fingerprint: int) -> Registered | None:
    """Return the program with a fingerprint, if this rank has traced it."""
    found = backend.registry.programs.get(fingerprint)
    return found if isinstance(found, Registered) else None


def set_mismatch_handler(backend: Ranks) -> None:
    """Have `_mismatch_text` write the error where a program's messages differ between ranks."""
    backend.explain_mismatches(partial(_mismatch_text, backend))


def _mismatch_text(
    backend: Ranks, fingerprint: int, message: str | Message | Taken, ranks: Sequence[int]
) -> str:
    """Return the text of the error for messages that differ, and keep it for `raise_mismatch`."""
    if isinstance(message, Taken):
        error = _branches_error(message.branches)
    else:
        text = str(message)
        program = _registered(backend, fingerprint)
        report = Report(Call.of(text), message=text)
        if program:
            report = Report(program.call, program.details(), text)
        error = mismatch_of(gather_reports(backend, report, ranks), ranks)
    return f"RankMismatchError: {error} {backend.registry.keep(error)}"


def _branches_error(branches: Sequence[Branch]) -> RankMismatchError:
    """Return the error for ranks in different branches under plain `jax.jit`, one of each rank."""
    skipping = [rank for rank, branch in enumerate(branches) if not branch.messages]
    sending = [branch for branch in branches if branch.messages]
    function = sending[0].function or "jax.jit"
    if skipping:
        return Finding(
            "skipped_update", function, ranks=skipping, detail=str(sending[0]), has_allow=False
        ).error()
    call = Call.of(function)
    return mismatch_of([Report(call, message=str(branch)) for branch in branches])


def raise_mismatch(backend: Ranks, error: Exception) -> None:
    """Raise the RankMismatchError behind the JaxRuntimeError of a program, if there is one.

    XLA carries only the text of an error, so the error itself was kept, under a mark in the text.
    """
    if found := backend.registry.pop(str(error)):
        raise found from None


def has_agreed(backend: Ranks, fingerprint: int) -> bool:
    """Return whether the ranks have agreed on a program."""
    return fingerprint in backend.registry.agreed


def note_agreed(backend: Ranks, fingerprint: int) -> None:
    """Note that the ranks have agreed on a program."""
    backend.registry.agreed.add(fingerprint)


def has_compared_values(backend: Ranks, fingerprint: int) -> bool:
    """Return whether the ranks have compared the values of arguments before this program."""
    return fingerprint in backend.registry.values_compared


def note_compared_values(backend: Ranks, fingerprint: int) -> None:
    """Note that the ranks have compared the values of arguments before a program."""
    backend.registry.values_compared.add(fingerprint)


def compare_values_again(backend: Ranks) -> None:
    """Have the next call of each step compare its arguments: all ranks have restored them."""
    backend.registry.values_compared.clear()
    backend.registry.restores += 1


# fingerprints in words, for the monitor


def describe(backend: Processes, fingerprint: int, *, lately: bool = False) -> str:
    """Return the message or program with a fingerprint in words; `lately` is as in `Sent`."""
    program, what = backend.described(fingerprint)
    if not is_program(backend, fingerprint):
        return str(what) or "a collective"
    registered = _registered(backend, program)
    assert registered is not None
    title, collectives = registered.call.title, registered.sent(lately=lately)
    if what in ("", title):  # the program as a whole
        more = f", and {len(collectives) - 1} more" if len(collectives) > 1 else ""
        return f"{title} ({collectives[0]}{more})" if collectives else title
    for collective in collectives:
        if isinstance(what, Message) and _carries(collective, what):
            return f"{collective} of {title}"
    return f"{what} of {title}"


def _carries(collective: SentArrays, message: Message) -> bool:
    """Return whether a message of a program belongs to a collective of it.

    A message may have a part of the arrays, or more than these, so its first ones decide.
    """
    first = collective.arrays[:3]
    return collective.name == message.title and first == message.arrays[: len(first)]


def is_program(backend: Processes, fingerprint: int) -> bool:
    """Return whether a fingerprint is that of a program, or of one of its messages."""
    return backend.described(fingerprint)[0] in backend.registry.programs
