"""Compiled programs in files: shared by the ranks of a host, and kept for the next job.

They are machine code, so no other user may be able to write them.

- `CompiledFiles` keeps what JAX has compiled, for the next job. The folder and all above it are
  checked, and each file that is read. An entry begins with the digest of the rest: one that a full
  disk or a crash has cut off is removed, and compiled again. If there are too many bytes, the files
  that were read longest ago are removed.
- `made_once` makes one rank of a host compile for all. The bytes are in the folder of the run. The
  first rank makes them, and waits for nobody. The others wait, asleep, until it is done or has
  ended.
"""

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxmpi._job.process import files
from jaxmpi._job.process.processor import processor
from jaxmpi._job.process.waits import waits

__all__ = ["CompiledFiles", "folder_of", "made_once", "usage"]

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ_MADE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
SUFFIX = ".compiled"
DIGEST_BYTES = 32
DRAFT_SECONDS = 3600.0  # a file that is not complete by then never will be
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-3, 2e-2  # between two looks at a lock


# For the next job


class CompiledFiles:
    """The files of one folder, which is made if it does not exist.

    Args:
      path: the folder.
      limit_bytes: of all files together.
      say: gets a line the first time that something does not work.

    Raises:
      OSError: the folder cannot be made, or others could write to it.
    """

    def __init__(self, path: str, limit_bytes: int, say: Callable[[str], None]) -> None:
        real = Path(os.path.realpath(path))
        for folder in (*reversed(real.parents), real):
            if not folder.exists():
                files.make_folder(folder)
        files.check_path(real)
        self.path, self._limit, self._say = real, limit_bytes, say
        self._folder = files.open_folder(real, private=True)
        self._silent = False

    def get(self, key: str) -> bytes | None:
        """Return the entry with this key; None if there is none that may be used."""
        name = self._name(key)
        try:
            data = self._read(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._fail(f"{self.path / name} is not used: {error}.")
            return None
        value = data[DIGEST_BYTES:]
        if hashlib.sha256(value).digest() == data[:DIGEST_BYTES]:
            return value
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)
        self._fail(f"{self.path / name} is damaged, and is compiled anew.")
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry."""
        data = hashlib.sha256(value).digest() + value
        try:
            files.replace_bytes(self._folder, self._name(key), data)
            self._prune()
        except OSError as error:
            self._fail(
                f"what was compiled is not kept in {self.path}: {error.strerror}. "
                "JAXMPI_CACHE_BYTES=0 does without."
            )

    def _name(self, key: str) -> str:
        return hashlib.sha256(f"{processor()} {key}".encode()).hexdigest()[:40] + SUFFIX

    def _read(self, name: str) -> bytes:
        opened = os.open(name, _READ, dir_fd=self._folder)
        with open(opened, "rb") as file:
            status = os.fstat(opened)
            others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or others:
                raise PermissionError("it belongs to another user, or others may write to it")
            with contextlib.suppress(OSError):
                os.utime(opened)  # `_prune` removes the files with the oldest times
            return file.read()

    def _prune(self) -> None:
        """Remove the files that were read longest ago, down to the limit."""
        entries, total = _entries(self._folder)
        for entry in entries:
            if total <= self._limit:
                return
            with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                os.unlink(entry.name, dir_fd=self._folder)
            total -= entry.bytes

    def _fail(self, why: str) -> None:
        if not self._silent:
            self._say(why)
        self._silent = True


class _Entry(NamedTuple):
    time: float
    bytes: int
    name: str


def _entries(folder: int | str) -> tuple[list[_Entry], int]:
    """Return the files of a folder, in the order in which to remove them, and their bytes.

    Drafts that were never completed come first, then the files that were read longest ago.
    """
    entries = []
    with os.scandir(folder) as found:
        for file in found:
            with contextlib.suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                if file.name.endswith(SUFFIX):
                    entries.append(_Entry(status.st_mtime, status.st_size, file.name))
                elif SUFFIX in file.name and status.st_mtime < time.time() - DRAFT_SECONDS:
                    entries.append(_Entry(0.0, status.st_size, file.name))
    return sorted(entries), sum(entry.bytes for entry in entries)


def usage(path: str) -> tuple[int, int]:
    """Return the number of entries in a folder, and their bytes."""
    try:
        entries, total = _entries(path)
    except OSError:
        return 0, 0
    return len(entries), total


def folder_of(environ: Mapping[str, str], limit_bytes: int) -> str:
    """Return the folder for what a job compiles.

    It is "" if nothing is kept, or the user has named a folder to JAX.
    """
    if not limit_bytes or environ.get("JAX_COMPILATION_CACHE_DIR"):
        return ""
    if given := environ.get("JAXMPI_CACHE_DIR"):
        return given
    cache, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if os.path.isabs(cache):
        return os.path.join(cache, "jaxmpi", "compiled")
    return os.path.join(home, ".cache", "jaxmpi", "compiled") if os.path.isabs(home) else ""


# For the other ranks of a host


def made_once(directory: str | None, name: str, make: Callable[[], bytes]) -> bytes | None:
    """Return the bytes that another rank of this host has made, or make them.

    Args:
      directory: the folder of the run.
      name: a rank that gives the same name gets these bytes.
      make: makes the bytes; b"" is for no other rank. An error of it is raised here, and the next
        rank calls its own.

    Returns:
      The bytes; None if this rank has called `make`, as the first one or without a folder.
    """
    try:
        folder = files.open_folder(directory or "", private=True)
    except OSError:
        make()
        return None
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, folder)
        lock = os.open(f"{name}.lock", _LOCK, 0o600, dir_fd=folder)
        opened.callback(os.close, lock)
        _acquire(lock)
        # closing does not release it: a forked child of this process may have it open, too
        opened.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        with (
            contextlib.suppress(FileNotFoundError),
            open(os.open(name, _READ_MADE, dir_fd=folder), "rb") as file,
        ):
            return file.read()
        if data := make():
            with contextlib.suppress(OSError):  # a full disk: the others make their own
                files.replace_bytes(folder, name, data)
        return None


def _acquire(lock: int) -> None:
    """Wait for a lock, asleep."""
    for seconds in waits(SHORTEST_SECONDS, LONGEST_SECONDS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(seconds)
