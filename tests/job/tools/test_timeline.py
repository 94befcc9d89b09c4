"""`jaxmpi timeline` on foreign records: one sentence that names the file, for any content."""

import json
import os
import sys
from xml.etree import ElementTree

import pytest

from jaxmpi._job.tools import timeline

EVENT = [0, "allreduce mean of float32[3] at train.py:1 of step", 12, 0.5, 0.75, 1.0]
RECORD = {
    "rank": 0,
    "size": 1,
    "host": "node1",
    "pid": 1,
    "began": 1.0,
    "why": "the end",
    "events": [EVENT],
    "waits": [[0.5, 0.9]],
}
SHOWN = ("rank", "size", "host", "why", "events", "waits")
NO_EVENTS = (1, None, "text", {"0": EVENT}, [1], [None], ["sixsix"], [EVENT[:5]], [[*EVENT, 1]])
NO_TIMES = ("0", True, [0], {}, 1e300, float("nan"), -float("inf"))
NUMBERS = ("0", None, True, -1, 1.5, [0], {}, 10**30)
NO_WAITS = (1, None, "text", [1], [None], [[0.5]], [[0.5, None]], [[0.5, 1.0, 2.0]])
NO_RECORDS = ([], 3, "text", None, 1.5, [RECORD])


def without(name):
    return {k: v for k, v in RECORD.items() if k != name}


def with_event(i, value):
    return {"events": [EVENT, [*EVENT[:i], value, *EVENT[i + 1 :]]]}


MALFORMED = {
    "empty": b"",
    "no JSON": b"{'rank': 0}",
    "cut off": json.dumps(RECORD)[:-9].encode(),
    "no text": b"\x80\x81",
    "nested": b"[" * 100_000,
    "a nested object": b'{"a":' * 100_000,
    "more digits than Python reads": b"9" * 5000,
    **{f"a {type(x).__name__}": json.dumps(x).encode() for x in NO_RECORDS},
    **{f"without {name}": json.dumps(without(name)).encode() for name in SHOWN},
    **{f"rank {x!r}": {"rank": x} for x in NUMBERS},
    **{f"size {x!r}": {"size": x} for x in (*NUMBERS, 0)},
    **{f"host {x!r}": {"host": x} for x in (1, None, [], {})},
    **{f"why {x!r}": {"why": x} for x in (1, None, [])},
    **{f"events {x!r}": {"events": x} for x in NO_EVENTS},
    **{f"event {i} {x!r}": with_event(i, x) for i in (0, 2) for x in NUMBERS},
    **{f"event 1 {x!r}": with_event(1, x) for x in (1, None, [])},
    **{f"event {i} {x!r}": with_event(i, x) for i in (3, 4, 5) for x in NO_TIMES},
    **{f"job {x!r}": {"job": x} for x in (1, None, [])},
    "event 3 None": with_event(3, None),
    **{f"waits {x!r}": {"waits": x} for x in NO_WAITS},
    **{f"wait {x!r}": {"waits": [[0.5, 1.0], [x, 1.0]]} for x in NO_TIMES},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed(tmp_path, capsys, what):
    content = MALFORMED[what]
    content = content if isinstance(content, bytes) else json.dumps({**RECORD, **content}).encode()
    (tmp_path / "rank-0.json").write_bytes(content)
    assert timeline.run([str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith(
        f"jaxmpi timeline: {tmp_path}/rank-0.json is no flight record of jaxmpi: "
    )
    assert (
        said.err.count("\n") == 1 and len(said.err) < 400 and not list(tmp_path.glob("timeline*"))
    )


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "folder", "device"],
)
def test_no_file(tmp_path, capsys, make):
    make(tmp_path / "rank-0.json")
    assert timeline.run([str(tmp_path)]) == 2
    assert f"{tmp_path}/rank-0.json" in capsys.readouterr().err


def write(folder, **changes):
    (folder / f"rank-{changes.get('name', changes.get('rank', 0))}.json").write_text(
        json.dumps({**RECORD, **changes})
    )


def test_two_files_of_one_rank(tmp_path, capsys):
    write(tmp_path)
    write(tmp_path, name="00")
    assert timeline.run([str(tmp_path)]) == 2
    assert "rank-0.json and" in (err := capsys.readouterr().err) and "are both of rank 0" in err


@pytest.mark.parametrize("other", [{"size": 3}, {"job": "another one"}])
def test_two_jobs(tmp_path, capsys, other):
    write(tmp_path, size=2, job="one")
    write(tmp_path, **{"size": 2, "job": "one", "rank": 1, **other})
    assert timeline.run([str(tmp_path)]) == 2
    assert f"the records in {tmp_path} are of several jobs" in capsys.readouterr().err


def test_what_a_terminal_or_a_page_would_take_for_more_than_text(tmp_path, capsys):
    evil = "\x1b]0;title\x07\ud800</text><script>$\\frac$"
    write(tmp_path, host=evil, why=evil, events=[[0, evil, 1, 0, None, None]])
    assert timeline.run([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.isascii() or "\N{REPLACEMENT CHARACTER}" in shown
    picture = (tmp_path / "timeline.svg").read_text()
    for text in (shown, picture):
        assert not {"\x1b", "\x07", "\ud800"} & set(text)
    assert "<script" not in picture and ElementTree.fromstring(picture).tag.endswith("svg")


def test_without_matplotlib_there_is_no_picture_and_a_sentence(tmp_path, capsys, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert timeline.run([str(tmp_path)]) == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0.json", "timeline.json"}


def test_times_that_run_backwards_are_spans_of_nothing(tmp_path):
    write(tmp_path, events=[[0, "x", 1, 3.0, 2.0, 1.0]])
    assert timeline.run([str(tmp_path)]) == 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["cat"] != "program"]
    assert [span["dur"] for span in spans] == [0, 0]


@pytest.mark.parametrize(
    ("messages", "waits", "spans"),
    [
        ([], [], []),
        ([(1, 2)], [], []),  # waits are not recorded
        ([(1, 2)], [(1, 2)], []),
        ([(1, 5)], [(0, 1), (4, 5)], [(1, 4)]),
        ([(1, 5), (5, 6)], [(0, 0.5), (3, 4)], [(1, 3), (4, 6)]),
        ([(1, 3), (2, 4), (7, 9)], [(0, 0), (3.5, 8), (8.5, 10)], [(1, 3.5), (8, 8.5)]),
        ([(1, None), (2, 3)], [(0, 0)], [(2, 3)]),
        ([(1, 2), (5, 6)], [(4, 4.5)], [(5, 6)]),  # what was before the first wait on record
        ([(1, 1.000001)], [(0, 0)], []),
    ],
)
def test_when_a_program_goes_on_beside_a_message(messages, waits, spans):
    events = [
        timeline.Event(i, "x", 1, start, None, end) for i, (start, end) in enumerate(messages)
    ]
    assert timeline.overlapped(events, waits) == spans


def test_the_output_follows_no_link(tmp_path):
    """The folder may be another user's."""
    write(tmp_path)
    (tmp_path / "precious").write_text("precious")
    for name in ("timeline.json", "timeline.svg"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    assert timeline.run([str(tmp_path)]) == 0
    assert (tmp_path / "precious").read_text() == "precious"
    assert "svg" in (tmp_path / "timeline.svg").read_text()


def test_a_folder_that_cannot_be_written_to(tmp_path, capsys, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(
        os,
        "rename",
        lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied")),
    )
    assert timeline.run([str(tmp_path)]) == 2
    assert (
        f"{tmp_path} cannot be written to: Permission denied. Copy the records"
        in capsys.readouterr().err
    )


def test_a_good_record(tmp_path):
    write(tmp_path)
    assert timeline.read(tmp_path)[0].events == [tuple(EVENT)]
