"""Every public function gives the same bits under strict promotion and 64-bit integers."""

from pathlib import Path

import pytest
from programs import on_ranks, run

SCRIPT = Path(__file__).with_name("strict_script.py")


def check(ranks, *names, **environ):
    output = run(on_ranks(ranks, str(SCRIPT), *names), JAX_ENABLE_X64="1", **environ)
    assert "DIFFERS" not in output and output.count("done") == ranks, output


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_strict_promotion_changes_nothing(ranks):
    check(ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "environ", [{"JAXMPI_BACKEND": "xla"}, {"JAXMPI_NODE_RANKS": "1", "JAXMPI_OVERLAP": "1"}]
)
def test_strict_promotion_changes_nothing_on_other_ways(environ):
    check(2, **environ)


@pytest.mark.slow
@pytest.mark.mpi4jax
def test_strict_promotion_changes_nothing_on_mpi4jax():
    check(2, JAXMPI_TRANSPORT="mpi4jax")
