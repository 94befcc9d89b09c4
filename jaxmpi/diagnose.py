"""Looking at a step from outside: what it will communicate."""

import sys
from collections.abc import Callable, Sequence

from jaxmpi._backends.base import Backend
from jaxmpi._collectives.throughput import measured_speed
from jaxmpi._jit.api import jit
from jaxmpi._jit.step import Step
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.costs import Cost, cost, table
from jaxmpi._lowering.summary import Entry
from jaxmpi._world import session

__all__ = ["Explanation", "explain"]


class Explanation:
    """What a step will send in one call.

    Attributes:
      entries: its collectives, in the order in which they are carried out.
      messages: how many messages they are; None where a loop or a branch decides.
      sent_bytes: how many bytes each rank sends; None in the same case.
      seconds: how long the messages should take, one after the other; None in the same case, and
        where nothing is measured, as with simulated ranks.
      text: the table.
    """

    def __init__(
        self,
        title: str,
        entries: Sequence[Entry],
        backend: Backend,
        seconds: Callable[[Cost], float] | None,
    ) -> None:
        self.entries = entries
        costs = [cost(entry, backend) for entry in entries]
        times = [entry.times for entry in entries]
        known = None not in times
        self.messages = (
            sum(n * each.messages for n, each in zip(times, costs, strict=True) if n)
            if known
            else None
        )
        self.sent_bytes = (
            sum(n * each.sent_bytes for n, each in zip(times, costs, strict=True) if n)
            if known
            else None
        )
        predicted = [seconds(each) for each in costs] if seconds else [0.0] * len(costs)
        total = (
            sum(n * each for n, each in zip(times, predicted, strict=True) if n) if known else None
        )
        self.seconds = total if seconds or not entries else None
        self.text = table(title, entries, backend, seconds)

    def __repr__(self) -> str:
        return self.text


def explain(step: Callable[..., object], *args: PyTree, **kwargs: PyTree) -> Explanation:
    """Print what a step will communicate, before it runs.

    The table has a row for each collective: what it is, its arrays, the bytes that each rank sends,
    messages, how often, the loop or branch and the source line that it comes from, and the time it
    should take: that of a mean for which a rank sends as many bytes, between those of 1 KB to 25
    MB, and more for each further array. They are measured on these ranks, once.

    **Collective:** every rank calls it; rank 0 prints.
    **Communication:** that of the measurement: at least 200 MB, and as much as passes in half a
    second; nothing of the step itself.

    Args:
      step: a function that `jaxmpi.jit` has wrapped, or one that it could wrap.
      *args: its arguments, or `jax.ShapeDtypeStruct`s like them.
      **kwargs: its arguments.

    Returns:
      The Explanation, which also holds the numbers.

    >>> import jax, jaxmpi, numpy as np
    >>> with jaxmpi.simulate(4):
    ...     step = jaxmpi.jit(lambda x: jax.lax.pmean(x, jaxmpi.AXIS))
    ...     plan = jaxmpi.explain(step, np.ones(1000, np.float32))
    <lambda> on 4 ranks (simulate):
      collective     arrays         sent per rank  messages  times  where
      allreduce sum  float32[1000]  6 KB           1         1      <doctest
      jaxmpi.diagnose.explain[1]>:2 total                         6 KB           1
    """
    backend = session.current("explain")
    program = (step if isinstance(step, Step) else jit(step)).program(*args, **kwargs)
    known = measured_speed(backend) if program.entries else None
    result = Explanation(
        program.function.title, program.entries, backend, known.seconds_of if known else None
    )
    if backend.place.rank == 0:
        sys.stdout.write(result.text)
        sys.stdout.flush()
    return result
