"""Every block of Python in the documentation runs.

Blocks with >>> are doctests; the others run here, on one rank. All of them run on two ranks, too.
"""

import doctest
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmpi
from jaxmpi.testing import run_ranks

ROOT = Path(__file__).parent.parent
# go on from other ranks: test_recipes.py runs them
RECIPES = "fresh = tx.init(params)", '"stats": jaxmpi'
# pages whose blocks another test runs, on several ranks
ELSEWHERE = {"README.md": "test_quickstart.py", "docs/data.md": "test_loaders.py"}
OF_ONE_PROCESS = "simulate(", "jaxmpi.launch("  # errors on a rank
PAGES_ON_TWO_RANKS = [
    f"docs/{path.name}"
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.name != "sharp-bits.md"  # shows the wrong ways, too
]


def blocks(language):
    """List (page, line, code) of every block that is no doctest."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page, name = path.read_text(), str(path.relative_to(ROOT))
        for match in re.finditer(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
            if ">>>" in match[1] or any(recipe in match[1] for recipe in RECIPES):
                continue
            if not (language == "python" and name in ELSEWHERE):
                found.append(
                    pytest.param(match[1], id=f"{name}:{page[: match.start()].count(chr(10)) + 1}")
                )
    return found


def names_of_pages(directory):
    """Return the names that the pages use."""
    params = {"w": jnp.ones((8, 3)), "b": jnp.zeros(3)}

    def loss_of(params, batch, mask=1):
        return jnp.sum(
            mask * jnp.square(batch @ params["w"] + params["b"]).mean(axis=1)
        ) / jnp.maximum(1, jnp.sum(mask))

    tx = jaxmpi.distributed(optax.adam(1e-3))
    batch, mask = jnp.arange(64.0).reshape(8, 8), np.arange(8) < 5
    modules = {
        "functools": functools,
        "jax": jax,
        "jnp": jnp,
        "lax": lax,
        "np": np,
        "optax": optax,
        "sys": sys,
        "jaxmpi": jaxmpi,
    }
    training = {
        "params": params,
        "tx": tx,
        "state": tx.init(params),
        "grads": params,
        "loss_of": loss_of,
        "batch": batch,
    }
    squares = lambda params, batch: jnp.square(batch @ params["w"]).mean(axis=1)
    others = {
        "key": jax.random.key(0),
        "squares": squares,
        "mask": mask,
        "loss": 1.0,
        "local_loss": 1.0,
        "loss_of_this_rank": lambda params: jnp.square(params["w"]).sum(),
        "load": float,
        "directory": directory,
        "step": 3,
    }
    return modules | training | others | {"run": {"params": params}}


@pytest.mark.parametrize("code", blocks("python"))
def test_a_block_of_python(code, tmp_path):
    run_block(code, names_of_pages(tmp_path))


def run_block(code, names):
    if "init(axes=" in code:
        jaxmpi.finalize()
    else:
        jaxmpi.init()
    if "faults.inject" in code:
        names["step"] = lambda: None
    exec(compile(code, "page", "exec"), names)
    if "init(axes=" in code:
        jaxmpi.finalize()
    if "def test_train_step" in code and jaxmpi.size() == 1:
        names["test_train_step"]()


@pytest.mark.slow
@run_ranks(2)
@pytest.mark.parametrize("page", PAGES_ON_TWO_RANKS)
def test_a_page_on_two_ranks(page):
    """The blocks of a page raise nothing on two ranks, whatever they print there."""
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    names = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "jaxmpi": jaxmpi}
    fences = re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    for code in fences:
        if any(call in code for call in OF_ONE_PROCESS):
            continue
        for example in doctest.DocTestParser().get_examples(code):
            exec(compile(example.source, page, "single"), names)
    for block in blocks("python"):
        [code] = block.values
        skipped = any(call in code for call in OF_ONE_PROCESS)
        if block.id.startswith(f"{page}:") and not skipped:
            run_block(code, names_of_pages(directory))


def test_there_are_blocks_of_python():
    assert len(blocks("python")) >= 10


@pytest.mark.parametrize("code", blocks("bash"))
def test_a_block_of_bash(code):
    subprocess.run(["bash", "-n"], input=code, text=True, check=True)


SBATCH = (ROOT / "packaging/slurm/train.sbatch").read_text()
# what the batch script calls: a job that DONE lets come to its end, and that exits with CODE
SRUN = """
trap 'sleep 0.3; exit ${CODE:-0}' TERM
[ -z "$SIGNALED" ] || for _ in $(seq 100); do sleep 0.1; done
[ -z "$DONE" ] || touch finished
exit ${CODE:-0}
"""
CALLED = {"srun": SRUN, "jaxmpi": SRUN, "scontrol": 'echo "$*"', "module": "", "activate": ""}


def test_the_page_has_the_batch_script_of_slurm():
    assert [block.values[0] for block in blocks("bash") if "#SBATCH" in block.values[0]] == [SBATCH]


@pytest.mark.parametrize("start", ["srun", "jaxmpi run"])
@pytest.mark.parametrize(
    ("environ", "stale", "code", "requeued"),
    [
        ({}, False, 0, True),
        ({}, True, 0, True),  # a file of an earlier job
        ({"DONE": "1"}, False, 0, False),
        ({"SLURM_RESTART_COUNT": "1"}, True, 0, False),
        ({"CODE": "5"}, False, 5, False),
        ({"SIGNALED": "1"}, False, 0, True),
        ({"SIGNALED": "1", "CODE": "5"}, False, 5, False),
    ],
)
def test_the_batch_script_of_slurm_requeues_a_job_that_is_not_done(
    environ, stale, code, requeued, start, tmp_path
):
    if "SIGNALED" in environ and start == "srun":
        pytest.skip("the signal goes to the job's tasks, not to the script")
    script = SBATCH
    if start == "jaxmpi run":
        [lines] = [block.values[0] for block in blocks("bash") if "trap" in block.values[0]]
        script = re.sub(r"^srun .*\n", lambda _: lines, SBATCH, flags=re.MULTILINE)
    folder = tmp_path / ".venv/bin"
    folder.mkdir(parents=True)
    for name, text in CALLED.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    if stale:
        (tmp_path / "finished").touch()
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**path, **slurm, **environ},
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        if "SIGNALED" in environ:
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(1)
            job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=20)
    assert (job.returncode, printed) == (code, "requeue 7\n" * requeued)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    ROOT / "native/README.md",
    ROOT / "benchmarks/results/README.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_ends_before_column_80(page):
    """Code in the documentation ends before column 80, where the site cuts lines."""
    in_fence, long = False, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            in_fence = not in_fence
        elif (in_fence or line.startswith("    ")) and len(line) > 79:
            long.append(f"{number}: {line}")
    assert not long, "\n".join(long)


@functools.cache
def anchors(page):
    """Return the anchors of a page's headings, as Python-Markdown and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles
    }


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) < 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_is_in_the_navigation(page):
    if page.parent != ROOT:
        assert f" {page.relative_to(ROOT / 'docs')}\n" in (ROOT / "mkdocs.yml").read_text()
