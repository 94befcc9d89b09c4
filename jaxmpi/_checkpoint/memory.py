"""Folder in a host's memory that belongs to a folder of checkpoints, for `in_memory=True`.

    directory/in-memory                   a line: the name of the folder in memory
    /dev/shm/checkpoints-USER-PATH-ID/    PATH: a checksum of the path of `directory`;
                                          ID: a random number
        step-000000000110/ and so on, as in `directory`

A folder in memory is used only where `directory` names it. A `directory` that was removed and made
anew, or that is a copy of another, names no folder or one of another path: so no run goes on from
what another one has left in memory.
"""

import contextlib
import os
import re
import secrets
import time
import zlib
from pathlib import Path

from jaxmpi._errors import CheckpointError
from jaxmpi._job.process import files

__all__ = ["MEMORY", "begin", "existing", "forgotten", "is_here", "present_time"]

MEMORY = Path("/dev/shm")
MARKER = "in-memory"
FORGOTTEN_SECONDS = 3600.0  # since the last change of a folder that no `directory` names any more

_NAME = re.compile(r"checkpoints-\d+-[0-9a-f]{8}-[0-9a-f]{16}")


def existing(directory: Path) -> Path | None:
    """Return the folder in memory that belongs to `directory`; None if there is none.

    There is none where nothing was saved in memory, or where the host was started since.
    """
    name = _named(directory)
    return MEMORY / name if name is not None and is_here(name) else None


def is_here(name: str) -> bool:
    """Return whether the memory of this host has a folder of this name, of this user."""
    try:
        os.close(files.open_folder(MEMORY / name, private=True))
    except OSError:
        return False
    return True


def begin(directory: Path) -> Path:
    """Return the folder in memory that belongs to `directory`; make it where it is not there.

    Raises:
      CheckpointError: it cannot be made, or is another user's.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        name = _named(directory)
        if name is None:
            name = _prefix(directory) + secrets.token_hex(8)
            opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                files.replace(opened, MARKER, name + "\n")
            finally:
                os.close(opened)
        files.make_folder(MEMORY / name)
        os.close(files.open_folder(MEMORY / name, private=True))
    except OSError as error:
        raise CheckpointError(
            f"save: there can be no folder in {MEMORY} for {directory}: {error}.",
            advice="Save without in_memory=True, to the folder itself.",
            path=directory,
        ) from error
    return MEMORY / name


def forgotten(directory: Path) -> list[Path]:
    """Return folders in memory of an earlier `directory` of the same path, which no job uses."""
    name, old = _named(directory), []
    for folder in MEMORY.glob(f"{_prefix(directory)}*"):
        with contextlib.suppress(OSError):  # another job has removed it
            status = folder.lstat()
            unused = time.time() - status.st_mtime > FORGOTTEN_SECONDS
            if folder.name != name and status.st_uid == os.geteuid() and unused:
                old.append(folder)
    return old


def present_time(directory: Path) -> float:
    """Return the time by the clock of the file system of `directory`, maybe another machine's."""
    marker = directory / MARKER
    os.utime(marker)
    return marker.stat().st_mtime


def _named(directory: Path) -> str | None:
    """Return the name in the marker of `directory`, if it is one that `begin` could have given."""
    with contextlib.suppress(OSError, ValueError):
        name = files.read(directory / MARKER).strip()
        if _NAME.fullmatch(name) and name.startswith(_prefix(directory)):
            return name
    return None


def _prefix(directory: Path) -> str:
    """Return how the names of folders in memory begin, for this user and this path."""
    path = os.path.realpath(directory)
    return f"checkpoints-{os.geteuid()}-{zlib.crc32(os.fsencode(path)):08x}-"
