"""Looks at the ranks of this user: on this host by /proc, on others through ssh.

`Local` reads the ranks of this host. For another host, `Remote` starts an agent such as ssh, which
runs `jaxmpi top --here` there. That command is `print_looks`: it prints one line of JSON per look,
the list of the host's `Look` records, until its stdin is closed.
"""

import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, NotRequired, TypedDict, cast

from jaxmpi._job.process import live_record, run_dir

__all__ = ["Local", "Look", "Remote", "print_looks"]

MAX_EVENTS = 512  # of a rank in a look, the last ones
FIND_RANKS_EVERY_SECONDS = 2.0
GPU_QUERY_SECONDS = 5.0
AGENT_END_SECONDS = 2.0  # for what was started on another host to end
SILENT_HOST_SECONDS = 10.0  # after which a host that says nothing is reported


class Look(TypedDict):
    """One rank at one moment; a record that JSON holds.

    The rank writes the first part itself, twice a second (`_job/monitor/live.py`; where it has not
    called jaxmpi.init, native/plain_record.cc). The last six are of the process that looks.
    Nanoseconds are those of `time.monotonic_ns` on the rank's host.
    """

    job: str  # process and host of its rank 0
    rank: int
    size: int
    pid: int
    host: str
    hosts: list[str]  # of all ranks of the job
    transport: str
    entered: int  # collectives that the rank has entered
    inside: bool  # whether it is in the last one
    # the ranks that this one waits for; None or not there where it does not know
    waits_for: NotRequired[list[int] | None]
    doing: str  # for people: the last collective, or the work of a busy rank
    busy: bool  # at a checkpoint or in a `jaxmpi.busy` block
    since_ns: int  # when it entered its last collective
    written_ns: int
    samples: int
    samples_per_second: float | None

    now_ns: int
    state: str  # of the process: "runs" or "stopped"
    events: list[live_record.Event]
    waits: float | None  # share of the time since the last look in which it waited for messages
    memory_bytes: int
    gpu_bytes: int | None


class Local:
    """The ranks of this host."""

    def __init__(self) -> None:
        self._readers: dict[int, live_record.Reader] = {}  # by process
        # At the last look, by process: when it was, and the nanoseconds of waiting until then.
        self._waited: dict[int, tuple[int, int]] = {}
        self._found_at = -FIND_RANKS_EVERY_SECONDS

    def look(self) -> list[Look]:
        """Return a look at each rank of this host."""
        if time.monotonic() - self._found_at >= FIND_RANKS_EVERY_SECONDS:
            self._find()
        gpu_bytes = _gpu_bytes() if self._readers else {}
        looks = []
        for reader in list(self._readers.values()):
            look = self._look(reader, gpu_bytes.get(reader.pid))
            if look is not None:
                looks.append(look)
        return looks

    def _find(self) -> None:
        self._found_at = time.monotonic()
        for pid in live_record.processes():
            if pid not in self._readers:
                with contextlib.suppress(OSError):  # it has just ended
                    self._readers[pid] = live_record.Reader(pid)

    def _look(self, reader: live_record.Reader, gpu_bytes: int | None) -> Look | None:
        state = run_dir.state(reader.pid)
        if state == "ended":
            self._readers.pop(reader.pid).close()
            return None
        shown = reader.about()
        # A child of a rank has inherited its files, and shows the parent's record.
        if not shown or shown["pid"] != reader.pid:
            return None
        look = {
            **shown,
            "now_ns": time.monotonic_ns(),
            "state": state,
            "events": reader.events(MAX_EVENTS),
            "waits": self._waits(reader),
            "memory_bytes": _memory_bytes(reader.pid),
            "gpu_bytes": gpu_bytes,
        }
        return cast(Look, look)

    def _waits(self, reader: live_record.Reader) -> float | None:
        """Return the share of the time since the last look in which a rank's programs waited.

        None at the first look, and on transports that do not count it.
        """
        now_ns, waited_ns = time.monotonic_ns(), reader.exposed()
        if waited_ns is None:
            return None
        before = self._waited.get(reader.pid)
        self._waited[reader.pid] = now_ns, waited_ns
        if before is None:
            return None
        return min(1.0, (waited_ns - before[1]) / max(1, now_ns - before[0]))


def print_looks(every_seconds: float) -> None:
    """Print this host's looks, a line of JSON each time, until stdin is closed."""
    local = Local()
    with contextlib.suppress(BrokenPipeError):
        while True:
            sys.stdout.write(json.dumps(local.look()) + "\n")
            sys.stdout.flush()
            # The wait between two looks; stdin is readable when it is closed.
            if select.select([0], [], [], every_seconds)[0] and not os.read(0, 4096):
                return


class Remote:
    """The ranks of another host, as `jaxmpi top --here` prints them there."""

    def __init__(self, host: str, agent: str, every_seconds: float) -> None:
        """Start the command by an agent, which takes a host and a command as ssh does."""
        self.host, self.error = host, ""
        self._silent_seconds = max(SILENT_HOST_SECONDS, 2 * every_seconds)
        self._looks: list[Look] = []
        self._heard = time.monotonic()
        there = [sys.executable, "-m", "jaxmpi", "top", "--here", "--every", str(every_seconds)]
        command = [*shlex.split(agent), host, shlex.join(there)]
        pipe = subprocess.PIPE
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            self.error = str(error)
            return
        self._threads = [
            threading.Thread(target=self._read_looks, args=[self._process.stdout], daemon=True),
            threading.Thread(target=self._read_errors, args=[self._process.stderr], daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def look(self) -> list[Look]:
        """Return the last looks that have arrived; the time goes on in those of a silent host."""
        silent_seconds = time.monotonic() - self._heard
        if silent_seconds <= self._silent_seconds:
            return self._looks
        self.error = self.error or f"nothing heard for {self._silent_seconds:.0f} s"
        later = []
        for look in self._looks:
            later.append(cast(Look, {**look, "now_ns": look["now_ns"] + int(1e9 * silent_seconds)}))
        return later

    def _read_looks(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                # What a shell's start-up files print on the other host is no look.
                with contextlib.suppress(ValueError):
                    looks = json.loads(line)
                    if isinstance(looks, list):
                        self._looks, self._heard, self.error = looks, time.monotonic(), ""

    def _read_errors(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self.error = line.decode(errors="replace").strip() or self.error

    def close(self) -> None:
        """End the agent and the command on the other host."""
        if self._process is None:
            return
        self._process.terminate()
        # ssh may end without a word to the other side; the closed stdin ends the command there.
        if self._process.stdin:
            self._process.stdin.close()
        for thread in self._threads:
            thread.join(AGENT_END_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(AGENT_END_SECONDS)


def _memory_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _gpu_bytes() -> dict[int, int]:
    """Return the memory that processes use on this host's NVIDIA GPUs."""
    if not shutil.which("nvidia-smi"):
        return {}
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=GPU_QUERY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    found: dict[int, int] = {}
    for line in done.stdout.splitlines():
        fields = line.split(",")
        if len(fields) == 2 and fields[1].strip().isdigit():  # "[N/A]" in a container
            pid, mebibytes = int(fields[0]), int(fields[1])
            found[pid] = found.get(pid, 0) + (mebibytes << 20)
    return found
