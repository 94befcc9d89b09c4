"""The quick start and the notebooks do what they say, on one rank and on more."""

import difflib
import json
import os
import re
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from programs import ROOT, on_ranks, run_all
from test_monitor import crowded

from jaxmpi._job.launch import mpiexec


@pytest.mark.launcher
@pytest.mark.slow
def test_quickstart_ends_with_the_same_loss_however_it_is_started():
    launcher = mpiexec.identify(mpiexec.find_launcher(None, os.environ))
    commands = {
        1: on_ranks(1, "examples/quickstart.py"),
        2: on_ranks(2, "examples/quickstart.py"),
        3: [launcher.path, *crowded(launcher), "-n", "3", sys.executable, "examples/quickstart.py"],
    }
    losses = []
    for ranks, output in zip(commands, run_all(commands.values()), strict=True):
        found = re.search(r"loss after 100 epochs: (\S+) \(ranks: (\d)\)", output)
        assert found and int(found[2]) == ranks
        losses.append(float(found[1]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


NO_MPI = "raise ImportError('no MPI in this test')"


@pytest.mark.slow
def test_notebook_runs_without_mpi(tmp_path, monkeypatch):
    for package in ("mpi4py", "mpi4jax"):
        (tmp_path / f"{package}.py").write_text(NO_MPI)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    check = (
        "import sys\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('mpi4py', 'mpi4jax')))"
    )
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert notebook.cells[-1].outputs[0].text.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulated_ranks", "several_ranks", "what_a_step_sends"])
def test_notebooks_run(name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # for `!jaxmpi`
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = ""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown += output.get("text", "")
    pattern = {
        "simulated_ranks": "on eight",
        "several_ranks": "ValueError: only here",
        # the collectives of 50 steps, and none of those by which `explain` measures the network
        "what_a_step_sends": r"last to come\s+0 +\S+ +10\d ",
    }
    assert re.search(pattern[name], shown), shown


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebooks_are_stored_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


@pytest.mark.exhaustive
def test_six_lines_make_a_script_for_one_device_one_for_many():
    """The six lines that the quick start shows make one_device.py into many_devices.py."""
    one, many = ROOT / "examples" / "one_device.py", ROOT / "examples" / "many_devices.py"
    names = [f"examples/{path.name}" for path in (one, many)]
    lines = [path.read_text().splitlines(keepends=True) for path in (one, many)]
    diff = [*difflib.unified_diff(*lines, *names, n=1)]
    assert "```diff\n" + "".join(diff) + "```" in (ROOT / "README.md").read_text()
    assert sum(line.startswith("+") and not line.startswith("+++") for line in diff) == 6
    losses = lambda output: [float(x) for x in re.findall(r"loss (\d\S+)", output)]
    device, alone, three = (
        losses(x) for x in run_all([on_ranks(1, one), on_ranks(1, many), on_ranks(3, many)])
    )
    assert len(device) == 5
    assert len(alone) == 5 and alone[-1] < 0.5 * alone[0]
    np.testing.assert_allclose(three, alone, atol=2e-4)


def test_readme_shows_the_quickstart():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks[0] == (ROOT / "examples" / "quickstart.py").read_text()
    assert len(blocks[0].splitlines()) <= 40
