"""Metrics in files: one line for each call, from rank 0; TensorBoard's records hold the same numbers."""

import csv
import struct
import tempfile
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxmpi
from jaxmpi._collectives import metrics_log
from jaxmpi.testing import run_ranks


@pytest.fixture(autouse=True)
def _one_rank():
    jaxmpi.init()


def lines(folder):
    with open(Path(folder) / "metrics.csv", newline="") as file:
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


def test_csv_and_tensorboard_hold_the_same(tmp_path):
    log = jaxmpi.MetricsLog(tmp_path / "runs", tensorboard=True)
    for step in (10, 20):
        log.write(step, {"loss": jnp.bfloat16(0.5 * step), "accuracy": 0.25}, jaxmpi.Rate(4.0, 2.0, None))
    head, *rows = lines(tmp_path / "runs")
    assert head == ["step", "time", "loss", "accuracy", "samples_per_second", "samples_per_second_per_rank", "communication"]
    assert [(row[0], row[2]) for row in rows] == [("10", "5.0"), ("20", "10.0")]
    assert {tuple(row[3:]) for row in rows} == {("0.25", "4.0", "2.0", "nan")}
    (file,) = (tmp_path / "runs").glob("events.out.tfevents*")
    found = {(step, name.rpartition("/")[2]): value for step, name, value in scalars(file)}
    assert found[10, "loss"] == 5 and found[20, "loss"] == 10 and found[20, "samples_per_second"] == 4


def test_a_job_that_goes_on_adds_lines(tmp_path):
    for step in (1, 2):
        jaxmpi.MetricsLog(tmp_path).write(step, {"loss": step})
    assert [row[0] for row in lines(tmp_path)] == ["step", "1", "2"]
    with pytest.raises(ValueError, match=r"has the columns step, time, loss, and this line has step, time, error"):
        jaxmpi.MetricsLog(tmp_path).write(3, {"error": 1.0})


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
