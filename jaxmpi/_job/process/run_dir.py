"""Who takes part in a job that `jaxmpi run` started: one small file a rank, in a directory that the launcher made.

The launcher names the directory in JAXMPI_RUN_DIR. A rank joins when it starts and leaves when it
ends in order; whoever joined and never left was killed, crashed or slipped out, whatever exit code
MPI's launcher reports.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxmpi._job.process import files as _files
from jaxmpi._job.process import launchers
from jaxmpi._job.process.failure import Failure, from_json, to_json

__all__ = [
    "Member",
    "join",
    "leave",
    "members",
    "note_rate",
    "processes",
    "rates",
    "refuse_count",
    "refused_count",
    "remove_segments",
    "report_failures",
    "reported_failures",
    "segments",
    "state",
    "takes_sigterm",
]

FAILURES, RATES, REFUSED = "failures.json", "rates", "refused.json"
FOLDER = "/dev/shm"  # which a container may lack

# What MPI and jaxmpi name their own files. A rank may map others (a data set in /dev/shm), and
# those must survive the job.
_SEGMENT = re.compile(
    rf"/dev/shm/(?:{'|'.join(launchers.names(lambda launcher: launcher.segments))}|jaxmpi)"
    r"[._-][^\s/]+"
)


@dataclass(frozen=True)
class Member:
    """One rank that joined: where it runs, the shared-memory files it maps, and whether it left in order."""

    rank: int
    pid: int
    host: str
    segments: tuple[str, ...] = ()
    left: bool = False


def join(directory: str, rank: int) -> None:
    """Enter this process as a rank of the job; again, to record shared memory that was mapped since.

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
            # first, so the launcher sees this one close before MPI's daemon misses the rank and
            # kills the others.
            os.open(pipe, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
        _write(folder, Member(rank, os.getpid(), os.uname().nodename, segments()))


def leave(directory: str, rank: int) -> None:
    """Note that this rank ends in order. Whatever becomes of the process from here on is no failure."""
    with _opened(directory) as folder:
        if folder is None:
            return
        joined = {
            path for member in members(directory) if member.rank == rank for path in member.segments
        }
        # after MPI_Finalize nothing is mapped, yet a file may remain
        paths = tuple(sorted(joined.union(segments())))
        _write(folder, Member(rank, os.getpid(), os.uname().nodename, paths, left=True))


def takes_sigterm(directory: str, rank: int) -> None:
    """Note that this rank stops in order at a SIGTERM, for `jaxmpi run`."""
    with _opened(directory) as folder:
        if folder is not None:
            _files.replace(folder, f"preemptible-{rank}", "")


def report_failures(directory: str, failures: Sequence[Failure]) -> None:
    """Report to `jaxmpi run` why the job ends, unless another rank has."""
    with _opened(directory) as folder:
        if folder is not None and not Path(directory, FAILURES).exists():
            _files.replace(folder, FAILURES, to_json(failures))


def reported_failures(directory: str) -> list[Failure]:
    """Return the failures that a rank has reported; none if no rank has."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return from_json(Path(directory, FAILURES).read_text())
    return []


def refuse_count(directory: str, reason: str) -> None:
    """Note, for `jaxmpi run`, why this rank ends in a job of so many ranks, unless another rank has."""
    with _opened(directory) as folder:
        if folder is not None and not Path(directory, REFUSED).exists():
            _files.replace(folder, REFUSED, json.dumps({"reason": reason}))


def refused_count(directory: str) -> str:
    """Return why a rank has ended in a job of so many ranks; "" if none has for this reason."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads(Path(directory, REFUSED).read_text())["reason"])
    return ""


def note_rate(directory: str, per_second: float) -> None:
    """Note the samples per second of all ranks, for `jaxmpi run --scaling`."""
    with _opened(directory) as folder:
        if folder is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(RATES, flags, 0o600, dir_fd=folder), "w") as file:
                file.write(f"{per_second!r}\n")


def rates(directory: str) -> tuple[float, ...]:
    """What was noted, in that order."""
    with contextlib.suppress(OSError):
        return tuple(map(float, Path(directory, RATES).read_text().split()))
    return ()


def members(directory: str, skip: Container[int] = ()) -> list[Member]:
    """Read the ranks that joined, by rank, but for those to skip; none when the directory is gone."""
    files = {
        int(path.stem.removeprefix("rank-")): path for path in Path(directory).glob("rank-*.json")
    }
    entries = [json.loads(files[rank].read_text()) for rank in sorted(files) if rank not in skip]
    return [Member(**{**entry, "segments": tuple(entry["segments"])}) for entry in entries]


def segments(pid: int | str = "self") -> tuple[str, ...]:
    """List the shared-memory files of MPI and of jaxmpi that a process maps; none where we may not look into it."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    paths = {
        match.group()
        for line in lines
        if (match := _SEGMENT.search(line)) and not line.endswith(" (deleted)")
    }
    return tuple(sorted(paths))


def state(pid: int) -> str:
    """What a process of this host does: "runs", is "stopped", or has "ended", and be it that nobody has asked how."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "ended"
    return "stopped" if letter in "Tt" else "ended" if letter in "ZX" else "runs"


def processes(directory: str) -> dict[int, bytes]:
    """Find the processes of the job on this host: the environment of each, by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environ = b"\0" + path.read_bytes()
            if b"\0JAXMPI_RUN_DIR=" + os.fsencode(directory) + b"\0" in environ:
                found[int(path.parent.name)] = environ
    return found


def remove_segments(recorded: set[str], started: float) -> None:
    """Remove the shared memory that the job left: what its ranks recorded, and what else appeared meanwhile.

    Never what a process maps. Of the unrecorded only what is ours and stays unmapped for a while:
    another job may be about to map what it has just made.
    """

    def unmapped(paths: set[str]) -> set[str]:
        mapped = {path for entry in Path("/proc").glob("[0-9]*") for path in segments(entry.name)}
        return {path for path in paths if os.path.exists(path)} - mapped

    def ours(path: Path) -> bool:
        with contextlib.suppress(OSError):
            status = path.stat()
            return status.st_uid == os.getuid() and status.st_ctime >= started
        return False

    left = unmapped(recorded)
    others = unmapped(
        {str(p) for p in Path(FOLDER).glob("*") if _SEGMENT.fullmatch(str(p)) and ours(p)}
        - recorded
    )
    if others:
        time.sleep(0.2)
        others = unmapped(others)
    for path in left | others:
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int | None]:
    """The directory, open; None where it does not exist, or is not this user's alone."""
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
    """Write the file whole or not at all: the launcher may read it at any moment."""
    _files.replace(folder, f"rank-{member.rank}.json", json.dumps(asdict(member)))
