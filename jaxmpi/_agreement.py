"""The ranks find out whether they are about to do the same thing, before any of them waits for another in vain.

A rank that is about to communicate says a number: what it is about to do. One short message tells the smallest and the largest
of all ranks' numbers to everyone; only when these differ do the ranks say more. It happens in Python between programs, or,
where the transport compares what it carries, with the messages of the program itself; never while tracing, and so a rank that
has to trace and compile first is waited for.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from jaxmpi._backends import word_of
from jaxmpi._errors import RankMismatchError

__all__ = ["Statement", "describe", "in_words", "know", "listen", "meet", "raise_found"]

Sides = tuple[list[str], list[str]]


class Statement(NamedTuple):
    """What a rank is about to do: equal words mean the same messages in the same order."""

    word: int
    title: str  # such as "tree_allreduce" or "train_step"

    @staticmethod
    def of(title: str, content: str | None = None) -> "Statement":
        """The statement with a word that differs where `content` does; by default it is the title."""
        return Statement(word_of(title if content is None else content), title)


def meet(backend: Any, statement: Statement, sides: Callable[[], Sides] = lambda: ([], [])) -> None:
    """Go on if all ranks make the same statement; raise on all of them otherwise.

    **Communication:** 16 bytes.

    Args:
      backend: the ranks.
      statement: what this rank is about to do.
      sides: what it will send, and what it was called with, in words, for the message where the ranks differ.

    Raises:
      RankMismatchError: on every rank, with both sides.
    """
    smallest, largest = backend.extremes(statement.word, statement.title)
    if smallest != largest:
        raise _mismatch(backend, statement, sides())


def describe(backend: Any, word: int) -> str:
    """What a rank has sent with this word."""
    program, what = backend.described(word)
    if program not in _known:
        return what or "a collective"
    statement, (lines, _) = _known[program]
    if what in ("", statement.title):
        more = f", and {len(lines) - 1} more" if len(lines) > 1 else ""
        return f"{statement.title} ({lines[0]}{more})" if lines else statement.title
    same = [line for line in lines if what.startswith(re.split(", and [0-9]+ more| at | in ", line)[0])]
    return f"{same[0] if same else what} of {statement.title}"


# where the transport compares

_known: dict[int, tuple[Statement, Sides]] = {}  # the programs that were traced
_found: list[RankMismatchError] = []  # on a thread of a program, and not raised yet


def know(statement: Statement, sides: Sides) -> None:
    """Keep what a program sends and takes, for an error."""
    _known[statement.word] = statement, sides


def listen(backend: Any) -> None:
    """Have the ranks of a transport that compares explain their differences."""
    _known.clear()
    _found.clear()
    if backend.in_band:
        backend.listen(partial(_explain, backend))


def raise_found(error: Exception) -> None:
    """Raise what the error of a program stands for, if it is that the ranks differ."""
    if _found and str(_found[0]) in str(error):
        raise _found.pop() from None


def _explain(backend: Any, word: int, message: str) -> str:
    statement, sides = _known.get(word, (Statement.of(message), ([], [])))
    _found[:] = [_mismatch(backend, statement, sides, message)]
    return f"RankMismatchError: {_found[0]}"


def _mismatch(backend: Any, statement: Statement, sides: Sides, message: str = "") -> RankMismatchError:
    """The error that all ranks raise, of what each of them says."""
    everyone = backend.gather_sides((tuple(statement), sides, message))
    said = [Statement(*statement) for statement, _, _ in everyone]
    if len(set(said)) > 1:
        return RankMismatchError(_compare(said, [sides for _, sides, _ in everyone]))
    messages = [message for _, _, message in everyone]  # the same program, at different places
    return RankMismatchError(
        _compare([Statement.of(m)._replace(title=statement.title) for m in messages], [([m], []) for m in messages])
    )


def _compare(everyone: Sequence[Statement], sides: Sequence[Sides]) -> str:
    """Rank 0's side and that of the first rank that differs, down to the first lines that do."""
    other = next(rank for rank, said in enumerate(everyone) if said.word != everyone[0].word)
    names = [in_words([r for r, said in enumerate(everyone) if said.word == everyone[k].word]) for k in (0, other)]
    titles = everyone[0].title, everyone[other].title
    head = f"{titles[0]}: {names[0]} and {names[1]} do not agree."
    if titles[0] != titles[1]:
        head = f"{names[0]} called {titles[0]}, and {names[1]} called {titles[1]}."
    differences = [
        f"\n  {verb} by {names[0]}: {a or 'nothing more'}\n  {verb} by {names[1]}: {b or 'nothing more'}"
        for verb, mine, theirs in zip(("sent", "taken"), sides[0], sides[other], strict=True)
        for a, b in zip_longest(mine, theirs, fillvalue="")
        if a != b
    ]
    hidden = f"\n  ... and {len(differences) - 3} more differences" if len(differences) > 3 else ""
    return head + " Every rank must send the same arrays in the same order." + "".join(differences[:3]) + hidden


def in_words(ranks: Sequence[int]) -> str:
    """Such as "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
