"""Bytes that one rank of a host makes for all that need them, in the folder of the run, where only this user can write.

Whoever comes first makes them, and waits for nobody; those who come meanwhile wait, asleep, until
it has them or has ended.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable

from jaxmpi._job.process import files

__all__ = ["made_once"]

_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
SHORTEST, LONGEST = 1e-3, 2e-2  # seconds between two looks


def made_once(directory: str | None, name: str, make: Callable[[], bytes]) -> bytes | None:
    """What another rank of this host has made; None where this one has called `make`, as the first, or without a directory.

    Args:
      directory: of the run.
      name: of what is made: a rank with the same name takes it.
      make: makes it; b"" is for nobody else. What it raises is raised here, and the next rank calls
        its own.
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
        # a forked child of this process may have it open, too
        opened.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        return _made(folder, name, make)


def _made(folder: int, name: str, make: Callable[[], bytes]) -> bytes | None:
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.open(name, _READ, dir_fd=folder), "rb") as file,
    ):
        return file.read()
    if data := make():
        with contextlib.suppress(OSError):  # a full disk: the others make their own
            files.replace_bytes(folder, name, data)
    return None


def _acquire(lock: int) -> None:
    began = time.monotonic()
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(min(max((time.monotonic() - began) / 16, SHORTEST), LONGEST))
