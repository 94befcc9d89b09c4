"""Output of many ranks: `print`, `get_logger`, `progress`, and `average_metrics` for the numbers.

They are for scripts that run on all ranks, and that should not fill the screen once per rank.
"""

import io
import logging
import math
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike
from tqdm import tqdm

from jaxmpi import _jaxcompat
from jaxmpi._consistency.compare import raising_on_all
from jaxmpi._job.process import settings
from jaxmpi._job.process.at_exit import STOP_SECONDS, Step, at_exit
from jaxmpi._leaves import PyTree, as_array, check_fits, leaf_name, widest
from jaxmpi._optim.mean import Allreduce, Weight
from jaxmpi._world import session

__all__ = ["average_metrics", "get_logger", "print", "progress"]

T = TypeVar("T")


def print(
    *values: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
) -> None:
    """Print the lines of all ranks in the order of the ranks, with the time and `[rank/size]`.

    It never blocks a rank and never hangs: the ranks send their lines to rank 0, which prints those
    of one call together. Rank 0 waits at most 0.2 s for ranks that do not call it. Before `init`
    the values are printed with the time only.

    **Communication:** one message from each rank to rank 0; no rank waits for an answer. None for
    another file than stdout and stderr.

    Args:
      *values: as for Python's `print`.
      sep: between the values.
      end: after the last value; without a newline, the next rank's text follows on the same line.
      file: None for stdout. `sys.stdout` and `sys.stderr` are those of rank 0. Any other file is
        this rank's.
      flush: flush such a file; rank 0 always flushes stdout and stderr.
    """
    label = f"[{session.rank()}/{session.size()}] " if session.initialized() else ""
    head = f"{time.strftime('%H:%M:%S')} {label}"
    *lines, last = (sep.join(map(str, values)) + end).split("\n")
    text = "".join(f"{head}{line}\n" for line in lines) + (last and head + last)
    monitor = session.monitor()
    this_ranks_file = file not in (None, sys.stdout, sys.stderr)
    if monitor is None or this_ranks_file:
        stream = sys.stdout if file is None else file
        stream.write(text)
        if flush or not this_ranks_file:
            stream.flush()
        return
    # The line of the script tells the monitor which texts of the ranks belong together.
    caller = sys._getframe(1)
    stream_name = "stderr" if file is sys.stderr else "stdout"
    monitor.print(caller.f_code.co_filename, caller.f_lineno, stream_name, text)


def get_logger(name: str, directory: str | None = None) -> logging.Logger:
    """Return a standard logger that shows all records of rank 0, and errors of the other ranks.

    Every record carries the rank as `%(rank)s`. Before `init` every process shows its records.
    Another call returns the same logger.

    Args:
      name: as in `logging.getLogger`.
      directory: a folder, made if need be, where every rank also writes all its records, to
        `<name>-rank<r>.log`; after `init` only.

    Returns:
      The logger, at level INFO, with its own handler on stderr.

    Raises:
      NotInitializedError: `directory` was given before `init`.
    """
    logger = logging.getLogger(name)
    handlers = {handler.get_name(): handler for handler in logger.handlers}
    layout = logging.Formatter(
        "%(asctime)s [%(rank)s] %(levelname)s %(name)s: %(message)s", "%H:%M:%S"
    )
    if "jaxmpi" not in handlers:
        screen = logging.StreamHandler()
        screen.addFilter(_is_shown)
        _add(logger, screen, "jaxmpi", layout)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    if directory is not None:
        path = Path(directory, f"{name}-rank{session.current('get_logger').place.rank}.log")
        if str(path) not in handlers:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = logging.FileHandler(path)
            file.addFilter(_add_rank)
            _add(logger, file, str(path), layout)
    return logger


def progress(iterable: Iterable[T] | None = None, **options: object) -> "tqdm[T]":
    """Return a tqdm progress bar that is shown on rank 0 only, and counts on every rank.

    Without a terminal it is shown nowhere. Its numbers (`n`, `total`, `format_dict`) and its
    methods are the same on all ranks, so that a step may depend on them.

    **Collective:** no. **Communication:** none.

    Args:
        iterable: The items; None for a bar that is moved by `update`.
        **options: Options of `tqdm.tqdm`, such as `desc`, `total`, `unit`. With `disable=True` it
            is shown on no rank; with `file` it writes there, on rank 0.

    Returns:
        The tqdm object: iterate over it, or use its methods, such as `update` and `set_postfix`.

    >>> bar = progress(total=6)
    >>> for step in range(3):
    ...     moved = bar.update(2)
    >>> bar.n
    6
    """
    terminal = sys.stderr.isatty() or settings.get("JAXMPI_TTY")
    disabled = options.pop("disable", False)
    shown = terminal and not disabled and (not session.initialized() or session.rank() == 0)
    # A disabled tqdm counts nothing. So it is enabled everywhere. A hidden bar writes to a stream
    # that drops everything, at a position that no visible bar has.
    hidden = {"file": _NullStream(), "mininterval": math.inf, "position": 1000}
    bar = _Bar(iterable, **(options if shown else {**options, **hidden}))
    # Close a bar that is left early before Python shuts down. Otherwise tqdm draws it once more
    # while modules are removed (Python 3.13.0 crashes there), and its thread still refreshes bars.
    bar_if_alive = weakref.ref(bar)
    forget = at_exit(Step.THREADS, lambda: _close(bar_if_alive()))
    weakref.finalize(bar, forget).atexit = False
    return bar


class _Bar(tqdm):  # type: ignore[misc]
    """A bar whose `n` is the number of finished items, also inside the loop.

    tqdm's own loop stores `n` only when it draws, which depends on the time and so on the rank.
    """

    def __iter__(self) -> Iterator[Any]:
        try:
            for item in self.iterable:
                yield item
                self.update(1)
        finally:
            self.close()


class _NullStream(io.TextIOBase):
    """A stream that drops everything."""

    def write(self, text: str) -> int:
        return len(text)


def average_metrics(metrics: PyTree, weight: Weight = 1.0) -> PyTree:
    """Average metrics over all ranks, weighted by each rank's number of samples or tokens.

    out = Σ_r w_r · m_r / Σ_r w_r, leaf by leaf; NaN where all weights are zero. A rank with weight
    zero may hold NaN.

    **Collective:** every rank calls it, with the same structure and shapes.
    **Communication:** one message, weight included.

    Args:
      metrics: any pytree of real numbers or arrays.
      weight: w_r of this rank: one finite number, 0 or more.

    Returns:
      The same structure with floating-point arrays, equal on all ranks.

    Raises:
      ValueError: on all ranks, if the weight of a rank is something else. In traced code all
        metrics are NaN if a weight is negative, infinite or NaN.
      TypeError: on the rank that passed it, if a leaf is not a real number, with its path.
      OverflowError: on the rank that passed it, if the dtype of the result, float32 without
        `jax_enable_x64`, cannot hold a number of Python or NumPy, with its path.
      RankMismatchError: on the other ranks, for either of these errors, with its text.

    >>> average_metrics({"loss": 0.5, "accuracy": 1.0}, weight=32)
    {'accuracy': Array(1., dtype=float32), 'loss': Array(0.5, dtype=float32)}
    """
    backend = session.current("average_metrics")
    paths, treedef = jax.tree_util.tree_flatten_with_path(metrics)
    with raising_on_all(backend, "average_metrics") if not _jaxcompat.tracing() else nullcontext():
        # Round numbers of Python and NumPy once, from 64 bits. JAX would first make integers of 32
        # bits of them.
        leaves = [_as_float(path, leaf) for path, leaf in paths]
        # of simulated ranks, a leaf is a stack of all ranks' values
        check = backend.eager(alone=_check_number, stacked=check_fits, parallel=_check_number)
        for (path, _), leaf in zip(paths, leaves, strict=True):
            check("average_metrics", path, leaf)
    dtype = widest(*leaves)
    floats = treedef.unflatten([jnp.asarray(x, dtype) for x in leaves])
    mean = Allreduce("average_metrics").weighted_by(weight, empty=jnp.nan)
    means, _, _ = mean.mean(floats, (), ())
    return means


def _check_number(function: str, path: KeyPath, leaf: object) -> None:
    as_array(function, path, leaf, "max")


def _as_float(path: KeyPath, leaf: ArrayLike) -> ArrayLike:
    """Return numbers of Python and integers of NumPy as float64, and any other leaf as it is.

    Raises:
      OverflowError: float64 cannot hold it, with its path.
    """
    if isinstance(leaf, int | float) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biu"
    ):
        try:
            return np.asarray(leaf, np.float64)
        except OverflowError:  # of Python's integers
            raise OverflowError(
                f"average_metrics: leaf {leaf_name(path)} is an integer of "
                f"{int(leaf).bit_length()} bits, which float64 cannot hold. Leave it out, or pass "
                "its logarithm."
            ) from None
    return leaf


def _close(bar: "tqdm[Any] | None") -> None:
    if bar is not None:
        bar.close()
    if (monitor := tqdm.monitor) is not None:
        monitor.was_killed.set()
        monitor.join(STOP_SECONDS)


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = session.rank() if session.initialized() else "-"
    return True


def _is_shown(record: logging.LogRecord) -> bool:
    return _add_rank(record) and (
        record.__dict__["rank"] in ("-", 0) or record.levelno >= logging.ERROR
    )


def _add(
    logger: logging.Logger, handler: logging.Handler, name: str, layout: logging.Formatter
) -> None:
    handler.set_name(name)
    handler.setFormatter(layout)
    logger.addHandler(handler)
