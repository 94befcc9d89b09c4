"""A checkpoint's folder while it is written: begun under another name, and renamed when everything in it is on the disk.

The job that writes it holds a lock on a file in it, so that other jobs can tell it from what a job that was killed has left.
"""

import contextlib
import errno
import fcntl
import math
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path

from jaxmpi._checkpoint import memory
from jaxmpi._checkpoint.files import advice, create, open_regular
from jaxmpi._checkpoint.folders import MANIFEST, MANIFEST_BYTES, found, step_of
from jaxmpi._checkpoint.manifest import Manifest
from jaxmpi._checkpoint.manifest_format import format_manifest
from jaxmpi._errors import CheckpointError
from jaxmpi._process import stderr

__all__ = ["Lineage", "begin", "commit"]

ABANDONED_SECONDS = 3600.0  # since the last change, where no lock tells whether a job still writes

_UNFINISHED, _REMOVED, _LOCK = "unfinished-", "removed-", "lock"
_ABANDONED = "abandoned-"


class Lineage:
    """Tells the checkpoints that this job has written, or found when it restored one, from those of jobs beside it."""

    def __init__(self, began: float) -> None:
        self.restored: dict[Path, int] = {}  # the step that was restored from a directory since its last save
        self._began = began  # by `time.monotonic`
        self._known: set[tuple[int, int, int]] = set()  # device, inode and time of last change

    def note(self, checkpoint: Path) -> None:
        """Note a checkpoint that this job has written, or goes on from."""
        self._known.add(_identity(checkpoint.stat()))

    def note_restore(self, directory: Path, step: int) -> None:
        """Note that a job goes on from a step: all checkpoints that are there now are its own, or of runs that it left."""
        self.restored[directory] = step
        for there in (directory, memory.existing(directory)):
            for old in found(there) if there else []:
                with contextlib.suppress(OSError):  # another job has removed it
                    self.note(old)

    def of_other_jobs(self, directory: Path, now: float) -> set[Path]:
        """Return the checkpoints that were written since this job began, and that it does not know.

        Args:
          directory: where to look.
          now: the time by the clock of the file system, which may be another machine's.
        """
        began = now - (time.monotonic() - self._began)
        others = set()
        for old in found(directory):
            with contextlib.suppress(OSError):  # another job has removed it
                status = old.stat()
                if status.st_mtime > began and _identity(status) not in self._known:
                    others.add(old)
        return others


def begin(directory: Path, in_memory: bool = False) -> tuple[Path, BufferedWriter]:
    """A new folder to write into, and its lock: an open file, to be closed in the end.

    What jobs that were killed have left is removed.

    Args:
      directory: of the checkpoints of a run.
      in_memory: whether to write into the folder in memory that belongs to `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if in_memory:
        for left in memory.forgotten(directory):
            _delete(left)
        directory = memory.begin(directory)
    _remove_left(directory)
    folder = directory / f"{_UNFINISHED}{uuid.uuid4().hex}-{_machine()}-{os.getpid()}"
    folder.mkdir()
    lock = create(folder / f"{_LOCK}.new")
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / f"{_LOCK}.new").rename(folder / _LOCK)  # has its name once it is locked
    return folder, lock


def commit(
    lineage: Lineage, directory: Path, folder: Path, manifest: Manifest, keep: int | None, base: int | None = None
) -> None:
    """Give a folder, in which all ranks have written, its name; remove the checkpoints beyond `keep`, as in `jaxmpi.save`.

    Args:
      lineage: of this job.
      directory: of the checkpoints of the run.
      folder: as `begin` has made it, in `directory` or in memory.
      manifest: what is in it.
      keep: how many checkpoints to keep.
      base: the step that was restored from `directory` since its last save, if any.
    """
    try:
        text = format_manifest(manifest)
        if len(text) > MANIFEST_BYTES:
            raise CheckpointError(f"{folder}: the manifest has {len(text)} bytes. Save fewer leaves, or shorter text.")
        with create(folder / MANIFEST) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        (folder / _LOCK).unlink(missing_ok=True)
        _to_disk(folder)
        # before the new checkpoint is there: a job that is killed in between goes on from an older one of its own
        set_aside(lineage, directory, folder, manifest.step, base)
        there = _name(folder, manifest.step)
        lineage.note(there)
        _to_disk(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written: {error}. {advice(error)}") from error
    twice = [old for old in found(folder.parent) if step_of(old) == manifest.step and old != there]
    older = [old for old in found(folder.parent) if step_of(old) < manifest.step]
    for old in {*twice, *(older[keep - 1 :] if keep is not None else ())}:
        _remove(old)
    in_memory = memory.existing(directory)
    if in_memory is not None and folder.parent == directory:
        _empty(lineage, in_memory)


def set_aside(lineage: Lineage, directory: Path, folder: Path, step: int, base: int | None) -> None:
    """Rename the checkpoints that a run which now saves `step` in `folder` has not come from, so that no job goes on from them.

    These are the later ones, of a run that went further and was left; and those between the step that was restored, `base`,
    and this one. What another job writes into the same directory while this one runs is left alone. Of those in memory, nothing
    is kept.
    """

    def of_another_run(there: Path, now: float) -> list[Path]:
        least = step if base is None else min(base, step)
        beside = lineage.of_other_jobs(there, now)
        return [old for old in found(there) if step_of(old) > least and step_of(old) != step and old not in beside]

    if in_memory := memory.existing(directory):
        for old in of_another_run(in_memory, time.time()):
            _remove(old)
    # the folder was changed just now
    now = folder.stat().st_mtime if folder.parent == directory else memory.present_time(directory)
    left = of_another_run(directory, now)
    for old in left:
        with contextlib.suppress(OSError):  # another job has removed it
            name = f"{_ABANDONED}{old.name}"
            while os.path.lexists(directory / name):
                name += f"-{uuid.uuid4().hex[:8]}"
            old.rename(directory / name)
    if left:
        origin = "" if base is None else f", which goes on from step {base}"
        steps = ", ".join(str(step_of(old)) for old in reversed(left))
        stderr.say(
            f"jaxmpi: save: the checkpoints of steps {steps} in {directory} are of another run than step {step}{origin}. They "
            f"are called {_ABANDONED}step-... from now on, and not restored; remove them, or rename them to go on from them.\n"
        )


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _empty(lineage: Lineage, in_memory: Path) -> None:
    """Remove the checkpoints in memory, as there is a newer one on the disk; not those that another job writes there."""
    beside = lineage.of_other_jobs(in_memory, time.time())
    for old in found(in_memory):
        if old not in beside:
            _remove(old)
    _remove_left(in_memory)
    with contextlib.suppress(OSError):  # another job uses it
        in_memory.rmdir()


def _name(folder: Path, step: int) -> Path:
    """Rename the folder of a step; what has the name already stays beside it."""
    name = folder.parent / f"step-{step:012}"
    again = 0
    while True:
        there = name.with_suffix(f".{again}") if again else name
        try:
            if not os.path.lexists(there):
                folder.rename(there)
                return there
        except OSError as error:  # another job was faster
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        again += 1


def _remove(checkpoint: Path) -> None:
    with contextlib.suppress(OSError):  # another job has removed it
        _delete(checkpoint.rename(checkpoint.with_name(f"{_REMOVED}{uuid.uuid4().hex}")))


def _remove_left(directory: Path) -> None:
    """Remove what jobs that were killed have left."""
    for left in directory.glob(f"{_REMOVED}*"):
        _delete(left)
    for left in directory.glob(f"{_UNFINISHED}*"):
        if _abandoned(left):
            _delete(left)


def _abandoned(folder: Path) -> bool:
    """Whether the job that wrote here has ended."""
    try:
        with open_regular(folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except (OSError, CheckpointError):  # no lock, or no locks
        return _of_dead_process(folder) or time.time() - max(_changes(folder), default=math.inf) > ABANDONED_SECONDS


def _of_dead_process(folder: Path) -> bool:
    """Whether the process that made the folder was one of this machine, and has ended."""
    _, _, machine, pid = (*folder.name.split("-"), "", "")[:4]
    return machine == _machine() and pid.isdigit() and not os.path.exists(f"/proc/{pid}")


def _machine() -> str:
    """Names this machine, since its start, and what of its processes can be seen from here."""
    facts = [os.uname().nodename]
    with contextlib.suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return f"{zlib.crc32(''.join(facts).encode()):08x}"


def _changes(folder: Path) -> Iterator[float]:
    """When the folder and what is in it were changed; another job may remove or rename them at any moment."""
    for path in (folder, *(folder / name for name in _listed(folder))):
        with contextlib.suppress(OSError):
            yield path.lstat().st_mtime


def _listed(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _to_disk(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
