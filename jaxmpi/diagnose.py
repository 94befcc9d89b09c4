"""Looking at a step from outside: what it will communicate."""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi._collectives.objects import barrier
from jaxmpi._collectives.trees import tree_allreduce
from jaxmpi._jit.api import jit
from jaxmpi._jit.step import Step
from jaxmpi._lowering.costs import Cost, cost, table
from jaxmpi._lowering.summary import Entry
from jaxmpi._world import session

__all__ = ["Explanation", "explain"]

LARGE_BYTES = 4 * 1024 * 1024
ROUNDS = 20


class Explanation:
    """What a step will send in one call.

    Attributes:
      entries: its collectives, in the order in which they are carried out.
      messages: how many messages they are; None where a loop or a branch decides.
      sent_bytes: how many bytes each rank sends; None in the same case.
      text: the table.
    """

    def __init__(self, title: str, entries: list[Entry], backend: Any, seconds: Callable[[Cost], float] | None) -> None:
        self.entries = entries
        costs = [cost(entry, backend) for entry in entries]
        times = [entry.times for entry in entries]
        known = None not in times
        self.messages = sum(n * each.messages for n, each in zip(times, costs, strict=True) if n) if known else None
        self.sent_bytes = sum(n * each.sent_bytes for n, each in zip(times, costs, strict=True) if n) if known else None
        self.text = table(title, entries, backend, seconds)

    def __repr__(self) -> str:
        return self.text


def explain(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Print what a step will communicate, before it runs.

    The table has a row for each collective: what it is, its arrays, the bytes that each rank sends, messages, how often, the
    loop or branch and the source line that it comes from, and the time it should take: latency · messages + bytes /
    bandwidth, both measured on these ranks, once.

    **Collective:** every rank calls it; rank 0 prints.
    **Communication:** that of the measurement, some 100 MB; nothing of the step itself.

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
    backend: Any = session.current("explain")
    program = (step if isinstance(step, Step) else jit(step)).program(*args, **kwargs)
    result = Explanation(program.function.title, program.entries, backend, _measured(backend) if program.entries else None)
    if backend.place.rank == 0:
        sys.stdout.write(result.text)
        sys.stdout.flush()
    return result


def _measured(backend: Any) -> Callable[[Cost], float] | None:
    """Seconds for a cost, from a small and a large allreduce; None where there is only one process."""
    if backend.place.size == 1 or backend.simulates:
        return None
    if not hasattr(backend, "speed"):
        small, large = _median_seconds(jnp.zeros(2)), _median_seconds(jnp.zeros(LARGE_BYTES // 4))
        size = backend.place.size
        speed = 2 * (size - 1) / size * LARGE_BYTES / max(large - small, 1e-9)
        backend.speed = tree_allreduce((small, speed))  # every rank predicts the same
    latency_seconds, bytes_per_second = map(float, backend.speed)
    return lambda each: each.messages * latency_seconds + each.sent_bytes / bytes_per_second


def _median_seconds(x: jax.Array) -> float:
    taken = []
    for _ in range(ROUNDS):
        barrier()
        start = time.perf_counter()
        jax.block_until_ready(tree_allreduce(x))
        taken.append(time.perf_counter() - start)
    return sorted(taken)[ROUNDS // 2]
