"""What the ranks of this user show of themselves: those of this host by `/proc`, those of other hosts through ssh.

A look at a rank is a dict that JSON holds, as it may come from another host.
"""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from jaxmpi._job.process import live_record, run_dir

__all__ = ["Here", "Look", "Remote"]

Look = dict[str, Any]
EVENTS = 512  # of a rank, the last ones
FIND_SECONDS = 2.0  # between two searches for new ranks
END_SECONDS = 2.0  # for what was started on another host to end
SILENT_SECONDS = 10.0  # until the ranks of a host that says nothing are given up


class Here:
    """The ranks of this host."""

    def __init__(self) -> None:
        self._readers: dict[int, live_record.Reader] = {}
        # at the last look: when, and for how long it had waited
        self._exposed: dict[int, tuple[int, int]] = {}
        self._found = -FIND_SECONDS

    def look(self) -> list[Look]:
        """What they show now."""
        if time.monotonic() - self._found >= FIND_SECONDS:
            self._find()
        gpu_bytes = _gpu_bytes() if self._readers else {}
        return [
            look
            for reader in list(self._readers.values())
            for look in self._look(reader, gpu_bytes)
        ]

    def _find(self) -> None:
        self._found = time.monotonic()
        for pid in live_record.processes():
            if pid not in self._readers:
                try:
                    self._readers[pid] = live_record.Reader(pid)
                except OSError:  # it has just ended
                    continue

    def _look(self, reader: live_record.Reader, gpu_bytes: dict[int, int]) -> Iterator[Look]:
        state, about = run_dir.state(reader.pid), reader.about()
        # or a child of the rank, which has inherited its files
        if state == "ended" or (about and about["pid"] != reader.pid):
            if state == "ended":
                self._readers.pop(reader.pid).close()
            return
        if about:
            now = {
                "now_ns": time.monotonic_ns(),
                "state": state,
                "events": reader.events(EVENTS),
                "waits": self._waits(reader),
            }
            yield {
                **about,
                **now,
                "memory_bytes": _memory_bytes(reader.pid),
                "gpu_bytes": gpu_bytes.get(reader.pid),
            }

    def _waits(self, reader: live_record.Reader) -> float | None:
        """The share of the time since the last look for which its programs have waited for messages; None at the first one."""
        now_ns, exposed_ns = time.monotonic_ns(), reader.exposed()
        if exposed_ns is None:
            return None
        before = self._exposed.get(reader.pid)
        self._exposed[reader.pid] = now_ns, exposed_ns
        return min(1.0, (exposed_ns - before[1]) / max(1, now_ns - before[0])) if before else None


class Remote:
    """The ranks of another host, which `jaxmpi top --here` shows there, line by line, until its stdin is closed."""

    def __init__(self, host: str, agent: str, every_seconds: float) -> None:
        """Start it, by an agent that takes a host and a command as ssh does."""
        self.host, self.error = host, ""
        self._looks: list[Look] = []
        self._heard = time.monotonic()
        there = shlex.join(
            [sys.executable, "-m", "jaxmpi", "top", "--here", "--every", str(every_seconds)]
        )
        command = [*shlex.split(agent), host, there]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        except OSError as error:
            self._process, self.error = None, str(error)
            return
        assert self._process.stdout and self._process.stderr
        listens = threading.Thread(target=self._listen, args=[self._process.stdout], daemon=True)
        complains = threading.Thread(
            target=self._complain, args=[self._process.stderr], daemon=True
        )
        self._threads = [listens, complains]
        for thread in self._threads:
            thread.start()

    def look(self) -> list[Look]:
        """What they have shown last."""
        if time.monotonic() - self._heard > SILENT_SECONDS:
            self.error = self.error or f"nothing heard for {SILENT_SECONDS:.0f} s"
        return self._looks

    def _listen(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._looks, self._heard, self.error = json.loads(line), time.monotonic(), ""

    def _complain(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self.error = line.decode(errors="replace").strip() or self.error

    def close(self) -> None:
        """End it."""
        if self._process is None:
            return
        self._process.terminate()
        if self._process.stdin:
            self._process.stdin.close()  # which ends what the agent has started
        for thread in self._threads:
            thread.join(END_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)


def _memory_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _gpu_bytes() -> dict[int, int]:
    """Memory of this host's GPUs, by process."""
    if not shutil.which("nvidia-smi"):
        return {}
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=False)
    except subprocess.TimeoutExpired:
        return {}
    rows: Sequence[list[str]] = [line.split(",") for line in done.stdout.splitlines()]
    found: dict[int, int] = {}
    for pid, mebibytes in (row for row in rows if len(row) == 2 and row[1].strip().isdigit()):
        found[int(pid)] = found.get(int(pid), 0) + (int(mebibytes) << 20)
    return found
