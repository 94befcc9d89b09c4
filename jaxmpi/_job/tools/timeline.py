"""`jaxmpi timeline DIR`: the flight records of all ranks as one trace, and which rank is late.

The records are checked when they are read, as anybody may have written them.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi._job.process import files
from jaxmpi._job.tools.picture import Bars, picture

__all__ = ["Event", "Record", "overlapped", "read", "run", "table", "trace"]

Span = tuple[float, float]  # begin and end, in seconds

# A program that waits for a message at once begins to wait some microseconds after the message
# begins. Such a gap is no overlap.
SHORTEST_OVERLAP_SECONDS = 1e-5
# Collectives of a rank in the picture: bars of more could not be told apart. The trace has all.
MAX_PICTURED_COLLECTIVES = 200


class Event(NamedTuple):
    """One collective of a rank; times in seconds since the recorder began."""

    number: int
    name: str
    bytes: int
    entered: float  # when this rank entered it
    all_entered: float | None  # when the last rank did; None if that is not known
    done: float | None  # when it was done; None if it was not

    @property
    def times(self) -> list[float]:
        """The times that are known."""
        return [t for t in (self.entered, self.all_entered, self.done) if t is not None]


class Record(NamedTuple):
    """The flight record of one rank, as `_job/monitor/flight_recorder.py` writes it."""

    rank: int
    size: int
    host: str
    why: str  # the reason for writing it
    events: list[Event]
    waits: list[Span]  # when the program waited for messages; empty where that is not recorded
    job: str = ""  # equal on all ranks of a session, and in no other; "" from an older jaxmpi


def run(arguments: Sequence[str]) -> int:
    """Write timeline.json and, with matplotlib, timeline.svg; print the table.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="jaxmpi timeline",
        description="Combine the flight records of a job: a trace for https://ui.perfetto.dev or "
        "chrome://tracing, and a table of which rank is late. Set JAXMPI_FLIGHT_DIR for a job to "
        "write them at its end, or send its ranks SIGUSR1.",
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="holds rank-0.json, rank-1.json, ..."
    )
    directory = parser.parse_args(arguments).directory
    try:
        records = read(directory)
        _write(directory, "timeline.json", json.dumps(trace(records)))
        pictured = _draw(directory, records)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"jaxmpi timeline: {error}\n")
        return 2
    sys.stdout.write(table(records))
    sys.stdout.write(
        f"\nThe trace is in {directory / 'timeline.json'}: open it in https://ui.perfetto.dev.\n"
    )
    sys.stdout.write(
        f"A picture is in {directory / 'timeline.svg'}.\n"
        if pictured
        else "For a picture of it: pip install matplotlib\n"
    )
    return 0


# reading


def read(directory: Path) -> list[Record]:
    """Read the ranks' records, in the order of the ranks.

    Raises:
      ValueError: there are none, one is not as the flight recorder writes it, or they are from
        several jobs.
      OSError: a file cannot be read.
    """
    paths: dict[int, Path] = {}
    records = []
    for path in sorted(directory.glob("rank-*.json")):
        record = _read_record(path)
        if (other := paths.setdefault(record.rank, path)) != path:
            raise ValueError(
                f"{other} and {path} are both of rank {record.rank}. Remove one of them."
            )
        records.append(record)
    if not records:
        raise ValueError(f"there is no flight record (rank-0.json, ...) in {directory}.")
    if len({(record.size, record.job) for record in records}) > 1:
        raise ValueError(
            f"the records in {directory} are of several jobs. Remove those of the old one."
        )
    return sorted(records)


def _read_record(path: Path) -> Record:
    try:
        record = json.loads(files.read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no flight record of jaxmpi: {type(error).__name__} while it is read."
        ) from error
    if problem := _problem(record):
        raise ValueError(f"{path} is no flight record of jaxmpi: {problem}.")
    return Record(
        record["rank"],
        record["size"],
        _printable(record["host"]),
        _printable(record["why"]),
        [Event(number, _printable(name), *rest) for number, name, *rest in record["events"]],
        [(start, end) for start, end in record["waits"]],
        record.get("job", ""),
    )


def _problem(record: object) -> str:
    """Return what is wrong with a record that was read; "" if nothing is."""
    if not isinstance(record, dict):
        return f"it holds a {type(record).__name__}"
    for name, is_valid in _FIELDS.items():
        if name not in record:
            return f"{name!r} is missing"
        if not is_valid(record[name]):
            return f"{name!r} is not what it should be"
    if not _is_text(record.get("job", "")):
        return "'job' is not what it should be"
    if not record["rank"] < record["size"]:
        return f"it is of rank {record['rank']} of {record['size']}"
    for i, event in enumerate(record["events"]):
        if not _is_list(event) or len(event) != len(_EVENT_FIELDS):
            return f"event {i} is not a number, a name, bytes and three times"
        for is_valid, value in zip(_EVENT_FIELDS, event, strict=True):
            if not is_valid(value):
                return f"event {i} is not a number, a name, bytes and three times"
    for i, wait in enumerate(record["waits"]):
        if not _is_list(wait) or len(wait) != 2 or not all(map(_is_time, wait)):
            return f"wait {i} is not two times"
    return ""


def _is_count(x: object) -> bool:
    return type(x) is int and 0 <= x < 1 << 63  # not bool


def _is_time(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 1e12  # seconds; false for NaN


def _is_time_or_none(x: object) -> bool:
    return x is None or _is_time(x)


def _is_text(x: object) -> bool:
    return isinstance(x, str)


def _is_list(x: object) -> bool:
    return isinstance(x, list)


_FIELDS: dict[str, Callable[[object], bool]] = {
    "rank": _is_count,
    "size": _is_count,
    "host": _is_text,
    "why": _is_text,
    "events": _is_list,
    "waits": _is_list,
}
_EVENT_FIELDS: tuple[Callable[[object], bool], ...] = (
    *(_is_count, _is_text, _is_count),
    *(_is_time, _is_time_or_none, _is_time_or_none),
)


def _printable(text: str) -> str:
    """Replace characters that a terminal would take for commands."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


# spans


def overlapped(events: Iterable[Event], waits: Sequence[Span]) -> list[Span]:
    """Return when messages were in transit while the program computed.

    These are the times of all messages, without the times in which the program waited for one;
    none where waits are not recorded.
    """
    # Fewer waits than events are kept: earlier messages may have been waited for, too.
    recorded_since = min((start for start, _ in waits), default=float("inf"))
    messages = []
    for event in events:
        if event.done is not None and event.entered >= recorded_since:
            messages.append((event.entered, event.done))
    found = _difference(_union(messages), _union(waits))
    return [(start, end) for start, end in found if end - start > SHORTEST_OVERLAP_SECONDS]


def _union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap; the result is in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _difference(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the spans without the others; both are in order, without overlaps."""
    left, first = [], 0
    for start, end in spans:
        # These end before this span, and so before all that follow.
        while first < len(others) and others[first][1] <= start:
            first += 1
        i = first
        while start < end and i < len(others) and others[i][0] < end:
            if start < others[i][0]:
                left.append((start, others[i][0]))
            start = max(start, others[i][1])
            i += 1
        if start < end:
            left.append((start, end))
    return left


def _end(record: Record) -> float:
    """Return the last time in a record."""
    return max((max(event.times) for event in record.events), default=0.0)


def _wait_and_transfer(event: Event, record_end: float) -> tuple[Span, Span | None]:
    """Split a collective: this rank waits for the last one, then the message is in transit.

    Where the last rank's arrival is not known, all of it is a wait: until it was done, or until the
    end of the record.
    """
    if event.all_entered is not None:
        waited_until = event.all_entered
    elif event.done is not None:
        waited_until = event.done
    else:
        waited_until = record_end
    wait = event.entered, max(waited_until, event.entered)
    if event.all_entered is None or event.done is None:
        return wait, None
    return wait, (event.all_entered, max(event.done, event.all_entered))


# the trace


def trace(records: Sequence[Record]) -> dict[str, object]:
    """Return a trace in Chrome's Trace Event Format: a process per host, a thread per rank."""
    hosts = list(dict.fromkeys(record.host for record in records))
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": i, "args": {"name": host}}
        for i, host in enumerate(hosts)
    ]
    for record in records:
        thread = {"pid": hosts.index(record.host), "tid": record.rank}
        events.append(_thread_name(thread, f"rank {record.rank}"))
        record_end = _end(record)
        for event in record.events:
            wait, transfer = _wait_and_transfer(event, record_end)
            events.append(
                {
                    **_trace_span("wait for the others", "wait", wait, thread),
                    "args": {"for": event.name},
                }
            )
            if transfer is not None:
                events.append(
                    {
                        **_trace_span(event.name, "collective", transfer, thread),
                        "args": {"bytes": event.bytes},
                    }
                )
        # A second thread of the rank: its program, where the transport records waits.
        if record.waits:
            thread = {"pid": hosts.index(record.host), "tid": record.size + record.rank}
            events.append(_thread_name(thread, f"rank {record.rank}, its program"))
            for wait in record.waits:
                events.append(_trace_span("waits for a message", "program", wait, thread))
            for span in overlapped(record.events, record.waits):
                events.append(
                    _trace_span("computes while a message travels", "program", span, thread)
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _thread_name(thread: dict[str, int], name: str) -> dict[str, object]:
    return {"ph": "M", "name": "thread_name", **thread, "args": {"name": name}}


def _trace_span(name: str, category: str, span: Span, thread: dict[str, int]) -> dict[str, object]:
    """Return a complete event, whose times are microseconds."""
    start, end = span
    times = {"ts": start * 1e6, "dur": max(end - start, 0) * 1e6}
    return {"ph": "X", "name": name, "cat": category, **times, **thread}


# the table


def table(records: Sequence[Record]) -> str:
    """Return a line per rank: milliseconds between and in collectives; share of being last."""
    lines = [
        "rank  host             collectives  before one (min, median, max)   "
        "waited (min, median, max)       last to come"
    ]
    last = _last_ranks(records)
    for record in records:
        before, waited = [], []
        for previous, event in itertools.pairwise(record.events):
            if previous.done is not None:
                before.append((event.entered - previous.done) * 1e3)
        for event in record.events:
            if event.all_entered is not None:
                waited.append((event.all_entered - event.entered) * 1e3)
        share = f"{100 * last.count(record.rank) / len(last):.0f} %" if last else "-"
        spread = [
            f"{min(x):.3f}, {statistics.median(x):.3f}, {max(x):.3f}" if x else "-"
            for x in (before, waited)
        ]
        lines.append(
            f"{record.rank:4}  {record.host[:15]:15}  {len(record.events):11}  {spread[0]:30}  "
            f"{spread[1]:30}  {share:>12}"
        )
    lines.append("milliseconds; a rank that comes last waits least and computes longest")
    for record in records:
        if record.events and record.events[-1].done is None:
            lines.append(
                f"rank {record.rank} was inside of {record.events[-1].name} ({record.why})"
            )
    return "\n".join(lines) + "\n"


def _last_ranks(records: Sequence[Record]) -> list[int]:
    """Return the rank that came last to each collective that all ranks have on record.

    It is the one that waited least: the clocks of two hosts cannot be compared, durations can. A
    collective of all ranks has the same number and name on each; those of groups do not count.
    """
    waits: list[dict[tuple[int, str], float]] = []
    for record in records:
        waits.append(
            {
                (event.number, event.name): event.all_entered - event.entered
                for event in record.events
                if event.all_entered is not None
            }
        )
    common = set.intersection(*map(set, waits))
    last = []
    for event in common:
        shortest = min(range(len(records)), key=lambda i: waits[i][event])
        last.append(records[shortest].rank)
    return last


# files


def _draw(directory: Path, records: Sequence[Record]) -> bool:
    """Write the picture; return False if there is no matplotlib."""
    try:
        drawn = picture([_bars(record) for record in records])
    except ImportError:
        return False
    _write(directory, "timeline.svg", drawn)
    return True


def _bars(record: Record) -> Bars:
    shown, record_end = record.events[-MAX_PICTURED_COLLECTIVES:], _end(record)
    waits, transfers = [], []
    for event in shown:
        wait, transfer = _wait_and_transfer(event, record_end)
        waits.append(wait)
        if transfer is not None:
            transfers.append(transfer)
    since = min((event.entered for event in shown), default=0.0)
    computes = [span for span in overlapped(record.events, record.waits) if span[0] >= since]
    return Bars(f"rank {record.rank} on {record.host}", waits, transfers, computes)


def _write(directory: Path, name: str, text: str) -> None:
    """Write a file into the folder of the records, which another user may have made."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.replace(folder, name, text)
    except OSError as error:
        raise OSError(
            f"{directory} cannot be written to: {error.strerror}. Copy the records to a folder of "
            "your own."
        ) from error
    finally:
        os.close(folder)
