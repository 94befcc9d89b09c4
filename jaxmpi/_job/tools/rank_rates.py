"""From looks at the ranks of a job: how fast each is, its share of time in collectives, who comes last, who is missing."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxmpi._job.process.live_record import Event
from jaxmpi._job.tools.observe import Look

__all__ = ["Row", "rows"]

# a slow rank: last so often, others wait so much, in so many collectives
LATE_SHARE, WAITED_SHARE, LATE_EVENTS = 0.6, 0.1, 10
# how long others wait for a rank that is missing; times the usual step
MISSING_SECONDS, MISSING_FACTOR = 1.0, 5.0


class Row(NamedTuple):
    """One rank, as it is shown."""

    job: str
    rank: int
    size: int
    host: str
    pid: int
    steps_per_second: float | None  # how often its largest message recurs
    samples_per_second: float | None  # that `Throughput` counts
    communication: float | None  # share of the time for which it waits for collectives
    last: float | None  # share of the collectives to which it came last
    memory_bytes: int
    gpu_bytes: int | None
    verdict: str  # "", "slow", "busy", "missing for 3 s", "stopped" or "silent"
    doing: str  # in or after the last collective


def rows(looks: Iterable[Look]) -> list[Row]:
    """A row for each rank, by job and rank."""
    jobs: dict[str, list[Look]] = defaultdict(list)
    for look in looks:
        jobs[look["job"]].append(look)
    return [
        row
        for _, job in sorted(jobs.items())
        for row in _job(sorted(job, key=lambda look: look["rank"]))
    ]


def _job(looks: Sequence[Look]) -> list[Row]:
    last = _last(looks)
    # the last collective that a rank has entered
    front = max(look["entered"] - (not look["inside"]) for look in looks)
    waits = [
        _seconds(look, "since_ns") for look in looks if look["inside"] and look["entered"] >= front
    ]
    found = []
    for look in looks:
        steps, interval = _steps(look)
        share = last.get(look["rank"])
        verdict = _verdict(look, front, min(waits, default=0.0), interval)
        if (
            not verdict
            and share is not None
            and share > LATE_SHARE
            and _waiting(looks, look["rank"]) > WAITED_SHARE
        ):
            verdict = "slow"
        found.append(
            Row(
                look["job"],
                look["rank"],
                look["size"],
                look["host"],
                look["pid"],
                steps,
                look["samples_per_second"],
                _communication(look),
                share,
                look["memory_bytes"],
                look["gpu_bytes"],
                verdict,
                look["doing"],
            )
        )
    return found


def _seconds(look: Look, since: str) -> float:
    return (look["now_ns"] - look[since]) / 1e9


def _verdict(look: Look, front: int, waited: float, interval: float | None) -> str:
    """Whether the others have to wait for it now."""
    if look["state"] == "stopped":
        return "stopped"
    if look["busy"]:
        return "busy"
    if _seconds(look, "written_ns") > max(2.0, MISSING_SECONDS):
        return "silent"  # its Python does not run
    here = look["entered"] - (not look["inside"])
    if here < front and waited > max(MISSING_SECONDS, MISSING_FACTOR * (interval or 0)):
        return f"missing for {waited:.0f} s"
    return ""


def _steps(look: Look) -> tuple[float | None, float | None]:
    """How often its largest message recurs: in a second, and after how many seconds. No more where it does not."""
    sent: Counter[int] = Counter()
    for _, word, bytes_, *_ in look["events"]:
        sent[word] += bytes_ + 1
    starts = [
        event[3] for event in look["events"] if sent and event[1] == sent.most_common(1)[0][0]
    ]
    if len(starts) < 3:
        return None, None
    interval = (starts[-1] - starts[0]) / (len(starts) - 1) / 1e9
    idle = (look["now_ns"] - starts[-1]) / 1e9
    return (
        0.0 if idle > max(1.0, MISSING_FACTOR * interval) else 1 / max(interval, 1e-9)
    ), interval


def _communication(look: Look) -> float | None:
    if look["waits"] is not None:
        return float(look["waits"])
    events, now = look["events"], look["now_ns"]
    if not events:
        return None
    return min(
        1.0, sum((end or now) - start for *_, start, _, end in events) / max(1, now - events[0][3])
    )


def _last(looks: Sequence[Look]) -> dict[int, float]:
    """Of each rank, the share of the collectives that all have on record for which it waited least."""
    waits = [
        {event[0]: event[4] - event[3] for event in look["events"] if event[4]} for look in looks
    ]
    common = set.intersection(*map(set, waits)) if len(looks) == looks[0]["size"] else set()
    if len(common) < LATE_EVENTS:
        return {}
    counts = Counter(min(range(len(looks)), key=lambda i: waits[i][number]) for number in common)
    return {look["rank"]: counts[i] / len(common) for i, look in enumerate(looks)}


def _waiting(looks: Sequence[Look], rank: int) -> float:
    """The share of the time that the other ranks wait for others, over what they have on record."""
    shares = [_waited(look["events"]) for look in looks if look["rank"] != rank]
    return sum(shares) / max(1, len(shares))


def _waited(events: Sequence[Event]) -> float:
    met = [event for event in events if event[4] and event[5]]
    span = met[-1][5] - met[0][3] if met else 0
    return sum(event[4] - event[3] for event in met) / span if span else 0.0
