"""CUDA's Multi-Process Service (MPS) for one job: its daemon starts and ends with the job.

Kernels of several processes run on a GPU at the same time under MPS only. A daemon waits at pipes
in a folder of this job, whose name the ranks get in CUDA_MPS_PIPE_DIRECTORY, so jobs do not share
daemons, nor find one that somebody else has left behind.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxmpi._job.launch.machine import socket_folder
from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.launch.supervisor import say

__all__ = ["mps_daemon"]

PROGRAM = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
QUESTION = "get_default_active_thread_percentage"  # answered before there is a server, too
START_SECONDS = 20.0  # for the daemon to start, or to answer
END_SECONDS = 5.0  # for the daemon and its servers to end before they are killed
_PIPE_NAME_BYTES = 48  # the folder's own name, and that of the longest pipe in it
_SHOWN_BYTES = 300  # of what a program has written


@contextlib.contextmanager
def mps_daemon(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run a daemon; yield the variables with which processes find it.

    The daemon ends with the block, also where that raises, and where SIGTERM or SIGHUP ends this
    process. A daemon that has died before is reported on stderr.

    Args:
      environ: the environment of the job.

    Raises:
      LaunchError: the program is missing, or the daemon does not start.
    """
    program = shutil.which(PROGRAM, path=environ.get("PATH"))
    if program is None:
        raise LaunchError(
            f"--mps needs {PROGRAM}, which is not on PATH. It comes with NVIDIA's driver for Linux "
            "(Debian: nvidia-cuda-mps). Leave --mps out to run without it."
        )
    try:
        parent = socket_folder(_PIPE_NAME_BYTES)
    except OSError as error:
        raise LaunchError(f"--mps: {error}") from None
    folder = tempfile.mkdtemp(prefix="jaxmpi-mps-", dir=parent)
    variables = {PIPES: folder, LOGS: folder}
    daemon = {**_without_numbers(environ), **variables}
    handlers = dict[int, Any]()
    try:
        # before the daemon starts, so that no signal leaves it behind
        _raise_at_signals(handlers)
        _start(program, daemon)
        yield variables
        if not _answers(program, daemon):
            say(
                "the CUDA MPS daemon of this job has died before the job ended, or does not "
                f"answer, and its ranks may have failed for that reason: {_last_line(folder)}"
            )
    finally:
        for number in handlers:
            signal.signal(number, _ignore)
        _stop(program, daemon, folder)
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _raise_at_signals(former: dict[int, Any]) -> None:
    """Have the signals that stop a job raise SystemExit; put the former handlers into `former`.

    While the job runs, the supervisor's handlers replace these.
    """
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # by nohup
        numbers.append(signal.SIGHUP)

    def leave(number: int, _: object) -> NoReturn:
        # A second signal, which may come at once, must not keep the daemon alive.
        for each in numbers:
            signal.signal(each, _ignore)
        raise SystemExit(128 + number)

    for number in numbers:
        former[number] = signal.getsignal(number)
        signal.signal(number, leave)


def _ignore(*_: object) -> None:
    """Handle a signal by doing nothing; what is started meanwhile does not inherit that."""


def _without_numbers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the daemon: without a CUDA_VISIBLE_DEVICES of numbers.

    The daemon would number the GPUs that it sees anew, and the ranks name them by the old numbers.
    """
    environ = dict(environ)
    listed = environ.get("CUDA_VISIBLE_DEVICES", "")
    if not listed.startswith(("GPU-", "MIG-")):
        environ.pop("CUDA_VISIBLE_DEVICES", None)
    return environ


def _start(program: str, environ: Mapping[str, str]) -> None:
    """Start the daemon, and wait until it answers.

    Raises:
      LaunchError: it does not.
    """
    said, folder = _run([program, "-d"], environ), environ[PIPES]
    if said is None:
        why = f"did not start within {START_SECONDS:g} s"
    elif said.returncode:
        words = f"{said.stdout} {said.stderr}"
        why = f"ended with code {said.returncode}: {_shown(words) or 'without a word'}"
    elif not _answers(program, environ):
        why = f"does not answer: {_last_line(folder)}"
    else:
        return
    raise LaunchError(
        f"--mps: {program} -d {why}. Look whether `nvidia-smi` finds a GPU of yours, and whether "
        "another user's MPS daemon has it; or leave --mps out."
    )


def _answers(program: str, environ: Mapping[str, str]) -> bool:
    """Return whether the daemon answers."""
    said = _run([program], environ, f"{QUESTION}\n")
    return said is not None and said.returncode == 0


def _stop(program: str, environ: Mapping[str, str], folder: str) -> None:
    """Ask the daemon to end, with its servers; kill what is left of them."""
    _run([program], environ, "quit\n", END_SECONDS)
    deadline = time.monotonic() + END_SECONDS
    while left := _processes(folder):
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _processes(folder: str) -> list[int]:
    """Return the daemon and servers of a folder of pipes; the ranks have other names."""
    wanted = f"\0{PIPES}={folder}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # the kernel keeps 15 characters of the name
            named = (path / "comm").read_text().strip() == PROGRAM[:15]
            if named and wanted in b"\0" + (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def _run(
    command: list[str],
    environ: Mapping[str, str],
    text: str = "",
    seconds: float = START_SECONDS,
) -> subprocess.CompletedProcess[str] | None:
    """Run a command in a session of its own, which Ctrl-C does not reach; None if it hangs.

    The output goes through files: a daemon keeps them open, and a pipe would not end.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                command,
                env=environ,
                input=text,
                text=True,
                stdout=out,
                stderr=errors,
                timeout=seconds,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        except OSError as error:
            return subprocess.CompletedProcess(command, 127, "", error.strerror or str(error))
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, out.read(), errors.read())


def _last_line(folder: str) -> str:
    """Return the last line of the daemon's log."""
    try:
        lines = Path(folder, "control.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return _shown(lines[-1]) if lines else "it has left no log"


def _shown(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_BYTES]
