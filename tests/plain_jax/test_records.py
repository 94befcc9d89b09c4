"""What `jaxmpi top`, `jaxmpi timeline` and SIGUSR1 show of programs of plain JAX."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("program_to_look_at.py")
SUMS = "all-reduce of 1000 float32 (sum), with ranks"


def jaxmpi_command(*words):
    return [sys.executable, "-m", "jaxmpi", *map(str, words)]


@contextlib.contextmanager
def running(ranks, go, *arguments, **environ):
    """Run the program; yield its job. It goes on when the file `go` is there."""
    command = jaxmpi_command("run", "-n", ranks, PROGRAM, go, *arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environ}
    ) as job:
        try:
            yield job
        finally:
            go.touch()
            job.terminate()


def looked(go, right):
    """Return what `jaxmpi top` shows of the ranks of this program, once it is right."""
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            jaxmpi_command("top", "--json"), capture_output=True, text=True, timeout=60, check=True
        )
        ranks = [rank for rank in json.loads(done.stdout)["ranks"] if is_rank_of(rank, go)]
        if right(ranks):
            return ranks
        assert time.monotonic() < deadline, ranks


def is_rank_of(rank, go):
    with contextlib.suppress(OSError):  # it has ended
        return str(go) in Path(f"/proc/{rank['pid']}/cmdline").read_text()
    return False


def is_missing(rank):
    return rank["verdict"].startswith("missing")


@pytest.mark.parametrize("ranks", [2, 4])
def test_top_shows_which_rank_is_missing(ranks, tmp_path):
    """In a mesh of two axes, too, where each rank waits for those of its row or column only."""
    go = tmp_path / "go"
    with running(ranks, go) as job:
        found = looked(go, lambda found: any(is_missing(rank) for rank in found))
        assert [rank["rank"] for rank in found] == list(range(ranks))
        missing = [rank["rank"] for rank in found if is_missing(rank)]
        # in a mesh, a rank may wait for one that waits itself
        assert 1 in missing and len(missing) < ranks, found
        assert re.search(re.escape(SUMS) + " 0, 1", found[0]["doing"]), found
        assert all(rank["memory_bytes"] > 0 for rank in found)
        go.touch()
        assert job.wait(120) == 0, job.stdout.read()


def flight(ranks, tmp_path, **environ):
    """Run the program to its end; return the records of its ranks."""
    go = tmp_path / "go"
    go.touch()
    folder = tmp_path / "flight"
    with running(ranks, go, JAXMPI_FLIGHT_DIR=str(folder), **environ) as job:
        output, _ = job.communicate(timeout=120)
        assert job.returncode == 0, output
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_record_of_a_job_has_its_messages(ranks, tmp_path):
    folder, records = flight(ranks, tmp_path)
    for record in records:
        assert (record["size"], record["why"]) == (ranks, "the end")
        rank = record["rank"]
        row = f"{2 * (rank // 2)}, {2 * (rank // 2) + 1}"
        events = record["events"]
        assert [event[0] for event in events] == list(range(len(events)))
        sums = [event for event in events if f"{SUMS} {row}" in event[1]]
        assert len(sums) == 30 and all(event[2] == 4000 for event in sums)
        assert all(0 < start <= met <= end for *_, start, met, end in sums)
        if ranks == 4:
            column = f"{rank % 2}, {rank % 2 + 2}"
            assert sum(f"{SUMS} {column}" in event[1] for event in events) == 30
        other = rank ^ 1
        for name in (f"a permute to rank {other}", f"a permute from rank {other}"):
            assert sum(event[1] == name for event in events) == 30
    # the ranks have one time, but for when the scheduler let each go on from their meeting
    first, second = (
        [event for event in record["events"] if f"{SUMS} 0, 1" in event[1]]
        for record in records[:2]
    )
    for one, other in zip(first, second, strict=True):
        assert one[3] <= other[5] + 0.2 and other[3] <= one[5] + 0.2
    done = subprocess.run(
        jaxmpi_command("timeline", folder), capture_output=True, text=True, timeout=60, check=True
    )
    assert re.search(rf"{ranks - 1} +\S+ +{len(records[0]['events'])} ", done.stdout), done.stdout
    assert SUMS in (folder / "timeline.json").read_text()


def test_a_restarted_job_keeps_the_record_of_the_rank_that_failed(tmp_path):
    folder = tmp_path / "flight"
    command = jaxmpi_command("run", "-n", 2, "--restarts", 1, PROGRAM, tmp_path, "fails")
    environ = {**os.environ, "JAXMPI_FLIGHT_DIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr
    failed = json.loads((folder / "rank-1.json").read_text())
    assert failed["why"] == "code 3" and len(failed["events"]) == 60
    for rank in range(2):
        record = json.loads((folder / "restart-1" / f"rank-{rank}.json").read_text())
        assert record["why"] == "the end" and len(record["events"]) == 90


@pytest.mark.launcher  # MPICH has a handler of its own
def test_a_signal_asks_for_the_record(tmp_path):
    go = tmp_path / "go"
    with running(2, go) as job:
        found = looked(go, lambda found: len(found) == 2 and found[0]["doing"].count(SUMS))
        os.kill(found[0]["pid"], signal.SIGUSR1)
        said = next(line for line in job.stdout if "SIGUSR1" in line)
        path = Path(re.search(r"rank 0 has SIGUSR1. Its last collectives are in (\S+)$", said)[1])
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
        record = json.loads(path.read_text())
        assert record["why"] == "SIGUSR1" and record["events"][-1][5] is None  # it is in it
        path.unlink()
        path.parent.rmdir()
        go.touch()
        assert "done" in job.stdout.read()


def test_a_long_wait_says_where_the_record_is(tmp_path):
    go, folder = tmp_path / "go", tmp_path / "flight"
    with running(2, go, JAXMPI_STALL_SECONDS="1", JAXMPI_FLIGHT_DIR=str(folder)) as job:
        said = next(line for line in job.stdout if "all-reduce" in line)
        assert "it waits for rank 1" in said and f"are in {folder}/rank-0.json" in said
        assert json.loads((folder / "rank-0.json").read_text())["why"] == "a long wait"


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    go, folder = tmp_path / "go", tmp_path / "file"
    folder.touch()
    with running(2, go, JAXMPI_STALL_SECONDS="1", JAXMPI_FLIGHT_DIR=str(folder)) as job:
        said = next(line for line in job.stdout if "all-reduce" in line)
        assert "cannot be written" in said and "set JAXMPI_FLIGHT_DIR to another folder" in said
        go.touch()
        assert "done" in job.stdout.read()


@pytest.mark.parametrize("how", ["jaxmpi", "jaxmpi late"])
def test_a_program_with_jaxmpi_has_one_record(how, tmp_path):
    """Its monitor writes it; the library for plain JAX has none, or has one until then."""
    go = tmp_path / "go"
    with running(2, go, how):
        found = looked(go, lambda found: len(found) == 2)
        # the monitor's: Python has mapped the first one by a descriptor of its own
        monitors = {"jaxmpi-rank": 2, "jaxmpi-events": 1}
        deadline = time.monotonic() + 60
        while (open_files := memory_files(found[0]["pid"])) != monitors:
            assert time.monotonic() < deadline, open_files


def memory_files(pid):
    """Return how many descriptors a process has of each of its records."""
    names = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            names.append(os.readlink(entry.path))
    return Counter(re.findall(r"/memfd:(jaxmpi-\w+)", " ".join(names)))


def test_a_rank_that_ends_without_a_word_ends_the_others(tmp_path):
    """`raise SystemExit(3)` is no error for Python's hooks, and JAX would wait for the others."""
    folder = tmp_path / "a" / "new" / "flight"
    command = jaxmpi_command("run", "-n", 2, PROGRAM, tmp_path, "raises")
    environ = {**os.environ, "JAXMPI_FLIGHT_DIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode != 0
    assert "local rank 1 of this node has ended, while this rank was in an all-" in done.stderr
    assert json.loads((folder / "rank-0.json").read_text())["why"] == "code 1", done.stderr
