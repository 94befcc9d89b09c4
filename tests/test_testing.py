"""The test kit: what it says when a rank fails, hangs or dies, and that the next test runs."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi._job.launch.pool import Task, pool
from jaxmpi.testing import RankFailure, assert_equivalent, assert_replicated, run_ranks
from jaxmpi.testing.faults import inject


@run_ranks(2)
def fine(word):
    assert jaxmpi.allgather_object((jaxmpi.rank(), word)) == [(0, word), (1, word)]


@run_ranks(1)
def alone():
    assert jaxmpi.size() == 1


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fails_on_one, ["failed on 1 of 2 ranks", "rank 1", "one is not zero", "printed by 1"]),
        (
            hangs_on_one,
            [
                "ranks [1] did not end within 4 s",
                "in hangs_on_one",
                "the next call starts new ones",
            ],
        ),
        (dies_on_one, ["the rank is gone", "the next call starts new ones", "exited with code 7"]),
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


@pytest.mark.slow
def test_ranks_without_a_test_end(monkeypatch):
    fine(ranks=2, word="first")
    job = pool(2)
    alone(ranks=1)
    assert job.alive()
    monkeypatch.setattr(jaxmpi.testing, "IDLE_RANKS_SECONDS", 0.0)
    fine(ranks=2, word="not its own")
    assert job.alive()
    alone(ranks=1)
    assert not job.alive()
    fine(ranks=2, word="again")


def test_sizes_must_be_numbers_of_ranks():
    with pytest.raises(ValueError, match=r"run_ranks: sizes are \(\)"):
        run_ranks()
    with pytest.raises(ValueError, match=r"sizes are \(0, 2\)"):
        run_ranks(0, 2)


def linear_step(average):
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(w)
        if average:
            loss, grad = jax.lax.pmean((loss, grad), jaxmpi.AXIS)
        return w - 0.1 * grad, {"loss": loss, "rows": batch["x"] @ w}

    return step


BATCH = {"x": np.random.default_rng(0).normal(size=(12, 3)), "y": np.arange(12.0)}


def test_assert_equivalent_of_a_step():
    assert_equivalent(linear_step(True), [1, 2, 3, 4], np.ones(3), BATCH, batch_argnums=1)
    assert_equivalent(jaxmpi.jit(linear_step(True)), [2, 6], np.ones(3), BATCH, batch_argnums=(1,))


def test_assert_equivalent_finds_a_forgotten_mean():
    with pytest.raises(AssertionError, match=r"output \[1\]\['loss'\] differs between the ranks"):
        assert_equivalent(
            lambda w, b: (w, linear_step(False)(w, b)[1]),
            [1, 2],
            np.ones(3),
            BATCH,
            batch_argnums=1,
        )
    with pytest.raises(AssertionError, match=r"output \[0\] on 2 ranks, compared with 1"):
        assert_equivalent(
            lambda w, b: (jaxmpi.tree_allreduce(w, "sum"),),
            [1, 2],
            np.ones(3),
            BATCH,
            batch_argnums=1,
        )


def test_assert_equivalent_of_a_whole_loop():
    step = jaxmpi.jit(linear_step(True))

    def train():
        w, losses = np.ones(3), []
        for epoch in range(2):
            for batch in jaxmpi.batches(BATCH, 6, seed=0, epoch=epoch):
                w, metrics = step(w, batch)
                losses.append(metrics["loss"])
        return w, losses

    assert_equivalent(train, [1, 2, 3])


def test_assert_equivalent_of_a_batch_that_cannot_be_shared():
    with pytest.raises(ValueError, match="which 5 ranks cannot share") as caught:
        assert_equivalent(linear_step(True), [1, 5], np.ones(3), BATCH, batch_argnums=1)
    assert str(caught.value) == (
        "assert_equivalent: batch ['x'] has shape [12, 3], which 5 ranks cannot share. Pass a "
        "batch whose length is a multiple of 5, or leave 5 out of sizes."
    )


def test_an_argument_that_does_not_exist():
    with pytest.raises(ValueError, match=r"is 2, and there are 2 arg.*Name positions from 0 to 1"):
        assert_equivalent(linear_step(True), [1, 2], np.ones(3), BATCH, batch_argnums=2)
    with pytest.raises(ValueError, match=r"are 0 arguments. Pass the arguments of the step, too"):
        assert_equivalent(lambda: 1, [1, 2], batch_argnums=0)
    of_two, of_none = inject(lambda *args: args, "nan", argnum=2), inject(lambda: 1, "nan")
    with jaxmpi.simulate(1):
        with pytest.raises(ValueError, match=r"are 2 positional .* is 2. Name one from 0 to 1"):
            of_two(np.ones(3), np.ones(3))
        with pytest.raises(ValueError, match=r"are 0 positional .* -1. Pass it by its position"):
            of_none()


def test_launch_returns_what_each_rank_returns(capsys):
    """`launch` takes a function that no module has, with its closure."""
    scale = 2.0

    def work(x, *, name):
        print("here is", jaxmpi.rank(), name)
        mean = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))(scale * x * jaxmpi.rank())
        return jaxmpi.rank(), {"mean": mean}

    for ranks in (1, 2, 3):
        results = jaxmpi.launch(work, ranks, np.ones(3), name="launched")
        assert [rank for rank, _ in results] == list(range(ranks))
        for _, out in results:
            assert isinstance(out["mean"], np.ndarray)
            np.testing.assert_allclose(out["mean"], np.full(3, scale * (ranks - 1) / 2))
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == [f"[{r}] here is {r} launched" for r in range(3)]


@pytest.mark.slow
def test_launch_raises_what_a_rank_raises():
    with pytest.raises(RankFailure, match=r"(?s)failed on 1 of 2 ranks.*rank 1.*ZeroDivisionError"):
        jaxmpi.launch(lambda: 1 / (1 - jaxmpi.rank()), 2)
    job = pool(2)
    assert jaxmpi.launch(jaxmpi.rank, 2) == [0, 1] and pool(2) is job  # the ranks live on
    with pytest.raises(RankFailure, match="did not end within 3"):
        jaxmpi.launch(lambda: time.sleep(100 * jaxmpi.rank()), 2, timeout_seconds=3.0)
    with pytest.raises(RankFailure, match=r"ranks \[0\] still ran 3 s after that") as failure:
        jaxmpi.launch(lambda: jaxmpi.barrier() if jaxmpi.rank() == 0 else 1 / 0, 2)
    text = str(failure.value)
    assert (
        "ZeroDivisionError" in text
        and "the next call starts new ones" in text
        and "inf" not in text
    ), text

    def aborts():
        from mpi4py import MPI

        if jaxmpi.rank() == 1:
            MPI.COMM_WORLD.Abort(5)
        jaxmpi.barrier()

    with pytest.raises(
        RankFailure, match=r"(?s)the next call starts new ones.*called MPI_Abort with code 5"
    ) as failure:
        jaxmpi.launch(aborts, 2)
    assert "\0" not in str(failure.value)
    with pytest.raises(ValueError, match="ranks is 0"):
        jaxmpi.launch(print, 0)


def children():
    pids = set()
    for path in Path("/proc/self/task").glob("*/children"):
        pids.update(map(int, path.read_text().split()))
    return pids


@pytest.mark.slow
@pytest.mark.parametrize("where", ["wait", "Listener"])
def test_a_launch_after_an_interrupt_returns_its_own_results(monkeypatch, where):
    """Answers to an interrupted call are not taken for the next one's.

    No rank that was starting is left behind.
    """
    double = lambda x: (2 * x, jaxmpi.rank())
    pool(2).end()
    others = children()
    if where == "wait":
        assert jaxmpi.launch(double, 2, 1) == [(2, 0), (2, 1)]

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        target = (
            "jaxmpi._job.launch.pool.wait"
            if where == "wait"
            else "multiprocessing.connection.Listener.accept"
        )
        patch.setattr(target, interrupted)
        with pytest.raises(KeyboardInterrupt):
            jaxmpi.launch(double, 2, 2)
    assert children() <= others
    assert jaxmpi.launch(double, 2, 3) == [(6, 0), (6, 1)]
    assert jaxmpi.launch(double, 2, 4) == [(8, 0), (8, 1)]


def test_launches_of_several_threads_return_their_own_results():
    def work(x):
        time.sleep(0.02)
        return x, jaxmpi.size()

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda x: jaxmpi.launch(work, 1, x), range(12))] == [
            [(x, 1)] for x in range(12)
        ]


def test_a_launch_on_ranks_with_much_memory_keeps_what_was_compiled():
    """Ranks of tests drop compiled programs at 640 MiB; those of `launch` never do."""

    def traces(bytes_):
        import builtins

        if not hasattr(builtins, "kept"):
            builtins.kept, builtins.traced = np.ones(bytes_, np.uint8), []
            builtins.double = jax.jit(lambda x: builtins.traced.append(1) or 2 * x)
        builtins.double(np.float32(1))
        return len(builtins.traced)

    try:
        assert jaxmpi.launch(traces, 1, 640 << 20) == [1]
        assert jaxmpi.launch(traces, 1, 640 << 20) == [1]
    finally:
        pool(1).end()


def test_a_test_with_ranks_of_its_own_is_refused():
    with pytest.raises(
        ValueError,
        match=r"run_ranks: .*mine has a parameter ranks, which run_ranks adds itself. Take it out",
    ):

        @run_ranks(2)
        def mine(ranks):
            pass


@run_ranks(1, 2, 3)
def test_assert_replicated_names_the_leaf_and_the_rank():
    rank, last = jaxmpi.rank(), jaxmpi.size() - 1
    assert_replicated({"w": np.arange(3.0), "n": 2, "key": jax.random.key(0)})
    assert_replicated(jaxmpi.tree_allreduce({"w": jnp.arange(3.0) * (rank + 1)}))
    assert_replicated({"w": np.float32(1 + 1e-7 * rank)}, rtol=1e-5)
    if last == 0:
        return
    for different in (
        {"w": np.arange(3.0) + (rank == last)},
        {"w": np.zeros(3, np.float64 if rank == last else np.float32)},
        {"w": np.zeros(4 if rank == last else 3)},
        {"w": jax.random.key(rank == last)},
        {"w": np.zeros(3)} if rank < last else {"v": np.zeros(3)},
    ):
        with pytest.raises(AssertionError, match=f"(?s)(rank {last}|'w'|structur)"):
            assert_replicated(different)
    assert_replicated({"w": np.arange(3.0)})


def test_files_of_one_name_are_told_apart(tmp_path):
    for folder, number in ("a", 1), ("b", 0):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_m.py").write_text(f"def which():\n    return 1 / {number}\n")
    for folder in "aba":
        task = Task(str(tmp_path / folder / "test_m.py"), "which", {}, 30.0)
        if folder == "a":
            pool(2).run(task)
        else:
            with pytest.raises(RankFailure, match="ZeroDivisionError"):
                pool(2).run(task)
