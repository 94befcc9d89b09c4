"""Metrics in files: one line a call, from rank 0, and the same numbers in TensorBoard's records."""

import csv
import shutil
import struct
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxmpi
from jaxmpi._collectives import metrics_log
from jaxmpi.testing import run_ranks


@pytest.fixture(autouse=True)
def _one_rank():
    jaxmpi.init()


def lines(folder, name="metrics.csv"):
    with open(Path(folder) / name, newline="") as file:
        return [*csv.reader(file)]


def scalars(path):
    """(step, name, value) of each record of a TensorBoard event file."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        yield from ((event.step, value.tag, value.simple_value) for value in event.summary.value)
        at += 16 + length


def purge_step(path):
    """The step from which on TensorBoard discards what earlier files have."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        if event.session_log.status == SessionLog.START:
            return event.step
        at += 16 + length
    return None


def test_csv_and_tensorboard_hold_the_same(tmp_path):
    log = jaxmpi.MetricsLog(tmp_path / "runs", tensorboard=True)
    for step in (10, 20):
        log.write(
            step, {"loss": jnp.bfloat16(0.5 * step), "accuracy": 0.25}, jaxmpi.Rate(4.0, 2.0, None)
        )
    head, *rows = lines(tmp_path / "runs")
    assert head == [
        "step",
        "time",
        "loss",
        "accuracy",
        "samples_per_second",
        "samples_per_second_per_rank",
        "communication",
    ]
    assert [(row[0], row[2]) for row in rows] == [("10", "5.0"), ("20", "10.0")]
    assert {tuple(row[3:]) for row in rows} == {("0.25", "4.0", "2.0", "nan")}
    (file,) = (tmp_path / "runs").glob("events.out.tfevents*")
    found = {(step, name.rpartition("/")[2]): value for step, name, value in scalars(file)}
    assert (
        found[10, "loss"] == 5 and found[20, "loss"] == 10 and found[20, "samples_per_second"] == 4
    )


def test_a_job_that_goes_on_adds_lines(tmp_path):
    for step in (1, 2):
        jaxmpi.MetricsLog(tmp_path).write(step, {"loss": step})
    assert [row[0] for row in lines(tmp_path)] == ["step", "1", "2"]
    assert not (tmp_path / "metrics.old.csv").exists()


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_step_stands_once_after_a_restart(tmp_path, tensorboard):
    # the third goes on from an older checkpoint
    for start, values in ((0, 1.0), (40, 2.0), (20, 3.0)):
        log = jaxmpi.MetricsLog(tmp_path, tensorboard=tensorboard)
        for step in range(start, start + 60, 10):
            log.write(step, {"loss": values})
        time.sleep(0.002)  # times in the file have three digits
    _, *rows = lines(tmp_path)
    assert [int(row[0]) for row in rows] == [*range(0, 80, 10)]
    assert [float(row[2]) for row in rows] == [1, 1] + [3] * 6
    old = [row for row in lines(tmp_path, "metrics.old.csv") if row[0] != "step"]
    assert [(int(row[0]), float(row[2])) for row in old] == [
        (40, 1),
        (50, 1),
        (20, 1),
        (30, 1),
        *((s, 2) for s in range(40, 100, 10)),
    ]
    if tensorboard:
        starts = {purge_step(path) for path in tmp_path.glob("events.out.tfevents*")}
        assert 20 in starts <= {0, 20, 40}  # files of one second have one name


def test_two_logs_of_one_job_keep_their_lines(tmp_path):
    train, evaluation = jaxmpi.MetricsLog(tmp_path), jaxmpi.MetricsLog(tmp_path)
    train.write(10, {"loss": 1.0})
    evaluation.write(10, {"accuracy": 0.5})
    train.write(20, {"loss": 0.5})
    head, *rows = lines(tmp_path)
    assert head == ["step", "time", "loss", "accuracy"]
    assert [(row[0], *row[2:]) for row in rows] == [
        ("10", "1.0", ""),
        ("10", "", "0.5"),
        ("20", "0.5", ""),
    ]


def test_names_in_any_order_later_and_missing(tmp_path):
    log = jaxmpi.MetricsLog(tmp_path)
    log.write(0, {"loss": 1.0, "accuracy": 0.1})
    log.write(1, {"accuracy": 0.2, "loss": 0.5})
    log.write(2, {"grad_norm": 3.0, "loss": 0.25})
    jaxmpi.MetricsLog(tmp_path).write(3, {"accuracy": 0.4})
    head, *rows = lines(tmp_path)
    assert head == ["step", "time", "loss", "accuracy", "grad_norm"]
    assert [row[2:] for row in rows] == [
        ["1.0", "0.1", ""],
        ["0.5", "0.2", ""],
        ["0.25", "", "3.0"],
        ["", "0.4", ""],
    ]


def test_a_folder_that_is_gone_is_made_again(tmp_path):
    log = jaxmpi.MetricsLog(tmp_path / "runs")
    log.write(1, {"loss": 1.0})
    shutil.rmtree(tmp_path / "runs")
    log.write(2, {"loss": 0.5})
    assert [row[::2] for row in lines(tmp_path / "runs")] == [["step", "loss"], ["2", "0.5"]]


def test_what_cannot_be_written_does_not_end_the_job(tmp_path):
    log = jaxmpi.MetricsLog(tmp_path / "runs")
    log.write(1, {"loss": 1.0})
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").write_text("a file in its place")
    with pytest.warns(
        UserWarning, match=r"MetricsLog.write: step 2 could not be written .* The job goes on"
    ):
        log.write(2, {"loss": 0.5})
    log.write(3, {"loss": 0.5})  # is said once
    (tmp_path / "runs").unlink()
    log.write(4, {"loss": 0.25})
    assert [row[0] for row in lines(tmp_path / "runs")] == ["step", "4"]


def test_a_line_that_was_cut_off_stays(tmp_path):
    jaxmpi.MetricsLog(tmp_path).write(1, {"loss": 1.0})
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("2,17")  # killed while it wrote
    jaxmpi.MetricsLog(tmp_path).write(2, {"loss": 0.5, "new": 1.0})
    assert [row[0] for row in lines(tmp_path)] == ["step", "1", "2"]


@pytest.mark.parametrize("value", ["0.5", None, jnp.ones(2), 1j])
def test_what_is_no_number_is_refused(value, tmp_path):
    with pytest.raises(TypeError, match=r"metric 'loss' is .* and must be one number"):
        jaxmpi.MetricsLog(tmp_path).write(1, {"loss": value})


def test_without_tensorboardx(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        jaxmpi.MetricsLog(tmp_path, tensorboard=True)


@pytest.mark.slow
@run_ranks(1, 2, 3, 4)
def test_rank_0_writes():
    folder = jaxmpi.broadcast_object(tempfile.mkdtemp() if jaxmpi.rank() == 0 else "", 0)
    log, meter = jaxmpi.MetricsLog(folder), jaxmpi.Throughput()
    meter.add(8)
    log.write(5, jaxmpi.average_metrics({"loss": float(jaxmpi.rank())}), meter.read())
    jaxmpi.barrier()
    head, row = lines(folder)
    assert head[:3] == ["step", "time", "loss"] and float(row[2]) == (jaxmpi.size() - 1) / 2
    with pytest.raises(TypeError, match="must be one number"):
        log.write(6, {"loss": "x"})


@pytest.mark.parametrize("step", [3.0, True, "3", None, jnp.float32(3)])
@run_ranks(1, 2)
def test_a_step_that_is_no_integer_is_an_error_on_every_rank(step):
    log = jaxmpi.MetricsLog(tempfile.mkdtemp())
    with pytest.raises(TypeError, match=r"step is .*, and must be an integer"):
        log.write(step, {"loss": 1.0})


@pytest.mark.parametrize("name", ["step", "time", "samples_per_second"])
@run_ranks(1, 2)
def test_a_metric_with_the_name_of_another_column_is_an_error_on_every_rank(name):
    log = jaxmpi.MetricsLog(tempfile.mkdtemp())
    with pytest.raises(ValueError, match=f"metric '{name}' has the name of another column"):
        log.write(3, {"loss": 1.0, name: 2.0}, jaxmpi.Rate(4.0, 2.0, None))


@pytest.mark.parametrize("n", [1, 3])
def test_throughput_counts_the_samples_of_every_simulated_rank_once(n):
    with jaxmpi.simulate(n):
        meter = jaxmpi.Throughput()
        meter.add(32)
        time.sleep(0.01)
        rate = meter.read()
    assert rate.per_second <= 32 * n / 0.01
    assert rate.per_second == pytest.approx(n * rate.per_second_per_rank)
    # the time of a few lines: within that, n ranks are n times as fast
    assert rate.per_second_per_rank > 32 / 5
