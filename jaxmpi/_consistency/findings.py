"""Findings: assumptions of data-parallel training that a program breaks, and their words.

A check makes a `Finding` of what it has found; this file alone makes the text of it. What is
checked can be turned off:

- `allow="NAME"` of `jaxmpi.jit`, `jaxmpi.nn.jit` and `jaxmpi.pmap` turns off one check by its name,
  for one function;
- JAXMPI_CHECK=0 in the environment turns off all of them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxmpi._job.process import settings

__all__ = ["ASSUMPTIONS", "Assumption", "Finding", "checked_names", "is_checked"]

MAX_LEAVES = 3  # that a text names


class Assumption(NamedTuple):
    """An assumption of data-parallel training.

    Attributes:
      found: the sentence about a program that breaks it; `{leaves}` are those of the finding.
      advice: what to do about it.
    """

    found: str
    advice: str


# by the name that `allow` takes
ASSUMPTIONS: Mapping[str, Assumption] = {
    "forgotten_mean": Assumption(
        "output {leaves} may differ between the ranks from this call on, and was equal on all of "
        "them before.",
        "If it is trained, average the gradients (jaxmpi.distributed, jaxmpi.tree_allreduce). If "
        "it should differ, such as a sum over the batches of a rank, put it into a "
        "jaxmpi.PerRankState, or in nnx into an nnx.BatchStat.",
    ),
}


class Finding(NamedTuple):
    """An assumption that a program breaks.

    Attributes:
      assumption: its name, a key of ASSUMPTIONS.
      function: the title of the step in which it was found.
      leaves: the names of the leaves that it is about.
    """

    assumption: str
    function: str
    leaves: Sequence[str]

    def warning(self) -> str:
        """Return the text of the warning: what was found, what to do, and how to turn it off."""
        assumption = ASSUMPTIONS[self.assumption]
        leaves = ", ".join(self.leaves[:MAX_LEAVES])
        if len(self.leaves) > MAX_LEAVES:
            leaves += f" and {len(self.leaves) - MAX_LEAVES} more"
        return (
            f"{self.function}: {assumption.found.format(leaves=leaves)} {assumption.advice} "
            f'If it is meant, allow="{self.assumption}" turns this check off.'
        )


def checked_names(function: str, allow: str | Iterable[str]) -> frozenset[str]:
    """Return the names in an argument `allow`.

    Raises:
      ValueError: a name that no assumption has.
    """
    names = frozenset((allow,) if isinstance(allow, str) else allow)
    if unknown := sorted(names - ASSUMPTIONS.keys()):
        raise ValueError(
            f"{function}: allow has {unknown[0]!r}. It takes {', '.join(map(repr, ASSUMPTIONS))}."
        )
    return names


def is_checked(assumption: str, allowed: Collection[str] = ()) -> bool:
    """Return whether an assumption is checked: JAXMPI_CHECK is not 0, and it is not allowed."""
    return settings.get("JAXMPI_CHECK") != "0" and assumption not in allowed
