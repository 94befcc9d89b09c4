"""The flight recorder: what this rank has communicated lately, in a file when somebody wants to know.

Each backend keeps its last collectives (`Job.events`). `dump` writes them as JSON: when the job stalls, on SIGUSR1, and where
JAXMPI_FLIGHT_DIR is set also when the job ends, in order or by an error. `jaxmpi timeline DIR` puts the ranks' files together.
"""

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxmpi import _agreement

__all__ = ["Recorder"]


class Recorder:
    """That of one rank."""

    def __init__(self, guard: Any) -> None:
        self._backend, self._guard = guard.backend, guard
        self._backend.barrier()
        self._zero = time.monotonic_ns()  # at about the same moment on all ranks, whatever their clocks show
        self._at = time.time()
        # the same name on all ranks: that of rank 0's process
        self._directory = os.environ.get("JAXMPI_FLIGHT_DIR", "")
        self._default = Path(tempfile.gettempdir(), f"jaxmpi-flight-{guard.members[0][0]}")
        guard.topics["dump"] = lambda rank, why: self.dump(why)
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and guard.has_signals:
            signal.signal(signal.SIGUSR1, lambda *_: None)  # the guard's thread learns of it, and would else be killed
            guard.on_signal[signal.SIGUSR1] = self._on_signal
        if self._directory:
            guard.at_end.append(self.dump)

    def _on_signal(self) -> None:
        path = self.dump("SIGUSR1")
        self._guard.say(f"SIGUSR1: this rank is {where(self._backend)}; its last collectives are in {path}")

    def dump(self, why: str) -> Path:
        """Write what is known now, over what was written before; returns the file."""
        directory = Path(self._directory) if self._directory else self._default
        directory.mkdir(parents=True, exist_ok=True)
        rank, (pid, host) = self._backend.place.rank, self._guard.members[self._backend.place.rank]
        seconds = lambda ns: (ns - self._zero) / 1e9 if ns else None
        names: dict[int, str] = {}
        events = []
        for number, word, bytes_, *times in self._backend.events():
            if word not in names:
                names[word] = _agreement.describe(self._backend, word)
            events.append([number, names[word], bytes_, *map(seconds, times)])
        about = {"rank": rank, "size": self._backend.place.size, "host": host, "pid": pid, "why": why, "began": self._at}
        path = directory / f"rank-{rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({**about, "events": events}))
        part.rename(path)
        return path


def where(backend: Any) -> str:
    """What a rank is doing, as far as its communication goes."""
    entered, inside = backend.progress()
    if not entered:
        return "before its first collective"
    return ("in " if inside else "after ") + _agreement.describe(backend, backend.doing())
