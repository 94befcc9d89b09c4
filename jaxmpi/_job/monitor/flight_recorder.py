"""The flight recorder: a file with the last collectives of this rank.

Each backend keeps its last collectives (`MpiRanks.events`). `dump` writes them as JSON: when the
job stalls, at SIGUSR1, and where JAXMPI_FLIGHT_DIR is set also when the job ends, in order or by an
error. `jaxmpi timeline DIR` combines the files of all ranks.
"""

import contextlib
import json
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jaxmpi._consistency import compare
from jaxmpi._job.monitor.monitor import Monitor, RankEnd, doing
from jaxmpi._job.process import files, settings

__all__ = ["Recorder"]

# For the other ranks to write their records before this rank ends the job.
OTHER_DUMPS_SECONDS = 0.5


class Recorder:
    """The flight recorder of one rank."""

    def __init__(self, monitor: Monitor) -> None:
        """Agree with the other ranks on a folder and on time zero.

        **Collective:** every rank calls it.
        """
        self._backend, self._monitor = monitor.backend, monitor
        # The random part of the folder's name is the same on all ranks, and no other user can make
        # the folder first.
        tokens = secrets.token_hex(8), secrets.token_hex(8)
        self._token, self._job = self._backend.broadcast_object(tokens, 0)
        # The clocks of two hosts differ. All ranks leave the barrier at about the same moment, and
        # that moment is zero in their records.
        self._backend.barrier()
        self._zero_ns = time.monotonic_ns()
        self._began = time.time()
        self._flight_dir = settings.get("JAXMPI_FLIGHT_DIR")
        self._writing = threading.Lock()
        self._is_last = False  # whether the record says why this rank ends the job
        self._path: Path | None = None  # of the record; None if it could not be written
        self._others_until = 0.0  # until when, by time.monotonic, the others may write theirs
        monitor.topics["dump"] = lambda rank, why: self.dump(why)
        monitor.signals.register(signal.SIGUSR1, self._on_signal)
        if self._flight_dir:
            monitor.at_end.append(self._on_end)

    def _on_signal(self) -> None:
        path = self.dump("SIGUSR1")
        self._monitor.say(
            f"SIGUSR1: this rank is {doing(self._backend)}; its last collectives are in {path}"
        )

    def _on_end(self, end: RankEnd) -> None:
        """Write the record; if this rank ends the job, have the others write theirs before."""
        if end.in_order:
            self.dump(end.why)
        else:
            self.dump_all(end.why, last=True)
            self.wait_for_others()

    def dump_all(self, why: str, *, last: bool) -> Path | None:
        """Write the records of all ranks; return the path of this rank's as `dump`.

        Args:
          why: the reason that the records state.
          last: whether this rank ends the job now. Its record then remains as it is: the other
            ranks may end the job, too, and send their own reasons.
        """
        if not self._is_last:
            self._monitor.send_all("dump", why)
            if last:
                self._others_until = time.monotonic() + OTHER_DUMPS_SECONDS
        return self.dump(why, last=last)

    def wait_for_others(self) -> None:
        """Sleep until the other ranks have had the time to write their last records."""
        time.sleep(max(0.0, self._others_until - time.monotonic()))

    def dump(self, why: str, *, last: bool = False) -> Path | None:
        """Write the record, over one that is not the last; return its path.

        It is None if the record cannot be written.
        """
        # The thread that ends the job and the monitor's thread may come here at the same time.
        with self._writing:
            if not self._is_last:
                self._is_last = last
                self._path = self._write(why)
            return self._path

    def _write(self, why: str) -> Path | None:
        name = f"rank-{self._backend.place.rank}.json"
        try:
            with self._folder() as (path, folder):
                files.replace(folder, name, json.dumps({**self._record(), "why": why}))
                return path / name
        except OSError as error:
            self._monitor.say(
                f"the last collectives cannot be written: {error}. Set JAXMPI_FLIGHT_DIR to "
                "another folder."
            )
            return None

    @contextlib.contextmanager
    def _folder(self) -> Iterator[tuple[Path, int]]:
        """Make the folder of the records if need be; yield its path and its file descriptor."""
        with contextlib.ExitStack() as stack:
            if not self._flight_dir:
                path = Path(tempfile.gettempdir(), f"jaxmpi-flight-{os.getuid()}-{self._token}")
                files.make_folder(path)
                folder = files.open_folder(path, private=True)
            else:
                path = Path(self._flight_dir)
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                # Not O_NOFOLLOW: the user may have named a link.
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            # A restarted job keeps the records of the job that failed.
            if self._flight_dir and (restart := settings.get("JAXMPI_RESTART")):
                path /= f"restart-{restart}"
                files.make_folder(path.name, folder)
                folder = files.open_folder(path.name, folder, private=False)
                stack.callback(os.close, folder)
            yield path, folder

    def _record(self) -> dict[str, object]:
        """Return the record without its reason; times in seconds since zero, None if unknown."""
        place, (pid, host) = self._backend.place, self._monitor.members[self._backend.place.rank]
        seconds = lambda ns: (ns - self._zero_ns) / 1e9 if ns else None
        names: dict[int, str] = {}
        events = []
        for number, fingerprint, bytes_, *times in self._backend.events():
            if fingerprint not in names:
                names[fingerprint] = compare.describe(self._backend, fingerprint, lately=True)
            events.append([number, names[fingerprint], bytes_, *map(seconds, times)])
        waits = []
        for wait in self._backend.waits():
            if all(wait):
                waits.append([*map(seconds, wait)])
        return {
            "job": self._job,
            "rank": place.rank,
            "size": place.size,
            "host": host,
            "pid": pid,
            "began": self._began,
            "events": events,
            "waits": waits,
        }
