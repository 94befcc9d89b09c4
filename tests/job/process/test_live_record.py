"""A record of messages describes itself: another process reads it right, or says that it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmpi._job.process import live_record

EVENTS = [(7, 100, 10, 11, 12), (8, 200, 20, 21, 22), (7, 300, 30, 0, 0)]


@pytest.fixture
def reader_of(monkeypatch):
    """Return a function from the bytes of a record of messages to its reader."""
    readers, files = [], []

    def reader(record):
        writer = live_record.Writer()
        writer.write({"rank": 0, "doing": "allreduce"})
        file = os.memfd_create("record")
        os.write(file, record)
        files.append(file)
        paths = {
            live_record.RANK: f"/proc/self/fd/{writer._file}",
            live_record.EVENTS: f"/proc/self/fd/{file}",
        }
        monkeypatch.setattr(live_record, "_files", lambda _: paths)
        readers.append(live_record.Reader(os.getpid()))
        writer.close()
        return readers[-1]

    yield reader
    for each in readers:
        each.close()
    for file in files:
        os.close(file)


def record(layout, numbers):
    """Return a record: a layout, and int64 numbers from byte 1024 on."""
    return json.dumps(layout).encode().ljust(1024, b"\0") + np.array(numbers, np.int64).tobytes()


def layout_of(fields, count=4):
    """Return a layout with the counters at bytes 1024 and 1040, and a ring behind them."""
    stride = 8 * len(fields)
    return {
        "bytes": 1048 + count * stride,
        "counters": {"started": 1024, "ended": 1032, "exposed_ns": 1040},
        "events": {
            "offset": 1048,
            "count": count,
            "bytes": stride,
            "fields": {name: 8 * i for i, name in enumerate(fields)},
        },
    }


@pytest.mark.parametrize(
    "fields",
    [live_record.FIELDS, (*reversed(live_record.FIELDS), "new")],
    ids=["as it is", "of another version"],
)
def test_events_are_read_by_the_names_of_their_fields(fields, reader_of):
    ring = np.zeros((4, len(fields)), np.int64)
    for at, event in zip((3, 0, 1), EVENTS, strict=True):  # numbers 7, 8 and 9
        ring[at] = [
            dict(zip(live_record.FIELDS, event, strict=True)).get(name, -1) for name in fields
        ]
    reader = reader_of(record(layout_of(fields), [10, 9, 55, *ring.ravel()]))
    assert reader.events(2) == [(8, *EVENTS[1]), (9, *EVENTS[2])]
    assert reader.exposed() == 55
    assert reader.problem == "" and reader.about()["doing"] == "allreduce"


@pytest.mark.parametrize(
    "broken",
    [
        np.arange(1000, dtype=np.int64).tobytes(),  # counters first, as in earlier versions
        b"",
        record(layout_of(live_record.FIELDS[1:]), np.zeros(100)),
        record(layout_of(live_record.FIELDS) | {"bytes": 1 << 40}, np.zeros(100)),
        record(layout_of(live_record.FIELDS, count=1000) | {"bytes": 1824}, np.zeros(100)),
        record({"events": 3}, np.zeros(100)),
        record([], np.zeros(100)),
    ],
    ids=["numbers", "empty", "field missing", "file short", "ring long", "no layout", "a list"],
)
def test_a_record_of_an_unknown_layout_gives_a_line_and_no_numbers(broken, reader_of):
    reader = reader_of(broken)
    assert reader.events(10) == [] and reader.exposed() is None
    assert reader.about()["rank"] == 0
    assert reader.about()["doing"] == reader.problem
    assert reader.problem.startswith("jaxmpi top cannot read the messages of this rank")


def test_the_extension_writes_what_the_reader_reads():
    script = Path(__file__).with_name("record_script.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["4095", "4096", "5003"], done.stdout + done.stderr
