"""The examples and the notebook do what they say, on one rank and on more."""

import difflib
import json
import os
import re
import sys

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from programs import ROOT, on_ranks, run, run_all

from jaxmpi._run import mpiexec


def test_quickstart_ends_with_the_same_loss_however_it_is_started():
    launcher = mpiexec.identify(mpiexec.find_launcher(None, os.environ))
    flags = ["--oversubscribe"] + ["--allow-run-as-root"] * (os.geteuid() == 0) if launcher.vendor == "Open MPI" else []
    commands = {
        1: on_ranks(1, "examples/quickstart.py"),
        2: on_ranks(2, "examples/quickstart.py"),
        3: [launcher.path, *flags, "-n", "3", sys.executable, "examples/quickstart.py"],
    }
    losses = []
    for ranks, output in zip(commands, run_all(commands.values()), strict=True):
        found = re.search(r"loss after 100 epochs: (\S+) \(ranks: (\d)\)", output)
        assert found and int(found[2]) == ranks
        losses.append(float(found[1]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


ARGUMENTS = ["--epochs", "3", "--dtype", "float64"]
IN_A_NOTEBOOK = f"""
import runpy, sys
import jaxmpi
sys.argv = ["digits.py", *{ARGUMENTS}]
with jaxmpi.simulate(4):
    runpy.run_path("examples/digits.py")
"""


def curve(output, ranks, falls_to=0.5):
    """The losses of three epochs on so many ranks, which fall, and how many of all test images were recognized."""
    losses = [float(x) for x in re.findall(r"train loss (\S+)", output)]
    assert len(losses) == 3 and losses[-1] < falls_to * losses[0], output
    found = re.search(r"test accuracy \S+ % \((\d+) of 360\), \d+ images/s on (\d) rank", output)
    assert found and int(found[2]) == ranks, output
    return losses, int(found[1])


@pytest.fixture(scope="module")
def digits():
    """What digits.py prints on two ranks."""
    return run(on_ranks(2, "examples/digits.py", *ARGUMENTS))


def test_digits_has_the_same_loss_curve_on_any_number_of_ranks_and_every_backend(digits):
    """To 1e-12 in float64; the batch of 48 is divided by all."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(IN_A_NOTEBOOK)])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()
    three, single, on_xla = run_all(
        [*environ, *on_ranks(ranks, "examples/digits.py", *ARGUMENTS)]
        for environ, ranks in (([], 3), ([], 1), (["env", "JAXMPI_BACKEND=xla"], 2))
    )
    simulated = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    want, recognized = curve(single, 1)
    for name, output, ranks in (("mpi", digits, 2), ("mpi", three, 3), ("xla", on_xla, 2), ("simulated", simulated, 4)):
        losses, correct = curve(output, ranks)
        np.testing.assert_allclose(losses, want, rtol=1e-12, err_msg=f"{name}, {ranks}")
        assert correct == recognized, name


def test_digits_in_linen_has_the_same_loss_curve_on_any_number_of_ranks():
    """In float32: sums in another order make 5e-7 over these 87 steps, 2e-6 over all 30 epochs."""
    counts = (1, 3)
    outputs = run_all(on_ranks(ranks, "examples/digits_linen.py", "--epochs", "3") for ranks in counts)
    curves, correct = zip(*map(curve, outputs, counts), strict=True)
    np.testing.assert_allclose(*curves, rtol=1e-5)
    assert np.ptp(correct) <= 1


def test_digits_learns_with_every_transform(digits):
    """Sharded state changes nothing; what sends less still learns."""
    options = ("--sharded", "--codec int8", "--local-every 4 --codec powersgd")
    outputs = run_all(on_ranks(2, "examples/digits.py", *ARGUMENTS, *words.split()) for words in options)
    (sharded, _), *_ = [curve(output, 2, falls_to=0.6) for output in outputs]
    np.testing.assert_allclose(sharded, curve(digits, 2)[0], rtol=1e-12)


SMALL = "--steps 12 --batch-size 12 --length 32 --layers 2 --width 32 --megabytes 0.3"
GPT = ("examples/gpt.py", *SMALL.split())


def test_gpt_has_the_same_losses_on_any_number_of_ranks():
    """Training and held out, with the optimizer's state whole and shared out."""
    *same, diloco = run_all(
        on_ranks(ranks, *GPT, *options.split())
        for ranks, options in ((1, "--sample 20"), (3, "--sample 20 --sharded"), (2, "--sample 0 --local-every 3 --diloco"))
    )
    one, three = ([float(x) for x in re.findall(r"(?:train|held out) (\d\S+)", output)] for output in same)
    assert len(one) == 12 and all("def main(arguments):" in output for output in same)
    np.testing.assert_allclose(three, one, atol=2e-3)
    assert one[-1] < 0.95 * one[0]
    assert "held out" in diloco


def test_a_deep_equilibrium_model_has_the_same_losses_on_any_number_of_ranks():
    """Of a while_loop that is differentiated implicitly."""
    outputs = run_all(on_ranks(ranks, "examples/deq.py", "--epochs", "2") for ranks in (1, 3))
    one, three = ([float(x) for x in re.findall(r"train loss (\S+)", output)] for output in outputs)
    assert len(one) == 2 and all("test accuracy" in output for output in outputs)
    np.testing.assert_allclose(three, one, atol=1e-4)


def test_digits_reaches_98_percent():
    found = re.search(r"test accuracy (\S+) %", run(on_ranks(1, "examples/digits.py", "--seed", "1")))
    assert found and float(found[1]) >= 98.0


NO_MPI = "raise ImportError('no MPI in this test')"


def test_notebook_runs_without_mpi(tmp_path, monkeypatch):
    for package in ("mpi4py", "mpi4jax"):
        (tmp_path / f"{package}.py").write_text(NO_MPI)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    check = "import sys; print(sorted(m for m in sys.modules if m.split('.')[0] in ('mpi4py', 'mpi4jax')))"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert notebook.cells[-1].outputs[0].text.strip() == "[]"


@pytest.mark.parametrize("name", ["simulated_ranks", "several_ranks", "what_a_step_sends"])
def test_notebooks_run(name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    words = {"simulated_ranks": "on eight", "several_ranks": "ValueError: only here", "what_a_step_sends": "last to come"}
    assert words[name] in shown


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def test_six_lines_make_a_script_for_one_device_one_for_many():
    """Those that the quick start shows."""
    one, many = ROOT / "examples" / "one_device.py", ROOT / "examples" / "many_devices.py"
    names = [f"examples/{path.name}" for path in (one, many)]
    lines = [path.read_text().splitlines(keepends=True) for path in (one, many)]
    diff = [*difflib.unified_diff(*lines, *names, n=1)]
    assert "```diff\n" + "".join(diff) + "```" in (ROOT / "README.md").read_text()
    assert sum(line.startswith("+") and not line.startswith("+++") for line in diff) == 6
    losses = lambda output: [float(x) for x in re.findall(r"epoch \d: loss (\S+)", output)]
    device, alone, three = (losses(x) for x in run_all([on_ranks(1, one), on_ranks(1, many), on_ranks(3, many)]))
    assert len(device) == 5
    assert len(alone) == 5 and alone[-1] < 0.5 * alone[0]
    np.testing.assert_allclose(three, alone, atol=2e-4)


def test_readme_shows_the_quickstart():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks[0] == (ROOT / "examples" / "quickstart.py").read_text()
    assert len(blocks[0].splitlines()) <= 40
