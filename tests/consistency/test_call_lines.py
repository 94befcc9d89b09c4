"""A mismatch in an eager collective names the line of this call, not of the first compiled one."""

import inspect
import os
import re
import tempfile
import threading

import numpy as np
import optax
import pytest
from flax import nnx

import jaxmpi
from jaxmpi._consistency.eager_calls import EagerCalls
from jaxmpi.testing import run_ranks

X = np.ones(4, np.float32)
DIRECTORY = os.path.join(tempfile.gettempdir(), "jaxmpi-call-lines")


def rows():
    return np.ones((jaxmpi.size(), 2), np.float32)


def calls():
    state = jaxmpi.sharded(optax.sgd(0.1, momentum=0.9)).init({"w": X})
    return {
        "tree_allreduce": (jaxmpi.tree_allreduce, X),
        "tree_allreduce of a count": (jaxmpi.tree_allreduce, np.int32(3), "sum"),
        "tree_bcast": (jaxmpi.tree_bcast, X),
        "tree_reduce": (jaxmpi.tree_reduce, X),
        "tree_allgather": (jaxmpi.tree_allgather, X),
        "tree_alltoall": (jaxmpi.tree_alltoall, rows()),
        "tree_reduce_scatter": (jaxmpi.tree_reduce_scatter, rows()),
        "average_metrics": (jaxmpi.average_metrics, {"loss": 1.0}),
        "any_rank": (jaxmpi.any_rank, True),
        "unshard": (jaxmpi.unshard, state),
        "merge_metrics": (jaxmpi.merge_metrics, nnx.MultiMetric(loss=nnx.metrics.Average())),
        "allgather_object": (jaxmpi.allgather_object, 1),
        "broadcast_object": (jaxmpi.broadcast_object, 1),
        "barrier": (jaxmpi.barrier,),
        "synchronize": (jaxmpi.synchronize, X),
        "Throughput.read": (jaxmpi.Throughput().read,),
        "save": (jaxmpi.save, DIRECTORY, 1, {"w": X}),
        "latest": (jaxmpi.latest, DIRECTORY),
    }


def check_lines():
    rank, here = jaxmpi.rank(), inspect.currentframe()
    for name, (function, *args) in calls().items():
        if name != "save":
            function(*args)
            function(*args)
        line = here.f_lineno + 4  # of the call that the other ranks do not make
        with pytest.raises(jaxmpi.RankMismatchError) as caught:
            if rank:
                jaxmpi.tree_allgather({"other": X})
            function(*args)
        text = str(caught.value)
        assert f" at test_call_lines.py:{line}" in text, (name, text)
        assert f" at test_call_lines.py:{line - 1}" in text, (name, text)
        named = text.count(f":{line}") + text.count(f":{line - 1}")
        assert text.count("test_call_lines.py") == named, (name, text)
    assert jaxmpi.allgather_object(rank) == [0, 1]


@run_ranks(2)
def test_mismatch_names_the_line_of_this_call():
    check_lines()


@run_ranks(2, backend="xla")
def test_mismatch_names_the_line_of_this_call_on_xla():
    check_lines()


@run_ranks(2)
def test_mismatch_names_this_line_where_both_call_the_same_function():
    here = inspect.currentframe()
    jaxmpi.tree_allreduce(X)
    jaxmpi.broadcast_object(1)
    line = here.f_lineno + 2
    with pytest.raises(jaxmpi.RankMismatchError) as caught:
        jaxmpi.tree_allreduce(X, "sum" if jaxmpi.rank() else "mean")
    text = str(caught.value)
    assert text.count(f" at test_call_lines.py:{line}") == text.count("test_call_lines.py") >= 2, (
        text
    )
    line = here.f_lineno + 2
    with pytest.raises(jaxmpi.RankMismatchError, match="do not agree") as caught:
        jaxmpi.save(DIRECTORY, jaxmpi.rank(), {"w": X})
    text = str(caught.value)
    for rank in range(2):
        assert f"called by rank {rank} at test_call_lines.py:{line}" in text, text


@run_ranks(3)
def test_a_loop_over_unequal_shards_is_told_to_use_batches():
    """10 samples on 3 ranks: the last one has another turn of the loop."""
    here, step = inspect.currentframe(), jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))
    line = here.f_lineno + 1
    shard = jaxmpi.shard(np.arange(10.0, dtype=np.float32))
    barrier = here.f_lineno + 4
    with pytest.raises(jaxmpi.RankMismatchError, match=r"rank 2 called <lambda>") as caught:
        for x in shard:
            step(x)
        jaxmpi.barrier()
    text = str(caught.value)
    assert f"called barrier at test_call_lines.py:{barrier}" in text, text
    assert re.search(
        rf"sent by rank 2: allreduce \w+ of float32\[\] at test_call_lines.py:{line - 2}\b", text
    ), text
    assert (
        f"jaxmpi.shard at test_call_lines.py:{line} has more samples on some ranks than on others"
        in text
    ), text
    assert "jaxmpi.batches" in text, text


class End:
    """An output of a program."""

    ready = False

    def is_ready(self):
        return self.ready


def test_the_call_that_runs_is_the_first_whose_program_has_not_ended():
    calls, ends, frame = EagerCalls(), [End(), End()], inspect.currentframe()
    thread, first = threading.get_ident(), frame.f_lineno + 2
    assert calls.line() == ""
    calls.begin({})
    calls.begin({thread: ends[0]})  # that of the first call
    calls.begin({thread: ends[1]})
    assert calls.line() == f"test_call_lines.py:{first}"
    ends[0].ready = True
    assert calls.line() == f"test_call_lines.py:{first + 1}"
    ends[1].ready = True
    assert calls.line() == f"test_call_lines.py:{first + 2}"
    assert calls.lines() == [f"test_call_lines.py:{first + i}" for i in (2, 1, 0)]
    calls.clear()
    assert calls.line() == "" and calls.lines() == []
