"""Votes: each rank tells all others yes, no or that it has failed, and hears what they told."""

import enum
from collections.abc import Collection
from typing import NamedTuple

__all__ = ["Outcome", "Vote"]


class Vote(enum.IntEnum):
    """Vote of one rank."""

    NO, YES, FAILED = 0, 1, 2


class Outcome(NamedTuple):
    """Votes of all ranks together."""

    any: bool  # whether one has said yes
    all: bool  # whether all have
    failed: bool  # whether one has failed

    @classmethod
    def of(cls, votes: Collection[Vote]) -> "Outcome":
        """Return the outcome of the votes of all ranks, each kind of them once or more often."""
        return cls(Vote.YES in votes, set(votes) == {Vote.YES}, Vote.FAILED in votes)
