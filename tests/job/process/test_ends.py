"""Calls at the end of a process: none keeps another from being made."""

import subprocess
import sys
import threading

import pytest

from jaxmpi import RankCountError
from jaxmpi._job.process import run_dir

STEPS = """
from jaxmpi._job.process.at_exit import Step, at_exit, start_thread
import threading

def fail():
    raise OSError("a call failed")

told = threading.Event()

def stop():
    told.set()
    raise OSError("a stop failed")

for step in Step:
    at_exit(step, fail)
    at_exit(step, lambda step=step: print(step.name, flush=True))
start_thread(told.wait, "told", stop)
last = threading.Event()
start_thread(last.wait, "last", last.set)
"""


def test_a_call_that_raises_at_the_end_keeps_no_other_from_being_made():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["THREADS", "RANKS", "MPI", "OUTCOME"]
    assert (
        done.stderr.count("OSError: a call failed") == 4
        and done.stderr.count("OSError: a stop failed") == 1
    )
    assert done.returncode == 0


def in_circle():
    first, second = RuntimeError("no data"), KeyError("x")
    first.__cause__, second.__cause__ = second, first
    return first


def handled(suppress):
    try:
        try:
            raise RankCountError("batch_size is 8, which 3 ranks cannot share")
        except RankCountError:
            if suppress:
                raise RuntimeError("no data") from None
            raise RuntimeError("no data")  # noqa: B904
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "noted"),
    [
        (RankCountError("3 is no good"), "3 is no good"),
        (handled(suppress=False), "batch_size is 8, which 3 ranks cannot share"),
        (handled(suppress=True), None),
        (in_circle(), None),
        (KeyError("x"), None),
    ],
)
def test_what_is_noted_as_a_refused_number_of_ranks(monkeypatch, tmp_path, error, noted):
    notes = []
    monkeypatch.setattr(run_dir, "refuse_count", lambda folder, text: notes.append(text))
    monkeypatch.setenv("JAXMPI_RUN_DIR", str(tmp_path))
    thread = threading.Thread(target=run_dir.note_count_refusal, args=[error], daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()  # nor does an error that leads back to itself hang
    assert notes == [noted] * (noted is not None)
