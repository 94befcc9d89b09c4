"""A rank that is alive and stuck is named, and ends the job, where programs are seen as one whole.

XLA's collectives and mpi4jax show no messages. The watchdog sees which programs the ranks have
entered and left, callbacks that do not return, and CPU time.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from test_monitor import end, jaxmpi_run

import jaxmpi
from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Progress
from jaxmpi._backends.program_log import ENTERED, KEPT_PROGRAMS, LEFT, ProgramLog
from jaxmpi._job.monitor import activity, watchdog
from jaxmpi._job.monitor.activity import Stand, Standing
from jaxmpi._job.monitor.monitor import Doing
from jaxmpi._job.process import live_record
from jaxmpi.testing import run_ranks

SCRIPT = Path(__file__).with_name("stuck_script.py")
SLOW = Path(__file__).with_name("slow_script.py")
WAYS = ["xla", pytest.param("mpi4jax", marks=pytest.mark.mpi4jax)]
SECONDS = 40.0  # from the fault to the end of the job, with the limits below

# {situation: (the line at which rank 1 stands, what the report says of the rank)}
LINES = {
    "sleeps before": ("# the slow line", r"missing: rank 1 \(.*, in Python; .* is asleep at"),
    "loops before": ("# the line that loops", r"missing: rank 1 \(.*, in Python; .* runs at"),
    "callback sleeps": (
        "# the slow line",
        r"late: rank 1 \(.*, in a callback of the program for \d+ s, which is asleep at",
    ),
    "callback loops": (
        "# the line that loops",
        r"late: rank 1 \(.*, in a callback of the program for \d+ s, which runs at",
    ),
    "stopped inside": (
        "time.sleep(1.0)",  # half a second before it was stopped
        r"missing: rank 1 .* does not answer: it is stopped \(SIGSTOP, or a debugger\)\n"
        r"      last seen in a callback of its program",
    ),
}


def on(way, monkeypatch, seconds, end_seconds):
    monkeypatch.setenv("JAXMPI_BACKEND", "xla" if way == "xla" else "mpi")
    monkeypatch.setenv("JAXMPI_TRANSPORT", "auto" if way == "xla" else way)
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", str(seconds))
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", str(end_seconds))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.faults)])
@pytest.mark.parametrize("situation", LINES)
@pytest.mark.parametrize(
    "way", ["xla", pytest.param("mpi4jax", marks=[pytest.mark.mpi4jax, pytest.mark.faults])]
)
def test_a_rank_that_is_alive_and_stuck_ends_the_job(way, situation, ranks, tmp_path, monkeypatch):
    on(way, monkeypatch, 5, 20)
    code, output, _, left = end(jaxmpi_run(ranks, SCRIPT, situation), str(tmp_path), timeout=90)
    seconds = time.time() - max(map(float, re.findall(r"now (\d+\.\d+)", output)))
    assert code and not left and "is through" not in output, output
    assert seconds <= SECONDS, (seconds, output)
    mark, words = LINES[situation]
    assert re.search(words, output), output
    source = SCRIPT.read_text()
    line = source[: source.index(mark)].count("\n") + 1
    near = (line, line - 1) if "loops" in situation else (line,)  # it is at `while`, too
    assert any(f"stuck_script.py:{number}" in output for number in near), output
    how = "did not enter a collective"
    if situation.startswith("callback"):
        how = "did not return from a callback of a program"
    last = rf"jaxmpi run: the job failed: rank 1 \(pid \d+ on \S+\) {how}"
    assert re.search(last, output), output


@pytest.mark.slow
@pytest.mark.parametrize("situation", ["callback sleeps", "sleeps before"])
def test_plain_jax_waits_for_ever(situation, tmp_path):
    """The same situations without jaxmpi: the processes are still there after the limit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PROCESSES": "2", "PORT": str(port)}
    logs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    jobs = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            jobs.append(
                subprocess.Popen(
                    [sys.executable, SCRIPT, situation, "plain"],
                    env={**environ, "PROCESS": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        deadline = time.monotonic() + 60.0
        while not all("now" in log.read_text() for log in logs):
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.1)
        time.sleep(SECONDS)
        assert [job.poll() for job in jobs] == [None, None], [log.read_text() for log in logs]
        assert "through" not in logs[0].read_text()
    finally:
        for job in jobs:
            job.send_signal(signal.SIGKILL)
            job.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "long_calls", [5, pytest.param(100, marks=pytest.mark.exhaustive)], ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_programs_that_take_20_times_as_long_are_not_ended(way, long_calls, tmp_path, monkeypatch):
    """The long ones take longer than both limits, while one rank waits for another."""
    on(way, monkeypatch, 1, 2)
    code, output, _, left = end(jaxmpi_run(2, SLOW, str(long_calls)), str(tmp_path), timeout=900)
    assert not code and not left and output.count("is through") == 2, output
    assert min(map(float, re.findall(r"longest program took (\S+) s", output))) > 2.2, output
    assert "all ranks are in the program" in output, output


# the log of programs


class Output:
    """An array that is ready when the test says so."""

    ready = False

    def is_ready(self):
        if self.ready is None:
            raise RuntimeError("Array has been deleted")
        return self.ready


def run(log, fingerprint, output):
    log.enter(fingerprint)
    log.keep(output)
    log.end_call()


def test_a_program_is_left_when_its_output_is_ready():
    log, ends = ProgramLog(), (Output(), Output())
    run(log, 7, ends[0])
    log.enter(8)
    assert log.inside() and [*log.counts] == [2, 0]
    log.keep(ends[1])
    log.end_call()
    log.look()
    assert log.inside() and [*log.counts] == [2, 0] and log.current().usual_seconds is None
    ends[0].ready = True
    log.look()
    assert log.inside() and [*log.counts] == [2, 1]
    ends[1].ready = None  # donated to a later program
    assert not log.inside() and log.current() is None
    log.look()
    assert [*log.counts] == [2, 2]
    log.enter(7)
    assert 0 < log.current().usual_seconds < 10
    log.look()
    assert log.inside() and [*log.counts] == [3, 2]
    log.end_call()  # the call has failed: there is no output
    assert not log.inside()
    log.look()
    assert [*log.counts] == [3, 3]


def test_the_last_programs_tell_of_all_that_were_started():
    log, count = ProgramLog(), 3 * KEPT_PROGRAMS
    ends = [Output() for _ in range(count)]
    for k, output in enumerate(ends):
        run(log, k % 2, output)
    for output in ends[:-2]:
        output.ready = True
    log.look()
    assert [*log.counts] == [count, count - 2] and log.inside()
    ends[-1].ready = True  # so the one before it has ended, too
    log.look()
    assert [*log.counts] == [count, count] and not log.inside()
    log.enter(0)
    assert log.current().usual_seconds is not None


def test_an_output_of_the_users_is_not_kept():
    log, output = ProgramLog(), Output()
    log.enter(1)
    log.watch([output])
    log.end_call()
    assert log.inside()
    del output
    assert not log.inside()


def test_an_output_that_was_dropped_tells_nothing_of_those_before():
    log, first, second = ProgramLog(), Output(), Output()
    run(log, 1, first)
    log.enter(2)
    log.watch([second])
    log.end_call()
    del second
    log.look()
    assert log.inside() and [*log.counts] == [2, 1]


def test_the_time_of_a_program_that_waits_for_another_is_its_own(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("jaxmpi._backends.program_log.time.monotonic", lambda: now[0])
    log, ends = ProgramLog(), [Output(), Output()]
    for fingerprint, output in enumerate(ends):
        run(log, fingerprint, output)
    now[0], ends[0].ready = 150.0, True
    log.look()
    now[0], ends[1].ready = 153.0, True
    log.look()
    log.enter(0)
    assert log.current().usual_seconds == 50.0
    counts = [0, 0]
    log.share(counts)
    assert counts == [3, 2] and log.counts is counts
    log.enter(1)
    assert counts[ENTERED] == 4 and counts[LEFT] == 2


def test_another_process_reads_how_many_programs_were_entered(monkeypatch):
    writer = live_record.Writer()
    paths = {live_record.RANK: f"/proc/self/fd/{writer._file}"}
    monkeypatch.setattr(live_record, "_files", lambda _: paths)
    log = ProgramLog()
    log.share(writer.counts)
    writer.write({"rank": 3})
    log.enter(1)
    reader = live_record.Reader(os.getpid())
    assert reader.programs() == (1, 0) and reader.about() == {"rank": 3}
    old = os.memfd_create("a record of an earlier version")
    os.ftruncate(old, live_record.TEXT_BYTES)
    paths[live_record.RANK] = f"/proc/self/fd/{old}"
    earlier = live_record.Reader(os.getpid())
    assert earlier.programs() is None
    for each in (reader, earlier):
        each.close()
    os.close(old)
    writer.close()


@run_ranks(2, 3, backend="xla")
def test_ranks_count_the_programs_that_they_have_entered_and_left():
    backend = jaxmpi._world.session.current("test")
    before = [*backend.programs.counts]
    step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x, op="sum"))
    compiled = step.lower(jnp.ones(3)).compile()
    for function in (step, step, step, compiled):
        x = function(jnp.full(3, jaxmpi.rank() + 1.0))
    assert float(x[0]) == jaxmpi.size() * (jaxmpi.size() + 1) / 2
    deadline = time.monotonic() + 10.0
    while backend.programs.counts[LEFT] < before[LEFT] + 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backend.programs.counts[ENTERED] - before[ENTERED] == 4
    assert backend.programs.counts[LEFT] == backend.programs.counts[ENTERED]
    assert len(set(jaxmpi.allgather_object(backend.programs.counts[ENTERED]))) == 1


# where a rank stands


def test_a_callback_is_found_in_its_thread_and_each_call_has_a_frame_of_its_own():
    found, go = [], threading.Event()

    def look(x):
        with ThreadPoolExecutor(1) as others:  # as the monitor's thread does
            found.append(others.submit(_jaxcompat.callbacks).result())
        return x

    step = jax.jit(lambda x: jax.pure_callback(look, x, x) + 1)
    for _ in range(2):
        step(jnp.ones(3)).block_until_ready()
    (first,), (second,) = (calls.values() for calls in found)
    assert first is not second and not _jaxcompat.callbacks()

    waits = threading.Event()

    def wait(x):
        waits.set()
        go.wait(20.0)
        return x

    step = jax.jit(lambda x: jax.pure_callback(wait, x, x))
    runs = threading.Thread(target=lambda: step(jnp.ones(3)).block_until_ready())
    runs.start()
    assert waits.wait(20.0)  # JAX's own part of the callback, before, is one of its frames, too
    (thread, frame), *others = _jaxcompat.callbacks().items()
    assert not others and _jaxcompat.callbacks()[thread] is frame
    lines = activity.stack(thread, until=frame)
    assert any("test_stuck.py" in line and "in wait" in line for line in lines), lines
    assert not any("<lambda>" in line for line in lines), lines
    go.set()
    runs.join()


def test_cpu_time_tells_a_rank_that_computes_from_one_that_waits(monkeypatch):
    now, used = [0.0], [0.0]
    monkeypatch.setattr(activity.time, "monotonic", lambda: now[0])
    clock = activity.CpuTime(lambda: used[0])

    def go_on(seconds, share):
        for _ in range(10 * seconds):
            now[0] += 0.1
            used[0] += 0.1 * share
            clock.look(now[0])

    go_on(5, 0.5)
    assert clock.idle_seconds() < 1.2
    go_on(5, 0.01)
    assert 4.5 < clock.idle_seconds() < 6.2
    go_on(2, 0.2)
    assert clock.idle_seconds() < 1.2


def answer(stand, seconds=0.0, usual=None, *, inside=True, at_work="", idle=1e9, asleep=True):
    standing = Standing(stand, seconds, usual, asleep, ("train.py:88 in load: f()",))
    doing = Doing("in" if inside else "after", "train_step (allreduce)")
    return watchdog.Answer(
        Progress(5, 0, inside, False), seconds, doing, at_work, idle, standing, 3
    )


INF = float("inf")


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        # a callback that does not return
        ([answer(Stand.BLOCKED, 15), answer(Stand.CALLBACK, 14)], 6),
        ([answer(Stand.UNKNOWN, 15), answer(Stand.CALLBACK, 14)], 6),
        ([answer(Stand.COMPUTES, 15), answer(Stand.CALLBACK, 14)], 6),
        ([answer(Stand.PYTHON, 15), answer(Stand.CALLBACK, 14)], 6),  # it waits after the program
        ([answer(Stand.CALLBACK, 15), answer(Stand.CALLBACK, 14)], INF),
        ([answer(Stand.CALLBACK, 15), answer(Stand.PYTHON, 14, inside=False)], INF),
        ([answer(Stand.BLOCKED, 15), answer(Stand.CALLBACK, 14, at_work="busy")], INF),
        ([answer(Stand.BLOCKED, 15), answer(Stand.CALLBACK, 14, idle=3.0)], 17),
        # no rank computes
        ([answer(Stand.BLOCKED, 15), answer(Stand.BLOCKED, 12)], 8),
        ([answer(Stand.BLOCKED, 15), answer(Stand.COMPUTES, 12)], INF),
        # the time is all there is
        ([answer(Stand.UNKNOWN, 15, 0.1), answer(Stand.UNKNOWN, 12, 0.1)], 8),
        ([answer(Stand.UNKNOWN, 15, 0.5), answer(Stand.UNKNOWN, 15, 0.5)], 35),
        ([answer(Stand.UNKNOWN, 15, 0.5), answer(Stand.UNKNOWN, 15)], INF),
    ],
)
def test_how_long_a_program_may_take(answers, left):
    dog = object.__new__(watchdog.Watchdog)
    dog._end_seconds = 20.0
    assert dog._remaining_seconds_in_program(dict(enumerate(answers))) == left
    dog._end_seconds = 0.0
    assert dog._remaining_seconds_in_program(dict(enumerate(answers))) == INF


PROGRAM = Doing("in", "train_step (allreduce mean of float32[100] at train.py:12)")


@pytest.mark.parametrize(
    ("stands", "lines", "why"),
    [
        (
            [(Stand.BLOCKED, 15.0, None), (Stand.CALLBACK, 14.0, None)],
            [
                "  waiting in the program: rank 0",
                "  late: rank 1 (pid 11 on a), in a callback of the program for 14 s, which is "
                "asleep at",
                "      train.py:88 in load: f()",
                "  the job ends in 6 s if it does not go on (JAXMPI_STALL_END_SECONDS)",
                "  a rank that works alone for long says so: with jaxmpi.busy('what it does')",
            ],
            "a callback of the program does not return on rank 1 on a, at train.py:88 in load: "
            "f().",
        ),
        (
            [(Stand.BLOCKED, 15.0, None), (Stand.COMPUTES, 14.0, None)],
            ["  all ranks are in the program, which takes long: CPU time of rank 1"],
            "a program that all ranks have entered does not end.",
        ),
        (
            [(Stand.BLOCKED, 15.0, None), (Stand.BLOCKED, 14.0, None)],
            [
                "  all ranks are in the program, and none has used CPU time for 14 s",
                "  rank 0 (pid 10 on a): its main thread is asleep at",
                "      train.py:88 in load: f()",
                "  rank 1 (pid 11 on a): its main thread is asleep at",
                "      train.py:88 in load: f()",
                "  the job ends in 6 s if it does not go on (JAXMPI_STALL_END_SECONDS)",
            ],
            "a program that all ranks have entered does not end.",
        ),
        (
            [(Stand.UNKNOWN, 15.0, 2.0)] * 6,
            [
                "  all ranks are in the program: it takes long, or one of them is stuck in it",
                "  nothing but the time tells which: its longest run until now took 2.0 s",
                *(
                    line
                    for rank in range(4)
                    for line in (
                        f"  rank {rank} (pid {10 + rank} on a): its main thread is asleep at",
                        "      train.py:88 in load: f()",
                    )
                ),
                "  and 2 more ranks",
                "  the job ends in 6 s if it does not go on (JAXMPI_STALL_END_SECONDS)",
            ],
            "a program that all ranks have entered does not end.",
        ),
        (
            [(Stand.UNKNOWN, 15.0, None)],
            [
                "  all ranks are in the program: it takes long, or one of them is stuck in it",
                "  nothing but the time tells which: it runs for the first time, and the job does "
                "not end for it",
                "  rank 0 (pid 10 on a): its main thread is asleep at",
                "      train.py:88 in load: f()",
            ],
            "a program that all ranks have entered does not end.",
        ),
    ],
    ids=["callback", "computes", "blocked", "time", "first run"],
)
def test_a_report_of_a_program_in_words(stands, lines, why):
    program = [
        watchdog.InProgram(rank, 10 + rank, "a", "", answer(*stand).standing)
        for rank, stand in enumerate(stands)
    ]
    report = watchdog.StallReport(
        waited_seconds=15.2,
        stalled=True,
        doing=PROGRAM,
        arrived=[*range(len(stands))],
        missing=[],
        program=program,
        ends_in_seconds=6.0 if any("the job ends in" in line for line in lines) else None,
    )
    first, *others = watchdog.describe(report).splitlines()
    assert first == f"stalled: has waited 15 s {PROGRAM}"
    assert others == lines
    assert watchdog._why_ended(report) == f"stalled for 15 s: {why}"


def test_a_stopped_rank_was_last_seen_somewhere():
    seen = watchdog.LastSeen("in train_step", "train.py:31", True, 26, True)
    line = "      last seen in a callback of its program 26 at train.py:31, in train_step"
    assert watchdog._describe_seen(seen) == line
    before = seen._replace(in_callback=False, in_program=False)
    assert "in Python after its program 26" in watchdog._describe_seen(before)
    native = seen._replace(in_callback=False, program=0, in_program=False)
    assert watchdog._describe_seen(native) == "      last seen at train.py:31, in train_step"
