"""Random programs with one rank that deviates: right numbers, or the same error on all ranks.

See disagreements.py.
"""

import os

import pytest
from disagreements import DEVIATIONS, check, expected, make
from programs import on_ranks, run

from jaxmpi.testing import run_ranks

SOME, ALL, AT_ONCE = 20, 300, 50
OTHER = "native" if os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax" else "mpi4jax"


@pytest.mark.slow
@run_ranks(2, 3)
def test_some_programs():
    check(range(SOME))


@pytest.mark.slow
@run_ranks(2, 3, backend="xla")
def test_some_programs_on_xla():
    check(range(SOME, 2 * SOME))


def check_in_a_job(ranks, way, seeds, **environ):
    backend, transport = ("xla", "auto") if way == "xla" else ("mpi", way)
    command = on_ranks(ranks, "tests/disagreements.py", str(seeds.start), str(seeds.stop))
    output = run(command, JAXMPI_TRANSPORT=transport, JAXMPI_BACKEND=backend, **environ)
    assert "refused" in output and "right" in output, output


@pytest.mark.slow
@pytest.mark.mpi4jax
@pytest.mark.parametrize("ranks", [2, 3])
def test_some_programs_on_the_other_transport(ranks):
    check_in_a_job(ranks, OTHER, range(2 * SOME, 3 * SOME))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_some_programs_between_nodes(ranks):
    check_in_a_job(ranks, "native", range(3 * SOME, 4 * SOME), JAXMPI_NODE_RANKS="1")


@pytest.mark.disagreements
@pytest.mark.parametrize("way", ["native", "mpi4jax", "xla"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_programs(ranks, way):
    for first in range(0, ALL, AT_ONCE):
        check_in_a_job(ranks, way, range(first, first + AT_ONCE))


def test_the_programs_deviate():
    made = [make(seed, 3) for seed in range(200)]
    assert {what for what, _ in made} == set(DEVIATIONS)
    for what, programs in made:
        assert programs.count(programs[0]) in ((3,) if what == "none" else (1, 2))
    differ = [expected(programs) is None for what, programs in made if what != "none"]
    assert 0.5 < sum(differ) / len(differ) < 0.9
