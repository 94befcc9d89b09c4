"""The folder of a run: what the ranks tell `jaxmpi run`, in small files.

`jaxmpi run` makes the folder and names it in JAXMPI_RUN_DIR. A rank joins when it starts and leaves
when it ends in order. A rank that joined and never left has failed, whatever exit code MPI's
launcher reports, unless it is one of plain JAX: native/plain_record.cc writes that it joins and
leaves, and cannot where Python does not end, as by `os._exit` (`Member.notes_end`). Ranks also
write why the job ends, that they refuse the number of ranks, and their throughput. By
JAXMPI_RUN_DIR in their environment `jaxmpi run` finds the processes of the job, to leave nothing
behind.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from jaxmpi._errors import RankCountError
from jaxmpi._job.process import files as _files
from jaxmpi._job.process import launchers
from jaxmpi._job.process.failure import Failure, from_json, to_json

__all__ = [
    "SEGMENT_PREFIX",
    "Member",
    "count_refusal",
    "join",
    "join_alone",
    "leave",
    "members",
    "note_at_exceptions",
    "note_count_refusal",
    "note_preemptible",
    "note_rate",
    "processes",
    "rates",
    "refuse_count",
    "remove_segments",
    "report_failures",
    "reported_failures",
    "segment_folder",
    "segments",
    "state",
]

FAILURES, RATES, REFUSED = "failures.json", "rates", "refused.json"
FOLDER = "/dev/shm"  # which a container may lack
MAP_SECONDS = 0.2  # for a process to map a file of shared memory that it has just made

# How the names of jaxmpi's own files of shared memory begin
SEGMENT_PREFIX = "jaxmpi-"
# The names of MPI's and jaxmpi's own files. A rank may map others (a data set in /dev/shm), and
# those must survive the job.
_SEGMENT = re.compile(
    rf"/dev/shm/(?:{SEGMENT_PREFIX}[^\s/]+/)?"  # the folder of a job, as `segment_folder` makes it
    rf"(?:(?:{'|'.join(launchers.names(lambda launcher: launcher.segments))})[._-]"
    rf"|{SEGMENT_PREFIX})[^\s/]+"
)


# Ranks that take part


@dataclass(frozen=True)
class Member:
    """One rank that joined."""

    rank: int
    pid: int
    host: str
    segments: tuple[str, ...] = ()  # the shared-memory files that it maps
    left: bool = False  # whether it has ended in order
    notes_end: bool = True  # whether an end without `left` is a failure in any case


def join(directory: str, rank: int) -> None:
    """Enter this process as a rank of the job, with the shared memory that it maps now.

    Does nothing where the directory does not exist, which is the case on hosts other than the
    launcher's, and where another user could have made it.
    """
    with _opened(directory) as folder:
        if folder is None:
            return
        pipe = f"rank-{rank}.pipe"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe, 0o600, dir_fd=folder)
            # Held until the process ends. The kernel closes the files of a process last opened
            # first, so `jaxmpi run` sees this one close before MPI's daemon misses the rank and
            # kills the others.
            os.open(pipe, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
        _write(folder, Member(rank, os.getpid(), os.uname().nodename, segments()))


def join_alone(directory: str) -> None:
    """Enter this process as the only rank of the job; its exit code alone tells how it ends.

    Does nothing if another process has: it is a child of that one then.
    """
    with _opened(directory) as folder:
        if folder is not None and not members(directory):
            host = os.uname().nodename
            _write(folder, Member(0, os.getpid(), host, segments(), notes_end=False))


def leave(directory: str, rank: int) -> None:
    """Note that this rank ends in order. From here on, the end of the process is no failure."""
    with _opened(directory) as folder:
        if folder is None:
            return
        # After MPI_Finalize nothing is mapped, yet a file may remain: keep what was recorded.
        paths = set(segments())
        for member in members(directory):
            if member.rank == rank:
                paths.update(member.segments)
        host = os.uname().nodename
        _write(folder, Member(rank, os.getpid(), host, tuple(sorted(paths)), left=True))


def members(directory: str, skip: Container[int] = ()) -> list[Member]:
    """Read the ranks that joined, by rank, except those to skip; none if there is no directory."""
    paths = {
        int(path.stem.removeprefix("rank-")): path for path in Path(directory).glob("rank-*.json")
    }
    found: list[Member] = []
    for rank in sorted(paths):
        if rank not in skip:
            entry = json.loads(paths[rank].read_text())
            found.append(Member(**{**entry, "segments": tuple(entry["segments"])}))
    return found


def note_preemptible(directory: str, rank: int) -> None:
    """Note that this rank stops in order at a SIGTERM."""
    with _opened(directory) as folder:
        if folder is not None:
            _files.replace(folder, f"preemptible-{rank}", "")


# Why the job ends


def report_failures(directory: str, failures: Sequence[Failure]) -> None:
    """Report why the job ends, unless another rank has."""
    with _opened(directory) as folder:
        if folder is not None and not Path(directory, FAILURES).exists():
            _files.replace(folder, FAILURES, to_json(failures))


def reported_failures(directory: str) -> list[Failure]:
    """Return the failures that a rank has reported; none if no rank has."""
    with contextlib.suppress(OSError, ValueError):
        return from_json(Path(directory, FAILURES).read_text())
    return []


def refuse_count(directory: str, reason: str) -> None:
    """Note why the program does not run on this number of ranks, unless another rank has."""
    with _opened(directory) as folder:
        if folder is not None and not Path(directory, REFUSED).exists():
            _files.replace(folder, REFUSED, json.dumps({"reason": reason}))


def count_refusal(directory: str) -> str:
    """Return why the program does not run on this number of ranks; "" if no rank has said so."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads(Path(directory, REFUSED).read_text())["reason"])
    return ""


def note_at_exceptions() -> None:
    """Have each `RankCountError` that nothing handles noted, before it is shown.

    A second call does nothing.
    """
    show = sys.excepthook
    if not os.environ.get("JAXMPI_RUN_DIR") or getattr(show, "notes_count_refusal", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note_count_refusal(error)
        show(kind, error, trace)

    hook.notes_count_refusal = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def note_count_refusal(error: BaseException) -> None:
    """Note an error that ends this rank, if it is a `RankCountError`.

    A program may have raised an error of its own from ours, or while it handled ours.
    """
    cause: BaseException | None = error
    seen: list[BaseException] = []
    # a chain may lead back to itself
    while cause is not None and not any(cause is other for other in seen):
        if isinstance(cause, RankCountError):
            with contextlib.suppress(KeyError, OSError):
                refuse_count(os.environ["JAXMPI_RUN_DIR"], str(cause))
            return
        seen.append(cause)
        # as Python shows them: `raise ... from None` hides the error that was handled
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


# Throughput


def note_rate(directory: str, per_second: float) -> None:
    """Note the samples per second of all ranks, for `jaxmpi run --scaling`."""
    with _opened(directory) as folder:
        if folder is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(RATES, flags, 0o600, dir_fd=folder), "w") as file:
                file.write(f"{per_second!r}\n")


def rates(directory: str) -> tuple[float, ...]:
    """Return the rates that were noted, in their order."""
    with contextlib.suppress(OSError):
        return tuple(map(float, Path(directory, RATES).read_text().split()))
    return ()


# Processes and their shared memory


def state(pid: int) -> str:
    """Return "runs", "stopped" or "ended" for a process of this host; a zombie has ended."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "ended"
    if letter in "Tt":
        return "stopped"
    return "ended" if letter in "ZX" else "runs"


def processes(directory: str) -> dict[int, bytes]:
    """Return the environment of each process of the job on this host, by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environ = b"\0" + path.read_bytes()
            if b"\0JAXMPI_RUN_DIR=" + os.fsencode(directory) + b"\0" in environ:
                found[int(path.parent.name)] = environ
    return found


def segments(pid: int | str = "self") -> tuple[str, ...]:
    """Return the shared-memory files of MPI and jaxmpi that a process maps.

    There are none if this user may not look into the process.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    paths: set[str] = set()
    for line in lines:
        found = _SEGMENT.search(line)
        if found and not line.endswith(" (deleted)"):
            paths.add(found.group())
    return tuple(sorted(paths))


@contextlib.contextmanager
def segment_folder(variable: str, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Make a folder for MPI's shared memory of one job; yield the variable that names it.

    Open MPI names its files after the job, by 16 bits of a checksum. Two jobs on one host whose
    checksums are equal would open the same files, and write into each other's queues. This happens
    to one of some 65,000 pairs of jobs; then a rank ends by SIGSEGV, or hangs.

    Nothing is made, and no variable yielded, where `variable` is "", where the user has set it, and
    where there is no /dev/shm. The folder is removed afterwards. A process holds a lock on it for
    as long, so that the next job removes the folder of one that was killed.

    Args:
      variable: its name, as `Launcher.segment_folder`.
      environ: the variables of the user. In a job that a rank of another job starts, the variable
        has the folder of that one.
    """
    theirs = environ.get(variable, "")
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        if variable and (not theirs or theirs.startswith(f"{FOLDER}/{SEGMENT_PREFIX}")):
            with contextlib.suppress(OSError):
                _remove_folders_of_killed_jobs()
                variables = {variable: _make_locked_folder(stack)}
        yield variables


def _make_locked_folder(stack: contextlib.ExitStack) -> str:
    """Make a folder in shared memory and lock it until the stack is closed, which removes it."""
    while True:
        folder = tempfile.mkdtemp(prefix=SEGMENT_PREFIX, dir=FOLDER)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            break
        os.close(descriptor)  # another job has removed it before it was locked
    stack.callback(os.close, descriptor)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _remove_folders_of_killed_jobs() -> None:
    """Remove the folders of this user that no process has locked."""
    for path in Path(FOLDER).glob(f"{SEGMENT_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def remove_segments(recorded: set[str], started: float) -> None:
    """Remove the shared memory that a job has left.

    A file that a process maps is never removed. A file that the ranks have not recorded is removed
    if it belongs to this user, was made during the job, and stays unmapped for a while: another job
    may be about to map what it has just made.

    Args:
      recorded: the files that the ranks of the job have recorded.
      started: when the job started, as `time.time` has it.
    """

    def unmapped(paths: set[str]) -> set[str]:
        mapped: set[str] = set()
        for entry in Path("/proc").glob("[0-9]*"):
            mapped.update(segments(entry.name))
        return {path for path in paths if os.path.exists(path)} - mapped

    def ours(path: Path) -> bool:
        with contextlib.suppress(OSError):
            status = path.stat()
            return status.st_uid == os.getuid() and status.st_ctime >= started
        return False

    left = unmapped(recorded)
    named = {path for path in Path(FOLDER).glob("*") if _SEGMENT.fullmatch(str(path))}
    named = {path for path in named if not path.is_dir()}
    others = unmapped({str(path) for path in named if ours(path)} - recorded)
    if others:
        time.sleep(MAP_SECONDS)
        others = unmapped(others)
    for path in left | others:
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int | None]:
    """Open the directory; None if it does not exist, or others can write to it."""
    try:
        folder = _files.open_folder(directory, private=True)
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        os.close(folder)


def _write(folder: int, member: Member) -> None:
    """Write the file whole or not at all: `jaxmpi run` may read it at any moment."""
    _files.replace(folder, f"rank-{member.rank}.json", json.dumps(asdict(member)))
