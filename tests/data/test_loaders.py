"""The recipes of docs/data.md: each rank reads its rows of every global batch, by any loader.

Each is resumed in the middle and at the end of an epoch, from the state that it has given.
"""

import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from jaxmpi.data import Batches

ROOT = Path(__file__).parents[2]
N, B = 22, 4
MODULES = {
    "Grain": "grain",
    "PyTorch": "torch",
    "tf.data": "tensorflow",
    "Hugging Face datasets": "datasets",
}
SCRIPT = """
import sys
import warnings
from pathlib import Path

import jax
import numpy as np

import jaxmpi

class Samples:
    def __len__(self):
        return {N}

    def __getitem__(self, row):
        return {{"x": np.full(3, row, np.float32), "row": np.int64(row)}}

def main():
    jaxmpi.init()
    dataset, B = Samples(), {B}
{before}
    def make():
{recipe}
        return loader

    def rows(batch):
        x, row = batch["x"], np.asarray(batch["row"])
        assert isinstance(x, jax.Array) and x.shape == (B // jaxmpi.size(), 3), batch
        np.testing.assert_array_equal(x, np.broadcast_to(row[:, None], x.shape))
        return row

    seen, states, loader = [], [], make()
    for batch in loader:
        seen.append(rows(batch))
        states.append(loader.state)
    loader.close()
    steps = {N} // B
    for cut, place in ((2, (0, 2 * B)), (steps, (1, 0))):
        again = make()
        again.state = states[cut - 1]
        assert tuple(again.state.values())[:2] == place
        rest = [rows(batch) for batch in again]
        again.close()
        if cut < steps:
            np.testing.assert_array_equal(np.stack(seen[:cut] + rest), np.stack(seen))
        else:
            seen += rest
    np.save(Path(sys.argv[1]) / f"{{jaxmpi.rank()}}.npy", np.stack(seen))

if __name__ == "__main__":
    main()
"""
BEFORE = {
    "PyTorch": 'warnings.filterwarnings("ignore", "os.fork")',
    "tf.data": 'import tensorflow as tf; types = {"x": tf.float32, "row": tf.int64}',
    "Hugging Face datasets": "import datasets; "
    "dataset = datasets.Dataset.from_list([dataset[i] for i in range(len(dataset))])",
}


def recipe(name):
    """The code under a heading of the page."""
    page = (ROOT / "docs" / "data.md").read_text()
    return re.search(
        rf"^### {re.escape(name)}\n.*?```python\n(.*?)```", page, re.DOTALL | re.MULTILINE
    )[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODULES)
def test_every_rank_reads_its_rows(tmp_path, name, ranks):
    if importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip(
            f"{MODULES[name]} is not installed here: pip install torch tensorflow-cpu datasets"
        )
    indent = lambda text: textwrap.indent(text, "    ")
    script = tmp_path / "read.py"
    script.write_text(
        SCRIPT.format(
            N=N, B=B, before=indent(BEFORE.get(name, "")), recipe=indent(indent(recipe(name)))
        )
    )
    launcher = ["-m", "jaxmpi", "run", "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(ranks):
        plan = Batches(np.arange(N), B, rank=rank, size=ranks, seed=0)
        want = np.stack([rows for _ in range(2) for rows in plan])
        np.testing.assert_array_equal(np.load(tmp_path / f"{rank}.npy"), want)
