"""An error that a rank catches is one on all ranks, and the next call of all of them fits."""

import threading

import jax
import numpy as np
import pytest

import jaxmpi
from jaxmpi.testing import run_ranks


class NotPickled:
    def __reduce__(self):
        raise ValueError("not today")


class NotRead:
    def __reduce__(self):
        return boom, ()


class NotReadOnRank1:
    def __reduce__(self):
        return boom_on_rank_1, ()


def boom():
    raise ValueError("cannot be made again")


def boom_on_rank_1():
    return boom() if jaxmpi.rank() == 1 else 7


def x():
    return np.arange(6, dtype=np.float32) + jaxmpi.rank()


def rows():
    return np.arange(2.0 * jaxmpi.size(), dtype=np.float32).reshape(jaxmpi.size(), 2)


# {name: (a good call, bad calls)}; each bad call makes the one rank that makes it raise
CALLS = {
    "tree_allreduce": (lambda: jaxmpi.tree_allreduce(x()), [
        lambda: jaxmpi.tree_allreduce(x(), "median"),
        lambda: jaxmpi.tree_allreduce({"a": "text"}),
        lambda: jaxmpi.tree_allreduce(x(), axis="nowhere"),
        lambda: jaxmpi.tree_allreduce(jax.random.key(0)),
        lambda: jaxmpi.tree_allreduce(x() > 2, "sum"),
        lambda: jaxmpi.tree_allreduce(2**70),
    ]),
    "tree_bcast": (lambda: jaxmpi.tree_bcast(x()), [
        lambda: jaxmpi.tree_bcast(x(), 99),
        lambda: jaxmpi.tree_bcast(x(), True),
        lambda: jaxmpi.tree_bcast(object()),
    ]),
    "tree_reduce": (lambda: jaxmpi.tree_reduce(x()), [
        lambda: jaxmpi.tree_reduce(x(), "sum", 99),
        lambda: jaxmpi.tree_reduce(x(), "no"),
    ]),
    "tree_allgather": (lambda: jaxmpi.tree_allgather(x()), [
        lambda: jaxmpi.tree_allgather({"a": {1, 2}}),
    ]),
    "tree_reduce_scatter": (lambda: jaxmpi.tree_reduce_scatter(rows()), [
        lambda: jaxmpi.tree_reduce_scatter(rows()[:, 0][None]),
        lambda: jaxmpi.tree_reduce_scatter(rows(), "no"),
        lambda: jaxmpi.tree_reduce_scatter(1.0),
    ]),
    "tree_alltoall": (lambda: jaxmpi.tree_alltoall(rows()), [
        lambda: jaxmpi.tree_alltoall(np.ones(99, np.float32)),
    ]),
    "broadcast_object": (lambda: jaxmpi.broadcast_object("a"), [
        lambda: jaxmpi.broadcast_object("a", 99),
        lambda: jaxmpi.broadcast_object("a", "0"),
    ]),
    "allgather_object": (lambda: jaxmpi.allgather_object("a"), [
        lambda: jaxmpi.allgather_object(NotPickled()),
        lambda: jaxmpi.allgather_object(NotRead()),
        lambda: jaxmpi.allgather_object(lambda: 0),
        lambda: jaxmpi.allgather_object(threading.Lock()),
    ]),
    "synchronize": (lambda: jaxmpi.synchronize({"a": x()}), [
        lambda: jaxmpi.synchronize({"a": x()}, 99),
        lambda: jaxmpi.synchronize({"b": x()}),
        lambda: jaxmpi.synchronize({"a": "text"}),
    ]),
    "average_metrics": (lambda: jaxmpi.average_metrics({"loss": x()[0]}, weight=2), [
        lambda: jaxmpi.average_metrics({"loss": "text"}, weight=2),
        lambda: jaxmpi.average_metrics({"loss": x()[0]}, weight=-1),
        lambda: jaxmpi.average_metrics({"loss": x()[0]}, weight="2"),
    ]),
    "any_rank": (lambda: jaxmpi.any_rank(False), [
        lambda: jaxmpi.any_rank("text"),
        lambda: jaxmpi.any_rank({"a": 1}),
    ]),
    "barrier": (jaxmpi.barrier, [lambda: jaxmpi.tree_allreduce(x(), "no")]),
}  # fmt: skip


def check_that_the_next_calls_fit():
    """Different calls in a row, of shapes that the refused calls have, too."""
    n = jaxmpi.size()
    for k in range(2):
        mean = np.arange(6) + (n - 1) / 2 + k
        np.testing.assert_allclose(jaxmpi.tree_allreduce(x() + k), mean, rtol=1e-6)
        assert jaxmpi.allgather_object((jaxmpi.rank(), k)) == [(rank, k) for rank in range(n)]
        np.testing.assert_allclose(
            jaxmpi.tree_allgather(np.float32(jaxmpi.rank() + k)), np.arange(n) + k
        )


def check_one_bad_call(name, bad_rank, first_ever):
    good, bads = CALLS[name]
    if not first_ever:
        good()
    for number, bad in enumerate(bads):
        error = None
        try:
            bad() if jaxmpi.rank() == bad_rank else good()
        except Exception as caught:
            error = caught
        assert error is not None, (name, number, "went through on this rank")
        assert jaxmpi.rank() == bad_rank or isinstance(
            error, (jaxmpi.RankMismatchError, TypeError, ValueError)
        ), error
        check_that_the_next_calls_fit()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, 3)
def test_what_one_rank_refuses_is_an_error_on_all_and_the_next_calls_fit(name, last):
    check_one_bad_call(name, jaxmpi.size() - 1 if last else 0, first_ever=last)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, backend="xla")
def test_on_xla_what_one_rank_refuses_is_an_error_on_all(name):
    check_one_bad_call(name, 1, first_ever=False)


@run_ranks(1, 2, 3)
def test_what_all_ranks_refuse_keeps_its_own_error():
    with pytest.raises(ValueError, match="tree_allreduce: op 'no' is unknown"):
        jaxmpi.tree_allreduce(x(), "no")
    with pytest.raises(TypeError, match="broadcast_object: root is a str"):
        jaxmpi.broadcast_object(1, "0")
    check_that_the_next_calls_fit()


@run_ranks(2, 3)
def test_a_refused_argument_is_named_on_the_other_ranks():
    words = r"(?s)tree_allreduce: rank 0 and rank.*ValueError: tree_allreduce: op 'no'"
    error, words = (
        (ValueError, "tree_allreduce: op 'no'")
        if jaxmpi.rank() == 0
        else (jaxmpi.RankMismatchError, words)
    )
    with pytest.raises(error, match=words):
        jaxmpi.tree_allreduce(x(), "no" if jaxmpi.rank() == 0 else "mean")
    check_that_the_next_calls_fit()


@pytest.mark.parametrize("function", ["allgather", "broadcast"])
@run_ranks(2, 3)
def test_objects_that_pickle_refuses_are_one_error_on_all_ranks(function):
    last = jaxmpi.size() - 1
    for obj, words in (
        (NotPickled(), r"cannot be pickled \(ValueError: not today\)"),
        (lambda: 0, "cannot be pickled"),
    ):
        with pytest.raises(TypeError, match=f"_object: the object of rank {last} {words}"):
            if function == "allgather":
                jaxmpi.allgather_object(obj if jaxmpi.rank() == last else 0)
            else:
                jaxmpi.broadcast_object(obj, last)
        check_that_the_next_calls_fit()


@pytest.mark.parametrize("function", ["allgather", "broadcast"])
@run_ranks(2, 3)
def test_objects_that_one_rank_cannot_read_are_one_error_on_all_ranks(function):
    words = (
        "the object of rank 0 cannot be read back from its pickle on rank 1 "
        r"\(ValueError: cannot be made again\)"
    )
    with pytest.raises(TypeError, match=words):
        if function == "allgather":
            jaxmpi.allgather_object(NotReadOnRank1() if jaxmpi.rank() == 0 else 0)
        else:
            jaxmpi.broadcast_object(NotReadOnRank1())
    check_that_the_next_calls_fit()


@run_ranks(2, 3)
def test_unpicklable_objects_of_ranks_that_are_not_root_do_not_matter():
    assert jaxmpi.broadcast_object("here" if jaxmpi.rank() == 1 else NotPickled(), 1) == "here"
