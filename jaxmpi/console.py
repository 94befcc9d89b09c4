"""What a job of many ranks shows on the screen."""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxmpi import _jaxcompat, _settings, _world
from jaxmpi._collectives import tree_allreduce
from jaxmpi._jit import eager
from jaxmpi._leaves import as_array
from jaxmpi._watch import guard
from jaxmpi._watch.rounds import Key

__all__ = ["average_metrics", "get_logger", "print", "progress"]

T = TypeVar("T")

_calls: Counter[tuple[str, int, str]] = Counter()


def print(*values: Any, sep: str = " ") -> None:
    """Print on behalf of every rank that calls it, in the order of the ranks, each line with its time and `[rank/size]`.

    It never blocks a rank and never hangs: the ranks send their lines to rank 0, which prints those of one call together. Ranks
    that do not call it are waited for at most 0.2 s, on rank 0 only. Before `init` the line is printed as it is, with the time.

    **Communication:** one message from each rank to rank 0; nobody waits for an answer.
    """
    lines = sep.join(map(str, values)).split("\n")
    watch = guard.active()
    label = f"[{_world.rank()}/{_world.size()}] " if _world.initialized() else ""
    text = "".join(f"{time.strftime('%H:%M:%S')} {label}{line}\n" for line in lines)
    if watch is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    caller = sys._getframe(1)
    place = (caller.f_code.co_filename, caller.f_lineno, threading.current_thread().name)
    _calls[place] += 1  # no other thread has this key
    watch.print(Key(*place, _calls[place]), text)


def get_logger(name: str, directory: str | None = None) -> logging.Logger:
    """A standard `logging` logger that speaks on rank 0, and on the other ranks from ERROR on.

    Every record carries the rank as `%(rank)s`. Before `init` every process speaks. Calling it again gives the same logger.

    Args:
      name: as in `logging.getLogger`.
      directory: where every rank also writes all its records, to `<name>-rank<r>.log`; made if need be. After `init` only.

    Returns:
      The logger, at level INFO, with a handler on stderr of its own.

    Raises:
      NotInitializedError: `directory` was given before `init`.
    """
    logger = logging.getLogger(name)
    handlers = {handler.get_name(): handler for handler in logger.handlers}
    layout = logging.Formatter("%(asctime)s [%(rank)s] %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    if "jaxmpi" not in handlers:
        screen = logging.StreamHandler()
        screen.addFilter(_speaks)
        _add(logger, screen, "jaxmpi", layout)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    if directory is not None:
        path = Path(directory, f"{name}-rank{_world.current('get_logger').place.rank}.log")
        if str(path) not in handlers:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = logging.FileHandler(path)
            file.addFilter(_add_rank)
            _add(logger, file, str(path), layout)
    return logger


def progress(iterable: Iterable[T], **options: Any) -> "tqdm[T]":
    """A tqdm progress bar on rank 0; on the other ranks, and where there is no terminal, only the items.

    Args:
      iterable: the items.
      **options: those of `tqdm.tqdm`, such as `desc`, `total`, `unit`.

    Returns:
      The tqdm object: iterate over it, or use its methods, such as `set_postfix`.
    """
    terminal = sys.stderr.isatty() or _settings.get("JAXMPI_TTY")
    shown = terminal and (not _world.initialized() or _world.rank() == 0)
    return tqdm(iterable, disable=not shown, **options)


def average_metrics(metrics: Any, weight: Any = 1.0) -> Any:
    """Average metrics over all ranks, each rank's counting `weight`: its number of samples or tokens.

    out = Σ_r w_r · m_r / Σ_r w_r, leaf by leaf; NaN where all weights are zero. A rank of weight zero may hold NaN.

    **Collective:** every rank calls it, with the same structure and shapes.
    **Communication:** one message, weight included.

    Args:
      metrics: any pytree of real numbers or arrays.
      weight: a non-negative scalar.

    Returns:
      The same structure with floating-point arrays, equal on all ranks.

    Raises:
      ValueError: the weight is no scalar.
      TypeError: a leaf that is no real number, with its path.

    >>> average_metrics({"loss": 0.5, "accuracy": 1.0}, weight=32)
    {'accuracy': Array(1., dtype=float32), 'loss': Array(0.5, dtype=float32)}
    """
    backend = _world.current("average_metrics")
    if backend.name != "simulate":  # whose leaves are stacks
        _check(metrics, weight)
    if backend.place.size == 1 or _jaxcompat.tracing():
        return _average(metrics, weight)
    return _eager_average(metrics, weight)


def _average(metrics: Any, weight: Any) -> Any:
    leaves, treedef = jax.tree.flatten(metrics)
    dtype = jnp.result_type(jnp.float32, *leaves)
    w = jnp.asarray(weight, dtype)
    summed = [jnp.where(w > 0, jnp.asarray(x).astype(dtype), 0) * w for x in leaves]
    message = jnp.concatenate([w.reshape(1), *(x.reshape(-1) for x in summed)])
    total, *parts = jnp.split(tree_allreduce(message, op="sum"), np.cumsum([1, *(x.size for x in summed)])[:-1])
    return treedef.unflatten([part.reshape(x.shape) / total[0] for part, x in zip(parts, summed, strict=True)])


def _check(metrics: Any, weight: Any) -> None:
    if jnp.ndim(weight) != 0:
        raise ValueError(f"average_metrics: weight has shape {list(jnp.shape(weight))}. Pass one number for the rank.")
    for path, leaf in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        as_array("average_metrics", path, leaf, "max")


_eager_average = eager(lambda metrics, weight: _average(metrics, weight), "average_metrics")


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = _world.rank() if _world.initialized() else "-"
    return True


def _speaks(record: logging.LogRecord) -> bool:
    return _add_rank(record) and (record.__dict__["rank"] in ("-", 0) or record.levelno >= logging.ERROR)


def _add(logger: logging.Logger, handler: logging.Handler, name: str, layout: logging.Formatter) -> None:
    handler.set_name(name)
    handler.setFormatter(layout)
    logger.addHandler(handler)
