"""The host on which a job is started: its cores, and whether it allows a job at all."""

import contextlib
import os
import pwd
import resource
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from jaxmpi._job.launch.mpiexec import LaunchError

__all__ = ["Machine", "prepare", "socket_folder", "survey"]

FILE_BYTES = 32 << 20  # of one file: shared memory counts, and MPI's segments have 16 MiB
OPEN_FILES = 64  # of MPI's launcher
SOCKET_PATH_BYTES = 107  # Linux: sun_path without its last byte


@dataclass(frozen=True)
class Machine:
    """The cores, permissions and huge pages of this host."""

    cores: int  # physical ones that this process may use
    bindable: bool  # whether a launcher can bind to them
    root: bool  # whether this process runs as root
    huge_pages: bool  # whether a process gets huge pages if it asks for them, and not otherwise


def survey() -> Machine:
    """Count the physical cores, and find out whether malloc must ask for huge pages."""
    cpus = os.sched_getaffinity(0)
    # What the cpuset allows can be more than the affinity mask (taskset): ask for all processors,
    # and the kernel grants those of the cpuset.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    # Hyperthreads of one core have the same list of siblings.
    cores = set()
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(path.read_text() if path.exists() else str(path))
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return Machine(
        cores=len(cores),
        # Both MPIs bind within the cpuset, but outside a narrower mask, where others run.
        bindable=cpus == allowed,
        root=os.getuid() == 0,
        huge_pages=huge_pages.exists() and "[madvise]" in huge_pages.read_text(),
    )


def prepare(environ: MutableMapping[str, str]) -> None:
    """Check what a job cannot do without, and set HOME if it is missing.

    Open MPI's launcher does not start without HOME.

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
        try:
            environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a user without a name, as in some containers
            environ["HOME"] = tempfile.gettempdir()


def socket_folder(name_bytes: int) -> str:
    """Return a folder for temporary files whose path is short enough for a socket in it.

    It is the usual temporary folder, or else /tmp or /var/tmp.

    Args:
      name_bytes: the length of what follows the folder in the path of the socket, at most.

    Raises:
      OSError: none of them is short enough and can be written to.
    """
    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp"):
        short = len(os.fsencode(folder)) + name_bytes <= SOCKET_PATH_BYTES
        if short and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise OSError(
        f"the path of the temporary folder is too long for a socket: {usual}. Set TMPDIR to a "
        "shorter one."
    )
