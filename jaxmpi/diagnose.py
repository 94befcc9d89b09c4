"""`explain`: what a step will communicate, before it runs."""

import sys
from collections.abc import Callable, Sequence

from jaxmpi._backends.interface import Ranks
from jaxmpi._collectives.throughput import measured_speed
from jaxmpi._jit.api import jit
from jaxmpi._jit.step import Step
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.explain import Cost, cost, table
from jaxmpi._lowering.plan import Entry
from jaxmpi._world import session

__all__ = ["Explanation", "explain"]


class Explanation:
    """The messages of one call of a step.

    Attributes:
      entries: its collectives, in the order in which they run.
      messages: the number of messages; None if it depends on a loop or a branch.
      sent_bytes: the number of bytes that each rank sends; None in the same case.
      seconds: how long the messages should take, one after the other; None in the same case, and
        where nothing is measured, as with simulated ranks.
      text: the table that `explain` prints.
    """

    def __init__(
        self,
        title: str,
        entries: Sequence[Entry],
        backend: Ranks,
        seconds: Callable[[Cost], float] | None,
    ) -> None:
        self.entries = entries
        self.text = table(title, entries, backend, seconds)
        self.messages: int | None = None
        self.sent_bytes: float | None = None
        self.seconds: float | None = None
        messages, total_seconds = 0, 0.0
        sent_bytes: float = 0  # estimates: see `Cost`
        for entry in entries:
            if entry.times is None:  # only the running program knows
                return
            each = cost(entry, backend)
            messages += entry.times * each.messages
            sent_bytes += entry.times * each.sent_bytes
            if seconds and entry.times:
                total_seconds += entry.times * seconds(each)
        self.messages, self.sent_bytes = messages, sent_bytes
        if seconds or not entries:
            self.seconds = total_seconds

    def __repr__(self) -> str:
        return self.text


def explain(step: Callable[..., object], *args: PyTree, **kwargs: PyTree) -> Explanation:
    """Print what a step will communicate, before it runs.

    The table has a row for each collective: its name, its arrays, the bytes that each rank sends,
    the number of messages, how often it runs, its loop or branch, its source line, and the seconds
    it should take. The seconds are those of a mean that sends as many bytes per rank, interpolated
    between means of 1 KB to 25 MB that are measured on these ranks, once; each further array adds
    to them.

    **Collective:** every rank calls it; rank 0 prints.
    **Communication:** the measurement sends at least 200 MB, and as much as passes in half a
    second. The step itself sends nothing.

    Args:
      step: a function that `jaxmpi.jit` has wrapped, or one that it could wrap.
      *args: its arguments, or `jax.ShapeDtypeStruct`s like them.
      **kwargs: its keyword arguments.

    Returns:
      The Explanation, which also holds the numbers.

    >>> import jax, jaxmpi, numpy as np
    >>> step = jaxmpi.jit(lambda x: jax.lax.pmean(x, jaxmpi.AXIS))
    >>> with jaxmpi.simulate(4):
    ...     plan = jaxmpi.explain(step, np.ones(1000, np.float32))
    <lambda> on 4 ranks (simulate):
      collective     arrays         sent per rank  messages  times  where
      allreduce sum  float32[1000]  6 KB           1         1      <doctest ...>:1
      total                         6 KB           1
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
