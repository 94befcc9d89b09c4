"""What a job needs where it is started: a working directory, room for files, a temporary folder, a home."""

import os
import pwd
import resource
import tempfile
from collections.abc import MutableMapping

from jaxmpi._job.launch.mpiexec import LaunchError

__all__ = ["prepare", "socket_folder"]

FILE_BYTES = 32 << 20  # of one file: shared memory counts, and MPI's segments have 16 MiB
OPEN_FILES = 64  # of MPI's launcher
SOCKET_PATH_BYTES = 107  # Linux: sun_path without its last byte


def prepare(environ: MutableMapping[str, str]) -> None:
    """Check what cannot be done without, and set HOME, without which Open MPI's launcher does nothing.

    Raises:
      LaunchError: no job can start here. The text says why, and what to do.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory is gone. Change to one that exists (cd)."
        ) from None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit < FILE_BYTES:
        raise LaunchError(
            f"files may not be larger than {limit} bytes here, and shared memory needs "
            f"{FILE_BYTES}. Raise `ulimit -f`."
        )
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < OPEN_FILES:
        raise LaunchError(
            f"only {files} files may be open at once here, and a job needs {OPEN_FILES}. Raise "
            "`ulimit -n`."
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise LaunchError(
            "there is no folder for temporary files that can be written to. Set TMPDIR to one."
        ) from None
    if not environ.get("HOME"):
        environ["HOME"] = _home()


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a user without a name, as in some containers
        return tempfile.gettempdir()


def socket_folder(name_bytes: int) -> str:
    """A folder for temporary folders with sockets, whose paths are limited: the usual one, or another where that is too long.

    Args:
      name_bytes: what comes after it in the path of the socket, at most.

    Raises:
      OSError: none is short enough, and can be written to.
    """
    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp"):
        if len(os.fsencode(folder)) + name_bytes <= SOCKET_PATH_BYTES and os.access(
            folder, os.W_OK | os.X_OK
        ):
            return folder
    raise OSError(
        f"the path of the temporary folder is too long for a socket: {usual}. Set TMPDIR to a "
        "shorter one."
    )
