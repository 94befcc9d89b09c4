"""Doctests run on one rank, after `jaxmpi.init()`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        jaxmpi.init()
        request.node.dtest.globs.update(jax=jax, jnp=jnp, np=np, optax=optax, jaxmpi=jaxmpi)
