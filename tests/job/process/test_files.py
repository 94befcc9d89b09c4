"""Files in folders that others can write: nothing put there is followed, filled or believed."""

import json
import os
import stat
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmpi._backends.base import Place
from jaxmpi._backends.one_process import Single
from jaxmpi._job.monitor.flight_recorder import Recorder
from jaxmpi._job.process import files, run_dir


class OneRank(Single):
    """World with just enough of a job for the flight recorder."""

    place = Place()
    events = waits = lambda self: []
    progress, waits_for = lambda self: (0, False), lambda self: ("", 0)


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """One whose temporary folder is of all users, and what it has said."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.delenv("JAXMPI_FLIGHT_DIR", raising=False)
    said = []
    monitor = SimpleNamespace(
        backend=OneRank(),
        members=[(os.getpid(), "here")],
        topics={},
        at_end=[],
        say=said.append,
        signals=SimpleNamespace(register=lambda number, call: True),
    )
    return SimpleNamespace(make=lambda: Recorder(monitor), shared=shared, said=said)


@pytest.fixture
def victim(tmp_path):
    """A folder of the user with a file, which no other user may write to."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    (folder / "rank-0.json").write_text("precious")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["rank-0.json"]
    assert (folder / "rank-0.json").read_text() == "precious"


PLANTED = {
    "a link to a folder": lambda path, victim: path.symlink_to(victim),
    "a link to nowhere": lambda path, victim: path.symlink_to(victim / "new"),
    "a folder that others may write to": lambda path, victim: (path.mkdir(), path.chmod(0o777)),
    "a file": lambda path, victim: path.touch(),
    "a pipe": lambda path, victim: os.mkfifo(path),
}


@pytest.mark.parametrize("what", PLANTED)
def test_flight_records_are_not_written_to_what_is_there_before(
    recorder, victim, monkeypatch, what
):
    monkeypatch.setattr("secrets.token_hex", lambda bytes: "guessed")
    path = recorder.shared / f"jaxmpi-flight-{os.getuid()}-guessed"
    PLANTED[what](path, victim)
    assert recorder.make().dump("test") is None
    assert len(recorder.said) == 1 and "the last collectives cannot be written" in recorder.said[0]
    assert not path.is_dir() or path.is_symlink() or not any(path.iterdir())


def test_flight_records_are_not_written_to_a_folder_of_another_user(recorder, monkeypatch):
    first = recorder.make()
    path = first.dump("test")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert first.dump("again") is None and "belongs to another user" in recorder.said[0]
    assert json.loads(path.read_text())["why"] == "test"


def test_nobody_knows_where_flight_records_will_be(recorder):
    paths = [recorder.make().dump("test") for _ in range(3)]
    assert len({path.parent for path in paths}) == 3
    assert {path.name for path in paths} == {"rank-0.json"}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in paths} == {0o700}
    assert not recorder.said


def test_the_folder_of_the_user_is_used_and_links_in_it_are_not(
    recorder, victim, monkeypatch, tmp_path
):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "named").symlink_to(real)  # by the user
    for name in ("rank-0.json", "rank-0.part", ".rank-0.json"):
        (real / name).symlink_to(victim / "rank-0.json")
    monkeypatch.setenv("JAXMPI_FLIGHT_DIR", str(tmp_path / "named"))
    assert recorder.make().dump("test") == tmp_path / "named/rank-0.json"
    assert (
        not (real / "rank-0.json").is_symlink()
        and json.loads((real / "rank-0.json").read_text())["why"] == "test"
    )
    (real / "restart-2").symlink_to(victim)
    monkeypatch.setenv("JAXMPI_RESTART", "2")
    assert recorder.make().dump("test") is None and "cannot be written" in recorder.said[0]
    monkeypatch.setenv("JAXMPI_RESTART", "3")
    assert recorder.make().dump("test") == tmp_path / "named/restart-3/rank-0.json"


@pytest.mark.parametrize("what", PLANTED)
def test_a_rank_registers_nowhere_but_in_the_folder_of_its_launcher(tmp_path, victim, what):
    """A rank on another host than the launcher ignores a folder that someone else has made."""
    path = tmp_path / "run"
    PLANTED[what](path, victim)
    for call in (run_dir.join, run_dir.leave, run_dir.note_preemptible):
        call(str(path), 0)
    assert not path.is_dir() or path.is_symlink() or not any(path.iterdir())


def test_a_rank_registers_past_links(tmp_path, victim):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    for name in (".rank-0.draft", "rank-0.json", "preemptible-0"):
        (run / name).symlink_to(victim / "rank-0.json")
    run_dir.join(str(run), 0)
    run_dir.note_preemptible(str(run), 0)
    run_dir.leave(str(run), 0)
    assert [member.left for member in run_dir.members(str(run))] == [True]
    assert {path.name for path in run.iterdir() if path.is_symlink()} == {".rank-0.draft"}
    for path in run.iterdir():
        assert path.is_symlink() or stat.S_IMODE(path.lstat().st_mode) & 0o022 == 0


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = files.open_folder(tmp_path, private=False)
    files.replace(folder, "file", "before")
    monkeypatch.setattr(os, "rename", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        files.replace(folder, "file", "after")
    os.close(folder)
    assert (tmp_path / "file").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda path: path.write_text("text"), nullcontext()),
        (os.mkfifo, pytest.raises(OSError, match="file is no regular file")),
        (Path.mkdir, pytest.raises(OSError, match="file is no regular file")),
        (
            lambda path: path.symlink_to("/dev/zero"),
            pytest.raises(OSError, match="file is no regular file"),
        ),
    ],
)
def test_only_regular_files_are_read(tmp_path, make, wanted):
    make(tmp_path / "file")
    with wanted:
        assert files.read(tmp_path / "file") == "text"
