"""Votes: each rank tells all others yes, no or that it has failed, and hears what they told."""

import enum
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
