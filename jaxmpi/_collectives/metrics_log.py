"""Metrics by step in files, written by rank 0: CSV for programs, event files for TensorBoard."""

import csv
import operator
import time
import warnings
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
    """Log of metrics on rank 0: a line of `metrics.csv` for each call, and TensorBoard's files.

    A job that is started again goes on in the same files. It writes the steps since its checkpoint
    once more: the lines that an earlier job has written for its first step and for later ones go to
    `metrics.old.csv`, and TensorBoard discards them.

    A name that comes later gets a column of its own, which is empty in the lines before; a name
    that is missing leaves its column empty. What cannot be written is warned of, and the job goes
    on.

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
        self._events: Any = None
        self._opened, self._first = time.time(), True
        self._warned: set[str] = set()
        if tensorboard and find_spec("tensorboardX") is None:
            raise ImportError(
                "MetricsLog: tensorboard=True needs tensorboardX. Install it: pip install "
                "tensorboardX."
            )
        self._writes = session.current("MetricsLog").place.rank == 0
        if not self._writes:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._path = self.directory / "metrics.csv"
        if tensorboard:
            self._events = import_module("tensorboardX.event_file_writer").EventsWriter(
                str(self.directory / "events")
            )
            weakref.finalize(self, self._events.close)

    def write(self, step: int, metrics: Mapping[str, ArrayLike], rate: Rate | None = None) -> None:
        """Write one line; the other ranks do nothing.

        Args:
          step: of the training, an integer of Python, NumPy or JAX.
          metrics: numbers by name, in any order, such as `average_metrics` returns: equal on all
            ranks.
          rate: what `Throughput.read` returns.

        Raises:
          TypeError: on every rank, a metric is not a number, or the step no integer.
          ValueError: on every rank, a metric has the name of another column: "step", "time", or,
            with `rate`, one of its columns.

        Warns:
          UserWarning: the line could not be written: the disk is full, the folder may not be
            written to.
        """
        try:
            if isinstance(step, bool):
                raise TypeError
            step = operator.index(step)
        except TypeError:
            raise TypeError(
                f"MetricsLog.write: step is {step!r}, and must be an integer."
            ) from None
        taken = {"step", "time"} if rate is None else {"step", "time", *RATES.values()}
        if wrong := sorted(taken & {*metrics}):
            raise ValueError(
                f"MetricsLog.write: metric {wrong[0]!r} has the name of another column. Rename it."
            )
        values = {name: _number(name, value) for name, value in metrics.items()}
        if rate is not None:
            known = {column: getattr(rate, name) for name, column in RATES.items()}
            values |= {
                name: float("nan") if value is None else value for name, value in known.items()
            }
        if not self._writes:
            return
        try:
            self._add_line(step, values)
            if self._events is not None:
                self._add_events(step, values)
            self._first = False
        except OSError as error:  # metrics are no reason to end a job
            if str(error) not in self._warned:
                self._warned.add(str(error))
                warnings.warn(
                    f"MetricsLog.write: step {step} could not be written to {self.directory}: "
                    f"{error}. The job goes on.",
                    stacklevel=2,
                )

    def _add_line(self, step: int, values: Mapping[str, float]) -> None:
        line = {"step": step, "time": f"{time.time():.3f}", **values}
        self.directory.mkdir(parents=True, exist_ok=True)  # something may have removed it
        there = self._path.exists() and self._path.stat().st_size > 0
        known: list[str] = []
        if there:
            # another log of this job may have added a column
            with open(self._path, newline="") as file:
                known = next(csv.reader(file))
        columns = [*known, *(name for name in line if name not in known)]
        if there and (self._first or columns != known):
            self._rewrite(known, columns, step)
        with open(self._path, "a", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            if not there:
                writer.writeheader()
            writer.writerow(line)

    def _rewrite(self, known: list[str], columns: list[str], step: int) -> None:
        """Give the file these columns, and set the lines aside that are about to be repeated.

        Lines are repeated at the first line of this log only: those of steps since the checkpoint.
        """
        with open(self._path, newline="") as file:
            lines = list(csv.DictReader(file))
        kept: list[dict[str, str]] = []
        repeated: list[dict[str, str]] = []
        for line in lines:
            (repeated if self._first and self._is_repeated(line, step) else kept).append(line)
        if repeated:
            old = self.directory / "metrics.old.csv"
            with open(old, "a", newline="") as file:
                writer = csv.DictWriter(file, known, restval="", extrasaction="ignore")
                writer.writeheader()
                writer.writerows(repeated)
        if not repeated and columns == known:
            return
        # a job that is killed here leaves the file as it was
        part = self.directory / "metrics.csv.part"
        with open(part, "w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
        part.replace(self._path)

    def _is_repeated(self, line: Mapping[str, str], step: int) -> bool:
        """Return whether an earlier job has written a line for this step or a later one."""
        try:
            return int(line["step"]) >= step and float(line["time"]) < round(self._opened, 3)
        except (KeyError, TypeError, ValueError):  # a line that was cut off when its job was killed
            return False

    def _add_events(self, step: int, values: Mapping[str, float]) -> None:
        """Write TensorBoard's records at once.

        `SummaryWriter` writes them on a thread, and its `flush` does not wait for that.
        """
        protos, scalar = (
            import_module("tensorboardX.proto.event_pb2"),
            import_module("tensorboardX.summary").scalar,
        )
        if self._first:  # TensorBoard then discards what earlier files have from this step on
            start = protos.SessionLog(status=protos.SessionLog.START)
            self._events.write_event(
                protos.Event(wall_time=time.time(), step=step, session_log=start)
            )
        for name, value in values.items():
            self._events.write_event(
                protos.Event(wall_time=time.time(), step=step, summary=scalar(name, value))
            )
        self._events.flush()


def _number(name: str, value: ArrayLike) -> float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biufV":  # V: bfloat16 and its like
        raise TypeError(
            f"MetricsLog.write: metric {name!r} is {array.dtype} of shape {array.shape}, and must "
            "be one number."
        )
    number = array.reshape(()).item() if array.dtype.kind in "iu" else float(array.reshape(()))
    return number if abs(number) > EXACT else float(number)
