"""Metrics by step in files, written by rank 0: CSV for programs, and event files for TensorBoard."""

import csv
import time
import weakref
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jaxmpi._collectives.throughput import Rate
from jaxmpi._world import session

__all__ = ["MetricsLog"]

EXACT = 2**53  # up to here, a float is every integer
RATES = {
    "per_second": "samples_per_second",
    "per_second_per_rank": "samples_per_second_per_rank",
    "communication": "communication",
}


class MetricsLog:
    """Writes metrics to `metrics.csv` in a folder, a line for each call, and if asked to files for TensorBoard; on rank 0.

    A job that goes on from a checkpoint adds lines to the file that is there.

    >>> import tempfile
    >>> import jaxmpi
    >>> log = MetricsLog(tempfile.mkdtemp())
    >>> log.write(100, {"loss": 0.25}, jaxmpi.Throughput().read())
    >>> print((log.directory / "metrics.csv").read_text().splitlines()[0])
    step,time,loss,samples_per_second,samples_per_second_per_rank,communication
    """

    def __init__(self, directory: str | Path, *, tensorboard: bool = False) -> None:
        """Make the folder, on rank 0.

        Args:
          directory: of the files.
          tensorboard: whether to write event files, too; needs tensorboardX.

        Raises:
          ImportError: on every rank, if tensorboardX is asked for and not installed there.
        """
        self.directory = Path(directory)
        self._columns: list[str] | None = None
        self._events: Any = None
        if tensorboard and find_spec("tensorboardX") is None:
            raise ImportError("MetricsLog: tensorboard=True needs tensorboardX. Install it: pip install tensorboardX.")
        self._writes = session.current("MetricsLog").place.rank == 0
        if not self._writes:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._path = self.directory / "metrics.csv"
        if self._path.exists() and self._path.stat().st_size:
            with open(self._path, newline="") as file:
                self._columns = next(csv.reader(file))
        if tensorboard:
            self._events = import_module("tensorboardX.event_file_writer").EventsWriter(str(self.directory / "events"))
            weakref.finalize(self, self._events.close)

    def write(self, step: int, metrics: Mapping[str, ArrayLike], rate: Rate | None = None) -> None:
        """Write one line; the other ranks do nothing.

        Args:
          step: of the training.
          metrics: numbers by name, such as `average_metrics` returns: equal on all ranks.
          rate: what `Throughput.read` returns.

        Raises:
          TypeError: a metric is not a number.
          ValueError: the names are not those of the lines before.
        """
        values = {name: _number(name, value) for name, value in metrics.items()}
        if rate is not None:
            known = {column: getattr(rate, name) for name, column in RATES.items()}
            values |= {name: float("nan") if value is None else value for name, value in known.items()}
        if not self._writes:
            return
        columns = ["step", "time", *values]
        new = self._columns is None
        self._columns = self._columns or columns
        if columns != self._columns:
            raise ValueError(
                f"MetricsLog.write: {self._path} has the columns {', '.join(self._columns)}, and this line has "
                f"{', '.join(columns)}. Write the same metrics each time, or use another folder."
            )
        with open(self._path, "a", newline="") as file:
            csv.writer(file).writerows([columns] * new + [[step, f"{time.time():.3f}", *values.values()]])
        if self._events is not None:
            self._add_events(step, values)

    def _add_events(self, step: int, values: Mapping[str, float]) -> None:
        """Write TensorBoard's records at once: `SummaryWriter` leaves that to a thread, and `flush` does not wait for it."""
        event, scalar = import_module("tensorboardX.proto.event_pb2").Event, import_module("tensorboardX.summary").scalar
        for name, value in values.items():
            self._events.write_event(event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        self._events.flush()


def _number(name: str, value: ArrayLike) -> float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biufV":  # V: bfloat16 and its like
        raise TypeError(f"MetricsLog.write: metric {name!r} is {array.dtype} of shape {array.shape}, and must be one number.")
    number = array.reshape(()).item() if array.dtype.kind in "iu" else float(array.reshape(()))
    return number if abs(number) > EXACT else float(number)
