"""One thread communicates at a time; turns pass where that is safe, or the second one raises."""

import os
import queue
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_monitor import end, jaxmpi_run

import jaxmpi
from jaxmpi._job.process import communicating_thread
from jaxmpi.testing import run_ranks

X = np.arange(3.0, dtype=np.float32)
CHILD_SECONDS = 20  # after which a child that hangs is ended


def step(x):
    return lax.psum(x, jaxmpi.AXIS)


def own(x):
    return x + 1


CALLS = {
    "program": lambda: np.asarray(jaxmpi.jit(step)(X + jaxmpi.rank())),
    "eager": lambda: np.asarray(jaxmpi.tree_allreduce(X + jaxmpi.rank(), "sum")),
    "objects": lambda: sum(jaxmpi.allgather_object(X + jaxmpi.rank())),
    "ahead of time": lambda: np.asarray(jaxmpi.jit(step).lower(X).compile()(X + jaxmpi.rank())),
}


def total():
    size = jaxmpi.size()
    return X * size + size * (size - 1) / 2


def in_thread(call):
    """Return what a call returns or raises in another thread while this one is busy."""
    got, long_operation = [], []

    def run():
        while not long_operation:
            time.sleep(0.001)
        try:
            got.append(call())
        except RuntimeError as error:
            got.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    while not got:
        long_operation.append(time.sleep(0.001))  # a function of C: this thread counts as running
    thread.join()
    return got[0]


def started(target, identifier=0):
    """Start threads until one has this identifier, which Linux gives to a later one."""
    for _ in range(200):
        thread = threading.Thread(target=target)
        thread.start()
        if identifier in (0, thread.ident):
            return thread
    raise AssertionError("no thread got the identifier")


@pytest.mark.parametrize("which", ["a thread that runs beside", "the next caller"])
def test_a_thread_with_the_identifier_of_one_that_has_ended_is_another_one(which):
    finished, stop = [], threading.Event()

    def call_and_wait():
        if threading.get_ident() == caller.ident:
            turn.take()
        stop.wait()

    def work():
        while not stop.is_set():
            time.sleep(0.001)  # a function of C: this thread counts as running

    turn = communicating_thread.Turn(lambda: finished.append(True), lambda thread: 0)
    caller = started(turn.take)
    caller.join()
    try:
        if which == "the next caller":
            started(call_and_wait, caller.ident)
        else:
            started(work, caller.ident)
            turn.take()  # nobody else calls one
        deadline = time.monotonic() + 10
        while not finished and time.monotonic() < deadline:
            time.sleep(0.01)
        assert finished  # what the other thread has started
    finally:
        stop.set()


def check_second_thread(name, patch):
    call = CALLS[name]
    patch.setattr(communicating_thread, "PATIENCE_SECONDS", 0.1)
    np.testing.assert_array_equal(call(), total())
    error = in_thread(call)
    assert isinstance(error, RuntimeError), error
    assert (
        "called in thread 'second', while thread 'MainThread', which called the last one, runs"
        in str(error)
    )
    np.testing.assert_array_equal(call(), total())  # nothing was sent
    # what sends nothing may run anywhere
    np.testing.assert_array_equal(in_thread(lambda: jaxmpi.jit(own)(X)), X + 1)


def check_handing_over(name):
    call = CALLS[name]
    # as a server would: the main thread waits for the result
    with ThreadPoolExecutor(1) as executor:
        for _ in range(3):
            np.testing.assert_array_equal(executor.submit(call).result(), total())
            np.testing.assert_array_equal(call(), total())
    asked, answered = queue.Queue(), queue.Queue()

    def serve():
        while asked.get():
            answered.put(call())

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(3):
        asked.put(True)
        np.testing.assert_array_equal(answered.get(), total())
    asked.put(False)
    thread.join()
    np.testing.assert_array_equal(call(), total())


@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, 3)
def test_a_second_thread_is_refused_on_mpi(name):
    with pytest.MonkeyPatch.context() as patch:
        check_second_thread(name, patch)


@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, backend="xla")
def test_a_second_thread_is_refused_on_xla(name):
    with pytest.MonkeyPatch.context() as patch:
        check_second_thread(name, patch)


@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, 3)
def test_threads_that_wait_hand_over_on_mpi(name):
    check_handing_over(name)


@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, backend="xla")
def test_threads_that_wait_hand_over_on_xla(name):
    check_handing_over(name)


def check_slow_thread(name):
    """Check that threads whose order differs between the ranks get an error, and no wrong sum."""
    call, ends = CALLS[name], []
    np.testing.assert_array_equal(call(), total())
    slow = 0 if jaxmpi.rank() == 0 else 1

    def run(i):
        if i == slow:
            time.sleep(0.5)
        try:
            call()
        except RuntimeError as error:
            ends.append(str(error))

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(run, range(2)))
    (error,) = ends
    assert "ran while thread 'ThreadPoolExecutor-" in error
    np.testing.assert_array_equal(call(), total())


@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, 3)
def test_a_thread_that_was_slower_on_one_rank_is_refused_on_mpi(name):
    check_slow_thread(name)


@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, backend="xla")
def test_a_thread_that_was_slower_on_one_rank_is_refused_on_xla(name):
    check_slow_thread(name)


RACES = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import jaxmpi
rank = jaxmpi.init().rank
for i in range(50):
    with ThreadPoolExecutor(2) as threads:
        xs = [np.full(3, (rank + 1) * 10.0**k, np.float32) for k in (0, 1)]
        sums = threads.map(lambda x: np.asarray(jaxmpi.tree_allreduce(x, "sum")), xs)
        assert [list(x) for x in sums] == [[3] * 3, [30] * 3], "a wrong sum"
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mpi", "xla"])
def test_two_threads_at_once_get_no_wrong_sum(tmp_path, monkeypatch, backend):
    monkeypatch.setenv("JAXMPI_BACKEND", backend)
    (tmp_path / "script.py").write_text(RACES)
    code, output, _, _ = end(jaxmpi_run(2, tmp_path / "script.py"), str(tmp_path))
    assert code and "a collective was called in thread 'ThreadPoolExecutor-" in output, output
    assert "AssertionError" not in output, output


@run_ranks(1)
def test_one_rank_has_no_turns():
    jaxmpi.tree_allreduce(X)
    np.testing.assert_array_equal(in_thread(lambda: jaxmpi.tree_allreduce(X, "sum")), X)


def check_forked_child():
    """Check that a forked child knows its rank, and may not communicate."""
    step = jaxmpi.jit(lambda x: lax.psum(x, jaxmpi.AXIS))
    for call in CALLS.values():
        call()
    step(X)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, of threads
        child = os.fork()
    if not child:
        words = []
        for call in (*CALLS.values(), lambda: step(X), jaxmpi.barrier, jaxmpi.Throughput().read):
            try:
                call()
            except RuntimeError as error:
                words.append("in a forked child of a rank" in str(error))
        os.write(write, f"{words} {jaxmpi.rank()} {jaxmpi.size()}".encode())
        os._exit(0)
    os.close(write)
    assert (
        os.read(read, 100).decode()
        == f"{[True] * (len(CALLS) + 3)} {jaxmpi.rank()} {jaxmpi.size()}"
    )
    os.waitpid(child, 0)
    for call in CALLS.values():
        np.testing.assert_array_equal(call(), total())


@run_ranks(2)
def test_a_forked_child_cannot_communicate_on_mpi():
    check_forked_child()


@run_ranks(2, backend="xla")
def test_a_forked_child_cannot_communicate_on_xla():
    check_forked_child()


@pytest.mark.skipif(
    os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax", reason="mpi4jax knows nothing of forks"
)
@run_ranks(2)
def test_a_compiled_program_of_plain_jit_is_refused_in_a_forked_child():
    """Or the other rank would take what the child sends for what the rank sends."""
    sum_of = jax.jit(lambda x: jaxmpi.tree_allreduce(x, "sum"))
    x, of_child = jax.block_until_ready((jnp.ones(3), jnp.full(3, 100.0)))
    for each in (x, of_child, x):  # a child cannot compile: it has none of XLA's threads
        jax.block_until_ready(sum_of(each))
    if jaxmpi.rank() == 0:
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, of threads
            child = os.fork()
        if not child:
            signal.alarm(CHILD_SECONDS)
            try:
                jax.block_until_ready(sum_of(of_child))
            except RuntimeError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        text = os.read(read, 1000).decode()
        os.waitpid(child, 0)
        assert "this process is a forked child of a rank" in text, text
    np.testing.assert_array_equal(sum_of(x), [2.0] * 3)
