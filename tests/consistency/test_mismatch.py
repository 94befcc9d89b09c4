"""A RankMismatchError has its parts as attributes, and its text is made of them."""

import pickle

import numpy as np
import pytest

import jaxmpi
from jaxmpi import RankMismatchError
from jaxmpi._backends.base import Message
from jaxmpi._consistency.mismatch import Call, CallDetails, Report, mismatch_of, outliers
from jaxmpi._errors import MismatchSide, NotInitializedError
from jaxmpi.testing import run_ranks


def report(content, title="step", called_at="", **details):
    return Report(Call.of(title, content), CallDetails(**details), called_at=called_at)


def test_a_mismatch_shows_the_first_rank_beside_the_first_that_differs():
    a, b = (
        report("a", collectives=["allreduce sum", "bcast"]),
        report("b", collectives=["allreduce max", "bcast"]),
    )
    error = mismatch_of([a, a, b, a, b])
    assert error.function == "step" and error.leaf == ""
    assert error.what == "step: ranks 0, 1, 3 and ranks 2, 4 do not agree."
    assert error.sides == (
        MismatchSide((0, 1, 3), "step", (("sent", "allreduce sum"),)),
        MismatchSide((2, 4), "step", (("sent", "allreduce max"),)),
    )
    assert str(error) == (
        f"{error.what} {error.advice}"
        "\n  sent by ranks 0, 1, 3: allreduce sum\n  sent by ranks 2, 4: allreduce max"
    )


def test_a_mismatch_of_a_group_names_its_ranks():
    error = mismatch_of([report("a"), report("b")], ranks=[4, 6])
    assert [side.ranks for side in error.sides] == [(4,), (6,)]


def test_a_mismatch_of_functions_has_both_and_where_they_were_called():
    error = mismatch_of([report("a", "save", called_at="x.py:1"), report("b", "latest")])
    assert error.function == ""
    assert [(side.function, side.called_at) for side in error.sides] == [
        ("save", ("x.py:1",)),
        ("latest", ()),
    ]
    assert str(error).startswith("rank 0 called save at x.py:1, and rank 1 called latest. Every")


@pytest.mark.parametrize(
    ("mine", "theirs", "advice"),
    [
        ({"parameters": ["root=0"]}, {"parameters": ["root=1"]}, "with the same arguments"),
        (
            {"typed_arguments": ["x, of weak type"], "arguments": ["x"]},
            {"typed_arguments": ["x"], "arguments": ["x"]},
            "weak type",
        ),
        (
            {"collectives": ["allgather [3]"], "gathers": ["allgather"]},
            {"collectives": ["allgather [4]"], "gathers": ["allgather"]},
            "A gather takes arrays of one shape",
        ),
        (
            {"collectives": ["a"], "arguments": ["x"]},
            {"collectives": ["b"], "arguments": ["y"]},
            "send the same arrays",
        ),
        (
            {"arguments": ["x"], "equations": ["1"]},
            {"arguments": ["y"], "equations": ["2"]},
            "the xla backend",
        ),
        ({"control": ["x"]}, {"control": ["y"]}, "use jnp.where"),
    ],
)
def test_the_advice_follows_from_what_differs(mine, theirs, advice):
    error = mismatch_of([report("a", **mine), report("b", **theirs)])
    assert advice in error.advice and error.sides[0].lines != error.sides[1].lines


def test_one_program_at_two_messages_is_a_branch_or_a_caught_error():
    call = Call.of("step")
    error = mismatch_of([Report(call, message="allreduce"), Report(call, message="bcast")])
    assert "took different branches" in error.advice
    assert error.sides[1].lines == (("sent", "bcast"),)


def test_outliers_are_the_ranks_without_the_usual_value():
    assert outliers([5, 7, 5, 7, 7]) == [0, 2]
    assert outliers([5, 5]) == []


def test_errors_keep_their_parts_when_they_are_pickled():
    error = mismatch_of([report("a"), report("b")])
    for one in (
        error,
        NotInitializedError("rank"),
        jaxmpi.MPIError("no MPI", advice="Install it."),
    ):
        again = pickle.loads(pickle.dumps(one))
        assert str(again) == str(one) and vars(again) == vars(one)


def test_a_message_in_words_has_its_arrays():
    message = Message("allreduce sum", (((3,), "float32"), ((), "int32")))
    assert str(message) == "allreduce sum of float32[3], int32[]"


@run_ranks(3)
def test_a_mismatch_of_values_names_leaf_and_ranks():
    with pytest.raises(RankMismatchError) as caught:
        jaxmpi.synchronize({"w": np.ones(2 + jaxmpi.rank() // 2)})
    error = caught.value
    assert (error.function, error.leaf, error.ranks) == ("synchronize", "['w']", (2, 0))
    assert str(error) == f"{error.what} {error.advice}"


@run_ranks(2)
def test_a_mismatch_of_calls_has_both_sides():
    with pytest.raises(RankMismatchError) as caught:
        jaxmpi.tree_allreduce(np.ones(3 + jaxmpi.rank(), np.float32))
    error = caught.value
    assert error.function == "tree_allreduce"
    assert [side.ranks for side in error.sides] == [(0,), (1,)]
    sent = [line for side in error.sides for verb, line in side.lines if verb == "sent"]
    assert ["float32[3]" in sent[0], "float32[4]" in sent[1]] == [True, True]
