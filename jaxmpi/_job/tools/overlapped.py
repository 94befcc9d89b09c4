"""When a rank's program went on while a message was on its way."""

from collections.abc import Iterable

from jaxmpi._job.tools.records import Record

__all__ = ["Span", "overlapped"]

Span = tuple[float, float]  # begin and end, in seconds
# a message that is waited for at once begins and ends some microseconds beside its wait
SHORTEST_SECONDS = 1e-5


def overlapped(record: Record) -> list[Span]:
    """The times of messages on their way without those in which the program waited; none where waits are not recorded."""
    events, waits = record["events"], record["waits"]
    first = min((start for start, _ in waits), default=float("inf"))
    spans = _union(
        (start, end) for *_, start, _, end in events if end is not None and start >= first
    )
    return [
        (a, b) for a, b in _without(spans, _union(map(tuple, waits))) if b - a > SHORTEST_SECONDS
    ]


def _union(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _without(spans: list[Span], others: list[Span]) -> list[Span]:
    """What is left of spans, of which, as of the others, each begins behind the one before."""
    left, k = [], 0
    for start, end in spans:
        while k < len(others) and others[k][1] <= start:
            k += 1
        i = k
        while start < end and i < len(others) and others[i][0] < end:
            if start < others[i][0]:
                left.append((start, others[i][0]))
            start = max(start, others[i][1])
            i += 1
        if start < end:
            left.append((start, end))
    return left
