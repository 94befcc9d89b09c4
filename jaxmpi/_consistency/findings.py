"""Findings: assumptions of data-parallel training that a rank breaks, and their messages.

A check makes a `Finding` of what it has found. This file alone makes an error or a warning of it.

- A finding is an error where the numbers are surely wrong: each rank raises it. It is a warning, on
  rank 0, where the user may mean it.
- `allow="NAME"` of `jaxmpi.jit`, `jaxmpi.nn.jit`, `jaxmpi.pmap`, `jaxmpi.batches` and
  `jaxmpi.shard` turns off one check by its name, and no other.
- The environment variable JAXMPI_CHECK turns off all of them (0), or compares all values at every
  step as well (1).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxmpi._consistency.mismatch import ranks_have
from jaxmpi._errors import RankMismatchError
from jaxmpi._job.process import settings

__all__ = ["ASSUMPTIONS", "Assumption", "Finding", "allowed_names", "is_checked"]

MAX_LEAVES = 3  # that a text names


class Assumption(NamedTuple):
    """An assumption of data-parallel training.

    Attributes:
      found: the sentence about a rank that breaks it; `{leaves}`, `{ranks}` ("rank 1 has") and
        `{detail}` are those of the finding.
      advice: what to do about it.
    """

    found: str
    advice: str


# by the name that `allow` takes
ASSUMPTIONS: Mapping[str, Assumption] = {
    "unequal_start": Assumption(
        "{leaves} differ between the ranks before the first step: {ranks} other values than the "
        "other ranks. All ranks add the same updates, so they would differ for ever.",
        "Make them equal with jaxmpi.synchronize before the first step. What each rank should have "
        "of its own belongs into a jaxmpi.PerRankState, or in nnx into an nnx.BatchStat.",
    ),
    "unequal_number": Assumption(
        "{leaves} differ between the ranks: {detail}.",
        "Numbers such as a learning rate change on all ranks or on none: decide by a value that "
        "all ranks have (jaxmpi.average_metrics), or put it into a jaxmpi.PerRankState.",
    ),
    "data_order": Assumption(
        "the data differ between the ranks: {ranks} {detail}. Some samples would come twice, and "
        "others never.",
        "Read the samples in one order on all ranks, such as sorted(os.listdir(...)), and split "
        "them with one seed. Where each rank has data of its own, use jaxmpi.per_rank_batches.",
    ),
    "forgotten_mean": Assumption(
        "{leaves} may differ between the ranks from this call on, and was equal on all of "
        "them before.",
        "If it is trained, average the gradients (jaxmpi.distributed, jaxmpi.tree_allreduce). If "
        "it should differ, such as a sum over the batches of a rank, put it into a "
        "jaxmpi.PerRankState, or in nnx into an nnx.BatchStat.",
    ),
    "repeated_mean": Assumption(
        "the value summed or averaged at {detail} is equal on all ranks already.",
        "Leave the mean out; a sum multiplies the value by the number of ranks.",
    ),
    "skipped_update": Assumption(
        "{ranks} skipped an update, with its collectives, that the other ranks have made: "
        "{detail}.",
        "Put the transformation that skips inside of jaxmpi.distributed, or use "
        "jaxmpi.skip_nonfinite. In a branch of your own, decide by a value that all ranks have, "
        "such as jaxmpi.any_rank(flag).",
    ),
}


class Finding(NamedTuple):
    """An assumption that some rank breaks.

    Attributes:
      assumption: its name, a key of ASSUMPTIONS.
      function: the title of the step or the function of jaxmpi in which it was found.
      leaves: the names of the leaves, if it is about these.
      ranks: the ranks that differ from the others, if these are known.
      detail: anything else, as `Assumption.found` wants it.
      has_allow: whether the function in which it was found has the argument `allow`.
    """

    assumption: str
    function: str
    leaves: Sequence[str] = ()
    ranks: Sequence[int] = ()
    detail: str = ""
    has_allow: bool = True

    def error(self) -> RankMismatchError:
        """Return the error that every rank raises."""
        what, advice = self._sentences()
        return RankMismatchError(
            what,
            advice=advice,
            function=self.function,
            leaf=self.leaves[0] if self.leaves else "",
            ranks=self.ranks,
        )

    def warning(self) -> str:
        """Return the text of the warning on rank 0."""
        return " ".join(self._sentences())

    def _sentences(self) -> tuple[str, str]:
        """Return what was found, and what to do about it."""
        assumption = ASSUMPTIONS[self.assumption]
        leaves = ", ".join(self.leaves[:MAX_LEAVES])
        if len(self.leaves) > MAX_LEAVES:
            leaves += f" and {len(self.leaves) - MAX_LEAVES} more"
        found = assumption.found.format(
            leaves=leaves,
            ranks=ranks_have(self.ranks) if self.ranks else "some rank has",
            detail=self.detail,
        )
        advice = assumption.advice
        if self.has_allow:
            advice += f' If it is meant, allow="{self.assumption}" turns this check off.'
        return f"{self.function}: {found}", advice


def allowed_names(function: str, allow: str | Iterable[str]) -> frozenset[str]:
    """Return the names in an argument `allow`, each of which an assumption has.

    Raises:
      ValueError: a name that no assumption has.
    """
    names = frozenset((allow,) if isinstance(allow, str) else allow)
    if unknown := sorted(names - ASSUMPTIONS.keys()):
        raise ValueError(
            f"{function}: allow has {unknown[0]!r}, which is none of {', '.join(ASSUMPTIONS)}."
        )
    return names


def is_checked(assumption: str, allowed: Collection[str] = ()) -> bool:
    """Return whether an assumption is checked: JAXMPI_CHECK is not 0, and it is not allowed."""
    return settings.get("JAXMPI_CHECK") != "0" and assumption not in allowed
