"""Run MPI's launcher to its end: pass its output on, stop it on a signal, name the rank that failed, leave nothing behind.

Every process of the job carries JAXMPI_RUN_DIR in its environment: by that it is told from all others.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxmpi._process import run_dir as registry
from jaxmpi._process import settings
from jaxmpi._process.run_dir import Member
from jaxmpi._run.failed_host import failed_host
from jaxmpi._run.failure_report import End, describe_failure
from jaxmpi._run.output import Relay, say

__all__ = ["Outcome", "say", "supervise"]

GRACE_SECONDS = 2.0  # from a signal to SIGKILL for the ranks, and from there to SIGKILL for the launcher
GONE_SECONDS = 20.0  # the launcher may run on for so long after the ranks of this host have ended, not all of them in order

_RANK = re.compile(rb"\0(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=")  # in the environment of a rank, not of the launcher's daemons


class Outcome(NamedTuple):
    """How a job ended: its exit code, whether its ranks have failed, and a restart may help, and on which host, if known."""

    code: int
    failed: bool
    host: str = ""
    rates: tuple[float, ...] = ()  # samples per second, as the ranks have noted them


def supervise(command: Sequence[str], environ: Mapping[str, str], run_dir: str) -> Outcome:
    """Run MPI's launcher until it ends, and return how.

    The exit code is the launcher's own, but 1 where it is 0 and a rank never left in order, or the end of the output could not
    be written, and 128 + n where signal n stopped the job. Ranks that call `jaxmpi.preempted` may stop in order at a SIGTERM:
    then it is 0. Afterwards neither a process nor a shared-memory file of the job is left on this host, nor `run_dir`.
    """
    started = time.time()
    received: list[tuple[int, float]] = []  # signals, and when
    # An ignored SIGHUP is nohup's doing and stays ignored.
    numbers = [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
    handlers = {n: signal.signal(n, lambda n, _: received.append((n, time.monotonic()))) for n in numbers}
    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide the launcher's exit code
    code, relays, watch = 1, list[Relay](), _Watch(run_dir)
    try:
        process = _start(command, environ)
        assert process.stdout and process.stderr
        relays = [Relay(process.stdout, 1), Relay(process.stderr, 2)]
        _wait(process, watch, received)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        ended, joined, rates = watch.close(), watch.members, registry.rates(run_dir)
        preempted = bool(received and watch.preemptible)
        in_order = not code and (preempted or not received) and all(m.left for m in joined)
        _kill_all(run_dir, {m.pid for m in joined} if in_order else None)
        registry.remove_segments({path for m in joined for path in m.segments}, started)
        shutil.rmtree(run_dir, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for relay in relays:
        relay.join(GRACE_SECONDS)
    if relays[1].tail and not relays[1].tail.endswith(b"\n"):  # half a line, such as a progress bar
        with contextlib.suppress(OSError):
            os.write(2, b"\n")

    if received:
        name = signal.Signals(received[0][0]).name
        say(f"the job was stopped by {name}" + (", and has ended in order" if in_order else ""))
        return Outcome(0 if in_order else 128 + received[0][0], failed=False)
    if not in_order:
        text = b"\n".join(relay.tail for relay in relays).decode(errors="replace")
        why = watch.verdict or describe_failure(text, joined, ended, code)
        say(f"the job failed: {why}")
        return Outcome(code or 1, failed=True, host=failed_host(text, why))
    lost = [missing for relay in relays if (missing := relay.missing())]
    for missing in lost:
        say(missing)
    return Outcome(int(bool(lost)), failed=False, rates=rates)


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the launcher so that it ends with us, and in a session of its own, where Ctrl-C reaches it through us only.

    With a terminal as stdin it stays in our session: Open MPI reads a terminal only from the terminal's foreground group.
    """
    libc = ctypes.CDLL(None)  # loaded before the fork
    return subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=not os.isatty(0),
        preexec_fn=lambda: libc.prctl(1, signal.SIGTERM),  # 1: PR_SET_PDEATHSIG
    )


def _wait(process: subprocess.Popen[bytes], watch: "_Watch", received: Sequence[tuple[int, float]]) -> None:
    """Wait for the launcher, and stop it when a signal was received."""
    step, due, asked = 0, 0.0, False
    ranks_until = time.monotonic()
    while process.poll() is None:
        watch.look(0.05)
        if not watch.all_have_failed():
            ranks_until = time.monotonic()
        elif time.monotonic() > ranks_until + GONE_SECONDS:
            say("the ranks of this host have failed, and MPI's launcher runs on, as if other hosts did not answer: it is ended")
            _kill([process.pid, *registry.processes(watch.run_dir)])
            process.wait()
            break
        impatient = step + asked == 1 and received[-1][1] > received[0][1] + 0.5  # not the same signal, delivered twice
        if not received or (time.monotonic() < due and not impatient):
            continue
        number = received[0][0]
        if step == 0 and number == signal.SIGTERM and watch.preemptible and not asked:
            asked = True
            _kill([member.pid for member in watch.members if member.rank in watch.preemptible], signal.SIGTERM)
            due = time.monotonic() + settings.get("JAXMPI_PREEMPTION_SECONDS")
            continue
        if step == 0:
            if not (number == signal.SIGINT and os.isatty(0)):  # the terminal has sent it to the launcher, too
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        elif step == 1:  # ranks that are inside MPI do not react; without them the launcher cleans up and ends
            _kill(pid for pid, environ in registry.processes(watch.run_dir).items() if _RANK.search(environ))
        else:
            _kill([process.pid, *registry.processes(watch.run_dir)])
        step, due = step + 1, time.monotonic() + GRACE_SECONDS


class _Watch:
    """What is known of the ranks of this host, and in which order they end: MPI's launcher kills all when it misses the first.

    What was read from the run's folder is kept: it is in the temporary folder, from which programs remove what is old.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.preemptible: set[int] = set()  # ranks that take a SIGTERM, and tell the others, so that all stop in order
        self.verdict = ""  # of the ranks: why the job has ended
        self._members: dict[int, Member] = {}  # of all hosts, by rank
        self._open: dict[int, Member] = {}  # by file descriptor: of the rank's pipe, and of the process
        self._process: dict[Member, int] = {}
        self._ended: dict[Member, None] = {}  # in order
        self._epoll = select.epoll()  # what comes first is returned first

    def look(self, timeout_seconds: float) -> None:
        with contextlib.suppress(OSError):
            os.mkdir(self.run_dir, 0o700)  # it was removed: ranks that leave in order say so in it
        if self._is_ours():
            self.preemptible |= {int(path.name.partition("-")[2]) for path in Path(self.run_dir).glob("preemptible-*")}
            for member in registry.members(self.run_dir, skip=self._members):
                self._members[member.rank] = member
                if member.host == os.uname().nodename:
                    with contextlib.suppress(OSError):  # the rank is gone already, or the kernel has no pidfd
                        self._follow(os.open(f"{self.run_dir}/rank-{member.rank}.pipe", os.O_RDONLY | os.O_NONBLOCK), member)
                        self._process[member] = os.pidfd_open(member.pid)
                        self._follow(self._process[member], member)  # a child may hold the pipe
        while events := self._epoll.poll(timeout_seconds, maxevents=1):
            self._epoll.unregister(events[0][0])
            self._ended.setdefault(self._open[events[0][0]])
            timeout_seconds = 0.0

    @property
    def members(self) -> list[Member]:
        """The ranks of this host, by rank, as they last described themselves."""
        now = {member.rank: member for member in registry.members(self.run_dir)} if self._is_ours() else {}
        known = {**self._members, **now}
        return [known[rank] for rank in sorted(known) if known[rank].host == os.uname().nodename]

    def _is_ours(self) -> bool:
        """Whether the folder is still the one that was made for the run, or made anew: in its place others may make one."""
        with contextlib.suppress(OSError):
            return os.lstat(self.run_dir).st_uid == os.geteuid()
        return False

    def all_have_failed(self) -> bool:
        """Whether no rank of this host is left, and one did not leave in order."""
        if not self._open or len(self._ended) < len(set(self._open.values())):
            return False
        return not all(m.left for m in self.members)

    def _follow(self, fd: int, member: Member) -> None:
        self._open[fd] = member
        self._epoll.register(fd, select.EPOLLIN)

    def close(self) -> list[End]:
        self.look(0.0)
        if self._is_ours():
            self.verdict = registry.verdict(self.run_dir)
        ended = [End(member, _exit_status(self._process.get(member, -1))) for member in self._ended]
        for fd in (*self._open, self._epoll.fileno()):
            os.close(fd)
        return ended


def _exit_status(pidfd: int) -> int | None:
    """Ask for the wait status of a process that is no child of ours: ioctl PIDFD_GET_INFO with PIDFD_INFO_EXIT."""
    info = bytearray(struct.pack("=QQ11Ii", 1 << 3, 0, *[0] * 11, 0))
    try:
        fcntl.ioctl(pidfd, 0xC040FF0B, info)
    except (OSError, ValueError):
        return None
    mask, *_, status = struct.unpack("=QQ11Ii", info)
    return status if mask & (1 << 3) else None


def _kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_all(run_dir: str, only: set[int] | None) -> None:
    """Kill what is left of the job, and wait until it is gone; `only` these, where the job ended in order."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and (pids := [p for p in registry.processes(run_dir) if only is None or p in only]):
        _kill(pids)
        time.sleep(0.02)
