"""What JAX has compiled, kept in files for the next job: machine code, so nobody else may be able to write it.

The folder and all above it are checked, and each file that is read. An entry begins with the digest
of the rest: one that a full disk or a crash has cut off is removed, and compiled anew. Where there
are too many bytes, those that were read longest ago go.
"""

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxmpi._job.process import files
from jaxmpi._job.process.processor import processor

__all__ = ["CompiledFiles", "folder_of", "usage"]

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
SUFFIX = ".compiled"
DIGEST_BYTES = 32
DRAFT_SECONDS = 3600.0  # what is not complete by then never will be


class CompiledFiles:
    """The files of one folder, which is made if it is not there.

    Args:
      path: of the folder.
      limit_bytes: of all files.
      say: gets a line the first time that something does not work.

    Raises:
      OSError: there can be no such folder, or others could write to it.
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
        """The entry with this key; None where there is none that may be used."""
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
        try:
            files.replace_bytes(
                self._folder, self._name(key), hashlib.sha256(value).digest() + value
            )
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
                os.utime(opened)  # it is younger than those that nobody reads
            return file.read()

    def _prune(self) -> None:
        entries, total = _entries(self._folder)
        for entry in entries:
            if total <= self._limit:
                return
            with contextlib.suppress(FileNotFoundError):  # another rank has taken it away
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
    """The files of a folder, those first that were read longest ago, and their bytes; old drafts are first of all."""
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
    """How many entries there are in a folder, and their bytes."""
    try:
        entries, total = _entries(path)
    except OSError:
        return 0, 0
    return len(entries), total


def folder_of(environ: Mapping[str, str], limit_bytes: int) -> str:
    """The folder for what a job compiles; "" where nothing is kept, or the user has named a folder to JAX."""
    if not limit_bytes or environ.get("JAX_COMPILATION_CACHE_DIR"):
        return ""
    if given := environ.get("JAXMPI_CACHE_DIR"):
        return given
    cache, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if os.path.isabs(cache):
        return os.path.join(cache, "jaxmpi", "compiled")
    return os.path.join(home, ".cache", "jaxmpi", "compiled") if os.path.isabs(home) else ""
