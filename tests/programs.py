"""Programs that are started as a user would, what they print, and what they leave."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxmpi._job.process import run_dir

ROOT = Path(__file__).parent.parent


def on_ranks(ranks, *program):
    if ranks == 1:
        return [sys.executable, *program]
    return [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), *program]


def run(command, *, seconds=240, **environ):
    """Run a command that must succeed in so many seconds; return its output.

    What is left of its process group is ended.
    """
    with subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environ},
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{command} did not end:\n{process.communicate()[0]}")
    assert process.returncode == 0, output
    return output


def run_all(commands):
    """Run commands, two at a time, since much of each is imports on one core.

    Returns their outputs.
    """
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(run, commands)]


def segments_left(before):
    """Return the names that MPI and jaxmpi left in /dev/shm since `before`, mapped by nobody.

    Jobs of a test beside this one come and go meanwhile, and so does their shared memory.
    """

    def unmapped():
        ours = re.compile(r"sm_segment|vader_segment|mpich_shm|Intel_MPI|jaxmpi")
        names = {name for name in os.listdir("/dev/shm") if ours.match(name)}
        for entry in Path("/proc").glob("[0-9]*"):
            names.difference_update(Path(path).name for path in run_dir.segments(entry.name))
            with contextlib.suppress(OSError):  # its environment names the folder of its job
                environ = (entry / "environ").read_bytes()
                names -= {name for name in names if f"/{name}\0".encode() in environ}
        return names

    left, deadline = unmapped().difference(before), time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= unmapped()
    return left
