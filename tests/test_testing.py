"""The test kit: what it says when a rank fails, hangs or dies, and that the next test runs."""

import os
import time

import pytest

import jaxmpi
from jaxmpi.testing import RankFailure, run_ranks


@run_ranks(2)
def fine(word):
    assert jaxmpi.allgather_object((jaxmpi.rank(), word)) == [(0, word), (1, word)]


@run_ranks(2)
def fails_on_one():
    print("printed by", jaxmpi.rank())
    assert jaxmpi.rank() == 0, "one is not zero"


@run_ranks(2, timeout_seconds=4.0)
def hangs_on_one():
    if jaxmpi.rank() == 1:
        time.sleep(100)


@run_ranks(2, timeout_seconds=20.0)
def dies_on_one():
    if jaxmpi.rank() == 1:
        os._exit(7)
    jaxmpi.barrier()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fails_on_one, ["failed on 1 of 2 ranks", "rank 1", "one is not zero", "printed by 1"]),
        (hangs_on_one, ["ranks [1] did not end within 4.0 s", "in hangs_on_one"]),
        (dies_on_one, ["the rank is gone"]),
    ],
)
def test_a_failure_is_told_and_the_next_test_runs(function, words):
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        function(ranks=2)
    assert time.monotonic() - start < 30
    for word in words:
        assert word in str(failure.value), str(failure.value)
    fine(ranks=2, word="again")


def test_sizes_must_be_numbers_of_ranks():
    with pytest.raises(ValueError, match=r"run_ranks: sizes are \(\)"):
        run_ranks()
    with pytest.raises(ValueError, match=r"sizes are \(0, 2\)"):
        run_ranks(0, 2)
