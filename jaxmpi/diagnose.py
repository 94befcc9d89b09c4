"""Looking at a step from outside: what it will communicate."""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._backends.base import Backend
from jaxmpi._collectives.objects import barrier
from jaxmpi._collectives.trees import tree_allreduce
from jaxmpi._jit.api import jit
from jaxmpi._jit.step import Step
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.costs import Cost, cost, table
from jaxmpi._lowering.summary import Entry
from jaxmpi._world import session

__all__ = ["Explanation", "explain"]

PROBED = {1 << 10: 20, 1 << 20: 10, 25 << 20: 4}  # bytes of an allreduce, and how often it is timed


class Explanation:
    """What a step will send in one call.

    Attributes:
      entries: its collectives, in the order in which they are carried out.
      messages: how many messages they are; None where a loop or a branch decides.
      sent_bytes: how many bytes each rank sends; None in the same case.
      seconds: how long the messages should take, one after the other; None in the same case, and where nothing is measured, as
        with simulated ranks.
      text: the table.
    """

    def __init__(self, title: str, entries: Sequence[Entry], backend: Backend, seconds: Callable[[Cost], float] | None) -> None:
        self.entries = entries
        costs = [cost(entry, backend) for entry in entries]
        times = [entry.times for entry in entries]
        known = None not in times
        self.messages = sum(n * each.messages for n, each in zip(times, costs, strict=True) if n) if known else None
        self.sent_bytes = sum(n * each.sent_bytes for n, each in zip(times, costs, strict=True) if n) if known else None
        predicted = [seconds(each) for each in costs] if seconds else [0.0] * len(costs)
        total = sum(n * each for n, each in zip(times, predicted, strict=True) if n) if known else None
        self.seconds = total if seconds or not entries else None
        self.text = table(title, entries, backend, seconds)

    def __repr__(self) -> str:
        return self.text


def explain(step: Callable[..., object], *args: PyTree, **kwargs: PyTree) -> Explanation:
    """Print what a step will communicate, before it runs.

    The table has a row for each collective: what it is, its arrays, the bytes that each rank sends, messages, how often, the
    loop or branch and the source line that it comes from, and the time it should take: that of an allreduce for which a rank
    sends as many bytes, between those of 1 KB, 1 MB and 25 MB, which are measured on these ranks, once.

    **Collective:** every rank calls it; rank 0 prints.
    **Communication:** that of the measurement, some 150 MB; nothing of the step itself.

    Args:
      step: a function that `jaxmpi.jit` has wrapped, or one that it could wrap.
      *args: its arguments, or `jax.ShapeDtypeStruct`s like them.
      **kwargs: its arguments.

    Returns:
      The Explanation, which also holds the numbers.

    >>> import jax, jaxmpi, numpy as np
    >>> with jaxmpi.simulate(4):
    ...     plan = jaxmpi.explain(jaxmpi.jit(lambda x: jax.lax.pmean(x, jaxmpi.AXIS)), np.ones(1000, np.float32))
    <lambda> on 4 ranks (simulate):
      collective     arrays         sent per rank  messages  times  where
      allreduce sum  float32[1000]  6 KB           1         1      <doctest jaxmpi.diagnose.explain[1]>:2
      total                         6 KB           1
    """
    backend = session.current("explain")
    program = (step if isinstance(step, Step) else jit(step)).program(*args, **kwargs)
    result = Explanation(program.function.title, program.entries, backend, _measured(backend) if program.entries else None)
    if backend.place.rank == 0:
        sys.stdout.write(result.text)
        sys.stdout.flush()
    return result


def _measured(backend: Any) -> Callable[[Cost], float] | None:
    """Seconds for a cost; None where there is only one process."""
    if backend.place.size == 1 or backend.simulates:
        return None
    if not hasattr(backend, "speed"):
        share = 2 * (backend.place.size - 1) / backend.place.size
        taken = [_median_seconds(size, times) for size, times in PROBED.items()]
        backend.speed = [share * size for size in PROBED], list(map(float, tree_allreduce(taken)))  # equal on every rank
    sent_bytes, seconds = backend.speed
    return partial(predicted_seconds, sent_bytes=sent_bytes, seconds=seconds)


def predicted_seconds(cost: Cost, sent_bytes: Sequence[float], seconds: Sequence[float]) -> float:
    """What a cost should take: on the lines between what was measured, of a message of so many bytes, and on the last one."""
    if not cost.messages:
        return 0.0
    size = cost.sent_bytes / cost.messages
    slope = (seconds[-1] - seconds[-2]) / (sent_bytes[-1] - sent_bytes[-2])
    beyond = max(0.0, size - sent_bytes[-1]) * max(0.0, slope)
    return cost.messages * (float(np.interp(size, sent_bytes, seconds)) + beyond)


def _median_seconds(size: int, times: int) -> float:
    """Of a mean in the place of the last one, in a compiled step."""
    step, x, taken = jit(tree_allreduce, donate_argnums=0), jnp.zeros(size // 4), []
    for _ in range(times + 2):  # the first ones compile
        jax.block_until_ready(x)
        barrier()
        start = time.perf_counter()
        x = jax.block_until_ready(step(x))
        taken.append(time.perf_counter() - start)
    return sorted(taken[2:])[times // 2]
