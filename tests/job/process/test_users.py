"""Other users of the machine: a working directory's files are not run, and a job's stay private."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.launch.options import parse

# not `python -m jaxmpi`, which looks into the working directory
COMMAND = str(Path(sys.executable).with_name("jaxmpi"))
PLANTED = (
    "mpi4py",
    "mpi4jax",
    "jax",
    "jaxlib",
    "numpy",
    "jaxmpi",
    "optax",
    "flax",
    "json",
    "re",
    "sitecustomize",
)


@pytest.fixture
def planted(tmp_path):
    """A working directory of somebody else: modules that leave a file when they are imported."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\nraise ImportError"
        )
    yield folder
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--option",)], ids=["plain", "packed"])
def test_what_the_working_directory_holds_is_not_imported_by_run(planted, tmp_path, arguments):
    script = tmp_path / "script.py"
    script.write_text("import jaxmpi; jaxmpi.init(); jaxmpi.print('fine')")
    command = [COMMAND, "run", "-n", "2", str(script), *arguments]
    done = subprocess.run(command, cwd=planted, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("fine") == 2, done.stderr


@pytest.mark.exhaustive
def test_what_the_working_directory_holds_is_not_imported_by_doctor(planted):
    done = subprocess.run(
        [COMMAND, "doctor", "-n", "2"], cwd=planted, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and "jaxmpi works here." in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["-c.py", "-m.py", "--help.py", "-.py", "-n.py"])
def test_a_script_is_no_option_whatever_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=rf"there is no file \./{name} in {tmp_path}"):
        parse(["-n", "2", name])
    (tmp_path / name).write_text("import sys; print('ran', *sys.argv)")
    request = parse(["-n", "2", name, "-c", "1"])
    assert request.program == (f"./{name}", "-c", "1") and request.mpi_options == ()
    done = subprocess.run(
        [sys.executable, *request.program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"ran ./{name} -c 1\n"
