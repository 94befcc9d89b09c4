"""Comparison of the order of data: do all ranks index the same samples by the same numbers?

What a function such as `batches` compares anyway, its arguments, goes with digests of a few samples
in one message. Where these differ, the ranks exchange what they have compared, and all raise the
same error.
"""

from collections.abc import Sequence

from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency.compare import continue_after_reports, gather_reports
from jaxmpi._consistency.findings import Finding
from jaxmpi._consistency.mismatch import Call, Details, Report, mismatch_of, outliers
from jaxmpi._data.fingerprint import ApproximateSample, Fingerprint

__all__ = ["check_same_data"]


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
    details: Details = {
        "given": list(arguments),
        "samples": [tuple(place) for place in places],
        "approximate": fingerprint.approximate() if fingerprint else [],
        "descriptions": fingerprint.descriptions() if fingerprint else [],
        "is_repeatable": [fingerprint is None or fingerprint.is_repeatable],
    }
    reports = gather_reports(backend, call, details)
    # Ranks that differ in more than their samples have the error of any other arguments.
    if any(report.call.title != function or "samples" not in report.details for report in reports):
        raise mismatch_of(reports)
    calls = [Call.of(function, "\n".join(report.details["given"])) for report in reports]
    if len(set(calls)) > 1:
        raise mismatch_of([Report(call, x.details) for call, x in zip(calls, reports, strict=True)])
    # Where one rank has found that samples change, it has compared their types alone.
    repeatable = [report.details["is_repeatable"][0] for report in reports]
    is_comparable = all(repeatable) or not any(repeatable)
    if is_comparable and all(report.details["samples"] for report in reports):
        _raise_difference(function, reports, groups, has_allow=has_allow)
    continue_after_reports(backend)
    return False


def _are_alike(mine: Sequence[ApproximateSample], theirs: Sequence[ApproximateSample]) -> bool:
    """Return whether samples are equal up to rounding."""
    return all(here.is_like(there) for here, there in zip(mine, theirs, strict=True))


def _raise_difference(
    function: str, reports: Sequence[Report], groups: Sequence[Sequence[int]], *, has_allow: bool
) -> None:
    """Raise the error of the first group whose ranks have different samples, if there is one."""
    for group in groups:
        approximate = [reports[rank].details["approximate"] for rank in group]
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
        row = reports[here].details["samples"][first][0]
        words = [reports[rank].details["descriptions"][first] for rank in (here, usual)]
        detail = f"another sample {row} than rank {usual}"
        if words[0] != words[1]:
            detail += f", {words[0]} and not {words[1]}"
        detail += f"; {len(unequal)} of {len(approximate[0])} samples that were compared differ"
        ranks = [group[i] for i in differ]
        raise Finding(
            "data_order", function, ranks=ranks, detail=detail, has_allow=has_allow
        ).error()
