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
        asked = os.environ.get("JAXMPI_FLIGHT_DIR", "")
        # the same name on all ranks of a host, and no other user's
        default = Path(tempfile.gettempdir(), f"jaxmpi-flight-{os.getuid()}-{guard.members[0][0]}")
        self._directory = Path(asked) if asked else default
        if (attempt := os.environ.get("JAXMPI_RESTART", "0")) != "0":
            self._directory /= f"restart-{attempt}"
        guard.topics["dump"] = lambda rank, why: self.dump(why)
        guard.signals.take(signal.SIGUSR1, self._on_signal)
        if asked:
            guard.at_end.append(self.dump)

    def _on_signal(self) -> None:
        path = self.dump("SIGUSR1")
        self._guard.say(f"SIGUSR1: this rank is {where(self._backend)}; its last collectives are in {path}")

    def dump(self, why: str) -> Path | None:
        """Write what is known now, over what was written before; returns the file, None where it cannot be written."""
        path = self._directory / f"rank-{self._backend.place.rank}.json"
        part = path.with_suffix(".part")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_text(json.dumps({**self._about(), "why": why}))
            part.rename(path)
        except OSError as error:
            self._guard.say(f"the last collectives cannot be written: {error}. Set JAXMPI_FLIGHT_DIR to another folder.")
            return None
        return path

    def _about(self) -> dict[str, Any]:
        place, (pid, host) = self._backend.place, self._guard.members[self._backend.place.rank]
        seconds = lambda ns: (ns - self._zero) / 1e9 if ns else None
        names: dict[int, str] = {}
        events = []
        for number, word, bytes_, *times in self._backend.events():
            if word not in names:
                names[word] = _agreement.describe(self._backend, word)
            events.append([number, names[word], bytes_, *map(seconds, times)])
        return {"rank": place.rank, "size": place.size, "host": host, "pid": pid, "began": self._at, "events": events}


def where(backend: Any) -> str:
    """What a rank is doing, as far as its communication goes."""
    if title := backend.waits_for():
        return f"in {title}"
    entered, inside = backend.progress()
    if not entered:
        return "before its first collective"
    return ("in " if inside else "after ") + _agreement.describe(backend, backend.doing())
