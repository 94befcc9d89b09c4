"""Every block of Python in the documentation runs.

Blocks with >>> are doctests; the others run here, on one rank.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmpi

ROOT = Path(__file__).parent.parent
# go on from other ranks: test_recipes.py runs them
RECIPES = "fresh = tx.init(params)", '"stats": jaxmpi'
# pages whose blocks another test runs, on several ranks
ELSEWHERE = {"README.md": "test_quickstart.py", "docs/data.md": "test_loaders.py"}


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


@pytest.fixture
def names(tmp_path):
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
        "directory": tmp_path,
        "step": 3,
    }
    return modules | training | others | {"run": {"params": params}}


@pytest.mark.parametrize("code", blocks("python"))
def test_a_block_of_python(code, names):
    if "init(axes=" in code:
        jaxmpi.finalize()
    else:
        jaxmpi.init()
    if "faults.inject" in code:
        names["step"] = lambda: None
    if "micro_batches" in code:
        names["state"] = jaxmpi.distributed(optax.adamw(1e-3), micro_batches=8).init(
            names["params"]
        )
    exec(compile(code, "page", "exec"), names)
    if "init(axes=" in code:
        jaxmpi.finalize()


def test_there_are_blocks_of_python():
    assert len(blocks("python")) >= 10


@pytest.mark.parametrize("code", blocks("bash"))
def test_a_block_of_bash(code):
    subprocess.run(["bash", "-n"], input=code, text=True, check=True)


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
