"""Output of many ranks on one screen."""

import io
import logging
import os
import re
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi._job.monitor.ordered_output import Key, OrderedOutput
from jaxmpi.testing import run_ranks


def test_rounds_come_in_the_order_of_the_ranks():
    written = []
    rounds = OrderedOutput(3, written.append)
    first, second = Key("f", 1, "t", 1), Key("f", 1, "t", 2)
    for rank, key in [(2, first), (1, second), (0, first), (1, first), (0, second), (2, second)]:
        rounds.add(rank, key, f"{key.call}{rank} ")
    assert written == ["10 11 12 ", "20 21 22 "]


def test_rounds_do_not_wait_for_ranks_that_never_print(monkeypatch):
    written = []
    rounds = OrderedOutput(3, written.append)
    key = Key("f", 1, "t", 1)
    rounds.add(1, key, "one")
    rounds.flush()
    assert written == [] and rounds.pending(key)
    monkeypatch.setattr("jaxmpi._job.monitor.ordered_output.ROUND_SECONDS", 0.0)
    rounds.flush()
    assert written == ["one"]


def test_text_that_the_screen_cannot_show_is_escaped(capsys, monkeypatch):
    OrderedOutput(1).add(0, Key("f", 1, "t", 1), "file \udcff ✓\n")
    assert capsys.readouterr().out == "file \\udcff ✓\n"
    closed = io.StringIO()
    closed.close()
    rounds = OrderedOutput(1)
    for stream in (closed, None, sys.stdout, closed):
        monkeypatch.setattr(sys, "stdout", stream)
        for call in range(2):
            rounds.add(0, Key("f", 1, "t", call), "nowhere to go\n")
    said = capsys.readouterr()
    assert said.out == "nowhere to go\n" * 2
    # once in a row
    assert said.err.count("a line of jaxmpi.print cannot be written to stdout") == 2


def test_a_stream_of_the_script_may_raise_anything(monkeypatch, capfd):
    class Stream:
        encoding = "utf-8"

        def write(self, text):
            raise KeyError(text)

    monkeypatch.setattr(sys, "stdout", Stream())
    OrderedOutput(1).add(0, Key("f", 1, "t", 1), "text\n")
    assert "a line of jaxmpi.print cannot be written to stdout ('text" in capfd.readouterr().err


PRINTING = """
import jaxmpi
jaxmpi.print("before")
r = jaxmpi.init().rank
for i in range(5):
    jaxmpi.print("line", i, "of", r)
if r == 1:
    jaxmpi.print("only one")
jaxmpi.print("two\\nlines")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_print_of_a_job(ranks, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PRINTING)
    launch = [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks)]
    done = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    texts = [line[9:] for line in lines]
    assert texts.count("before") == ranks
    ordered = [t for t in texts if t.startswith("[") and "only" not in t]
    want = [f"[{r}/{ranks}] line {i} of {r}" for i in range(5) for r in range(ranks)]
    want += [f"[{r}/{ranks}] {word}" for r in range(ranks) for word in ("two", "lines")]
    assert ordered == want
    assert ("[1/3] only one" in texts) == (ranks == 3)


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_get_logger_speaks_on_rank_0_and_writes_files_on_request():
    r = jaxmpi.rank()
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    logger = jaxmpi.get_logger("jaxmpi-test", directory)
    assert jaxmpi.get_logger("jaxmpi-test", directory) is logger and len(logger.handlers) == 2
    screen, file = logger.handlers
    shown = [
        bool(screen.filter(logging.LogRecord("n", level, "p", 1, "m", None, None)))
        for level in (logging.INFO, logging.ERROR)
    ]
    assert shown == [r == 0, True]
    logger.info("written by %d", r)
    file.flush()
    with open(file.baseFilename) as f:
        assert f"[{r}] INFO jaxmpi-test: written by {r}" in f.read()
    logger.handlers.clear()


@pytest.mark.slow
@run_ranks(1, 2)
def test_progress_is_quiet_without_a_terminal():
    bar = jaxmpi.progress([jaxmpi.rank(), 5], desc="items")
    assert list(bar) == [jaxmpi.rank(), 5] and bar.disable


PROGRESS = """
import sys, time, jaxmpi
jaxmpi.init()
seen = []
bar = jaxmpi.progress(range(4), desc="items")
for step in bar:
    time.sleep(0.06 * (1 + jaxmpi.rank()))
    seen.append(bar.n)
manual = jaxmpi.progress(total=6, disable=len(sys.argv) > 1)
for step in range(3):
    manual.update(2)
    seen.append(manual.n)
manual.reset()
seen += [manual.n, manual.total, bar.n, bar.format_dict["n"]]
print(seen)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["disable"]])
@pytest.mark.parametrize("terminal", ["0", "1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_progress_counts_alike_on_all_ranks(ranks, terminal, arguments, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRESS)
    launch = [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), str(script), *arguments]
    done = subprocess.run(
        launch,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"JAXMPI_TTY": terminal},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([0, 1, 2, 3, 2, 4, 6, 0, 6, 4, 4])] * ranks
    assert done.stderr.count("items:   0%") == (terminal == "1")  # rank 0's


@run_ranks(1, 2, 3, 4)
def test_average_metrics_counts_every_sample_once():
    r, n = jaxmpi.rank(), jaxmpi.size()
    part = jaxmpi.shard(np.arange(10.0))
    values = part[:]  # parts of different sizes
    mean = float(values.mean()) if len(values) else float("nan")
    out = jaxmpi.average_metrics(
        {"mean": mean, "vector": jnp.array([mean, 1.0]), "count": np.int32(len(values))},
        len(values),
    )
    np.testing.assert_allclose(out["mean"], 4.5, rtol=1e-6)
    np.testing.assert_allclose(out["vector"], [4.5, 1.0], rtol=1e-6)
    sizes = [len(range(q * 10 // n, (q + 1) * 10 // n)) for q in range(n)]
    np.testing.assert_allclose(out["count"], sum(s * s for s in sizes) / 10, rtol=1e-6)
    only_last = jaxmpi.average_metrics(
        1.0 * r if r == n - 1 else float("nan"), weight=float(r == n - 1)
    )
    np.testing.assert_allclose(only_last, n - 1)
    with pytest.raises(ValueError, match=r"average_metrics: weight has shape \[2\]"):
        jaxmpi.average_metrics(1.0, weight=np.ones(2))
    with pytest.raises(TypeError, match=r"average_metrics: leaf \['name'\] is a str"):
        jaxmpi.average_metrics({"name": "x"})


@run_ranks(1, 2)
def test_average_metrics_names_an_integer_that_is_too_large():
    is_mine = jaxmpi.rank() == jaxmpi.size() - 1
    error = OverflowError if is_mine else jaxmpi.RankMismatchError
    with pytest.raises(error, match=r"leaf \['a'\] is an integer of 1329 bits"):
        jaxmpi.average_metrics({"a": 10**400 if is_mine else 1})


@run_ranks(1, 2, 3)
def test_throughput_counts_all_ranks_and_the_time_in_collectives():
    r, n = jaxmpi.rank(), jaxmpi.size()
    meter = jaxmpi.Throughput()
    meter.add(10 * (r + 1))
    time.sleep(0.2)
    if r == 0:
        time.sleep(0.2)
    # the others wait for rank 0 half of the time
    jax.block_until_ready(jaxmpi.tree_allreduce(np.ones(4)))
    rate = meter.read()
    assert rate == jaxmpi.allgather_object(rate)[0]
    samples = 10 * n * (n + 1) / 2
    assert samples / 10 < rate.per_second <= samples / 0.4 and np.isclose(
        rate.per_second_per_rank * n, rate.per_second
    )
    if os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax" and n > 1:
        assert rate.communication is None and "collectives" not in str(rate)
    else:
        if n == 1:
            assert rate.communication == 0.0, rate
        else:
            assert 0.1 < rate.communication < 0.9 * (n - 1) / n, rate
        assert "of the time in collectives" in str(rate)
    assert meter.read().per_second == 0.0  # each look begins anew
