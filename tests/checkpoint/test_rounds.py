"""The rounds of collectives in `save`, `latest` and `restore`, which raise any rank's error."""

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi._checkpoint import array_files, saving
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

ROUNDS = (
    "allgather_object",
    "broadcast_object",
    "broadcast_buffer",
    "extremes",
    "barrier",
    "gather_details",
    "start_vote",
)


@pytest.fixture(autouse=True)
def initialized():
    jaxmpi.init()


@contextmanager
def counted():
    """Yield a list that gets the name of each collective that the backend runs for Python."""
    backend, names = session.current("test"), []
    with pytest.MonkeyPatch.context() as patch:
        for name in ROUNDS:
            if hasattr(backend, name):
                patch.setattr(backend, name, noted(getattr(backend, name), name, names))
        yield names


def noted(call, name, names):
    def noted_call(*args, **kwargs):
        names.append(name)
        return call(*args, **kwargs)

    return noted_call


def of_rank(step):
    """Make a tree with all layouts: replicated, sharded, per rank; arrays and Python numbers."""
    w = jnp.arange(5.0) + step
    own = {
        "key": np.full(2, jaxmpi.rank() + step),
        "score": jaxmpi.rank() / 3,
        "name": "x" * (jaxmpi.rank() + 1),
    }
    return {
        "w": w,
        "step": step,
        "state": jaxmpi.sharded(optax.adam(0.1)).init({"w": w}),
        "own": jaxmpi.PerRankState(own),
    }


def count_rounds():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    two = ["extremes", "allgather_object"]
    with counted() as names:
        jaxmpi.save(directory, 1, {"w": jnp.ones(3), "step": 1})
    assert names == two
    trees = {step: of_rank(step) for step in (2, 3, 4)}
    with counted() as names:
        jaxmpi.save(directory, 2, trees[2])
    assert names[:3] == [*two, "allgather_object"]  # whether all ranks see the folder
    # where MPI allows no threads
    written = [] if session.monitor() is not None else ["allgather_object"]
    with counted() as names:
        jaxmpi.save(directory, 3, trees[3])
    assert names == [*two, *written]
    with counted() as names:
        jaxmpi.save(directory, 4, trees[4], background=False)
    assert names == [*two, *written, "allgather_object"]
    with counted() as names:
        assert jaxmpi.latest(directory) == 4
    found = ["extremes", "broadcast_object", "broadcast_object"]
    assert names == found
    jaxmpi.save(directory, 5, trees[4], in_memory=True)
    with counted() as names:
        assert jaxmpi.latest(directory) == 5
    assert sorted(names) == sorted([*found, "allgather_object"])  # whether all ranks see it
    jaxmpi.save(directory, 6, trees[4])
    got = jaxmpi.restore(directory, trees[2])
    assert got["own"].per_rank["score"] == jaxmpi.rank() / 3 and got["step"] == 4
    np.testing.assert_array_equal(got["own"].per_rank["key"], np.full(2, jaxmpi.rank() + 4))


@run_ranks(2, 3)
def test_save_takes_two_rounds():
    count_rounds()


@run_ranks(2, backend="xla")
def test_save_takes_two_rounds_on_xla():
    count_rounds()


@run_ranks(2, 3)
@pytest.mark.parametrize("in_memory", [False, True])
def test_save_names_the_rank_that_does_not_see_the_folder(in_memory):
    """The last rank looks elsewhere, which is how one machine can show two file systems."""
    directory, last = jaxmpi.broadcast_object(tempfile.mkdtemp()), jaxmpi.size() - 1
    advice = (
        "save without in_memory=True" if in_memory else "gather the state with jaxmpi.unshard first"
    )
    exists = os.path.exists
    with pytest.MonkeyPatch.context() as patch:
        if jaxmpi.rank() == last:
            patch.setattr(
                os.path, "exists", lambda path: "unfinished-" not in str(path) and exists(path)
            )
        with pytest.raises(
            jaxmpi.CheckpointError, match=f"save: rank {last} on .* does not see .*{advice}"
        ):
            jaxmpi.save(directory, 1, of_rank(1), in_memory=in_memory)
    assert jaxmpi.latest(directory) is None
    jaxmpi.save(directory, 2, of_rank(2), in_memory=in_memory)
    assert jaxmpi.latest(directory) == 2
    jaxmpi.save(directory, 3, of_rank(3), background=False)


@run_ranks(1, 2, 3)
def test_save_raises_the_error_of_a_copy_on_all_ranks_and_keeps_that_of_the_save_before():
    directory, last = (
        jaxmpi.broadcast_object(tempfile.mkdtemp()),
        jaxmpi.rank() == jaxmpi.size() - 1,
    )
    tree = of_rank(1)

    def refuse(*args, **kwargs):
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(array_files, "write", refuse)
        jaxmpi.save(directory, 1, tree)
        time.sleep(0.3)
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(saving, "to_host", refuse)
        with pytest.raises(jaxmpi.CheckpointError, match=r"^MemoryError: no room$"):
            jaxmpi.save(directory, 2, tree)
    with pytest.raises(jaxmpi.CheckpointError, match=r"^save: step 1: no room$"):
        jaxmpi.save(directory, 3, tree)
    assert jaxmpi.latest(directory) == 3


@run_ranks(2, 3)
def test_save_beside_another_call_is_a_mismatch_with_both():
    """The error names both calls, even if the ranks that save have different values."""
    directory, rank = jaxmpi.broadcast_object(tempfile.mkdtemp()), jaxmpi.rank()
    others = {
        "latest": lambda: jaxmpi.latest(directory),
        "barrier": jaxmpi.barrier,
        "tree_allreduce": lambda: jaxmpi.tree_allreduce(jnp.ones(2)),
    }
    for name, call in others.items():
        for odd in (0, jaxmpi.size() - 1):
            with pytest.raises(jaxmpi.RankMismatchError) as caught:
                call() if rank == odd else jaxmpi.save(directory, 1, {"x": rank})
            text = str(caught.value)
            assert (
                re.search(r"called save at .*test_rounds\.py:\d+", text)
                and f"called {name}" in text
            ), text
    assert jaxmpi.latest(directory) is None
    assert not os.listdir(directory)


WITHOUT_THREADS = """
import sys, mpi4py
mpi4py.rc.thread_level = "funneled"
import jax.numpy as jnp, jaxmpi
from jaxmpi._checkpoint import array_files
from jaxmpi._world import session
jaxmpi.init()
backend, rank = session.current("test"), jaxmpi.rank()
assert session.monitor() is None
allgather, count = backend.allgather_object, []
backend.allgather_object = lambda x: count.append(x) or allgather(x)
own = lambda step: jaxmpi.PerRankState(jnp.full(2, rank + step))
for step in (1, 2):
    jaxmpi.save(sys.argv[1], step, own(step))
# the first save: the folder, whether it is seen, and what was written; the second lacks "seen"
assert len(count) == 3 + 2, count
assert jaxmpi.restore(sys.argv[1], own(0)).per_rank.tolist() == [rank + 2] * 2
# rank 0 alone writes what is equal on all ranks, and the others have nothing to tell it
count.clear()
jaxmpi.save(sys.argv[1] + "-equal", 1, {"w": jnp.ones(3)})
assert len(count) == 1, count
assert jaxmpi.latest(sys.argv[1] + "-equal") == 1
write = array_files.write
if rank == 1:
    array_files.write = lambda *_: 1 / 0
jaxmpi.save(sys.argv[1], 3, own(3))
array_files.write = write
try:
    jaxmpi.latest(sys.argv[1])
except jaxmpi.CheckpointError as error:
    assert str(error) == "save: step 3: division by zero", error
    assert jaxmpi.latest(sys.argv[1]) == 2
    print(f"rank {rank}: all is well")
"""


def test_save_without_threads_writes_before_it_returns(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_THREADS)
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", script, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.count("all is well") == 2, done.stdout + done.stderr
