"""A rank ends with the exit code of its script, soon, whatever threads of jaxmpi it has then."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import ROOT, on_ranks

SCRIPT = Path(__file__).with_name("exit_script.py")
KINDS = ("prefetch", "blocked", "busy", "save", "progress", "step")
ENDINGS = {"end": 0, "exit 3": 3, "raise": 1, "interrupt": 130}
PAIRS = [(kind, ending) for kind in KINDS for ending in ENDINGS]
FEW = [("prefetch", "end"), ("blocked", "exit 3"), ("save", "end")]
REPEATS = 30
EXIT_SECONDS = 15.0  # an exit waits 3 s for a thread at most, and the launcher ends after it


def pythons():
    """Return this Python, and those of .venv-312, .venv-313 and .venv-newest where they exist."""
    others = [ROOT / f".venv-{version}" / "bin" / "python" for version in ("312", "313", "newest")]
    return [sys.executable, *(str(path) for path in others if path.exists())]


def exit_of(ranks, kind, ending, folder, python=sys.executable):
    """Run once; return the exit code as a shell has it, the output, and seconds to exit.

    The seconds go from the end of the script to the end of the process.
    """
    command = [python, *on_ranks(ranks, str(SCRIPT), kind, ending, str(folder))[1:]]
    environ = {**os.environ, "JAXMPI_TTY": "1" if kind == "progress" else "0"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options = {"cwd": ROOT, "env": environ, "start_new_session": True, **streams}
    with subprocess.Popen(command, **options) as job:
        try:
            output, _ = job.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            pytest.fail(f"{command} did not end:\n{job.communicate()[0]}")
    code = job.returncode if job.returncode >= 0 else 128 - job.returncode
    return code, output, time.time() - max(map(float, re.findall(r"ends (\d+\.\d+)", output)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "ending"),
    [pytest.param(*p, marks=[] if p in FEW else pytest.mark.faults) for p in PAIRS],
)
def test_an_exit_has_the_code_of_its_script(ranks, kind, ending, tmp_path):
    for again in range(2):
        code, output, seconds = exit_of(ranks, kind, ending, tmp_path / str(again))
        assert code == ENDINGS[ending], output
        assert seconds < EXIT_SECONDS, output
        if kind == "save" and ending in ("end", "exit 3"):
            assert len([*Path(tmp_path, str(again)).glob("*/manifest.json")]) == 1, output


@pytest.mark.faults
@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).parts[-3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_thirty_exits_have_the_codes_of_their_scripts(kind, ranks, python, tmp_path):
    endings = [*ENDINGS]
    for number in range(REPEATS):
        ending = endings[number % len(endings)]
        code, output, _ = exit_of(ranks, kind, ending, tmp_path / str(number), python)
        assert code == ENDINGS[ending], f"run {number}, {ending}: {code}\n{output}"
