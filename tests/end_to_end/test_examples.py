"""The examples that train do what they say, on one rank and on more, from beginning to end."""

import ast
import re
import subprocess
import sys

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from programs import ROOT, on_ranks, run, run_all

ARGUMENTS = ["--epochs", "3", "--dtype", "float64"]
IN_A_NOTEBOOK = f"""
import runpy, sys
import jaxmpi
sys.argv = ["digits.py", *{ARGUMENTS}]
with jaxmpi.simulate(4):
    runpy.run_path("examples/digits.py")
"""


def curve(output, ranks, falls_to=0.5):
    """Return the losses of three epochs, which fall, and the number of recognized test images."""
    losses = [float(x) for x in re.findall(r"train loss (\S+)", output)]
    assert len(losses) == 3 and losses[-1] < falls_to * losses[0], output
    found = re.search(r"test accuracy \S+ % \((\d+) of 360\), \d+ images/s on (\d) rank", output)
    assert found and int(found[2]) == ranks, output
    return losses, int(found[1])


@pytest.fixture(scope="module")
def digits():
    """Return the output of digits.py on two ranks."""
    return run(on_ranks(2, "examples/digits.py", *ARGUMENTS))


def test_digits_has_the_same_loss_curve_on_any_number_of_ranks_and_every_backend(digits):
    """Curves agree to 1e-12 in float64, with a batch of 48 that all sizes divide."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(IN_A_NOTEBOOK)])
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    ).execute()
    command = ["examples/digits.py", *ARGUMENTS]
    three, single, on_xla = run_all(
        [
            on_ranks(3, *command),
            on_ranks(1, *command),
            ["env", "JAXMPI_BACKEND=xla", *on_ranks(2, *command)],
        ]
    )
    simulated = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    want, recognized = curve(single, 1)
    for name, output, ranks in (
        ("mpi", digits, 2),
        ("mpi", three, 3),
        ("xla", on_xla, 2),
        ("simulated", simulated, 4),
    ):
        losses, correct = curve(output, ranks)
        np.testing.assert_allclose(losses, want, rtol=1e-12, err_msg=f"{name}, {ranks}")
        assert correct == recognized, name


def test_digits_in_linen_has_the_same_loss_curve_on_any_number_of_ranks():
    """Curves in float32 differ by 5e-7 over these 87 steps, since sums have another order.

    Over all 30 epochs it is 2e-6.
    """
    counts = (1, 3)
    outputs = run_all(
        on_ranks(ranks, "examples/digits_linen.py", "--epochs", "3") for ranks in counts
    )
    curves, correct = zip(*map(curve, outputs, counts), strict=True)
    np.testing.assert_allclose(*curves, rtol=1e-5)
    assert np.ptp(correct) <= 1


def test_a_batch_of_more_images_than_there_are_is_refused():
    for name in ("digits", "digits_linen"):
        command = [sys.executable, f"examples/{name}.py", "--batch-size", "2000"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "--batch-size is 2000, and there are 1437 training images" in done.stderr


def test_the_two_digits_have_the_same_functions():
    """They differ in the model, and in what calls it."""
    functions = []
    for name in ("digits", "digits_linen"):
        source = (ROOT / "examples" / f"{name}.py").read_text()
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        functions.append({node.name: ast.get_source_segment(source, node) for node in nodes})
    digits, linen = functions
    assert {"shift", "evaluate"} <= linen.keys() <= digits.keys()
    for name in ("shift", "evaluate"):
        assert linen[name] == digits[name]


def test_digits_learns_with_every_transform(digits):
    """Sharded state changes nothing; what sends less still learns."""
    options = ("--sharded", "--codec int8", "--local-every 4 --codec powersgd")
    outputs = run_all(
        on_ranks(2, "examples/digits.py", *ARGUMENTS, *words.split()) for words in options
    )
    (sharded, _), *_ = [curve(output, 2, falls_to=0.6) for output in outputs]
    np.testing.assert_allclose(sharded, curve(digits, 2)[0], rtol=1e-12)


SMALL = "--steps 12 --batch-size 12 --length 32 --layers 2 --width 32 --megabytes 0.3"
GPT = ("examples/gpt.py", *SMALL.split())


def losses_in(output):
    return [float(x) for x in re.findall(r"(?:train|held out) (\d\S+)", output)]


def test_gpt_has_the_same_losses_on_any_number_of_ranks():
    """Training and held-out losses agree, with replicated and sharded state and parameters."""
    runs = [
        (1, "--sample 20"),
        (3, "--sample 20 --sharded"),
        (2, "--sample 20 --fully-sharded"),
        (2, "--sample 0 --local-every 3 --diloco"),
        (4, "--sample 0 --local-every 3 --diloco --islands 2"),
        (4, "--sample 0 --local-every 3 --diloco --islands 2 --sharded"),
    ]
    commands = [on_ranks(ranks, *GPT, *options.split()) for ranks, options in runs]
    *same, diloco, islands, sharded = run_all(commands)
    one, *others = map(losses_in, same)
    assert len(one) == 12 and all("def main(arguments):" in output for output in same)
    for other in others:
        np.testing.assert_allclose(other, one, atol=2e-3)
    assert one[-1] < 0.95 * one[0]
    for output in (islands, sharded):  # two islands of two ranks train as two ranks
        np.testing.assert_allclose(losses_in(output), losses_in(diloco), atol=2e-3)
    assert losses_in(diloco)[-1] < 0.99 * losses_in(diloco)[0]


def test_a_deep_equilibrium_model_has_the_same_losses_on_any_number_of_ranks():
    """The model's while_loop is differentiated implicitly."""
    outputs = run_all(on_ranks(ranks, "examples/deq.py", "--epochs", "2") for ranks in (1, 3))
    one, three = ([float(x) for x in re.findall(r"train loss (\S+)", output)] for output in outputs)
    assert len(one) == 2 and all("test accuracy" in output for output in outputs)
    np.testing.assert_allclose(three, one, atol=1e-4)


def test_digits_reaches_98_percent():
    found = re.search(
        r"test accuracy (\S+) %", run(on_ranks(1, "examples/digits.py", "--seed", "1"))
    )
    assert found and float(found[1]) >= 98.0
