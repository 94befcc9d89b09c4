"""The flight recorder: what this rank has communicated lately, in a file when somebody wants to know.

Each backend keeps its last collectives (`Job.events`). `dump` writes them as JSON: when the job
stalls, on SIGUSR1, and where JAXMPI_FLIGHT_DIR is set also when the job ends, in order or by an
error. `jaxmpi timeline DIR` puts the ranks' files together.
"""

import contextlib
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jaxmpi import _jaxcompat
from jaxmpi._backends.process_group import MpiProcessGroup
from jaxmpi._consistency import compare
from jaxmpi._job.monitor.watching import Watching
from jaxmpi._job.process import files, settings

__all__ = ["Recorder", "where"]


class Recorder:
    """That of one rank."""

    def __init__(self, monitor: Watching) -> None:
        self._backend, self._monitor = monitor.backend, monitor
        # the name of the folder: the same on all ranks, and nobody else can make it before they do
        self._token = self._backend.broadcast_object(secrets.token_hex(8), 0)
        self._backend.barrier()
        # at about the same moment on all ranks, whatever their clocks show
        self._zero = time.monotonic_ns()
        self._at = time.time()
        self._asked = settings.get("JAXMPI_FLIGHT_DIR")
        monitor.topics["dump"] = lambda rank, why: self.dump(why)
        monitor.signals.take(signal.SIGUSR1, self._on_signal)
        if self._asked:
            monitor.at_end.append(self.dump)

    def _on_signal(self) -> None:
        path = self.dump("SIGUSR1")
        self._monitor.say(
            f"SIGUSR1: this rank is {where(self._backend)}; its last collectives are in {path}"
        )

    def dump(self, why: str) -> Path | None:
        """Write what is known now, over what was written before; returns the file, None where it cannot be written."""
        name = f"rank-{self._backend.place.rank}.json"
        try:
            with self._folder() as (path, folder):
                files.replace(folder, name, json.dumps({**self._about(), "why": why}))
                return path / name
        except OSError as error:
            self._monitor.say(
                f"the last collectives cannot be written: {error}. Set JAXMPI_FLIGHT_DIR to "
                "another folder."
            )
            return None

    @contextlib.contextmanager
    def _folder(self) -> Iterator[tuple[Path, int]]:
        """The folder of the records, made if need be: its path, and it open."""
        with contextlib.ExitStack() as stack:
            if not self._asked:
                path = Path(tempfile.gettempdir(), f"jaxmpi-flight-{os.getuid()}-{self._token}")
                files.make_folder(path)
                folder = files.open_folder(path, private=True)
            else:
                path = Path(self._asked)
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                # the user may have named a link
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            if self._asked and (restart := settings.get("JAXMPI_RESTART")):
                path /= f"restart-{restart}"
                files.make_folder(path.name, folder)
                folder = files.open_folder(path.name, folder, private=False)
                stack.callback(os.close, folder)
            yield path, folder

    def _about(self) -> dict[str, object]:
        place, (pid, host) = self._backend.place, self._monitor.members[self._backend.place.rank]
        seconds = lambda ns: (ns - self._zero) / 1e9 if ns else None
        names: dict[int, str] = {}
        events = []
        for number, word, bytes_, *times in self._backend.events():
            if word not in names:
                names[word] = compare.describe(self._backend, word, lately=True)
            events.append([number, names[word], bytes_, *map(seconds, times)])
        waits = [[*map(seconds, wait)] for wait in self._backend.waits() if all(wait)]
        about = {
            "rank": place.rank,
            "size": place.size,
            "host": host,
            "pid": pid,
            "began": self._at,
        }
        return {**about, "events": events, "waits": waits}


def where(backend: MpiProcessGroup) -> str:
    """What a rank is doing, as far as its communication goes."""
    title, thread = backend.waits_for()
    if title:
        return f"in {title}{_line_of(thread)}"
    entered, inside = backend.progress()
    if not entered:
        return "before its first collective"
    word = backend.doing()
    what = compare.describe(backend, word)
    if not inside:
        return f"after {what}"
    # The words for a program have its line. What is no program has not returned yet.
    return (
        f"in {what}"
        if compare.is_program(backend, word)
        else f"in {what}{_line_of(backend.turn.thread)}"
    )


def _line_of(thread: int) -> str:
    """Where a thread is in the user's program, such as " at train.py:12"; "" if it runs none of it."""
    line = _jaxcompat.called_at(thread)
    return f" at {line}" if line else ""
