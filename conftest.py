"""Doctests run on one rank, after `jaxmpi.init()`; what one rank has compiled, those that tests start later find."""

import os
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi

ON_ALL_RANKS = "collectives"  # the folder whose tests CI runs on every number of ranks
# programs of tests, which are no modules
collect_ignore = [
    "tests/job/monitor/busy_script.py",
    "tests/job/monitor/fault_script.py",
    "tests/optim/strict_script.py",
    "tests/pmap_programs",
    "tests/job/process/exit_script.py",
    "tests/smoke.py",
    "tests/world/jax_processes_script.py",
]
COMPILED = Path(__file__).parent / "build" / "compiled"


def pytest_configure() -> None:
    """Share what is compiled among the processes that the tests start, and with the next run of the tests."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of as many ranks stand beside each other within a file, so that these ranks are started once."""
    items.sort(key=lambda item: (str(item.path), _ranks(item)))
    _mark_repeated(items)
    if find_spec("mpi4jax") is None:
        for item in items:
            wants = any(
                isinstance(value, str) and value == "mpi4jax"
                for value in _parameters(item).values()
            )
            if wants or item.get_closest_marker("mpi4jax"):
                item.add_marker(
                    pytest.mark.skip(reason="mpi4jax is not installed: make test-mpi4jax")
                )


def _mark_repeated(items: list[pytest.Item]) -> None:
    """Of a test on several numbers of ranks, `make test` runs that on 3; another target has the other numbers."""
    numbers = defaultdict(set)
    for item in items:
        if not item.get_closest_marker("exhaustive"):
            numbers[_test(item)].add(_ranks(item))
    for item in items:
        if 3 in numbers[_test(item)] - {_ranks(item)}:
            item.add_marker(
                pytest.mark.slow
                if item.path.parent.name == ON_ALL_RANKS
                else pytest.mark.exhaustive
            )


def _test(item: pytest.Item) -> tuple[str, str]:
    """A test without its number of ranks."""
    others = {name: repr(value) for name, value in _parameters(item).items() if name != "ranks"}
    return str(item.path), f"{getattr(item, 'originalname', item.name)} {others}"


def _ranks(item: pytest.Item) -> int:
    ranks = _parameters(item).get("ranks", 0)
    return ranks if isinstance(ranks, int) else 0


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        jaxmpi.init()
        request.node.dtest.globs.update(jax=jax, jnp=jnp, np=np, optax=optax, jaxmpi=jaxmpi)
