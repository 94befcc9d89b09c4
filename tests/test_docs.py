"""Every block of Python in the documentation runs; those with >>> are doctests, the others are run here, on one rank."""

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
RECIPES = "fresh = tx.init(params)", '"stats": jaxmpi'  # go on from other ranks: test_recipes.py runs them
ELSEWHERE = {"README.md": "test_quickstart.py", "docs/data.md": "test_loaders.py"}  # which run them on several ranks


def blocks(language):
    """(page, line, code) of every block that is no doctest."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page, name = path.read_text(), str(path.relative_to(ROOT))
        for match in re.finditer(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
            if ">>>" in match[1] or any(recipe in match[1] for recipe in RECIPES):
                continue
            if not (language == "python" and name in ELSEWHERE):
                found.append(pytest.param(match[1], id=f"{name}:{page[: match.start()].count(chr(10)) + 1}"))
    return found


@pytest.fixture
def names(tmp_path):
    """What the pages speak of."""
    params = {"w": jnp.ones((8, 3)), "b": jnp.zeros(3)}

    def loss_of(params, batch, mask=1):
        return jnp.sum(mask * jnp.square(batch @ params["w"] + params["b"]).mean(axis=1)) / jnp.maximum(1, jnp.sum(mask))

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
    training = {"params": params, "tx": tx, "state": tx.init(params), "grads": params, "loss_of": loss_of, "batch": batch}
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
        names["state"] = jaxmpi.distributed(optax.adamw(1e-3), micro_batches=8).init(names["params"])
    exec(compile(code, "page", "exec"), names)
    if "init(axes=" in code:
        jaxmpi.finalize()


def test_there_are_blocks_of_python():
    assert len(blocks("python")) >= 10


@pytest.mark.parametrize("code", blocks("bash"))
def test_a_block_of_bash(code):
    subprocess.run(["bash", "-n"], input=code, text=True, check=True)
