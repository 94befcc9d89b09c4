"""The flight records of a job, as `jaxmpi timeline` reads them: checked, as anybody may have written them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmpi._job.process import files as _files

__all__ = ["Record", "read"]

Record = dict[str, Any]  # of one rank, as the flight recorder writes it


def read(directory: Path) -> list[Record]:
    """The ranks' records, by rank.

    Raises:
      ValueError: there are none, one is not as the flight recorder writes it, or they are of
        several jobs.
      OSError: a file cannot be read.
    """
    files: dict[int, Path] = {}
    records = []
    for path in sorted(directory.glob("rank-*.json")):
        record = _record(path)
        if (other := files.setdefault(record["rank"], path)) != path:
            raise ValueError(
                f"{other} and {path} are both of rank {record['rank']}. Remove one of them."
            )
        records.append(record)
    if not records:
        raise ValueError(f"there is no flight record (rank-0.json, ...) in {directory}.")
    if len({record["size"] for record in records}) > 1:
        raise ValueError(
            f"the records in {directory} are of several jobs. Remove those of the old one."
        )
    return sorted(records, key=lambda record: record["rank"])


def _record(path: Path) -> Record:
    try:
        record = json.loads(_files.read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no flight record of jaxmpi: {type(error).__name__} while it is read."
        ) from error
    if wrong := _wrong(record):
        raise ValueError(f"{path} is no flight record of jaxmpi: {wrong}.")
    events = [[number, _printable(name), *rest] for number, name, *rest in record["events"]]
    return {
        **record,
        "host": _printable(record["host"]),
        "why": _printable(record["why"]),
        "events": events,
    }


def _wrong(record: object) -> str:
    """What is wrong with a record; "" if nothing is."""
    if not isinstance(record, dict):
        return f"it holds a {type(record).__name__}"
    for name, right in _PARTS.items():
        if name not in record:
            return f"{name!r} is missing"
        if not right(record[name]):
            return f"{name!r} is not what it should be"
    if not record["rank"] < record["size"]:
        return f"it is of rank {record['rank']} of {record['size']}"
    for i, event in enumerate(record["events"]):
        if (
            not _is_list(event)
            or len(event) != len(_EVENT)
            or not all(f(x) for f, x in zip(_EVENT, event, strict=True))
        ):
            return f"event {i} is not a number, a name, bytes and three times"
    for i, wait in enumerate(record["waits"]):
        if not _is_list(wait) or len(wait) != 2 or not all(map(_is_time, wait)):
            return f"wait {i} is not two times"
    return ""


def _is_count(x: object) -> bool:
    return type(x) is int and 0 <= x < 1 << 63


def _is_time(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 1e12  # seconds; false for NaN


def _is_text(x: object) -> bool:
    return isinstance(x, str)


def _is_list(x: object) -> bool:
    return isinstance(x, list)


def _maybe(right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda x: x is None or right(x)


_PARTS = {
    "rank": _is_count,
    "size": _is_count,
    "host": _is_text,
    "why": _is_text,
    "events": _is_list,
    "waits": _is_list,
}
_EVENT = (_is_count, _is_text, _is_count, _is_time, _maybe(_is_time), _maybe(_is_time))


def _printable(text: str) -> str:
    """Without what a terminal would take for a command."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
