"""Folders of checkpoints: whole or not there, however a job ends, and checked when read.

    directory/step-000000000100/manifest.json   the leaves, and where their numbers are
                                rank-0.npz      arrays by name
                                rank-1.npz      where ranks have shards or values of their own
    directory/unfinished-ID-MACHINE-PID/        being written; `lock` in it is locked meanwhile
    directory/abandoned-step-000000000200/      of a run that went further, and was left
    directory/removed-ID/                       being removed

A save writes into an unfinished folder, and renames it when everything in it is on the disk. The
job that writes holds a lock on a file in it (flock), which the kernel releases however the job
ends: so another job can tell a folder that is being written from one that a killed job has left.
Several jobs may use one directory, and any of them may rename or remove a folder at any moment.
"""

import contextlib
import errno
import fcntl
import math
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedWriter
from pathlib import Path

from jaxmpi._checkpoint import memory
from jaxmpi._checkpoint.array_files import PIECE_BYTES, Archive, advice, create, open_regular
from jaxmpi._checkpoint.manifest import Manifest, format_manifest, parse_manifest
from jaxmpi._errors import CheckpointError
from jaxmpi._job.process import stderr

__all__ = [
    "Lineage",
    "begin",
    "check",
    "commit",
    "found",
    "newest",
    "read_manifest",
    "step_of",
]

MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 28  # at most; about 100 for each array
UNTOUCHED_SECONDS = 3600.0  # since the last change, where no lock tells whether a job still writes

_UNFINISHED, _REMOVED, _SET_ASIDE, _LOCK = "unfinished-", "removed-", "abandoned-", "lock"
_NAME = re.compile(r"step-(\d{12,})(?:\.(\d+))?")  # the second number: a step that was saved again
_FIRST_LINE = re.compile(rb'\{"checksum": (\d{1,10}),\n')


# whole checkpoints, found and checked


def found(directory: Path) -> list[Path]:
    """Return the folders named as checkpoints, from the newest to the oldest, unchecked.

    Of one step, the newest is the one that was saved last.
    """
    if not directory.is_dir():
        return []
    named = (path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    return sorted(named, key=_order, reverse=True)


def _order(folder: Path) -> tuple[int, int]:
    """Return (step, number among the saves of this step) by the name of a checkpoint."""
    match = _NAME.fullmatch(folder.name)
    assert match
    return int(match[1]), int(match[2] or 0)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return _order(folder)[0]


def newest(
    directories: Sequence[Path], step: int | None = None
) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    """Return the newest whole checkpoint; of one step in several directories, the last one's.

    Args:
      directories: where to look.
      step: of the checkpoint; any by default.

    Returns:
      The folder and its manifest, or None; and an error for each newer checkpoint that is damaged.
    """
    errors: list[str] = []
    folders: list[Path] = []
    for directory in reversed(directories):
        folders += found(directory)
    for folder in sorted(folders, key=step_of, reverse=True):
        if step is None or step_of(folder) == step:
            try:
                return (folder, check(folder)), errors
            except CheckpointError as error:
                errors.append(str(error))
    return None, errors


def check(folder: Path) -> Manifest:
    """Read all of a checkpoint, and return its manifest.

    Raises:
      CheckpointError: something is not as it was written, with the file, and the leaf in it.
    """
    manifest = read_manifest(folder)
    for rank in range(manifest.ranks):
        size, members = manifest.file_bytes[rank], manifest.members[rank]
        with Archive(folder, rank, size, members) as archive:
            for leaf in manifest.leaves:
                if leaf.in_file(rank):
                    archive.check(leaf, manifest.ranks)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
      CheckpointError: it is missing, damaged, or of another step than the folder's name.
    """
    path = folder / MANIFEST
    with open_regular(path) as file:
        try:
            # The checksum first: text that differs from what was written is not interpreted.
            first = _FIRST_LINE.fullmatch(file.readline(64))
            if first is None or os.fstat(file.fileno()).st_size > MANIFEST_BYTES:
                raise ValueError("it does not begin or end as one")
            start, checksum = file.tell(), zlib.crc32(b"{")
            while piece := file.read(PIECE_BYTES):
                checksum = zlib.crc32(piece, checksum)
            intact = checksum == int(first[1])
            if intact:
                file.seek(start)
                manifest = parse_manifest(b"{" + file.read())
        except Exception as error:  # of any type: the text may be anything
            raise CheckpointError(
                f"{path} is no manifest of a checkpoint: {error}.", path=path
            ) from error
    if not intact:
        raise CheckpointError(f"{path} is corrupted: its checksum does not match.", path=path)
    if _NAME.fullmatch(folder.name) and manifest.step != step_of(folder):
        raise CheckpointError(
            f"{path} is of step {manifest.step}, and not of this folder.", path=path
        )
    return manifest


# a checkpoint that is being written


def begin(directory: Path, in_memory: bool = False) -> tuple[Path, BufferedWriter]:
    """Make a folder to write into, and remove what killed jobs have left.

    Args:
      directory: of the checkpoints of a run.
      in_memory: whether to write into the folder in memory that belongs to `directory`.

    Returns:
      The folder and its lock: an open file, which the caller closes after `commit` or a failure.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if in_memory:
        for left in memory.forgotten(directory):
            _delete(left)
        directory = memory.begin(directory)
    _remove_left(directory)
    folder = directory / f"{_UNFINISHED}{uuid.uuid4().hex}-{_machine()}-{os.getpid()}"
    folder.mkdir()
    # The file is called `lock` only once it is locked. Another job that looks between these lines
    # finds no lock, and goes by the process in the folder's name.
    lock = create(folder / f"{_LOCK}.new")
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / f"{_LOCK}.new").rename(folder / _LOCK)
    return folder, lock


class Lineage:
    """Checkpoints of this job, and those it goes on from, told from those of jobs beside it."""

    def __init__(self, began: float) -> None:
        self.restored: dict[Path, int] = {}  # by directory, the step restored since its last save
        self._began = began  # by `time.monotonic`
        self._known: set[tuple[int, int, int]] = set()  # device, inode, time of last change

    def note(self, checkpoint: Path) -> None:
        """Note a checkpoint that this job has written, or goes on from."""
        self._known.add(_identity(checkpoint.stat()))

    def note_restore(self, directory: Path, step: int) -> None:
        """Note that this job goes on from a step.

        All checkpoints that are there by now are then its own, or of runs that it leaves.
        """
        self.restored[directory] = step
        for there in (directory, memory.existing(directory)):
            for checkpoint in found(there) if there else []:
                with contextlib.suppress(OSError):  # another job has removed it
                    self.note(checkpoint)

    def not_of_other_jobs(self, directory: Path, now: float) -> list[Path]:
        """Return the checkpoints that this job knows, and those from before it began.

        The others were written by jobs that run beside this one, which may write one more at any
        moment: a list of theirs is never complete, but this one is.

        Args:
          directory: where to look.
          now: the time by the clock of the file system, which may be another machine's.

        Returns:
          The folders, from the newest to the oldest.
        """
        began = now - (time.monotonic() - self._began)
        checkpoints = []
        for checkpoint in found(directory):
            with contextlib.suppress(OSError):  # another job has removed it
                status = checkpoint.stat()
                if status.st_mtime <= began or _identity(status) in self._known:
                    checkpoints.append(checkpoint)
        return checkpoints


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    """Return what tells a folder from all others, whatever its name."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


def commit(
    lineage: Lineage,
    directory: Path,
    folder: Path,
    manifest: Manifest,
    keep: int | None,
) -> None:
    """Make a checkpoint of a folder in which all ranks have written.

    Args:
      lineage: of this job. It forgets the step that was restored from `directory` once the
        checkpoint is there: a save that fails leaves it to the next one.
      directory: of the checkpoints of the run.
      folder: as `begin` has made it, in `directory` or in memory.
      manifest: describes what is in it.
      keep: how many checkpoints to keep.

    Raises:
      CheckpointError: the disk refuses something, with the reason and what to do.
    """
    try:
        # 1. The manifest, and then the folder's list of names, are on the disk: what gets the name
        #    of a checkpoint is whole even if the machine stops at once.
        text = format_manifest(manifest)
        if len(text) > MANIFEST_BYTES:
            raise CheckpointError(
                f"{folder}: the manifest has {len(text)} bytes.",
                advice="Save fewer leaves, or shorter text.",
                path=folder,
            )
        with create(folder / MANIFEST) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        (folder / _LOCK).unlink(missing_ok=True)
        _to_disk(folder)
        # 2. Later checkpoints of a run that was left lose their names before the new one gets its
        #    own: a job that is killed in between goes on from an older one of its own.
        set_aside(lineage, directory, folder, manifest.step)
        # 3. The checkpoint is there.
        checkpoint = _rename(folder, manifest.step)
        lineage.restored.pop(directory, None)
        lineage.note(checkpoint)
        _to_disk(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written: {error}.", advice=advice(error), path=folder
        ) from error
    # 4. Only now the older ones can go: those of the same step, and those beyond `keep`.
    earlier = []
    for other in found(folder.parent):
        if step_of(other) == manifest.step and other != checkpoint:
            _remove(other)
        elif step_of(other) < manifest.step:
            earlier.append(other)
    for other in earlier[keep - 1 :] if keep is not None else ():
        _remove(other)
    in_memory = memory.existing(directory)
    if in_memory is not None and folder.parent == directory:
        _empty(lineage, in_memory)


def set_aside(lineage: Lineage, directory: Path, folder: Path, step: int) -> None:
    """Rename the checkpoints that this run has not come from, so that no job goes on from them.

    These are the later ones, of a run that went further and was left; and those between the step
    that was restored and this one. Those that another job writes while this one runs are left
    alone. Of those in memory, nothing is kept.

    Args:
      lineage: of this job.
      directory: of the checkpoints of the run.
      folder: the unfinished folder of this save.
      step: that is being saved.
    """
    base = lineage.restored.get(directory)
    least = step if base is None else min(base, step)

    def of_another_run(there: Path, now: float) -> list[Path]:
        abandoned = []
        for checkpoint in lineage.not_of_other_jobs(there, now):
            if step_of(checkpoint) > least and step_of(checkpoint) != step:
                abandoned.append(checkpoint)
        return abandoned

    if in_memory := memory.existing(directory):
        for checkpoint in of_another_run(in_memory, time.time()):
            _remove(checkpoint)
    # the present time by the file system's clock: the folder was changed just now
    in_directory = folder.parent == directory
    now = folder.stat().st_mtime if in_directory else memory.present_time(directory)
    abandoned = of_another_run(directory, now)
    for checkpoint in abandoned:
        with contextlib.suppress(OSError):  # another job has removed it
            name = f"{_SET_ASIDE}{checkpoint.name}"
            while os.path.lexists(directory / name):
                name += f"-{uuid.uuid4().hex[:8]}"
            checkpoint.rename(directory / name)
    if abandoned:
        origin = "" if base is None else f", which goes on from step {base}"
        steps = ", ".join(str(step_of(checkpoint)) for checkpoint in reversed(abandoned))
        stderr.say(
            f"jaxmpi: save: the checkpoints of steps {steps} in {directory} are of another run "
            f"than step {step}{origin}. They are called {_SET_ASIDE}step-... from now on, and not "
            "restored; remove them, or rename them to go on from them.\n"
        )


def _rename(folder: Path, step: int) -> Path:
    """Give an unfinished folder the name of its step, and return the new path.

    Earlier ones of the step stay for now, and the new one is called step-STEP.N, with N above all
    of theirs: there is no moment without a whole checkpoint of the step, and from the first one on
    `found` has the new one before them, even if nobody ever removes them.
    """
    name = folder.parent / f"step-{step:012}"
    numbers = [number for at, number in map(_order, found(folder.parent)) if at == step]
    again = max(numbers, default=-1) + 1
    while True:
        checkpoint = name.with_suffix(f".{again}") if again else name
        try:
            if not os.path.lexists(checkpoint):
                folder.rename(checkpoint)
                return checkpoint
        except OSError as error:  # another job was faster
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        again += 1


# what is removed


def _empty(lineage: Lineage, in_memory: Path) -> None:
    """Remove the checkpoints in memory, but those of other jobs: the disk has a newer one."""
    for checkpoint in lineage.not_of_other_jobs(in_memory, time.time()):
        _remove(checkpoint)
    _remove_left(in_memory)
    with contextlib.suppress(OSError):  # another job uses it
        in_memory.rmdir()


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that nobody finds half of it."""
    with contextlib.suppress(OSError):  # another job has removed it
        _delete(checkpoint.rename(checkpoint.with_name(f"{_REMOVED}{uuid.uuid4().hex}")))


def _remove_left(directory: Path) -> None:
    """Remove what killed jobs have left."""
    for left in directory.glob(f"{_REMOVED}*"):
        _delete(left)
    for left in directory.glob(f"{_UNFINISHED}*"):
        if _writer_is_gone(left):
            _delete(left)


def _writer_is_gone(folder: Path) -> bool:
    """Return whether the job that wrote into an unfinished folder has ended."""
    try:
        with open_regular(folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except (OSError, CheckpointError):
        pass
    # No lock, or a file system without locks: the process tells, if it was one of this machine,
    # and otherwise that nothing has changed for long.
    _, _, machine, pid = (*folder.name.split("-"), "", "")[:4]
    if machine == _machine() and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
        return True
    return time.time() - max(_changes(folder), default=math.inf) > UNTOUCHED_SECONDS


def _machine() -> str:
    """Return a name for this machine since its start, and for this container's process numbers."""
    facts = [os.uname().nodename]
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        facts += [boot, os.readlink("/proc/self/ns/pid")]
    return f"{zlib.crc32(''.join(facts).encode()):08x}"


def _changes(folder: Path) -> Iterator[float]:
    """Yield when the folder and each file in it were changed, as far as they are still there."""
    paths = [folder]
    with contextlib.suppress(OSError):
        paths += [folder / name for name in os.listdir(folder)]
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.lstat().st_mtime


def _delete(path: Path) -> None:
    """Delete a file or a folder as far as possible, without an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _to_disk(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
