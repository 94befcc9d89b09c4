"""Hanging jobs, the flight recorder, stopping together, restarts, and injected faults.

A job that hangs says why, and ends.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_monitor import end, jaxmpi_run

import jaxmpi
from jaxmpi._backends.base import Place, Progress
from jaxmpi._job.monitor import end_watch, flight_recorder, watchdog
from jaxmpi._job.monitor.activity import Stand, Standing
from jaxmpi._job.monitor.monitor import Doing, RankEnd
from jaxmpi._job.monitor.preemption import AgreedPreemption
from jaxmpi._job.tools import timeline
from jaxmpi.testing import faults, run_ranks

STALLS = """
import itertools, os, signal, sys, time
import jax, jax.numpy as jnp
import jaxmpi
rank = jaxmpi.init().rank
what, calls = sys.argv[1], itertools.count()

@jaxmpi.jit
def train_step(x):
    if what in ("inside", "ahead of time"):
        x = jax.pure_callback(hold, x, x)
    return jaxmpi.tree_allreduce({"w": x})["w"]  # the collective

def load_batch():
    time.sleep(float(sys.argv[2]))  # the slow line

def hold(x):
    if rank == 1 and next(calls) == 25:
        load_batch()
    return x

x = jnp.ones(100)
if what == "ahead of time":
    train_step = train_step.lower(x).compile()
for i in range(30):
    if rank == 1 and i == 25:
        if what == "sleep":
            load_batch()
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "barrier":
            jaxmpi.barrier()
    if what == "objects":
        jaxmpi.allgather_object(i)
    else:
        x = train_step(x)
        x.block_until_ready()
print(f"rank {rank} is through", flush=True)
"""


def stalled(tmp_path, monkeypatch, what, seconds, *, backend="mpi", ranks=2):
    script = tmp_path / "script.py"
    script.write_text(STALLS)
    monkeypatch.setenv("JAXMPI_BACKEND", backend)
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "1")
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "4")
    return end(jaxmpi_run(ranks, script, what, str(seconds)), str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "ranks"), [("mpi", 2), ("mpi", 3), ("xla", 2)])
def test_a_rank_that_does_not_come_is_named_with_what_it_does(
    tmp_path, monkeypatch, backend, ranks
):
    code, output, seconds, left = stalled(
        tmp_path, monkeypatch, "sleep", 100, backend=backend, ranks=ranks
    )
    assert code and seconds < 30 and not left, output
    line = STALLS[: STALLS.index("# the collective")].count("\n") + 1
    report = rf"\[rank 0/{ranks} on \S+\] stalled: has waited [12] s in .*train_step"
    assert re.search(report, output), output
    if backend == "mpi":
        assert (
            f"allreduce mean of float32[100] at script.py:{line} of train_step" in output
            or "JAXMPI_TRANSPORT" in os.environ
        )
    assert re.search(r"missing: rank 1 \(pid \d+ on \S+\), after ", output), output
    line = STALLS[: STALLS.index("# the slow line")].count("\n") + 1
    assert f"script.py:{line} in load_batch: time.sleep(float(sys.argv[2]))" in output
    assert f"arrived: rank{'s' if ranks > 2 else ''} 0" in output
    assert re.search(r"the job ends in [123] s", output)
    assert re.search(r"stalled for [45] s: rank 1 on", output), output
    # `jaxmpi run` names the rank that was waited for, and not the one that ended the job.
    last = r"jaxmpi run: the job failed: rank 1 \(pid \d+ on \S+\) did not enter a collective"
    assert re.search(last, output) and "jaxmpi-failure" not in output, output
    went_on = output.count("resumed after")  # the first call, where the machine is busy
    assert (
        len(re.findall(r"\] stalled: has waited [12] s in .*train_step", output)) - went_on == 1
    ), output


EAGER = """
import sys, time
import numpy as np
import jaxmpi
rank = jaxmpi.init().rank
x = np.ones(2_000_000, np.float32)
for _ in range(3):
    jaxmpi.tree_allreduce(x).block_until_ready()  # an earlier call
    jaxmpi.barrier()
if rank == 1:
    time.sleep(3)
if sys.argv[1] == "objects":
    jaxmpi.broadcast_object(rank)  # the call that waits
else:
    jaxmpi.tree_allreduce(x)  # the call that waits
    jaxmpi.tree_allreduce(x)  # may be called before that has ended
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "what"), [("mpi", "arrays"), ("xla", "arrays"), ("mpi", "objects")]
)
def test_stall_in_an_eager_collective_names_the_line_of_this_call(
    tmp_path, monkeypatch, backend, what
):
    script = tmp_path / "script.py"
    script.write_text(EAGER)
    monkeypatch.setenv("JAXMPI_BACKEND", backend)
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "1")
    monkeypatch.setenv("JAXMPI_FLIGHT_DIR", str(tmp_path / "flight"))
    code, output, _, left = end(jaxmpi_run(2, script, what), str(tmp_path))
    waits = (
        "broadcast_object"
        if what == "objects"
        else "jaxmpi.tree_allreduce(x)  # the call that waits"
    )
    line = EAGER[: EAGER.index(waits)].count("\n") + 1
    report = re.search(r"stalled: has waited .* s in (?!jaxmpi.init).*", output)
    assert not code and not left and report and f" at script.py:{line}" in report[0], output
    assert report[0].count("script.py") == 1, output
    earlier = EAGER[: EAGER.index("# an earlier call")].count("\n") + 1
    record = json.loads((tmp_path / "flight" / "rank-0.json").read_text())
    names = {name for _, name, *_ in record["events"] if "2000000" in name}
    assert names and all(
        f"script.py:{line}" in name or f"script.py:{earlier}" in name for name in names
    ), names


VOTES = """
import sys, time
import numpy as np
import jaxmpi
rank = jaxmpi.init().rank
what = sys.argv[1]

def batches():
    for k in range(30):
        time.sleep(0.01 * (rank == 0))  # all others wait for rank 0
        yield np.ones(2)

for k, batch in enumerate(jaxmpi.per_rank_batches(batches())):
    if what == "left" and rank == 1 and k == 20:
        break
if what == "late" and rank == 1:
    time.sleep(1000)
jaxmpi.barrier()  # the barrier
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", ["left", "late"])
def test_a_rank_that_votes_wait_for_is_named(tmp_path, monkeypatch, what, ranks):
    script = tmp_path / "script.py"
    script.write_text(VOTES)
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "1")
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "3")
    code, output, _, left = end(jaxmpi_run(ranks, script, what), str(tmp_path))
    assert code and not left, output
    call = "per_rank_batches, for the other ranks' data" if what == "left" else "barrier"
    assert re.search(rf"\[rank 0/{ranks} on \S+\] stalled: has waited \d+ s in {call} at", output)
    assert f"arrived: rank{'s' if ranks > 2 else ''} 0" in output, output
    doing = "in barrier at script.py" if what == "left" else "after "
    assert re.search(rf"missing: rank 1 \(pid \d+ on \S+\), {doing}", output), output
    # A rank that has left waits for the others, too: each side ends the job for the other one.
    failed = r"\d" if what == "left" else "1"
    assert re.search(rf"the job failed: rank {failed} \(pid \d+ on \S+\) did not enter", output), (
        output
    )


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(tmp_path, monkeypatch):
    code, output, _, left = stalled(tmp_path, monkeypatch, "sleep", 2.5, ranks=3)
    assert not code and not left and output.count("is through") == 3, output
    # the rank that has reported the wait says when it is over, and no other
    assert output.count("resumed after") == 1, output
    assert re.search(r"stalled: has waited [12] s", output)
    assert re.search(r"rank 0/3 on \S+\] resumed after \d+ s", output)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["inside", "ahead of time"])
@pytest.mark.parametrize("backend", ["mpi", "xla"])
def test_a_wait_inside_of_the_call_is_seen(tmp_path, monkeypatch, backend, what):
    """JAX runs a short program whose arguments are ready before the call of it returns."""
    code, output, _, left = stalled(tmp_path, monkeypatch, what, 3, backend=backend)
    assert not code and not left and output.count("is through") == 2, output
    assert re.search(r"rank 0/2 on \S+\] stalled: has waited [12] s in .*train_step", output), (
        output
    )
    assert re.search(r"rank 0/2 on \S+\] resumed after [23] s", output), output


@pytest.mark.launcher
@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(tmp_path, monkeypatch):
    code, output, seconds, left = stalled(tmp_path, monkeypatch, "stop", 0)
    assert code and seconds < 30 and not left, output
    assert re.search(
        r"missing: rank 1 \(pid \d+ on \S+\) does not answer: it is stopped", output
    ), output


INSIDE = """
import time
import jaxmpi
from jaxmpi._world import session as _world
jaxmpi.init()
with _world.current("test").entered():  # as an allgather of objects that never ends
    time.sleep(100)
"""


ENDS = """
import os, signal, subprocess, sys, time
from pathlib import Path
import jaxmpi
from jaxmpi._job.monitor import end_watch
from jaxmpi._world import session
end_watch.MIN_REPEAT_SECONDS = 2.0  # between two looks
rank = jaxmpi.init().rank
what, told = sys.argv[1], Path("told")
monitor = session.monitor()
say = monitor.say

def say_and_tell(text):
    say(text)
    if "at its end for the others" in text:
        told.touch()

def evaluates():
    while not told.exists():
        time.sleep(0.1)

monitor.say = say_and_tell
jaxmpi.barrier()
if rank == 1:
    if what != "stops":
        evaluates()
    if what == "stops for a moment":
        later = f"sleep 5; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", later], start_new_session=True)
    if what != "is slow":
        os.kill(os.getpid(), signal.SIGSTOP)
print(f"rank {rank} is through", flush=True)
"""


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize("what", ["stops", "stops late", "stops for a moment", "is slow"])
def test_a_rank_that_does_not_come_to_its_end_is_named(what, tmp_path, monkeypatch):
    """The job ends for one only that stays stopped, and after it has said so."""
    (tmp_path / "script.py").write_text(ENDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "2")
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "6")
    command = jaxmpi_run(3, tmp_path / "script.py", what)
    code, output, *_ = end(command, str(tmp_path), timeout=90)
    assert "at its end for the others\n  missing: rank 1 (pid " in output, output
    if what != "stops":
        assert re.search(r"script\.py:\d+ in evaluates: ", output), output
    if what in ("is slow", "stops for a moment"):
        assert not code and output.count("is through") == 3, output
        return
    stopped = r"does not answer: it is stopped \(SIGSTOP, or a debugger\)(\n   +last seen.*)?"
    announced = stopped + r"\n  the job ends in 6 s if the stopped process does not go on"
    assert code and len(re.findall(announced, output)) == 1, output
    assert len(re.findall(stopped, output)) == 2, output
    last = r"the job failed: rank 1 \(pid \d+ on \S+\) is stopped \(SIGSTOP, or a debugger\)"
    assert re.search(last, output), output


@pytest.mark.parametrize(
    ("stopped", "announced_at", "ends"),
    [
        ([(0, 1000)], [4], True),
        ([(3, 6)], [4], False),
        ([(65, 1000)], [66], True),
        ([(65, 70)], [66], False),
        ([(65, 70), (97, 100)], [66, 98], False),
        ([(65, 70), (97, 1000)], [66, 98], True),
    ],
)
def test_a_stopped_rank_has_all_of_its_time_from_the_look_that_saw_it(
    monkeypatch, stopped, announced_at, ends
):
    """The ranks wait at their end; rank 1 is late, and stopped in some spans of seconds."""
    now, announced, ended = [0.0], [], []
    is_stopped = lambda: any(begin <= now[0] < end for begin, end in stopped)
    state = lambda _: "stopped" if is_stopped() else "runs"
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "2")
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "30")
    monkeypatch.setattr(end_watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(end_watch.run_dir, "state", state)
    monkeypatch.setattr(end_watch.stderr, "say", lambda _: None)
    found = lambda rank, *_: (watchdog.MissingRank(rank, 11, "a", state=state(11)), 0.0)
    monitor = SimpleNamespace(
        backend=SimpleNamespace(place=Place(rank=0, size=2)),
        members=[(10, "a"), (11, "a")],
        topics={},
        end_watchers=[],
        send_all=lambda *_: None,
        say=lambda text: announced.append(now[0]) if "job ends in 30 s" in text else None,
        end=lambda *_: ended.append(now[0]),
    )
    end_watch.EndWatch(monitor, SimpleNamespace(missing_rank=found))
    while now[0] < 200 and not ended:
        monitor.end_watchers[0]()
        now[0] += 0.1
    assert announced == pytest.approx(announced_at, abs=1.0)
    assert len(ended) == ends
    for at in ended:  # after one more question, which the others have ANSWER_SECONDS to answer
        assert at - announced[-1] == pytest.approx(30 + watchdog.ANSWER_SECONDS, abs=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mpi", "xla"])
def test_a_collective_on_objects_that_does_not_end_ends_the_job(tmp_path, monkeypatch, backend):
    script = tmp_path / "script.py"
    script.write_text(INSIDE)
    monkeypatch.setenv("JAXMPI_BACKEND", backend)
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "1")
    # more than one rank may start after the other
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "5")
    code, output, seconds, left = end(jaxmpi_run(2, script), str(tmp_path))
    assert code and seconds < 30 and not left, output
    assert "all ranks entered the collective; no progress" in output, output
    assert "a collective that all ranks have entered does not end. The job ends." in output, output


def test_a_stall_report_in_words():
    standing = Standing(Stand.PYTHON, stack=("train.py:88 in load_batch: image = decode(path)",))
    answer = watchdog.Answer(
        Progress(7, 0, False, False), 61.2, Doing("after", "allgather_object"), "", 61.2, standing
    )
    report = watchdog.StallReport(
        waited_seconds=60.4,
        stalled=True,
        doing=Doing("in", "barrier", "train.py:41"),
        arrived=[0, 4],
        missing=[
            watchdog.MissingRank(1, 11, "a", answer=answer),
            watchdog.MissingRank(2, 12, "b", at_work="busy: tokenizing, for 75 s"),
            watchdog.MissingRank(3, 13, "b", state="stopped"),
        ],
        program=[],
        ends_in_seconds=540.0,
    )
    assert watchdog.describe(report).splitlines() == [
        "stalled: has waited 60 s in barrier at train.py:41",
        "  arrived: ranks 0, 4",
        "  missing: rank 1 (pid 11 on a), after allgather_object, 61 s ago, in Python; its main "
        "thread runs at",
        "      train.py:88 in load_batch: image = decode(path)",
        "  missing: rank 2 (pid 12 on b) is busy: tokenizing, for 75 s",
        "  missing: rank 3 (pid 13 on b) does not answer: it is stopped (SIGSTOP, or a debugger)",
        "  the job ends in 540 s if it does not go on (JAXMPI_STALL_END_SECONDS)",
        "  a rank that works alone for long says so: with jaxmpi.busy('what it does')",
    ]
    alone = report._replace(arrived=[0, 1, 2, 3, 4], missing=[], ends_in_seconds=None)
    assert watchdog.describe(alone).splitlines()[1:] == [
        "  all ranks entered the collective; no progress"
    ]


@pytest.mark.slow
def test_ordinary_work_is_no_stall(tmp_path, monkeypatch):
    code, output, _, _ = stalled(tmp_path, monkeypatch, "objects", 0)
    assert not code and "stalled" not in output, output


@pytest.mark.exhaustive
def test_no_seconds_mean_never(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(STALLS.replace("range(30)", "range(60)"))
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "0")
    code, output, _, _ = end(jaxmpi_run(2, script, "sleep", "12"), str(tmp_path))
    assert not code and "has waited" not in output, output


@pytest.mark.slow
def test_records_that_cannot_be_written_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMPI_FLIGHT_DIR", "/proc/nowhere")
    code, output, _, left = stalled(tmp_path, monkeypatch, "sleep", 100)
    assert code and not left and "the last collectives cannot be written" in output, output
    assert "stalled for 4 s: rank 1 on" in output and "defect" not in output, output
    code, output, _, left = stalled(tmp_path, monkeypatch, "objects", 0)
    assert not code and not left and "defect" not in output, output


# the flight recorder

WORKS = """
import os, sys, time
import jax.numpy as jnp
import jaxmpi
rank = jaxmpi.init().rank
step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))
x = jnp.ones(1000)
for i in range(20):
    time.sleep(0.02 * rank)
    x = step(x).block_until_ready()
print(f"pid {os.getpid()}", flush=True)
if sys.argv[1] == "raise" and rank == 1:
    raise ValueError("boom")
if sys.argv[1] == "raise each":
    jaxmpi.barrier()
    raise ValueError(f"boom {rank}")
if sys.argv[1] == "wait":
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", ["end", "raise"])
def test_the_timeline_of_a_job(tmp_path, monkeypatch, capsys, how, ranks):
    (tmp_path / "script.py").write_text(WORKS)
    flight = tmp_path / "flight"
    monkeypatch.setenv("JAXMPI_FLIGHT_DIR", str(flight))
    code, output, _, _ = end(jaxmpi_run(ranks, tmp_path / "script.py", how), str(tmp_path))
    assert bool(code) == (how == "raise"), output
    there = {path.name for path in flight.iterdir()}
    assert there >= {f"rank-{r}.json" for r in range(ranks)}
    records = [json.loads((flight / f"rank-{r}.json").read_text()) for r in range(ranks)]
    assert len({record["job"] for record in records}) == 1
    assert {record["why"] for record in records} == {
        "the end" if how == "end" else "ValueError: boom."
    }
    assert timeline.run([str(flight)]) == 0
    table = capsys.readouterr().out
    if how == "end":
        lines = table.splitlines()[1 : 1 + ranks]
        last = [float(line.split()[-2]) for line in lines]
        assert last[-1] > 80, table  # the last rank is the slowest
        before = [float(re.findall(r"[\d.]+, ([\d.]+), [\d.]+", line)[0]) for line in lines]
        assert before[0] < 20 <= before[1] < 35, table
    events = json.loads((flight / "timeline.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and "allreduce" in e["name"]]
    # of the comparison before the program is compiled
    sizes = {e["args"]["bytes"] for e in spans} - {0}
    assert sizes == {4000} or "JAXMPI_TRANSPORT" in os.environ
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    picture = (flight / "timeline.svg").read_text()
    assert picture.count("rank 1 on ") == 1 and "last to come" in table


@pytest.mark.slow
def test_the_record_of_a_rank_that_fails_states_its_own_reason(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(WORKS)
    flight = tmp_path / "flight"
    monkeypatch.setenv("JAXMPI_FLIGHT_DIR", str(flight))
    code, output, *_ = end(jaxmpi_run(2, tmp_path / "script.py", "raise each"), str(tmp_path))
    assert code, output
    whys = [json.loads((flight / f"rank-{r}.json").read_text())["why"] for r in (0, 1)]
    assert whys == ["ValueError: boom 0.", "ValueError: boom 1."], output


def recorders(monkeypatch, folder, ranks):
    """Return the flight recorders of a job in one process, whose messages arrive at once.

    Also returns the reasons of their records, by a function, and the number of messages.
    """
    monkeypatch.setenv("JAXMPI_FLIGHT_DIR", str(folder))
    monkeypatch.setattr(flight_recorder, "OTHER_DUMPS_SECONDS", 0.0)
    monitors, sent = [], []

    def send_all(rank, topic, message):
        sent.append(message)
        for other, monitor in enumerate(monitors):
            if other != rank:
                monitor.topics[topic](rank, message)

    for rank in range(ranks):
        backend = SimpleNamespace(
            place=Place(rank=rank, size=ranks),
            broadcast_object=lambda value, root: value,
            barrier=lambda: None,
            events=list,
            waits=list,
        )
        monitors.append(
            SimpleNamespace(
                backend=backend,
                members=[(1, "a")] * ranks,
                topics={},
                at_end=[],
                signals=SimpleNamespace(register=lambda number, call: True),
                send_all=functools.partial(send_all, rank),
            )
        )
    made = [flight_recorder.Recorder(monitor) for monitor in monitors]
    read = lambda r: json.loads((folder / f"rank-{r}.json").read_text())["why"]
    end_of = [monitor.at_end[0] for monitor in monitors]
    return made, end_of, lambda: [read(r) for r in range(ranks)], sent


def test_each_record_states_why_its_rank_ended_the_job_or_else_why_another_did(
    tmp_path, monkeypatch
):
    _, end_of, whys, _ = recorders(monkeypatch, tmp_path, 3)
    end_of[2](RankEnd(True, "the end"))
    end_of[0](RankEnd(False, "mine 0"))
    end_of[1](RankEnd(False, "mine 1"))
    end_of[0](RankEnd(True, "the end"))
    assert whys() == ["mine 0", "mine 1", "mine 1"]


def test_a_stall_that_ends_the_job_is_recorded_once(tmp_path, monkeypatch):
    made, end_of, whys, sent = recorders(monkeypatch, tmp_path, 2)
    assert made[0].dump_all("stall", last=False) == tmp_path / "rank-0.json"
    made[1].dump("SIGUSR1")
    assert whys() == ["stall", "SIGUSR1"]
    assert made[0].dump_all("stall", last=True) == tmp_path / "rank-0.json"
    end_of[0](RankEnd(False, "stalled for 5 s"))
    assert whys() == ["stall", "stall"] and sent == ["stall", "stall"]


@pytest.mark.slow
def test_a_signal_writes_the_records(tmp_path):
    (tmp_path / "script.py").write_text(WORKS)
    go = tmp_path / "go"
    command = jaxmpi_run(2, tmp_path / "script.py", "wait", go)
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **both) as job:
        lines, pid = [], None
        for line in job.stdout:
            lines.append(line)
            if pid is None and (found := re.search(r"pid (\d+)$", line.strip())):
                pid = int(found[1])
                os.kill(pid, signal.SIGUSR1)
            if "SIGUSR1" in line:
                go.touch()
    assert job.returncode == 0, lines
    (said,) = [line for line in lines if "SIGUSR1" in line]
    assert (
        "this rank is after allreduce mean of float32[1000]" in said
        or "JAXMPI_TRANSPORT" in os.environ
    ), said
    path = Path(re.search(r"are in (\S+)", said)[1])
    assert len(json.loads(path.read_text())["events"]) >= 20
    assert (
        re.fullmatch(r"jaxmpi-flight-\d+-[0-9a-f]{16}", path.parent.name)
        and path.parent.stat().st_mode & 0o777 == 0o700
    )
    shutil.rmtree(path.parent)


def test_no_records(tmp_path, capsys):
    assert timeline.run([str(tmp_path)]) == 2
    assert "there is no flight record" in capsys.readouterr().err
    (tmp_path / "rank-0.json").write_text("[]")
    assert timeline.run([str(tmp_path)]) == 2
    assert "rank-0.json is no flight record of jaxmpi" in capsys.readouterr().err


# stop together

STOPS = """
import os, signal, sys, time
import numpy as np
import jaxmpi
rank = jaxmpi.init().rank
for step in range(10_000):
    time.sleep(0.001 * np.random.default_rng(rank * 10_000 + step).random())
    if rank == jaxmpi.size() - 1 and step == 100 and sys.argv[1] == "rank":
        os.kill(os.getpid(), signal.SIGTERM)
    if step == 50 and rank == 0:
        print("here", flush=True)
    if jaxmpi.preempted():
        assert jaxmpi.preempted()
        assert len(set(jaxmpi.allgather_object(step))) == 1
        jaxmpi.save(sys.argv[2], step, {"step": step})
        print(f"rank {rank} has saved", flush=True)
        sys.exit(0)
    if step % 10 == 0:
        jaxmpi.barrier()
"""


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "whom"),
    [
        *((ranks, whom) for ranks in (1, 2, 3) for whom in ("rank", "launcher")),
        (2, "launcher of a job without its folder"),
    ],
)
def test_a_signal_to_one_stops_all_at_the_same_step(tmp_path, monkeypatch, ranks, whom):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    script = tmp_path / "script.py"
    script.write_text(STOPS)
    command = (
        [sys.executable, script, "rank", tmp_path / "saved"]
        if (ranks, whom) == (1, "rank")
        else jaxmpi_run(ranks, script, whom, tmp_path / "saved")
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as job:
        if whom.startswith("launcher"):
            assert "here" in job.stdout.readline()
            if whom != "launcher":
                for folder in (tmp_path / "temporary").glob("jaxmpi-*"):
                    shutil.rmtree(folder)
            job.send_signal(signal.SIGTERM)
        out, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert out.count("has saved") == ranks and "told to end (SIGTERM)" in errors
    if whom.startswith("launcher"):
        assert "the job was stopped by SIGTERM, and has ended in order" in errors
    jaxmpi.init()
    assert (jaxmpi.latest(tmp_path / "saved") or 0) >= 50


RELEASED = """
import os, signal, time
import jaxmpi

def handler():
    return signal.getsignal(signal.SIGTERM)

default = handler()
for _ in range(2):  # sessions
    jaxmpi.init()
    assert not jaxmpi.preempted() and handler() is not default
    with jaxmpi.simulate(2):
        assert not jaxmpi.preempted()
    assert handler() is not default  # the session around the block still listens
    for _ in range(20):
        if (child := os.fork()) == 0:
            time.sleep(20)
            os._exit(1)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
    jaxmpi.finalize()
    assert handler() is default
with jaxmpi.simulate(2):
    jaxmpi.preempted()
    os.kill(os.getpid(), signal.SIGTERM)
    assert jaxmpi.preempted()
assert handler() is default
"""


def test_sigterm_ends_a_process_again_after_the_session_and_in_a_forked_child(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RELEASED)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


class Together:
    """The monitors of two ranks in one process, whose messages arrive at once."""

    def __init__(self, rank, everyone):
        self.rank, self.everyone, self.topics = rank, everyone, {}
        self.backend = self
        everyone.append(self)

    def send(self, rank, topic, message):
        self.everyone[rank].topics[topic](self.rank, message)

    def waiting(self, title):
        return contextlib.nullcontext()

    def say(self, text):
        pass


def test_the_call_to_stop_at_is_the_same_however_the_threads_take_turns():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            monitors = []
            stops = [AgreedPreemption(Together(rank, monitors), 2, rank) for rank in range(2)]
            calls = [0, 0]

            def run(rank, calls=calls, stops=stops):
                calls[rank] += 1
                while not stops[rank].requested():
                    calls[rank] += 1

            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
            for thread in threads:
                thread.start()
            stops[1]._send(0, "stop", 1)
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()
            assert calls[0] == calls[1]
    finally:
        sys.setswitchinterval(interval)


WAITS = """
import os, signal, sys, time
import jaxmpi
rank = jaxmpi.init().rank
if sys.argv[1] == "late":
    jaxmpi.barrier()
    print("here", flush=True)
    if rank == 1:
        time.sleep(4)
if sys.argv[1] == "again":
    jaxmpi.preempted()
    jaxmpi.finalize()
    jaxmpi.init()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
if sys.argv[1] == "stopped" and rank == 1:
    jaxmpi.preempted()
    os.kill(os.getpid(), signal.SIGSTOP)
for step in range(1000):
    time.sleep(0.01)
    stop = jaxmpi.preempted()
    if stop:
        break
    if step == 20 and rank == 0 and sys.argv[1] != "late":
        os.kill(os.getpid(), signal.SIGTERM)
assert stop
print(f"rank {rank} stops at {step}", flush=True)
"""


@pytest.mark.launcher
@pytest.mark.slow
def test_a_rank_that_has_not_asked_yet_is_waited_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WAITS)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(jaxmpi_run(2, script, "late"), **streams) as job:
        assert "here" in job.stdout.readline()
        time.sleep(1)
        job.send_signal(signal.SIGTERM)
        out, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert len(set(re.findall(r"stops at (\d+)", out))) == 1 and out.count("stops at") == 2, out


@pytest.mark.launcher
@pytest.mark.slow
def test_stopping_together_after_a_second_init(tmp_path):
    (tmp_path / "script.py").write_text(WAITS)
    code, output, _, _ = end(jaxmpi_run(2, tmp_path / "script.py", "again"), str(tmp_path))
    assert not code and output.count("stops at") == 2 and "SIGUSR1: this rank is" in output, output


@pytest.mark.launcher
@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(WAITS)
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "1")
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "3")
    code, output, seconds, left = end(
        jaxmpi_run(2, tmp_path / "script.py", "stopped"), str(tmp_path)
    )
    assert code and seconds < 30 and not left, output
    assert "in jaxmpi.preempted, after a SIGTERM" in output and "it is stopped" in output, output


# restarts

TRAINS = """
import os, sys
import jax, jax.numpy as jnp, numpy as np, optax
import jaxmpi
from jaxmpi.testing import faults
world = jaxmpi.init()
directory, kind, call = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = np.arange(96.0, dtype=np.float32).reshape(48, 2) / 100
tx = jaxmpi.sharded(optax.adam(0.1))

@jaxmpi.jit
def step(params, state, batch, mask):
    def loss(p):
        return jnp.sum(jnp.where(mask, ((batch @ p["w"]) - 1) ** 2, 0)) / 6
    grads = jax.tree.map(lambda g: g * world.size, jax.grad(loss)(params))
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

params = {"w": jnp.array([0.5, -0.5])}
run = {"params": params, "state": tx.init(params), "epoch": 0, "batch": 0}
if jaxmpi.latest(directory) is not None:
    run = jaxmpi.restore(directory, run)
first = os.environ["JAXMPI_RESTART"] == "0"
faulty = step
if first and kind != "none":
    faulty = faults.inject(step, kind, rank=world.size - 1, call=call)
while run["epoch"] < 4:
    batches = jaxmpi.batches(
        data, 6, seed=0, epoch=run["epoch"], start=6 * run["batch"], remainder="mask"
    )
    for batch, mask in batches:
        params, state = faulty(run["params"], run["state"], batch, mask)
        run |= {"params": params, "state": state, "batch": run["batch"] + 1}
        jaxmpi.save(directory, run["epoch"] * 100 + run["batch"], run)
    run |= {"epoch": run["epoch"] + 1, "batch": 0}
if jaxmpi.rank() == 0:
    print("final", np.asarray(run["params"]["w"]).tobytes().hex(), jaxmpi.size(), flush=True)
"""


def trained(tmp_path, name, *args, ranks=2, options=()):
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    command = [*jaxmpi_run(ranks, *options, script, tmp_path / name, *args)]
    code, output, _, left = end(command, str(tmp_path / name), timeout=120)
    assert not left
    return code, output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Train without faults; return how the training ends."""
    code, output = trained(tmp_path_factory.mktemp("training"), "undisturbed", "none", "0")
    assert not code, output
    return re.search(r"final \S+ 2", output)[0]


@pytest.mark.launcher
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["kill", "raise", "exit 3"])
def test_a_job_that_has_failed_goes_on_as_if_nothing_had_happened(tmp_path, kind, undisturbed):
    code, output = trained(tmp_path, "disturbed", kind, "13", options=["--restarts", "2"])
    assert (
        not code
        and "restart 1 of 2" in output
        and re.search(r"final \S+ 2", output)[0] == undisturbed
    ), output


@pytest.mark.launcher
@pytest.mark.slow
def test_fewer_ranks_after_a_failure(tmp_path):
    options = ["--restarts", "1", "--min-ranks", "2"]
    code, output = trained(tmp_path, "fewer", "kill", "5", ranks=3, options=options)
    assert not code and re.search(r"final \S+ 2", output), output


@pytest.mark.launcher
@pytest.mark.slow
def test_what_fails_each_time_fails(tmp_path):
    (tmp_path / "script.py").write_text("import jaxmpi; jaxmpi.init(); raise ValueError('again')")
    code, output, _, _ = end(
        jaxmpi_run(2, "--restarts", "2", tmp_path / "script.py"), str(tmp_path)
    )
    assert code and output.count("the job failed") == 3 and "restart 2 of 2" in output


# faults


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_faults_come_at_their_call_on_their_rank():
    seen = []
    here = lambda: jaxmpi.rank() == jaxmpi.size() - 1
    rank = jaxmpi.size() - 1
    faulty = faults.inject(lambda x: seen.append(x) or len(seen), "extra", rank=rank, call=1)
    assert [faulty(1.0), faulty(2.0)] == ([1, 3] if here() else [1, 2])
    faulty = faults.inject(lambda x: float(x[0]), "missing", rank=rank, call=1)
    assert [faulty([1]), faulty([2]), faulty([3])] == ([1, 1, 3] if here() else [1, 2, 3])
    changed = {
        "nan": lambda x: np.isnan(x[0]),
        "flip": lambda x: x[0] != 1 and abs(x[0] - 1) < 1e-6,
    }
    for kind, holds in changed.items():
        got = faults.inject(lambda x: x["a"], kind, rank=rank)({"a": jnp.ones(3), "i": 1})
        assert bool(holds(got)) == here() and bool((got[1:] == 1).all())
    assert faults.inject(jnp.shape, "shape", rank=rank)(jnp.ones((3, 2))) == (
        (2, 2) if here() else (3, 2)
    )
    assert faults.inject(jnp.result_type, "dtype", rank=rank)(jnp.ones(3)) == (
        jnp.int32 if here() else jnp.float32
    )
    if here():
        with pytest.raises(RuntimeError, match="a fault on purpose"):
            faults.inject(seen.append, "raise", rank=rank)(1)
        with pytest.raises(ValueError, match="the first call cannot be missing"):
            faults.inject(seen.append, "missing", rank=rank)(1)
        with pytest.raises(ValueError, match="there are 0 positional arguments"):
            faults.inject(lambda x: x, "nan", rank=rank)(x=1)
        with pytest.raises(SystemExit, match="3"):
            faults.inject(seen.append, "exit 3", rank=rank)(1)
        start = time.monotonic()
        faults.inject(seen.append, "delay", rank=rank, seconds=0.2)(1)
        assert time.monotonic() - start >= 0.2
    step = jax.jit(lambda x: x + 1)
    step(1)
    faults.inject(step, "recompile", rank=rank)(1)
    with pytest.raises(ValueError, match="kind 'explode' is unknown"):
        faults.inject(step, "explode")
    with pytest.raises(ValueError, match="no float array to change"):
        faults.inject(step, "nan", rank=jaxmpi.rank())(1)
