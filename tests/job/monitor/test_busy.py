"""A busy rank is waited for, and named; a busy rank that is gone, or stopped, is found out."""

import os
import re
import threading
import time
from pathlib import Path

import pytest
from test_monitor import end, jaxmpi_run, mpirun

import jaxmpi
from jaxmpi._job.process import busy as registry

SCRIPT = Path(__file__).with_name("busy_script.py")


def job(how, tmp_path, monkeypatch, ranks=2, launch=jaxmpi_run, backend="mpi"):
    monkeypatch.setenv("JAXMPI_BACKEND", backend)
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "1")
    # `init` itself takes time
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "15" if how.startswith("init") else "6")
    return end(launch(ranks, str(SCRIPT), how), str(tmp_path), timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "ranks", "launch", "backend", "what"),
    [
        ("barrier", 2, jaxmpi_run, "mpi", "tokenizing the text"),
        ("object", 3, jaxmpi_run, "mpi", "tokenizing the text"),
        ("step", 2, mpirun, "mpi", "tokenizing the text"),
        ("step", 2, jaxmpi_run, "xla", "tokenizing the text"),
        ("then work", 2, jaxmpi_run, "mpi", "tokenizing the text"),
        ("decorator", 2, jaxmpi_run, "mpi", "evaluating"),
        ("thread", 2, jaxmpi_run, "mpi", "evaluating"),
        ("gil", 2, jaxmpi_run, "mpi", "tokenizing"),
        ("fork", 2, jaxmpi_run, "mpi", "tokenizing"),
        ("init", 2, jaxmpi_run, "mpi", "tokenizing"),
        ("init", 3, mpirun, "mpi", "tokenizing"),
    ],
)
def test_a_busy_rank_is_named_and_waited_for(
    how, ranks, launch, backend, what, tmp_path, monkeypatch
):
    code, output, _, _ = job(how, tmp_path, monkeypatch, ranks, launch, backend)
    assert code == 0 and output.count("went on") == ranks, output
    assert re.search(rf"rank 0 \(pid \d+ on \S+\) is busy: {what}, for \d+ s$", output, re.M), (
        output
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed", "rank 0 .*signal 9"),
        ("raises", "ValueError: no such file"),
        ("stopped", "rank 0 .* does not answer: it is stopped"),
        ("limit", "busy: tokenizing, for [0-9]+ s, past its limit of 2 s"),
        ("then nothing", "is busy: tokenizing the text, for"),
        ("init, stopped", "rank 0 .* is stopped"),
        ("init, then nothing", "is busy: tokenizing, for"),
    ],
)
def test_a_busy_rank_that_is_gone_or_stuck_ends_the_job(how, words, tmp_path, monkeypatch):
    code, output, seconds, left = job(how, tmp_path, monkeypatch)
    assert code and not left and "went on" not in output, output
    assert re.search(words, output.replace("\n", " ")), output
    assert seconds < 60, output


def test_busy_blocks_are_nested_and_are_shown_until_they_end():
    assert not registry.work().counts and registry.work().block is None
    with jaxmpi.busy("outer"):
        assert registry.work() == registry.work_of(os.getpid()) and registry.work().counts
        assert registry.work().block.what == "outer"
        with jaxmpi.busy("inner", limit_seconds=0.05):
            assert registry.work().block.what == "inner"
            time.sleep(0.1)  # past its limit, the outer one counts
            assert registry.work().block.what == "outer"
        with pytest.raises(ZeroDivisionError), jaxmpi.busy("fails"):
            1 / 0  # noqa: B018
        assert registry.work().block.what == "outer"
    assert registry.work().block is None


def test_busy_blocks_of_threads_end_in_any_order():
    shared, begun, over = jaxmpi.busy("shared"), threading.Event(), threading.Event()

    def work():
        with shared:
            begun.set()
            over.wait(10)

    thread = threading.Thread(target=work)
    with shared:
        thread.start()
        assert begun.wait(10)
    assert registry.work().block.what == "shared"
    over.set()
    thread.join()
    assert registry.work().block is None


def test_busy_as_a_decorator_opens_a_block_for_each_call():
    shown = []

    @jaxmpi.busy("counting")
    def count(n):
        shown.append(registry.work().block.what)
        return n + count(n - 1) if n else 0

    assert count(3) == 6 and shown == ["counting"] * 4
    assert registry.work().block is None


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((3,), {}, TypeError, "what is 3"),
        (("",), {}, ValueError, "what is empty"),
        (("x",), {"limit_seconds": "1"}, TypeError, "limit_seconds is '1'"),
        (("x",), {"limit_seconds": True}, TypeError, "limit_seconds is True"),
        (("x",), {"limit_seconds": 0}, ValueError, "limit_seconds is 0"),
        (("x",), {"limit_seconds": float("nan")}, ValueError, "limit_seconds is nan"),
    ],
)
def test_busy_refuses(arguments, options, error, words):
    with pytest.raises(error, match=f"busy: {words}"):
        jaxmpi.busy(*arguments, **options)


async def awaited():
    pass


async def awaited_in_a_loop():
    yield


def iterated():
    yield


@pytest.mark.parametrize("function", [awaited, awaited_in_a_loop, iterated])
def test_busy_refuses_functions_whose_call_does_no_work(function):
    with pytest.raises(TypeError, match=f"busy: {function.__qualname__} is an? .*Write `with "):
        jaxmpi.busy("reading")(function)


def test_busy_tells_since_when_a_rank_does_nothing_any_more():
    with jaxmpi.busy("outer", limit_seconds=0.05):
        assert registry.work().idle_seconds == 0.0
        time.sleep(0.2)
        assert not registry.work().counts and registry.work().block.what == "outer"
        assert 0.1 < registry.work().idle_seconds < 5
    assert registry.work().idle_seconds < 0.1 and registry.work().block is None
    assert registry.work_of(os.getpid()).idle_seconds < 5
