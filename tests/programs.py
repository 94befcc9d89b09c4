"""Programs that are started as a user would, and what they print."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def on_ranks(ranks, *program):
    return [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), *program] if ranks > 1 else [sys.executable, *program]


def run(command, **environ):
    """The output of a command that must succeed; its whole process group ends with it."""
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **environ},
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{command} did not end:\n{process.communicate()[0]}")
    assert process.returncode == 0, output
    return output


def run_all(commands):
    """The outputs of commands, of which two run at a time: much of each is imports, on one core."""
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(run, commands)]
