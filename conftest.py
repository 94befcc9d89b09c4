"""Doctests run on one rank, after `jaxmpi.init()`; what one rank has compiled, those that tests start later find."""

import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi

_compiled = tempfile.TemporaryDirectory(prefix="jaxmpi-compiled-", ignore_cleanup_errors=True)


def pytest_configure() -> None:
    """Share what is compiled among the processes that the tests start: a third of the time of those that train models."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        jaxmpi.init()
        request.node.dtest.globs.update(jax=jax, jnp=jnp, np=np, optax=optax, jaxmpi=jaxmpi)
