"""Processes that a rank starts, such as data loaders: they inherit what MPI's launcher has told the rank, and are no ranks."""

import os
from typing import NamedTuple

from jaxmpi._job.process import launchers

__all__ = ["Parent", "note_rank", "parent"]

_VARIABLE = "JAXMPI_RANK_PROCESS"  # what the rank tells them


class Parent(NamedTuple):
    """The rank whose child this process is: its process id, its number on its node, and how many ranks there are."""

    pid: int
    local_rank: int
    size: int


def note_rank(local_rank: int, size: int) -> None:
    """Let the processes that this one starts from now on know that it is a rank."""
    os.environ[_VARIABLE] = " ".join([*map(str, Parent(os.getpid(), local_rank, size)), *_launch()])


def parent() -> Parent | None:
    """The rank that has started this process, or its parent; None in a rank, and where there is none."""
    words = os.environ.get(_VARIABLE, "").split()
    if words[3:] != _launch() or words[:3] == [] or int(words[0]) == os.getpid():
        return None
    return Parent(*map(int, words[:3]))


def _launch() -> list[str]:
    # Where these differ, another launcher has started this process within the rank.
    names = ("JAXMPI_RUN_DIR", *launchers.names(lambda launcher: launcher.identity))
    return [f"{name}={os.environ[name]}" for name in names if name in os.environ]
