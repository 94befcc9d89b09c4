"""Doctests run on one rank after `jaxmpi.init()`; all tests share a compilation cache."""

import os
import subprocess
import time
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

ROOT = Path(__file__).parent
COMPILED = ROOT / "build" / "compiled"
ON_ALL_RANKS = "collectives"  # the folder whose tests CI runs on every number of ranks
SKIP_FROM = "JAXMPI_TESTS_SKIP_FROM"  # the variable with the second from which tests are skipped
# markers of tests that `make test-all` runs, and neither `make test` nor `make test-slow`
LONG = (
    *("exhaustive", "matrix", "disagreements", "faults"),
    *("environments", "soak", "examples"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tables`, which writes the tables of docs/ in place of comparing them; `--minutes`."""
    parser.addoption("--tables", action="store_true", help="write docs/'s tables from the tests")
    parser.addoption("--minutes", type=float, help="skip the tests that have not started by then")


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs among the processes that the tests start, and with later runs."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # pytest-xdist's workers inherit what follows
    if config.getoption("tables"):
        os.environ["JAXMPI_WRITE_TABLES"] = "1"
    if (minutes := config.getoption("minutes")) is not None:
        os.environ.setdefault(SKIP_FROM, str(time.time() + 60 * minutes))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the test if the time of `--minutes` is over."""
    if time.time() > float(os.environ.get(SKIP_FROM, "inf")):
        pytest.skip("the time of --minutes is over")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the tables whose rows the tests have recorded, once all have run."""
    if session.config.getoption("tables") and not hasattr(session.config, "workerinput"):
        import tables

        tables.write()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Collect only test_*.py below tests/: its other files are programs and tables of tests."""
    in_tests = collection_path.is_relative_to(ROOT / "tests")
    if in_tests and collection_path.suffix == ".py" and not collection_path.match("test_*"):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of a file by their number of ranks, so that each pool starts once."""
    items.sort(key=lambda item: (str(item.path), _ranks(item)))
    for item in items:
        if item.path.parent.name == "end_to_end":
            item.add_marker(pytest.mark.examples)
    _mark_repeated(items)
    for item in items:
        if any(item.get_closest_marker(name) for name in LONG):
            item.add_marker(pytest.mark.long)
    if find_spec("mpi4jax") is None:
        for item in items:
            if item.get_closest_marker("mpi4jax") or "mpi4jax" in _texts(item):
                reason = "mpi4jax is not installed: make test TRANSPORT=mpi4jax"
                item.add_marker(pytest.mark.skip(reason=reason))
    if SKIP_FROM in os.environ:
        _start_elsewhere(items)


def _start_elsewhere(items: list[pytest.Item]) -> None:
    """Start with another file of slow tests for each commit: `--minutes` leaves out other ones."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    files = list(dict.fromkeys(str(item.path) for item in slow))
    head = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    first = int(commit or "0", 16) % max(len(files), 1)
    place = {file: k for k, file in enumerate([*files[first:], *files[:first]])}
    items.sort(key=lambda item: place.get(str(item.path), len(files)))


def _mark_repeated(items: list[pytest.Item]) -> None:
    """Mark every run of a test but the one on 3 ranks, which `make test` runs.

    Other suites run the other numbers of ranks.
    """
    numbers = defaultdict(set)
    for item in items:
        if not item.get_closest_marker("exhaustive"):
            numbers[_test(item)].add(_ranks(item))
    for item in items:
        if 3 in numbers[_test(item)] - {_ranks(item)}:
            on_all_ranks = item.path.parent.name == ON_ALL_RANKS
            item.add_marker(pytest.mark.slow if on_all_ranks else pytest.mark.exhaustive)


def _test(item: pytest.Item) -> tuple[str, str]:
    """A test without its number of ranks."""
    others = {name: repr(value) for name, value in _parameters(item).items() if name != "ranks"}
    return str(item.path), f"{getattr(item, 'originalname', item.name)} {others}"


def _ranks(item: pytest.Item) -> int:
    ranks = _parameters(item).get("ranks", 0)
    return ranks if isinstance(ranks, int) else 0


def _texts(item: pytest.Item) -> list[str]:
    return [value for value in _parameters(item).values() if isinstance(value, str)]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        jaxmpi.init()
        request.node.dtest.globs.update(jax=jax, jnp=jnp, np=np, optax=optax, jaxmpi=jaxmpi)
