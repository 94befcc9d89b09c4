"""`jaxmpi timeline DIR`: the flight records of all ranks as one trace, and who comes late."""

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxmpi._job.process import files
from jaxmpi._job.tools.overlapped import overlapped
from jaxmpi._job.tools.picture import picture
from jaxmpi._job.tools.records import Record, read

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Write DIR/timeline.json and, with matplotlib, DIR/timeline.svg, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="jaxmpi timeline",
        description="Put the flight records of a job together: a trace for https://ui.perfetto.dev or chrome://tracing, and "
        "a table of who comes late. Set JAXMPI_FLIGHT_DIR for a job to write them at its end, or "
        "send its ranks SIGUSR1.",
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="holds rank-0.json, rank-1.json, ..."
    )
    directory = parser.parse_args(arguments).directory
    try:
        records = read(directory)
        _write(directory, "timeline.json", json.dumps(trace(records)))
        with_picture = _draw(directory, records)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"jaxmpi timeline: {error}\n")
        return 2
    sys.stdout.write(table(records))
    sys.stdout.write(
        f"\nThe trace is in {directory / 'timeline.json'}: open it in https://ui.perfetto.dev.\n"
    )
    sys.stdout.write(
        f"A picture is in {directory / 'timeline.svg'}.\n"
        if with_picture
        else "For a picture of it: pip install matplotlib\n"
    )
    return 0


def trace(records: Sequence[Record]) -> dict[str, object]:
    """In the Trace Event Format of Chrome: a process for each host, a thread for each rank."""
    hosts = list(dict.fromkeys(record["host"] for record in records))
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": i, "args": {"name": host}}
        for i, host in enumerate(hosts)
    ]
    for record in records:
        thread = {"pid": hosts.index(record["host"]), "tid": record["rank"]}
        events.append(
            {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"rank {record['rank']}"}}
        )
        last = max(
            (t for event in record["events"] for t in event[3:] if t is not None), default=0.0
        )
        for _, name, bytes_, start, met, end in record["events"]:
            arrived = met if met is not None else end if end is not None else last
            times = {"cat": "wait", "ts": start * 1e6, "dur": max(arrived - start, 0) * 1e6}
            events.append(
                {"ph": "X", "name": "wait for the others", **times, **thread, "args": {"for": name}}
            )
            if met is not None and end is not None:
                times = {"cat": "collective", "ts": met * 1e6, "dur": max(end - met, 0) * 1e6}
                events.append(
                    {"ph": "X", "name": name, **times, **thread, "args": {"bytes": bytes_}}
                )
        events += _program(record, hosts)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _program(record: Record, hosts: Sequence[str]) -> list[dict[str, object]]:
    """A thread for what the rank's program does meanwhile, where that is recorded."""
    if not record["waits"]:
        return []
    thread = {"pid": hosts.index(record["host"]), "tid": record["size"] + record["rank"]}
    name = {
        "ph": "M",
        "name": "thread_name",
        **thread,
        "args": {"name": f"rank {record['rank']}, its program"},
    }
    spans = {
        "waits for a message": record["waits"],
        "computes while a message travels": overlapped(record),
    }
    return [
        name,
        *({"ph": "X", "name": what, "cat": "program", "ts": start * 1e6, "dur": max(end - start, 0) * 1e6, **thread}
          for what, times in spans.items() for start, end in times),
    ]  # fmt: skip


def table(records: Sequence[Record]) -> str:
    """For each rank: the milliseconds between its collectives, those that it waited for others, and how often it was last."""
    columns = "rank  host             collectives  before one (min, median, max)   waited (min, median, max)       last to come"
    lines = [columns]
    last = _last(records)
    for record in records:
        events = record["events"]
        pairs = itertools.pairwise(events)
        before = [(b[3] - a[5]) * 1e3 for a, b in pairs if a[5] is not None]
        waited = [(met - start) * 1e3 for *_, start, met, _ in events if met is not None]
        share = f"{100 * last.count(record['rank']) / len(last):.0f} %" if last else "-"
        spread = [
            f"{min(x):.3f}, {statistics.median(x):.3f}, {max(x):.3f}" if x else "-"
            for x in (before, waited)
        ]
        lines.append(
            f"{record['rank']:4}  {record['host'][:15]:15}  {len(events):11}  {spread[0]:30}  "
            f"{spread[1]:30}  {share:>12}"
        )
    lines.append("milliseconds; a rank that comes last waits least and computes longest")
    for record in records:
        if record["events"] and record["events"][-1][5] is None:
            lines.append(
                f"rank {record['rank']} was inside of {record['events'][-1][1]} ({record['why']})"
            )
    return "\n".join(lines) + "\n"


def _last(records: Sequence[Record]) -> list[int]:
    """Of each collective that all ranks have on record, the rank that waited least."""
    waits = [
        {number: met - start for number, *_, start, met, _ in r["events"] if met is not None}
        for r in records
    ]
    common = set.intersection(*(set(of_rank) for of_rank in waits))
    return [
        records[min(range(len(records)), key=lambda i: waits[i][number])]["rank"]
        for number in common
    ]


def _draw(directory: Path, records: Sequence[Record]) -> bool:
    """Write the picture; False if there is no matplotlib."""
    try:
        drawn = picture(records)
    except ImportError:
        return False
    _write(directory, "timeline.svg", drawn)
    return True


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
