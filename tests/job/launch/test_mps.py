"""`jaxmpi run --mps`: the daemon of CUDA's Multi-Process Service starts and ends with the job.

fake_mps.sh stands in for NVIDIA's program.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from jaxmpi.__main__ import main
from jaxmpi._job.launch import mps
from jaxmpi._job.launch.mpiexec import LaunchError

pytestmark = pytest.mark.launcher

FAKE = Path(__file__).with_name("fake_mps.sh")
# What a rank does: it tells the folder of the pipes, and then SCRIPT_DOES.
SCRIPT = """
import os, signal, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
print("pipes", folder, os.path.exists(folder + "/control"), flush=True)
what = sys.argv[1]
if what == "fail":
    sys.exit(7)
if what == "end the daemon":
    time.sleep(1)  # so that both ranks have looked
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
        os.kill(int(open(folder + "/pid").read()), signal.SIGKILL)
if what == "sleep":
    time.sleep(60)
"""


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """The file of what the program was asked; it is on PATH, and temporary files are below here."""
    (tmp_path / "bin").mkdir()
    shutil.copy(FAKE, tmp_path / "bin" / mps.PROGRAM)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS_SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("FAKE_MPS", "")
    monkeypatch.setattr(mps, "START_SECONDS", 3.0)
    monkeypatch.setattr(mps, "END_SECONDS", 1.0)
    (tmp_path / "seen").touch()
    return tmp_path / "seen"


def asked(seen):
    return [line.split()[0] for line in seen.read_text().splitlines()]


def folders():
    """The folders of daemons: none may be left."""
    return {*Path(tempfile.gettempdir()).glob("jaxmpi-mps-*")}


def test_a_daemon_for_a_block(seen, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with mps.mps_daemon(os.environ) as variables:
        folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder, "control").exists() and variables["CUDA_MPS_LOG_DIRECTORY"] == folder
        assert len(mps._processes(folder)) == 1
    assert not os.path.exists(folder) and not mps._processes(folder)
    assert asked(seen) == ["start", mps.QUESTION, mps.QUESTION, "quit"]
    # it would number those two anew, and the ranks would ask for a GPU 2 that is not there
    assert seen.read_text().splitlines()[0].endswith("gpus=")


@pytest.mark.parametrize("name", ["GPU-1", "MIG-1"])
def test_uuids_are_handed_to_the_daemon(seen, monkeypatch, name):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    with mps.mps_daemon(os.environ):
        assert seen.read_text().splitlines()[0].endswith(f"gpus={name}")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("fails", "-d ended with code 1: An instance of this daemon is already running. Look "),
        (
            "silent",
            r"-d does not answer: \[2026\] No GPU to share. Look whether `nvidia-smi` finds",
        ),
        ("hangs", "-d did not start within 3 s"),
    ],
)
def test_a_daemon_that_does_not_start(seen, monkeypatch, fault, text):
    before = folders()
    monkeypatch.setenv("FAKE_MPS", fault)
    with pytest.raises(LaunchError, match=text), mps.mps_daemon(os.environ):
        pytest.fail("no block without a daemon")
    assert folders() == before


def test_without_the_program(monkeypatch):
    with (
        pytest.raises(LaunchError, match="--mps needs nvidia-cuda-mps-control, which is not on"),
        mps.mps_daemon({"PATH": "/nowhere"}),
    ):
        pytest.fail("no block without a daemon")


def test_a_daemon_that_does_not_end_is_killed(seen, monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    with mps.mps_daemon(os.environ) as variables:
        folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
    time.sleep(0.2)
    assert not mps._processes(folder) and not os.path.exists(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_daemon(seen, number):
    former = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, mps.mps_daemon(os.environ) as variables:
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number and signal.getsignal(number) == former
    assert not mps._processes(variables["CUDA_MPS_PIPE_DIRECTORY"])


def test_other_hosts_are_refused(seen, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    # both launchers' options
    for option in ("--host", "-hosts"):
        code = main(["run", "-n", "2", "--mps", option, "a,b", "train.py"])
        errors = capfd.readouterr().err
        if "--mps" in errors:
            break
    assert code == 2 and "on this host, and the job has others" in errors and not asked(seen)


def job(tmp_path, what, *options):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", "--mps", *options]
    return subprocess.Popen(
        [*command, script, what],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", "fail", "end the daemon", "sleep"])
def test_a_job_has_a_daemon(seen, tmp_path, what):
    before = folders()
    started = job(tmp_path, what)
    if what == "sleep":
        printed = started.stdout.readline()
        started.send_signal(signal.SIGTERM)
    else:
        printed = ""
    output, errors = started.communicate(timeout=60)
    output = printed + output
    assert "pipes /" in output and " True" in output, output + errors
    codes = {"nothing": 0, "fail": 7, "end the daemon": 0, "sleep": 143}
    assert started.returncode == codes[what], errors
    died = "the CUDA MPS daemon of this job has died before the job ended"
    assert (died in errors) == (what == "end the daemon"), errors
    assert folders() == before and asked(seen)[-1] == "quit"
    assert not mps._processes(output.split()[1])


@pytest.mark.slow
def test_each_attempt_has_a_daemon_of_its_own(seen, tmp_path):
    started = job(tmp_path, "fail", "--restarts", "1")
    started.communicate(timeout=60)
    assert asked(seen).count("start") == asked(seen).count("quit") == 2


@pytest.mark.slow
def test_a_job_without_the_program_is_refused(tmp_path):
    started = job(tmp_path, "nothing")
    output, errors = started.communicate(timeout=60)
    assert started.returncode == 2 and not output
    assert errors.startswith("jaxmpi run: --mps needs nvidia-cuda-mps-control"), errors
