"""The ranks find out whether they are about to do the same thing, before any of them waits for another in vain.

A rank that is about to communicate says a number: what it is about to do. One short message tells the smallest and the largest
of all ranks' numbers to everyone; only when these differ do the ranks say more. All of it happens in Python between programs,
never while tracing, and so a rank that has to trace and compile first is waited for.
"""

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from jaxmpi._backends import Backend
from jaxmpi._errors import RankMismatchError

__all__ = ["FAILED", "Statement", "calls", "meet"]

Sides = tuple[list[str], list[str]]

FAILED = 0  # in the place of a word: this rank cannot do what it was to do


class Statement(NamedTuple):
    """What a rank is about to do: equal words mean the same messages in the same order."""

    word: int
    title: str  # such as "tree_allreduce" or "train_step"
    failure: str = ""  # why it cannot


def calls(function: str, *details: Any) -> Statement:
    """The statement of a rank that calls a function which is no program; a word has 62 bits and is above 0."""
    digest = hashlib.blake2b(repr((function, details)).encode(), digest_size=8).digest()
    return Statement(int.from_bytes(digest, "big") >> 2 or 1, " ".join([function, *map(str, details)]))


def meet(backend: Backend, statement: Statement, sides: Callable[[], Sides] = lambda: ([], [])) -> None:
    """Go on if all ranks make the same statement; raise on all of them otherwise.

    **Communication:** 16 bytes.

    Args:
      backend: the ranks.
      statement: what this rank is about to do.
      sides: what it will send, and what it was called with, in words, for the message where the ranks differ.

    Raises:
      RankMismatchError: on every rank, with both sides. A rank with a `failure` of its own returns instead.
    """
    smallest, largest = backend.extremes(statement.word)
    if smallest == largest != FAILED:
        return
    everyone = [Statement(*said) for said in backend.allgather_object(tuple(statement))]
    failed = next((rank for rank, said in enumerate(everyone) if said.failure), None)
    if statement.failure:
        return
    if failed is not None:
        raise RankMismatchError(
            f"{statement.title}: rank {failed} could not trace {everyone[failed].title}: {everyone[failed].failure} "
            "The other ranks stop here, before anything is sent."
        )
    raise RankMismatchError(_compare(everyone, backend.allgather_object(sides())))


def _compare(everyone: Sequence[Statement], sides: Sequence[Sides]) -> str:
    """Rank 0's side and that of the first rank that differs, down to the first lines that do."""
    other = next(rank for rank, said in enumerate(everyone) if said.word != everyone[0].word)
    names = [_ranks([r for r, said in enumerate(everyone) if said.word == everyone[k].word]) for k in (0, other)]
    titles = everyone[0].title, everyone[other].title
    head = f"{titles[0]}: {names[0]} and {names[1]} do not agree."
    if titles[0] != titles[1]:
        head = f"{names[0]} called {titles[0]}, and {names[1]} called {titles[1]}."
    differences = [
        f"\n  {names[0]} {verb} {a or 'nothing more'}\n  {names[1]} {verb} {b or 'nothing more'}"
        for verb, mine, theirs in zip(("sends", "takes"), sides[0], sides[other], strict=True)
        for a, b in zip_longest(mine, theirs, fillvalue="")
        if a != b
    ]
    hidden = f"\n  ... and {len(differences) - 3} more differences" if len(differences) > 3 else ""
    return head + " Every rank must send the same arrays in the same order." + "".join(differences[:3]) + hidden


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
