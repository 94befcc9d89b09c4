"""Several ranks from one process that is none of them: a notebook, an interactive session."""

import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

from jaxmpi._job.launch.pool import pool
from jaxmpi._job.launch.task import Call
from jaxmpi._world import session

__all__ = ["launch"]


def launch(
    function: Callable[..., object],
    ranks: int,
    *args: object,
    backend: str = "auto",
    timeout_seconds: float = math.inf,
    **kwargs: object,
) -> list[Any]:
    """Call a function on several ranks of this machine, after `jaxmpi.init()`, and return what each of them returns.

    For notebooks. The ranks are processes that wait, without using a core, for the next call, and
    so keep what they have compiled and imported; they end with this process. What they print is
    shown when they are done. Where a rank exits, crashes or aborts the job, and where the others
    still run when one has failed, all are ended, and the next call starts new ones.

    Args:
      function: any function, one of the notebook's own or a lambda; what it uses travels with it.
      ranks: how many; 1 needs no MPI.
      *args: for the function: arrays, pytrees, whatever can be pickled.
      backend: as in `jaxmpi.init`.
      timeout_seconds: after which the ranks are ended.
      **kwargs: for the function.

    Returns:
      A list of what each rank has returned, by rank; JAX arrays come as NumPy arrays.

    Raises:
      RankFailure: with every failing rank's traceback and output, if the function fails on any, or
        takes too long.
      ValueError: `ranks` below 1.
      RuntimeError: this process is one of several ranks.
      ModuleNotFoundError: cloudpickle is not installed.
    """
    if ranks < 1:
        raise ValueError(f"launch: ranks is {ranks}. Give 1 or more.")
    if session.initialized() and session.size() > 1 and not session.current("launch").simulates:
        raise RuntimeError(
            f"launch: this is one of {session.size()} ranks. Call it from a process that is not a "
            "rank, such as a notebook."
        )
    try:
        import cloudpickle
    except ImportError as error:
        raise ModuleNotFoundError(
            "launch: functions travel by cloudpickle. Install it: pip install cloudpickle."
        ) from error
    results = pool(ranks, backend).run(
        Call(cloudpickle.dumps((function, args, kwargs)), timeout_seconds)
    )
    for result in results:
        sys.stdout.write(
            "".join(f"[{result.rank}] {line}" for line in result.output.splitlines(keepends=True))
        )
    return [pickle.loads(result.value) for result in results]  # from our own ranks
