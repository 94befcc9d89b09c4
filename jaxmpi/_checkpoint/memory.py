"""The folder in the memory of a host that belongs to a folder of checkpoints: what `save(..., in_memory=True)` writes into.

    directory/in-memory                   a line: the name of the folder in memory
    /dev/shm/checkpoints-USER-PATH-ID/    PATH: a checksum of the path of `directory`; ID: a random number
                                          step-000000000110/ and so on, as in `directory`

A folder in memory is used only where `directory` names it. A `directory` that was removed and made anew, or that is a copy of
another, names no folder or one of another path: no run goes on from what another one has left in memory.
"""

import contextlib
import os
import re
import secrets
import time
import zlib
from pathlib import Path

from jaxmpi._errors import CheckpointError
from jaxmpi._process import files

__all__ = ["MEMORY", "begin", "existing", "forgotten", "present_time"]

MEMORY = Path("/dev/shm")
MARKER = "in-memory"
FORGOTTEN_SECONDS = 3600.0  # since the last change of a folder that no `directory` names any more

_NAME = re.compile(r"checkpoints-\d+-[0-9a-f]{8}-[0-9a-f]{16}")


def existing(directory: Path) -> Path | None:
    """The folder in memory that belongs to a folder of checkpoints; None if there is none, as after the host was started."""
    name = _named(directory)
    if name is None:
        return None
    try:
        os.close(files.open_folder(MEMORY / name, private=True))
    except OSError:
        return None
    return MEMORY / name


def begin(directory: Path) -> Path:
    """Return the folder in memory that belongs to a folder of checkpoints, made where it is not there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        name = _named(directory)
        if name is None:
            name = _prefix(directory) + secrets.token_hex(8)
            marked = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                files.replace(marked, MARKER, name + "\n")
            finally:
                os.close(marked)
        files.make_folder(MEMORY / name)
        os.close(files.open_folder(MEMORY / name, private=True))
    except OSError as error:
        raise CheckpointError(
            f"save: there can be no folder in {MEMORY} for {directory}: {error}. Save without in_memory=True, to the folder "
            "itself."
        ) from error
    return MEMORY / name


def forgotten(directory: Path) -> list[Path]:
    """Folders in memory of a `directory` of the same path that was removed since, and that no job writes into any more."""
    name, old = _named(directory), []
    for folder in MEMORY.glob(f"{_prefix(directory)}*"):
        with contextlib.suppress(OSError):  # another job has removed it
            status = folder.lstat()
            if folder.name != name and status.st_uid == os.geteuid() and time.time() - status.st_mtime > FORGOTTEN_SECONDS:
                old.append(folder)
    return old


def present_time(directory: Path) -> float:
    """The present time by the clock of the file system of `directory`, which may be another machine's."""
    marker = directory / MARKER
    os.utime(marker)
    return marker.stat().st_mtime


def _named(directory: Path) -> str | None:
    """The name that `directory` holds, if it is one that `begin` could have given it."""
    with contextlib.suppress(OSError, ValueError):
        name = files.read(directory / MARKER).strip()
        if _NAME.fullmatch(name) and name.startswith(_prefix(directory)):
            return name
    return None


def _prefix(directory: Path) -> str:
    path = os.path.realpath(directory)
    return f"checkpoints-{os.geteuid()}-{zlib.crc32(os.fsencode(path)):08x}-"
