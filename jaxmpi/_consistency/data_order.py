"""Comparison of the order of data: do all ranks index the same samples by the same numbers?

What a function such as `batches` compares anyway, its arguments, goes with digests of a few samples
in one message. Where these differ, the ranks exchange what they have compared, and all raise the
same error.
"""

from collections.abc import Sequence

from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency.compare import gather_reports
from jaxmpi._consistency.findings import Finding
from jaxmpi._consistency.mismatch import Call, Details, Report, mismatch_of, outliers
from jaxmpi._data.fingerprint import Fingerprint, Rough

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
      Whether the samples are equal on all ranks, and not up to rounding alone; False if not all
      ranks have a fingerprint. It is the same on all ranks.

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
        "rough": fingerprint.rough() if fingerprint else [],
        "in_words": fingerprint.in_words() if fingerprint else [],
    }
    reports = gather_reports(backend, call, details)
    # Ranks that differ in more than their samples have the error of any other arguments.
    if any(report.call.title != function or "samples" not in report.details for report in reports):
        raise mismatch_of(reports)
    calls = [Call.of(function, "\n".join(report.details["given"])) for report in reports]
    if len(set(calls)) > 1:
        raise mismatch_of([Report(call, x.details) for call, x in zip(calls, reports, strict=True)])
    if all(report.details["samples"] for report in reports):
        _raise_difference(function, reports, groups, has_allow=has_allow)
    return False


def _are_alike(mine: Sequence[Rough], theirs: Sequence[Rough]) -> bool:
    """Return whether samples are equal up to rounding."""
    return all(here.is_like(there) for here, there in zip(mine, theirs, strict=True))


def _raise_difference(
    function: str, reports: Sequence[Report], groups: Sequence[Sequence[int]], *, has_allow: bool
) -> None:
    """Raise the error of the first group whose ranks have different samples, if there is one."""
    for group in groups:
        samples = [tuple(reports[rank].details["samples"]) for rank in group]
        rough = [reports[rank].details["rough"] for rank in group]
        if all(_are_alike(rough[0], theirs) for theirs in rough[1:]):
            continue
        differ = outliers(samples)
        if not differ:
            continue
        here = group[differ[0]]
        usual = next(rank for i, rank in enumerate(group) if i not in differ)
        pairs = zip(samples[group.index(here)], samples[group.index(usual)], strict=True)
        unequal = [i for i, (mine, theirs) in enumerate(pairs) if mine != theirs]
        first = unequal[0]
        row = reports[here].details["samples"][first][0]
        words = [reports[rank].details["in_words"][first] for rank in (here, usual)]
        detail = f"another sample {row} than rank {usual}"
        if words[0] != words[1]:
            detail += f", {words[0]} and not {words[1]}"
        detail += f"; {len(unequal)} of {len(samples[0])} samples that were compared differ"
        ranks = [group[i] for i in differ]
        raise Finding(
            "data_order", function, ranks=ranks, detail=detail, has_allow=has_allow
        ).error()
