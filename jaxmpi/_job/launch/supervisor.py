"""Run MPI's launcher to its end: pass its output on, stop it on a signal, name the rank that failed, leave nothing behind.

Every process of the job carries JAXMPI_RUN_DIR in its environment: by that it is told from all
others.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi._job.launch.failed_host import failed_host
from jaxmpi._job.launch.failure_report import find_failure
from jaxmpi._job.launch.host_ranks import HostRanks
from jaxmpi._job.launch.mpi_daemons import MpiDaemons, children
from jaxmpi._job.launch.output import Relay, say
from jaxmpi._job.process import run_dir as registry
from jaxmpi._job.process import settings
from jaxmpi._job.process.launchers import Launcher

__all__ = ["Outcome", "say", "supervise"]

# from a signal to SIGKILL for the ranks, and from there to SIGKILL for the launcher
GRACE_SECONDS = 2.0
# the launcher may run on for so long after the ranks of this host have ended, not all of them in
# order
GONE_SECONDS = 20.0

Received = tuple[int, float]  # a signal, and when


class Outcome(NamedTuple):
    """How a job ended."""

    code: int  # of the exit
    failed: bool  # whether its ranks have failed, and a restart may help
    host: str = ""  # on which they have failed, if known
    refused_count: str = ""  # why its ranks do not work in a job of so many of them
    rates: tuple[float, ...] = ()  # samples per second, as the ranks have noted them


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    run_dir: str,
    launcher: Launcher,
    hosts: Sequence[str] = (),
) -> Outcome:
    """Run MPI's launcher until it ends, and return how; `hosts` are those that its options name.

    The exit code is that of the rank that failed, 128 + n where signal n killed it, if that is
    known. Otherwise it is the launcher's own, but 1 where it is 0 and a rank never left in order,
    or the end of the output could not be written. It is 128 + n where signal n stopped the job.
    Ranks that call `jaxmpi.preempted` may stop in order at a SIGTERM: then it is 0. Afterwards
    neither a process nor a shared-memory file of the job is left on this host, nor `run_dir`.
    """
    started = time.time()
    received, handlers = _receive_signals()
    code, relays, ranks, daemons = 1, list[Relay](), HostRanks(run_dir), MpiDaemons(launcher, hosts)
    try:
        process = _start(command, environ)
        assert process.stdout and process.stderr
        relays = [Relay(process.stdout, 1), Relay(process.stderr, 2)]
        _wait(process, launcher, ranks, daemons, received)
        daemons.look(process.pid)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        daemons.close()
        ended, joined, rates = ranks.close(), ranks.members, registry.rates(run_dir)
        preempted = bool(received and ranks.preemptible)
        in_order = not code and (preempted or not received) and all(m.left for m in joined)
        _kill_all(run_dir, {m.pid for m in joined} if in_order else None)
        registry.remove_segments({path for m in joined for path in m.segments}, started)
        shutil.rmtree(run_dir, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    _end_output(relays)
    if received:
        return _stopped(received[0][0], in_order)
    if not in_order:
        text = b"\n".join(relay.tail for relay in relays).decode(errors="replace")
        if ranks.refused_count:
            say(f"the job does not work on this number of ranks: {ranks.refused_count}")
            return Outcome(code or 1, failed=True, refused_count=ranks.refused_count)
        failure = find_failure(text, joined, ended)
        why = ranks.verdict or daemons.lost(text) or failure.describe(code)
        say(f"the job failed: {why}")
        return Outcome(failure.exit_code(code), failed=True, host=failed_host(text, why))
    lost = [missing for relay in relays if (missing := relay.missing())]
    for missing in lost:
        say(missing)
    return Outcome(int(bool(lost)), failed=False, rates=rates)


def _receive_signals() -> tuple[list[Received], dict[int, Any]]:
    """Receive what stops a job: the signals that come from now on, and the handlers that were there before."""
    received: list[Received] = []
    # An ignored SIGHUP is nohup's doing and stays ignored.
    numbers = [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (
        signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    )
    handlers: dict[int, Any] = {
        n: signal.signal(n, lambda n, _: received.append((n, time.monotonic()))) for n in numbers
    }
    # ignored, it would hide the launcher's exit code
    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return received, handlers


def _end_output(relays: Sequence[Relay]) -> None:
    """Wait until the output of the job is written, and end its last line."""
    for relay in relays:
        relay.join(GRACE_SECONDS)
    if relays[1].tail and not relays[1].tail.endswith(b"\n"):  # half a line, such as a progress bar
        with contextlib.suppress(OSError):
            os.write(2, b"\n")


def _stopped(number: int, in_order: bool) -> Outcome:
    """The outcome of a job that a signal has stopped."""
    say(
        f"the job was stopped by {signal.Signals(number).name}"
        + (", and has ended in order" if in_order else "")
    )
    return Outcome(0 if in_order else 128 + number, failed=False)


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the launcher so that it ends with us, and in a session of its own, where Ctrl-C reaches it through us only.

    With a terminal as stdin it stays in our session: Open MPI reads a terminal only from the
    terminal's foreground group.
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


def _wait(
    process: subprocess.Popen[bytes],
    launcher: Launcher,
    ranks: HostRanks,
    daemons: MpiDaemons,
    received: Sequence[Received],
) -> None:
    """Wait for the launcher, and stop it when a signal was received."""
    step, due, asked = 0, 0.0, False
    ranks_until = time.monotonic()
    while process.poll() is None:
        ranks.look(0.05)
        daemons.look(process.pid)
        if not ranks.all_have_failed():
            ranks_until = time.monotonic()
        elif time.monotonic() > ranks_until + GONE_SECONDS:
            say(
                "the ranks of this host have failed, and MPI's launcher runs on, as if other hosts "
                "did not answer: it is ended"
            )
            _kill([process.pid, *registry.processes(ranks.run_dir)])
            process.wait()
            break
        # not the same signal, delivered twice
        impatient = step + asked == 1 and received[-1][1] > received[0][1] + 0.5
        if not received or (time.monotonic() < due and not impatient):
            continue
        number = received[0][0]
        if step == 0 and number == signal.SIGTERM and ranks.preemptible and not asked:
            asked = True
            _kill(
                [member.pid for member in ranks.members if member.rank in ranks.preemptible],
                signal.SIGTERM,
            )
            due = time.monotonic() + settings.get("JAXMPI_PREEMPTION_SECONDS")
            continue
        if step == 0:
            # the terminal has sent it to the launcher, too
            if not (number == signal.SIGINT and os.isatty(0)):
                _kill(
                    _launchers(process.pid), signal.SIGTERM if number == signal.SIGHUP else number
                )
        elif step == 1:
            # ranks that are inside MPI do not react; without them the launcher cleans up and ends
            _kill(
                pid
                for pid, environ in registry.processes(ranks.run_dir).items()
                if any(b"\0%s=" % name.encode() in environ for name in launcher.rank)
            )
        else:
            _kill([process.pid, *registry.processes(ranks.run_dir)])
        step, due = step + 1, time.monotonic() + GRACE_SECONDS


def _launchers(pid: int) -> list[int]:
    """Return the processes that a signal for MPI's launcher goes to; `pid` is what we have started.

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
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_all(run_dir: str, only: set[int] | None) -> None:
    """Kill what is left of the job, and wait until it is gone; `only` these, where the job ended in order."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and (
        pids := [p for p in registry.processes(run_dir) if only is None or p in only]
    ):
        _kill(pids)
        time.sleep(0.02)
