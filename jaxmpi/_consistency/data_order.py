"""Comparison of the order of data: do all ranks index the same samples by the same numbers?

What a function such as `batches` compares anyway, its arguments, goes with digests of a few samples
in one message. Where these differ, the ranks exchange what they have compared, and all raise the
same error.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency.compare import continue_after_reports, gather_reports
from jaxmpi._consistency.findings import Finding
from jaxmpi._consistency.mismatch import Call, CallDetails, Report, facts_of, mismatch_of, outliers
from jaxmpi._data.fingerprint import ApproximateSample, Fingerprint

__all__ = ["check_same_data"]


class _Samples(NamedTuple):
    """Samples that one rank has compared: the facts of its report.

    Attributes:
      rows: the number of each sample.
      approximate: the samples up to rounding.
      descriptions: the samples as short texts.
      is_repeatable: whether they are the same ones when they are read again.
    """

    rows: Sequence[int]
    approximate: Sequence[ApproximateSample]
    descriptions: Sequence[str]
    is_repeatable: bool


def check_same_data(
    backend: Ranks,
    function: str,
    arguments: Sequence[str],
    fingerprint: Fingerprint | None,
    groups: Sequence[Sequence[int]],
    *,
    has_allow: bool = True,
) -> bool:
    """Compare arguments that must be equal on all ranks, and samples that must be within groups.

    **Collective:** every rank calls it. **Communication:** 16 bytes; where the ranks differ, an
    allgather of what they have compared.

    Args:
      backend: the ranks.
      function: the name in errors.
      arguments: one line for each.
      fingerprint: of the data; None where it is not compared.
      groups: the ranks that share one data set, for each data set.
      has_allow: whether the function has the argument `allow`.

    Returns:
      Whether what was compared is equal on all ranks, and not up to rounding alone. It is the same
      on all ranks.

    Raises:
      RankMismatchError: on every rank.
    """
    places = fingerprint.places if fingerprint else ()
    text = "\n".join(arguments)
    call = Call.of(function, f"{text}\n{places}" if places else text)
    smallest, largest = backend.extremes(*call)
    if smallest == largest:
        return True
    samples = _Samples([], [], [], is_repeatable=True)
    if fingerprint:
        samples = _Samples(
            [place.row for place in places],
            fingerprint.approximate(),
            fingerprint.descriptions(),
            fingerprint.is_repeatable,
        )
    reports = gather_reports(
        backend, Report(call, CallDetails(parameters=list(arguments)), facts=samples)
    )
    # Ranks that differ in more than their samples have the error of any other arguments.
    everyone = facts_of(reports, _Samples)
    if everyone is None or any(report.call.title != function for report in reports):
        raise mismatch_of(reports)
    of_arguments = []
    for report in reports:
        call = Call.of(function, "\n".join(report.details.parameters))
        of_arguments.append(report._replace(call=call))
    if len({report.call for report in of_arguments}) > 1:
        raise mismatch_of(of_arguments)
    # Where one rank has found that samples change, it has compared their types alone.
    repeatable = [theirs.is_repeatable for theirs in everyone]
    is_comparable = all(repeatable) or not any(repeatable)
    if is_comparable and all(theirs.rows for theirs in everyone):
        _raise_difference(function, everyone, groups, has_allow=has_allow)
    continue_after_reports(backend)
    return False


def _are_alike(mine: Sequence[ApproximateSample], theirs: Sequence[ApproximateSample]) -> bool:
    """Return whether samples are equal up to rounding."""
    return all(here.is_like(there) for here, there in zip(mine, theirs, strict=True))


def _raise_difference(
    function: str, everyone: Sequence[_Samples], groups: Sequence[Sequence[int]], *, has_allow: bool
) -> None:
    """Raise the error of the first group whose ranks have different samples, if there is one."""
    for group in groups:
        approximate = [everyone[rank].approximate for rank in group]
        # for each rank the first one with the same samples, up to rounding
        same_as = [
            next(i for i in range(len(group)) if _are_alike(approximate[i], x)) for x in approximate
        ]
        differ = outliers(same_as)
        if not differ:
            continue
        here = group[differ[0]]
        usual = next(rank for i, rank in enumerate(group) if i not in differ)
        pairs = zip(approximate[group.index(here)], approximate[group.index(usual)], strict=True)
        unequal = [i for i, (mine, theirs) in enumerate(pairs) if not mine.is_like(theirs)]
        first = unequal[0]
        row = everyone[here].rows[first]
        words = [everyone[rank].descriptions[first] for rank in (here, usual)]
        detail = f"another sample {row} than rank {usual}"
        if words[0] != words[1]:
            detail += f", {words[0]} and not {words[1]}"
        detail += f"; {len(unequal)} of {len(approximate[0])} samples that were compared differ"
        ranks = [group[i] for i in differ]
        raise Finding(
            "data_order", function, ranks=ranks, detail=detail, has_allow=has_allow
        ).error()
