"""`jaxmpi top` on a running job names slow and stopped ranks, from what was recorded."""

import json
import os
import signal
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

from jaxmpi._job.process import live_record
from jaxmpi._job.tools import observe, top

SCRIPT = """
import sys, time
import jax.numpy as jnp
import jaxmpi
world = jaxmpi.init()
step, meter = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x)), jaxmpi.Throughput()
while True:
    time.sleep(0.05 * (world.rank == 1))
    step(jnp.ones(1000)).block_until_ready()
    meter.add(8)
"""
MS = 1_000_000


def look(rank=0, waits=(5,) * 20, step_ms=10, **changed):
    """Make the record of one of two ranks, with a message every `step_ms`.

    `waits` are the milliseconds until the other rank came.
    """
    ends = [(i + 1) * step_ms * MS for i in range(len(waits))]
    events = []
    for i, (end, wait) in enumerate(zip(ends, waits, strict=True)):
        events.append((i, 7, 100, end - wait * MS - MS, end - MS, end))
    now = {
        "now_ns": ends[-1],
        "written_ns": ends[-1],
        "since_ns": ends[-1],
        "events": events,
        "entered": len(events),
    }
    place = {
        "job": "1@node",
        "rank": rank,
        "size": 2,
        "host": "node",
        "hosts": ["node"],
        "pid": 10 + rank,
    }
    rest = {
        "inside": False,
        "doing": "",
        "busy": False,
        "state": "runs",
        "samples_per_second": None,
        "waits": None,
    }
    return {**place, **now, **rest, "memory_bytes": 1, "gpu_bytes": None, **changed}


def test_rates_follow_from_the_events():
    first, second = top.rows([look(1, (0,) * 20), look(0)])
    assert (first.rank, second.rank) == (0, 1)
    assert first.steps_per_second == pytest.approx(100)
    assert first.communication == pytest.approx(20 * 6 / 196)
    assert second.communication == pytest.approx(20 / 191)
    assert (first.last, second.last) == (0, 1)
    assert (first.verdict, second.verdict) == ("", "slow")


def test_a_rank_that_the_others_do_not_wait_for_is_not_slow():
    rows = top.rows([look(0, (0.5,) * 20), look(1, (0,) * 20)])
    assert rows[1].last == 1 and not rows[1].verdict


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"state": "stopped"}, "stopped"),
        ({"busy": True}, "busy"),
        ({"written_ns": -3_000 * MS}, "silent"),
        ({}, "missing for 4 s"),
    ],
)
def test_a_rank_that_others_wait_for(changed, verdict):
    waiting = look(0, inside=True, entered=21, since_ns=200 * MS - 4_000 * MS)
    rows = top.rows([waiting, look(1, (0,) * 20, **changed)])
    assert [row.verdict_text for row in rows] == ["", verdict]


def waiting(rank, *others, seconds=4, **changed):
    """Make the record of a rank that says for whom it waits, and for how long it has."""
    now = look()["now_ns"]
    says = {"inside": bool(others), "waits_for": list(others)}
    if others:
        says["since_ns"] = now - seconds * 1_000 * MS
    return look(rank, **{**says, **changed})


@pytest.mark.parametrize(
    ("looks", "verdicts"),
    [
        # the ranks of one group go on, in the other one is missing
        (
            [waiting(0, 1), waiting(1), waiting(2, 3, seconds=0), waiting(3, 2, seconds=0)],
            ["", "missing for 4 s", "", ""],
        ),
        # a rank that waits itself is not the one that is missing
        ([waiting(0, 1), waiting(1, 2, seconds=3), waiting(2)], ["", "", "missing for 3 s"]),
        # each waits for the other, in another collective
        ([waiting(0, 1), waiting(1, 0, seconds=3)], ["missing for 3 s", "missing for 4 s"]),
        # two do so beside a rank that waits for a third one
        (
            [waiting(0, 1), waiting(1), waiting(2, 3), waiting(3, 2), waiting(4, 3)],
            ["", "missing for 4 s", "missing for 4 s", "missing for 4 s", ""],
        ),
        # a rank of another node says whom it waits for, one of this node does not know it
        (
            [waiting(0, waits_for=None, entered=90), waiting(1, 2), waiting(2), waiting(3, 0)],
            ["", "", "missing for 4 s", ""],
        ),
        # what a stopped rank last wrote is out of date
        (
            [waiting(0, 1), waiting(1, 0, state="stopped"), waiting(2, 1)],
            ["", "stopped", ""],
        ),
        # more events on one rank, but nobody waits
        ([waiting(0, entered=90, events=[]), waiting(1)], ["", ""]),
        # a rank that does not know it: by the numbers of the collectives
        (
            [waiting(0, 1, waits_for=None, entered=21), waiting(1, waits=(0,) * 20)],
            ["", "missing for 4 s"],
        ),
    ],
)
def test_ranks_that_say_for_whom_they_wait(looks, verdicts):
    assert [row.verdict_text for row in top.rows(looks)] == verdicts


def test_without_events_there_are_dashes():
    rows = top.rows([look(0, events=[]), look(1, events=[])])
    assert {(row.steps_per_second, row.communication, row.last) for row in rows} == {
        (None, None, None)
    }
    assert "jaxmpi_last{" not in top.as_prometheus(rows)


def test_a_record_is_read_by_another_process():
    writer = live_record.Writer()
    writer.write({"rank": 3, "text": "x" * 500})
    assert os.getpid() in live_record.processes()
    reader = live_record.Reader(os.getpid())
    assert reader.about()["rank"] == 3
    writer.write({"rank": 4})
    assert reader.about() == {"rank": 4}
    writer.write({"rank": "x" * live_record.TEXT_BYTES})  # more than fits
    assert reader.about() == {"rank": 4}
    reader.close()
    writer.close()
    with pytest.raises(OSError, match="is not a rank"):
        live_record.Reader(os.getpid())


def test_ranks_of_other_hosts_come_through_an_agent(tmp_path):
    """The agent gets the host and a command, and runs it, as ssh does."""
    agent = tmp_path / "agent"
    agent.write_text(
        '#!/bin/sh\n[ "$1" = node2 ] && shift && exec sh -c "$*"\necho cannot reach "$1" >&2\n'
    )
    agent.chmod(0o755)
    writer = live_record.Writer()
    of_reader = ("events", "now_ns", "state", "memory_bytes", "gpu_bytes")
    shown = {name: value for name, value in look().items() if name not in of_reader}
    writer.write({**shown, "pid": os.getpid(), "host": "node2"})
    near, far = observe.Remote("node2", str(agent), 0.2), observe.Remote("node3", str(agent), 0.2)
    try:
        deadline = time.monotonic() + 60
        while not (near.look() and far.error) and time.monotonic() < deadline:
            time.sleep(0.05)
        (mine,) = [look for look in near.look() if look["pid"] == os.getpid()]
        assert (mine["host"], mine["state"]) == ("node2", "runs")
        assert not near.error and far.error == "cannot reach node3"
    finally:
        near.close()
        far.close()
        writer.close()


def test_a_host_whose_shell_greets_is_seen_and_one_that_falls_silent_is_told(tmp_path, monkeypatch):
    agent = tmp_path / "agent"
    record = json.dumps([look(0)])
    agent.write_text(f"#!/bin/sh\necho Welcome to $1\necho 42\necho '{record}'\nexec cat\n")
    agent.chmod(0o755)
    monkeypatch.setattr(observe, "SILENT_HOST_SECONDS", 1.0)
    remote = observe.Remote("node2", str(agent), 0.2)
    try:
        deadline = time.monotonic() + 60
        while not remote.look() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [row.verdict for row in top.rows(remote.look())] == [""] and not remote.error
        time.sleep(top.SILENT_RECORD_SECONDS + 0.2)
        assert [row.verdict for row in top.rows(remote.look())] == ["silent"]
        assert remote.error == "nothing heard for 1 s"
    finally:
        remote.close()


def printed(*arguments):
    command = [sys.executable, "-m", "jaxmpi", "top", *arguments]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    )


def until(script, right, seconds):
    """Return the screen of `jaxmpi top` on the job of a script, once it is right."""
    deadline = time.monotonic() + seconds
    while True:
        ranks = [rank for rank in printed("--json")["ranks"] if script in rank["doing"]]
        if right(ranks) or time.monotonic() > deadline:
            return ranks


@pytest.mark.slow
def test_a_slow_and_a_stopped_rank_are_named(tmp_path):
    script = tmp_path / f"script{os.getpid()}.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "4", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        try:
            slow = lambda ranks: (
                [r["verdict"] for r in ranks] == ["", "slow", "", ""]
                and all(r["samples_per_second"] for r in ranks)
            )
            ranks = until(script.name, slow, 120)
            assert slow(ranks) and all((r["last"] > 0.5) == (r["rank"] == 1) for r in ranks), ranks
            os.kill(ranks[2]["pid"], signal.SIGSTOP)
            ranks = until(script.name, lambda ranks: ranks[2]["verdict"] == "stopped", 30)
            assert [r["verdict"] for r in ranks] == ["", "slow", "stopped", ""], ranks
            os.kill(ranks[2]["pid"], signal.SIGCONT)
        finally:
            job.terminate()
            job.communicate(timeout=60)
    assert not until(script.name, lambda ranks: not ranks, 10)


def test_prometheus_reads_it_on_loopback():
    interruptible = ["env", "--default-signal=INT"]  # which a shell's background jobs are not
    command = [*interruptible, sys.executable, "-m", "jaxmpi", "top", "--prometheus", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = server.stderr.readline().split()[-1]
            assert address.startswith("http://127.0.0.1:")
            assert b"# TYPE jaxmpi_stalled gauge" in urlopen(address, timeout=10).read()
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0
