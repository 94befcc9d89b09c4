"""What a job of many ranks shows on the screen."""

import io
import logging
import math
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from tqdm import tqdm

from jaxmpi import _jaxcompat
from jaxmpi._consistency.compare import raising_on_all
from jaxmpi._job.monitor.ordered_output import Key
from jaxmpi._job.process import settings
from jaxmpi._job.process.at_exit import STOP_SECONDS, Step, at_exit
from jaxmpi._leaves import PyTree, as_array, check_fits, widest
from jaxmpi._optim.weights import Weight, weighted_mean
from jaxmpi._world import session

__all__ = ["average_metrics", "get_logger", "print", "progress"]

T = TypeVar("T")

_calls: Counter[tuple[str, int, str]] = Counter()


def print(
    *values: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
) -> None:
    """Print on behalf of every rank that calls it, each line with its time and `[rank/size]`.

    It never blocks a rank and never hangs: the ranks send their lines to rank 0, which prints those
    of one call together, in the order of the ranks. Rank 0 waits at most 0.2 s for ranks that do
    not call it. Before `init` the line is printed as it is, with the time.

    **Communication:** one message from each rank to rank 0; nobody waits for an answer. None for a
    file of the rank's own.

    Args:
      *values: as for Python's `print`.
      sep: between the values.
      end: after the last value; without a newline, what the next rank prints is on the same line.
      file: None for stdout. `sys.stdout` and `sys.stderr` are those of rank 0; any other file is
        this rank's own.
      flush: for a file of the rank's own; what rank 0 prints is always flushed.
    """
    label = f"[{session.rank()}/{session.size()}] " if session.initialized() else ""
    head = f"{time.strftime('%H:%M:%S')} {label}"
    *lines, last = (sep.join(map(str, values)) + end).split("\n")
    text = "".join(f"{head}{line}\n" for line in lines) + (last and head + last)
    watch = session.monitor()
    own = file not in (None, sys.stdout, sys.stderr)
    if watch is None or own:
        stream = sys.stdout if file is None else file
        stream.write(text)
        if flush or not own:
            stream.flush()
        return
    caller = sys._getframe(1)
    place = (caller.f_code.co_filename, caller.f_lineno, threading.current_thread().name)
    _calls[place] += 1  # no other thread has this key
    watch.print(Key(*place, _calls[place], "stderr" if file is sys.stderr else "stdout"), text)


def get_logger(name: str, directory: str | None = None) -> logging.Logger:
    """A standard `logging` logger that speaks on rank 0, and on the other ranks from ERROR on.

    Every record carries the rank as `%(rank)s`. Before `init` every process speaks. Calling it
    again gives the same logger.

    Args:
      name: as in `logging.getLogger`.
      directory: where every rank also writes all its records, to `<name>-rank<r>.log`; made if need
        be. After `init` only.

    Returns:
      The logger, at level INFO, with a handler on stderr of its own.

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
        screen.addFilter(_speaks)
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
    """Return a tqdm progress bar that shows on rank 0 only, and counts on every rank.

    Where there is no terminal it shows nowhere. Its numbers (`n`, `total`, `format_dict`) and its
    methods are the same on all ranks, so that a step may depend on them.

    **Collective:** no. **Communication:** none.

    Args:
        iterable: The items; None for a bar that is moved by `update`.
        **options: Those of `tqdm.tqdm`, such as `desc`, `total`, `unit`. With `disable=True` it
            shows on no rank; with `file` it writes there, on rank 0.

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
    # tqdm counts nothing where it is disabled. So it is enabled everywhere, and where it is not to
    # be seen it writes into nothing, at a position that leaves those of visible bars alone.
    hidden = {"file": _Nowhere(), "mininterval": math.inf, "position": 1000}
    bar = _Bar(iterable, **(options if shown else {**options, **hidden}))
    # A bar that is left early is closed before Python shuts down: tqdm would draw it for the last
    # time while modules go (Python 3.13.0 crashes there), and has a thread that refreshes bars.
    still_there = weakref.ref(bar)
    forget = at_exit(Step.THREADS, lambda: _close(still_there()))
    weakref.finalize(bar, forget).atexit = False
    return bar


class _Bar(tqdm):  # type: ignore[misc]
    """A bar whose `n` is the number of items that the loop is done with, in the loop, too.

    tqdm's own loop stores it only when it draws, which depends on the time and so on the rank.
    """

    def __iter__(self) -> Iterator[Any]:
        try:
            for item in self.iterable:
                yield item
                self.update(1)
        finally:
            self.close()


class _Nowhere(io.TextIOBase):
    """A stream for a bar that nobody sees."""

    def write(self, text: str) -> int:
        return len(text)


def average_metrics(metrics: PyTree, weight: Weight = 1.0) -> PyTree:
    """Average metrics over all ranks, weighted by each rank's number of samples or tokens.

    out = Σ_r w_r · m_r / Σ_r w_r, leaf by leaf; NaN where all weights are zero. A rank of weight
    zero may hold NaN.

    **Collective:** every rank calls it, with the same structure and shapes.
    **Communication:** one message, weight included.

    Args:
      metrics: any pytree of real numbers or arrays.
      weight: one finite number, 0 or more.

    Returns:
      The same structure with floating-point arrays, equal on all ranks.

    Raises:
      ValueError: on all ranks, a weight of any rank that is something else. In traced code a
        negative, infinite or NaN weight makes NaN of all metrics.
      TypeError: a leaf that is no real number, with its path.
      OverflowError: on all ranks, a number of Python or NumPy that the result's dtype cannot hold:
        float32 without `jax_enable_x64`.

    >>> average_metrics({"loss": 0.5, "accuracy": 1.0}, weight=32)
    {'accuracy': Array(1., dtype=float32), 'loss': Array(0.5, dtype=float32)}
    """
    backend = session.current("average_metrics")
    paths, treedef = jax.tree_util.tree_flatten_with_path(metrics)
    with raising_on_all(backend, "average_metrics") if not _jaxcompat.tracing() else nullcontext():
        # Numbers of Python and NumPy are rounded once, from 64 bits: JAX would make integers of 32
        # bits of them first.
        leaves = [_as_float(leaf) for _, leaf in paths]
        for (path, _), leaf in zip(paths, leaves, strict=True):
            if backend.simulates:  # whose leaves are stacks
                check_fits("average_metrics", path, leaf)
            else:
                as_array("average_metrics", path, leaf, "max")
    dtype = widest(*leaves)
    floats = treedef.unflatten([jnp.asarray(x, dtype) for x in leaves])
    return weighted_mean("average_metrics", floats, weight, empty=jnp.nan)


def _as_float(leaf: ArrayLike) -> ArrayLike:
    """Numbers of Python and integers of NumPy in float64; a leaf that is anything else."""
    if isinstance(leaf, int | float) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biu"
    ):
        return np.asarray(leaf, np.float64)
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


def _speaks(record: logging.LogRecord) -> bool:
    return _add_rank(record) and (
        record.__dict__["rank"] in ("-", 0) or record.levelno >= logging.ERROR
    )


def _add(
    logger: logging.Logger, handler: logging.Handler, name: str, layout: logging.Formatter
) -> None:
    handler.set_name(name)
    handler.setFormatter(layout)
    logger.addHandler(handler)
