"""Compiled programs are kept in files that nobody else can write.

A damaged file, or one that does not fit, is compiled anew.
"""

import errno
import os
import threading
import time

import pytest

from jaxmpi._job.process import compiled_files, files
from jaxmpi._job.process.compiled_files import CompiledFiles, folder_of, made_once, usage
from jaxmpi._job.tools import doctor

LIMIT = 10**6


@pytest.fixture
def said():
    return []


@pytest.fixture
def kept(tmp_path, said):
    tmp_path.chmod(0o700)
    return CompiledFiles(str(tmp_path / "cache" / "compiled"), LIMIT, said.append)


def only_file(kept):
    (path,) = kept.path.iterdir()
    return path


def test_an_entry_comes_back(kept, said):
    assert kept.get("a") is None
    kept.put("a", b"one")
    kept.put("a", b"two")
    assert kept.get("a") == b"two" and kept.get("b") is None and not said


def test_nobody_else_can_read_or_write_what_is_kept(kept):
    kept.put("a", b"one")
    for path in (kept.path.parent, kept.path, only_file(kept)):
        assert path.stat().st_mode & 0o077 == 0 and path.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("cut", [0, 10, 33])
def test_a_damaged_entry_is_removed_and_named_once(kept, said, cut):
    kept.put("a", b"one" * 100)
    path = only_file(kept)
    path.write_bytes(path.read_bytes()[:cut])
    assert kept.get("a") is None and not path.exists()
    assert said == [f"{path} is damaged, and is compiled anew."]
    kept.put("a", b"one")
    assert kept.get("a") == b"one"


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_an_entry_that_others_may_write_is_not_used(kept, said, mode):
    kept.put("a", b"one")
    only_file(kept).chmod(mode)
    assert kept.get("a") is None and "belongs to another user, or others may write to it" in said[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_an_entry_of_another_user_is_not_used(kept, said):
    kept.put("a", b"one")
    os.chown(only_file(kept), 12345, -1)
    assert kept.get("a") is None and len(said) == 1
    kept.put("a", b"two")  # in its place
    assert kept.get("a") == b"two"


def test_a_link_or_a_pipe_is_not_used(kept, said, tmp_path):
    kept.put("a", b"one")
    path = only_file(kept)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert kept.get("a") is None and len(said) == 1
    path.unlink()
    os.mkfifo(path, 0o600)
    assert kept.get("a") is None


@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_could_have_made_is_refused(tmp_path, above):
    tmp_path.chmod(0o700)
    folders = [tmp_path / "a" / "b" / "c", tmp_path / "a" / "b", tmp_path / "a"]
    folders[0].mkdir(parents=True)
    folders[above].chmod(0o777)
    with pytest.raises(
        PermissionError,
        match=f"{folders[above]} belongs to another user, or others may write to it",
    ):
        CompiledFiles(str(folders[0]), LIMIT, print)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of other users")
def test_a_folder_of_another_user_is_refused(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "a").mkdir(mode=0o700)
    os.chown(tmp_path / "a", 12345, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        CompiledFiles(str(tmp_path / "a" / "b"), LIMIT, print)


def test_of_a_sticky_folder_nothing_can_be_taken_away(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    files.check_path(tmp_path / "tmp")


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(OSError, match="cache"):
        CompiledFiles(str(tmp_path / "cache"), LIMIT, print)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_what_cannot_be_written_is_said_once(kept, said, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "replace_bytes", fail)
    kept.put("a", b"one")
    kept.put("b", b"two")
    assert said == [
        f"what was compiled is not kept in {kept.path}: {os.strerror(number)}. "
        "JAXMPI_CACHE_BYTES=0 does without."
    ]


def test_what_was_read_longest_ago_goes_first(kept, tmp_path):
    for i in range(8):
        kept.put(str(i), bytes(LIMIT // 8 - 100))
    for path in kept.path.iterdir():
        os.utime(path, (1, 1))
    assert kept.get("0")  # now it is the youngest
    kept.put("8", bytes(LIMIT // 4))
    count, used = usage(str(kept.path))
    assert used <= LIMIT and count == 7
    assert kept.get("0") and kept.get("8")


def test_old_drafts_are_removed_and_new_ones_are_not(kept):
    for name, age in (("old", 2 * compiled_files.DRAFT_SECONDS), ("new", 0)):
        draft = kept.path / f".{name}{compiled_files.SUFFIX}.0123"
        draft.write_bytes(bytes(100))
        os.utime(draft, (time.time() - age,) * 2)
    kept.put("a", bytes(LIMIT))
    assert [path.name for path in kept.path.glob(".*")] == [f".new{compiled_files.SUFFIX}.0123"]


def test_the_folder_is_below_the_user_s_cache_folder():
    home = {"HOME": "/home/me"}
    assert folder_of(home, 1) == "/home/me/.cache/jaxmpi/compiled"
    assert folder_of({**home, "XDG_CACHE_HOME": "/var/me"}, 1) == "/var/me/jaxmpi/compiled"
    assert folder_of({**home, "XDG_CACHE_HOME": "relative"}, 1) == "/home/me/.cache/jaxmpi/compiled"
    assert folder_of({**home, "JAXMPI_CACHE_DIR": "/data"}, 1) == "/data"


def test_no_folder_where_none_is_wanted():
    assert not folder_of({"HOME": "/home/me"}, 0)
    assert not folder_of({"HOME": "/home/me", "JAX_COMPILATION_CACHE_DIR": "/data"}, 1)
    assert not folder_of({}, 1)


def test_doctor_says_where_and_how_large(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "jaxmpi" / "compiled"
    CompiledFiles(str(folder), LIMIT, print).put("a", bytes(3 * 10**5))
    assert doctor.compiled()[:3] == (
        "compiled programs",
        "ok",
        f"1 in {folder}, 0 MB of at most 2000",
    )
    folder.chmod(0o777)
    assert doctor.compiled().verdict == "slow" and str(folder) in doctor.compiled().facts
    monkeypatch.setenv("JAXMPI_CACHE_BYTES", "0")
    assert doctor.compiled().facts.startswith("not kept")


# among the ranks of a host


def test_what_one_has_made_the_next_one_takes(tmp_path):
    tmp_path.chmod(0o700)
    assert made_once(str(tmp_path), "a", lambda: b"one") is None
    assert made_once(str(tmp_path), "a", lambda: b"two") == b"one"
    assert made_once(str(tmp_path), "b", lambda: b"") is None
    assert made_once(str(tmp_path), "b", lambda: b"three") is None  # b"" is for nobody else
    assert made_once(str(tmp_path), "b", lambda: b"") == b"three"


def test_those_who_come_meanwhile_wait(tmp_path):
    tmp_path.chmod(0o700)
    begun, go, got = threading.Event(), threading.Event(), []

    def make():
        begun.set()
        go.wait()
        return b"one"

    first = threading.Thread(target=lambda: made_once(str(tmp_path), "a", make))
    others = [
        threading.Thread(target=lambda: got.append(made_once(str(tmp_path), "a", lambda: b"two")))
        for _ in range(3)
    ]
    first.start()
    begun.wait()
    for other in others:
        other.start()
    time.sleep(0.1)
    assert not got
    go.set()
    for thread in (first, *others):
        thread.join()
    assert got == [b"one"] * 3


def test_after_an_error_the_next_one_makes_it(tmp_path):
    tmp_path.chmod(0o700)
    with pytest.raises(ZeroDivisionError):
        made_once(str(tmp_path), "a", lambda: bytes(1 // 0))
    assert made_once(str(tmp_path), "a", lambda: b"one") is None
    assert made_once(str(tmp_path), "a", lambda: b"two") == b"one"


@pytest.mark.parametrize("directory", [None, "", "missing"])
def test_without_a_folder_each_makes_its_own(tmp_path, directory):
    made = []
    assert (
        made_once(directory and str(tmp_path / directory), "a", lambda: made.append(1) or b"one")
        is None
        and made
    )


def test_in_a_folder_of_others_each_makes_its_own(tmp_path):
    tmp_path.chmod(0o777)
    for _ in range(2):
        assert made_once(str(tmp_path), "a", lambda: b"one") is None
    assert not [*tmp_path.iterdir()]
