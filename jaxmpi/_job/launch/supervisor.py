"""One run of MPI's launcher, from its start to its end.

`supervise` passes the launcher's output on, stops the job on a signal, names the rank that failed,
and leaves nothing behind. Every process of the job has JAXMPI_RUN_DIR in its environment: that
tells it from all others.
"""

import array
import contextlib
import ctypes
import enum
import errno
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxmpi._job.launch.find_failure import find_failure
from jaxmpi._job.launch.host_ranks import HostRanks, MpiDaemons, children
from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.process import run_dir as registry
from jaxmpi._job.process import settings
from jaxmpi._job.process.failure import MARK, find_stalled
from jaxmpi._job.process.launchers import Launcher

__all__ = ["Outcome", "Relay", "open_streams", "say", "supervise"]

LOOK_SECONDS = 0.05  # between two looks at the ranks; the end of a rank is seen at once
# A launcher that got a signal passes it on, waits for its ranks and cleans up. Open MPI kills its
# ranks 0.25 s after the signal. A rank inside MPI does not react at all, so after this time the
# next, harder measure follows.
GRACE_SECONDS = 2.0
# Seconds that the launcher has to end the job after a rank of this host has failed. It may wait
# forever: for daemons of other hosts that do not answer, or, in Open MPI 5, if a rank ends while
# another one connects to the launcher (PMIX_ERR_UNREACH).
LAUNCHER_END_SECONDS = 20.0
# Two signals that come within this time may be one that was delivered twice.
REPEAT_SECONDS = 0.5
KILL_SECONDS = 0.02  # between two rounds of killing, as a process may have forked meanwhile

TAIL_BYTES = 65536  # are kept, to find what MPI says about the end of the job
_LINE = b"-" * 74 + b"\n"  # begins and ends what Open MPI's launcher says
# a launcher may put the rank before the line (`--tag-output`, `-l`)
_RECORD = re.compile(rb"^(?:\[[^]\n]{1,40}\]\S* ?)?%s.*\n" % MARK.encode(), re.MULTILINE)
_NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF)  # a closed pipe, a terminal that is gone
_NAMES = {1: "stdout", 2: "stderr"}

Received = tuple[int, float]  # a signal, and when it came


class Outcome(NamedTuple):
    """The end of a job."""

    code: int  # of the exit
    failed: bool  # whether its ranks have failed, and a restart may help
    host: str = ""  # on which they have failed, if known
    count_refusal: str = ""  # why the program does not run on this number of ranks
    rates: tuple[float, ...] = ()  # samples per second, as the ranks have noted them


class _Stage(enum.IntEnum):
    """The measures taken so far to stop a job after a signal."""

    RUNS = 0
    PREEMPTED = 1  # ranks that handle SIGTERM have got it
    SIGNALED = 2  # the launcher has got the signal
    RANKS_KILLED = 3
    KILLED = 4  # the launcher, too


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    run_dir: str,
    launcher: Launcher,
    hosts: Sequence[str] = (),
) -> Outcome:
    """Run MPI's launcher until it ends, and return how.

    The exit code is that of the rank that failed, 128 + n where signal n killed it, if that is
    known. Otherwise it is the launcher's own, but 1 where it is 0 and a rank never left in order,
    or the end of the output could not be written. It is 128 + n where signal n stopped the job.
    Ranks that call `jaxmpi.preempted` may stop in order at a SIGTERM: then it is 0, or 1 where
    output is lost. A slow reader of the output is waited for, unless a signal stops the job.
    Afterwards neither a process nor a shared-memory file of the job is left on this host, nor
    `run_dir`.

    Args:
      command: the launcher's command line.
      environ: its environment, with JAXMPI_RUN_DIR.
      run_dir: the folder that JAXMPI_RUN_DIR names.
      launcher: its row in the table of launchers.
      hosts: the hosts that its options name.

    Raises:
      LaunchError: the launcher cannot be started.
    """
    received, handlers = _receive_signals()
    try:
        return _supervise(command, environ, run_dir, launcher, hosts, received)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    run_dir: str,
    launcher: Launcher,
    hosts: Sequence[str],
    received: Sequence[Received],
) -> Outcome:
    """Run the launcher as `supervise`; `received` has the signals that come meanwhile."""
    started = time.time()
    code, relays = 1, list[Relay]()
    ranks, daemons = HostRanks(run_dir), MpiDaemons(launcher, hosts)
    try:
        process = _start(command, environ)
        assert process.stdout and process.stderr
        relays = [Relay(process.stdout, 1), Relay(process.stderr, 2)]
        ended_itself = _wait(process, launcher, ranks, daemons, received)
        daemons.look(process.pid)
        if ended_itself:
            code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        daemons.close()
        ended, joined, rates = ranks.close(), ranks.members, registry.rates(run_dir)
        preempted = bool(received and ranks.preemptible)
        all_left = all(member.left or not member.notes_end for member in joined)
        in_order = not code and (preempted or not received) and all_left
        # A job that ended in order may have left processes on purpose: only its ranks are killed.
        _kill_all(run_dir, {m.pid for m in joined} if in_order else None)
        segments: set[str] = set()
        for member in joined:
            segments.update(member.segments)
        registry.remove_segments(segments, started)
        shutil.rmtree(run_dir, ignore_errors=True)
    stopped_by = received[0][0] if received else None
    _end_output(relays, received)
    lost = [relay.missing() for relay in relays if relay.lost]
    for missing in lost:
        say(missing)
    if stopped_by is not None:
        return _stopped(stopped_by, in_order, output_is_whole=not lost)
    if in_order:
        # The ranks have done their work, so a restart would not help where a disk is full.
        return Outcome(1 if lost else 0, failed=False, rates=rates)
    if ranks.count_refusal:
        say(f"the job does not work on this number of ranks: {ranks.count_refusal}")
        return Outcome(code or 1, failed=True, count_refusal=ranks.count_refusal)
    # The ranks know best. A daemon that ended first took its ranks with it. Otherwise it is the
    # rank that the launcher names, or that was seen to end first.
    text = b"\n".join(relay.tail for relay in relays).decode(errors="replace")
    failure = find_failure(text, joined, ended)
    failures = ranks.failures or daemons.find_lost(text) or find_stalled(text) or [failure]
    say(f"the job failed: {'; '.join(each.describe(code) for each in failures)}")
    # A launcher that has lost a host kills the ranks of the others, which may be named first.
    host = failure.lost_host or failures[0].failed_host or failure.host
    return Outcome(failure.exit_code(code), failed=True, host=host)


def _receive_signals() -> tuple[list[Received], dict[int, Any]]:
    """Receive the signals that stop a job.

    Returns a list to which those that come are added, and the handlers that were there before.
    """
    received: list[Received] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it, and so it stays
        numbers.append(signal.SIGHUP)

    def note(number: int, _: object) -> None:
        received.append((number, time.monotonic()))

    handlers: dict[int, Any] = {number: signal.signal(number, note) for number in numbers}
    # ignored, it would hide the launcher's exit code
    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return received, handlers


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the launcher in a session of its own, so that it ends with this process.

    There Ctrl-C reaches it only through this process. With a terminal as stdin it stays in our
    session: Open MPI reads a terminal only from the terminal's foreground group.
    """
    libc = ctypes.CDLL(None)  # loaded before the fork
    try:
        return subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=not os.isatty(0),
            preexec_fn=lambda: libc.prctl(1, signal.SIGTERM),  # 1: PR_SET_PDEATHSIG
        )
    except OSError as error:
        advice = ""
        if error.errno == errno.E2BIG:
            advice = " Pass the program a file with its arguments instead."
        raise LaunchError(
            f"MPI's launcher {command[0]} cannot be started: {error.strerror}.{advice}"
        ) from error


def _wait(
    process: subprocess.Popen[bytes],
    launcher: Launcher,
    ranks: HostRanks,
    daemons: MpiDaemons,
    received: Sequence[Received],
) -> bool:
    """Wait until the launcher ends, and stop it when a signal was received.

    Returns whether it has ended itself: a launcher that does not end a job in which a rank has
    failed is killed.
    """
    stop = _Stop(process, launcher, ranks)
    sound_until = time.monotonic()  # the last time at which no failed rank was seen
    while process.poll() is None:
        ranks.look(LOOK_SECONDS)
        daemons.look(process.pid)
        if not ranks.one_has_failed():
            sound_until = time.monotonic()
        elif time.monotonic() > sound_until + LAUNCHER_END_SECONDS:
            say(
                f"MPI's launcher has not ended the job {LAUNCHER_END_SECONDS:.0f} s after a rank "
                "has failed: the launcher and all ranks of this host are killed"
            )
            _kill([process.pid, *registry.processes(ranks.run_dir)])
            process.wait()
            return False
        if received:
            stop.go_on(received)
    return True


class _Stop:
    """The measures that stop a job after a signal, each harder than the one before.

    Each has time to work: the signal goes to the launcher, then the ranks are killed, then
    everything. A second signal of an impatient user skips the time after the first measure.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], launcher: Launcher, ranks: HostRanks
    ) -> None:
        self._process, self._launcher, self._ranks = process, launcher, ranks
        self._stage, self._due = _Stage.RUNS, 0.0  # of the next measure
        self._preempted = False  # whether ranks were asked to stop in order

    def go_on(self, received: Sequence[Received]) -> None:
        """Take the next measure if it is due; `received` has the signals, one at least."""
        number, first_came = received[0]
        first_measure = _Stage.PREEMPTED if self._preempted else _Stage.SIGNALED
        is_repeated = received[-1][1] > first_came + REPEAT_SECONDS
        impatient = is_repeated and self._stage == first_measure
        if time.monotonic() < self._due and not impatient:
            return

        # Ranks that call `jaxmpi.preempted` finish their step and save. The launcher must not get
        # the signal meanwhile: it would kill them.
        ranks = self._ranks
        if self._stage == _Stage.RUNS and number == signal.SIGTERM and ranks.preemptible:
            self._stage, self._preempted = _Stage.PREEMPTED, True
            asked = [member.pid for member in ranks.members if member.rank in ranks.preemptible]
            _kill(asked, signal.SIGTERM)
            self._due = time.monotonic() + settings.get("JAXMPI_PREEMPTION_SECONDS")
            return
        if self._stage < _Stage.SIGNALED:
            self._stage = _Stage.SIGNALED
            # A terminal has sent its SIGINT to the launcher, too. Launchers do not stop at SIGHUP.
            if not (number == signal.SIGINT and os.isatty(0)):
                to_send = signal.SIGTERM if number == signal.SIGHUP else number
                _kill(_launchers(self._process.pid), to_send)
        elif self._stage == _Stage.SIGNALED:
            self._stage = _Stage.RANKS_KILLED
            # Ranks inside MPI do not react. Without them the launcher removes its files, and ends.
            # Its daemons do not have the variable of the rank.
            variables = [b"\0%s=" % name.encode() for name in self._launcher.rank]
            for pid, environ in registry.processes(ranks.run_dir).items():
                if any(variable in environ for variable in variables):
                    _kill([pid])
        else:
            self._stage = _Stage.KILLED
            _kill([self._process.pid, *registry.processes(ranks.run_dir)])
        self._due = time.monotonic() + GRACE_SECONDS


def _launchers(pid: int) -> list[int]:
    """Return the processes that a signal for MPI's launcher goes to; `pid` is what was started.

    The mpirun of Intel MPI is a script, as is that of a site with a wrapper of its own. A shell
    that waits for a command passes no signal on, and dies of it while the job lives: what the shell
    has started gets the signal in its place.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [pid]
    # the interpreter's name, at most one option of it, the script
    if not any(_is_script(word) for word in words[1:3]):
        return [pid]
    started: list[int] = []
    for child in children(pid):
        started += _launchers(child)
    return started or [pid]


def _is_script(path: bytes) -> bool:
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        return file.read(2) == b"#!"
    return False


def _kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes, of which some may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_all(run_dir: str, only: set[int] | None) -> None:
    """Kill what is left of the job, and wait until it is gone.

    Args:
      run_dir: the folder of the run, by which its processes are found.
      only: the processes to kill; None for all.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        pids = [pid for pid in registry.processes(run_dir) if only is None or pid in only]
        if not pids:
            return
        _kill(pids)
        time.sleep(KILL_SECONDS)


def _stopped(number: int, in_order: bool, *, output_is_whole: bool) -> Outcome:
    """Return the outcome of a job that a signal has stopped."""
    order = ", and has ended in order" if in_order else ""
    say(f"the job was stopped by {signal.Signals(number).name}{order}")
    if not in_order:
        return Outcome(128 + number, failed=False)
    return Outcome(0 if output_is_whole else 1, failed=False)


# Output


class Relay:
    """Copies a stream to stdout or stderr in a thread, and keeps its last bytes.

    The job never waits for a stream that nobody reads any more. Where a disk is full, what does not
    fit is left out; the copy goes on once there is space, with a line that says how much is
    missing.
    """

    def __init__(self, source: IO[bytes], sink: int) -> None:
        """Start to copy `source` to the file descriptor `sink`."""
        self.tail = bytearray()
        self.lost = 0  # bytes since the last one that was written
        self.error = ""
        self._unwritten = 0  # bytes that wait for the reader of the sink
        self._given_up = False  # those have been counted as lost
        self._writing = threading.Lock()  # held while bytes are written and counted
        self._source, self._sink, self._name = source, sink, _NAMES.get(sink, "output")
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until the stream has ended and is written; what then waits to be written is lost.

        A slow reader, such as `less` or a paused terminal, has all the time that it wants: a wait
        for it does not count.

        Args:
          timeout_seconds: for the stream to end, as a process that the job has left may hold it
            open.
          is_stopped: returns whether the job is stopped: then a wait for the reader counts, too.
        """
        counted_seconds = 0.0
        while self._thread.is_alive() and counted_seconds < timeout_seconds:
            began = time.monotonic()
            self._thread.join(LOOK_SECONDS)
            if is_stopped() or not self._unwritten:
                counted_seconds += time.monotonic() - began
        if not self._thread.is_alive():
            return
        # What the thread writes at this moment is not counted as lost: wait for it, GRACE_SECONDS
        # at most. It may wait in a write after all, where another process has filled the stream:
        # then nothing of it is written.
        counts_exactly = self._writing.acquire(timeout=GRACE_SECONDS)
        if self._unwritten:
            self.error = self.error or "nobody has read it in time"
            self.lost += self._unwritten + _readable_bytes(self._source)
            self._given_up = True  # after the count, which the thread would change
        if counts_exactly:
            self._writing.release()

    def missing(self) -> str:
        """Return a sentence about the end of the stream that was not written, or ""."""
        if not self.lost:
            return ""
        return f"the last {self.lost} bytes of {self._name} could not be written ({self.error})"

    def _copy(self) -> None:
        while not self._given_up and (chunk := os.read(self._source.fileno(), TAIL_BYTES)):
            chunk = self._without_nul(chunk)
            self.tail.extend(chunk)
            del self.tail[:-TAIL_BYTES]
            if MARK.encode() in chunk:  # a record for this process, and not for the user
                chunk = _RECORD.sub(b"", chunk)
            if self.lost:
                notice = f"\njaxmpi run: {self.lost} bytes are missing here ({self.error})\n"
                if not self._write(notice.encode()) and not self._given_up:
                    self.lost = 0
            if left := len(chunk) if self.lost else self._write(chunk):
                if not self.lost:
                    say(
                        f"{self._name} cannot be written ({self.error}). What does not fit is left "
                        "out."
                    )
                self.lost += left

    def _without_nul(self, chunk: bytes) -> bytes:
        """Remove the zero byte that Open MPI 5 writes behind its message about MPI_Abort."""
        # it may be in another chunk than the line before it
        before = bytes(self.tail[-len(_LINE) :])
        return (before + chunk).replace(_LINE + b"\0", _LINE)[len(before) :]

    def _write(self, data: bytes) -> int:
        """Write all of it; return how many bytes could not be written.

        It is 0 once `join` has given up, which has counted them.
        """
        rest = memoryview(data)
        self._unwritten = len(rest)
        try:
            poll = select.poll()
            poll.register(self._sink, select.POLLOUT)
            while rest:
                poll.poll()  # another process may have made the stream one that does not block
                with self._writing:
                    if self._given_up:
                        return 0
                    # A pipe that is ready has room for PIPE_BUF bytes. The write of more would wait
                    # in the middle, and what it has written would count as unwritten.
                    rest = rest[os.write(self._sink, rest[: select.PIPE_BUF]) :]
                    self._unwritten = len(rest)
        except OSError as error:
            if error.errno in _NOBODY_READS:
                self._sink = os.open(os.devnull, os.O_WRONLY)
                return 0
            self.error = error.strerror or str(error)
        finally:
            with self._writing:
                self._unwritten = 0
        return 0 if self._given_up else len(rest)


def _readable_bytes(stream: IO[bytes]) -> int:
    """Return how many bytes a pipe holds that have not been read."""
    number = array.array("i", [0])
    fcntl.ioctl(stream.fileno(), termios.FIONREAD, number)
    return number[0]


def _end_output(relays: Sequence[Relay], received: Sequence[Received]) -> None:
    """Wait until the output of the job is written, and end its last line.

    A job that a signal has stopped, or stops now, does not wait for a slow reader.
    """
    for relay in relays:
        relay.join(GRACE_SECONDS, is_stopped=lambda: bool(received))
    if relays[1].tail and not relays[1].tail.endswith(b"\n"):  # half a line, such as a progress bar
        with contextlib.suppress(OSError):
            os.write(2, b"\n")


def say(text: str) -> None:
    """Write one line of `jaxmpi run` to stderr, where that can be written."""
    with contextlib.suppress(OSError):
        os.write(2, f"jaxmpi run: {text}\n".encode(errors="backslashreplace"))


def open_streams() -> None:
    """Open stdin, stdout and stderr if they are closed.

    Otherwise the next files would get their numbers, and then the output.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
