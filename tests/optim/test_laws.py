"""Laws 1 and 3 for the transforms, the fast rows of the table.

`make test-all ONLY=matrix` runs all rows on every transport and backend.
"""

import jax
import pytest
from optim_cases import OPTIMIZERS, VARIANTS, check

import jaxmpi
from jaxmpi.testing import run_ranks

TABLE = pytest.mark.parametrize("variant", VARIANTS)


@TABLE
@pytest.mark.parametrize("optimizer", ["momentum", pytest.param("lamb", marks=pytest.mark.slow)])
def test_simulated_ranks_train_as_one(variant, optimizer):
    with jaxmpi.simulate(3):
        check(variant, optimizer)


@run_ranks(2, 3)
@TABLE
def test_ranks_train_as_one(variant):
    check(variant, "adam")


@pytest.mark.slow
@run_ranks(3)
@TABLE
def test_ranks_train_as_one_under_plain_jit(variant):
    check(variant, "adamw", jit=jax.jit)


@pytest.mark.slow
@run_ranks(2, backend="xla")
@TABLE
def test_ranks_of_xla_train_as_one(variant):
    check(variant, "adamw")


@pytest.mark.matrix
@run_ranks(1, 2, 3, 4)
@TABLE
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_matrix(variant, optimizer):
    check(variant, optimizer)


@pytest.mark.matrix
@run_ranks(2, 3, 4, backend="xla")
@TABLE
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_matrix_of_xla(variant, optimizer):
    check(variant, optimizer)


@pytest.mark.matrix
@TABLE
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_matrix_of_simulated_ranks(variant, optimizer, ranks):
    with jaxmpi.simulate(ranks):
        check(variant, optimizer)
