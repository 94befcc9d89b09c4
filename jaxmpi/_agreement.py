"""The ranks find out whether they are about to do the same thing, before any of them waits for another in vain.

A rank that is about to communicate says a number: what it is about to do. One short message tells the smallest and the largest
of all ranks' numbers to everyone; only when these differ do the ranks say more. All of it happens in Python between programs,
never while tracing, and so a rank that has to trace and compile first is waited for.
"""

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from jaxmpi._backends import Backend
from jaxmpi._errors import RankMismatchError

__all__ = ["Statement", "meet"]

Sides = tuple[list[str], list[str]]


class Statement(NamedTuple):
    """What a rank is about to do: equal words mean the same messages in the same order."""

    word: int
    title: str  # such as "tree_allreduce" or "train_step"

    @staticmethod
    def of(title: str, content: str | None = None) -> "Statement":
        """The statement with a word that differs where `content` does; by default it is the title."""
        digest = hashlib.blake2b((title if content is None else content).encode(), digest_size=8).digest()
        return Statement(int.from_bytes(digest, "big") >> 2, title)  # 62 bits: its negative is to be an int64, too


def meet(backend: Backend, statement: Statement, sides: Callable[[], Sides] = lambda: ([], [])) -> None:
    """Go on if all ranks make the same statement; raise on all of them otherwise.

    **Communication:** 16 bytes.

    Args:
      backend: the ranks.
      statement: what this rank is about to do.
      sides: what it will send, and what it was called with, in words, for the message where the ranks differ.

    Raises:
      RankMismatchError: on every rank, with both sides.
    """
    smallest, largest = backend.extremes(statement.word)
    if smallest != largest:
        everyone = backend.allgather_object((tuple(statement), sides()))
        raise RankMismatchError(_compare([Statement(*said) for said, _ in everyone], [side for _, side in everyone]))


def _compare(everyone: Sequence[Statement], sides: Sequence[Sides]) -> str:
    """Rank 0's side and that of the first rank that differs, down to the first lines that do."""
    other = next(rank for rank, said in enumerate(everyone) if said.word != everyone[0].word)
    names = [_ranks([r for r, said in enumerate(everyone) if said.word == everyone[k].word]) for k in (0, other)]
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


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
