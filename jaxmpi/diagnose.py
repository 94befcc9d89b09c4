"""Looking at a step from outside: what it will communicate."""

import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxmpi._backends.base import Backend
from jaxmpi._collectives.objects import barrier
from jaxmpi._collectives.trees import tree_allreduce
from jaxmpi._jit.api import jit
from jaxmpi._jit.step import Step
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.costs import Cost, Speed, cost, table
from jaxmpi._lowering.summary import Entry
from jaxmpi._world import session

__all__ = ["Explanation", "explain"]

PROBED = {1 << 10: 100, 1 << 18: 20, 1 << 20: 10, 25 << 20: 1}  # bytes of a mean, and how often a step repeats it
MANY = 256  # arrays in one mean
TURNS = 3  # of each step, of which the middle one counts


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
    loop or branch and the source line that it comes from, and the time it should take: that of a mean for which a rank sends as
    many bytes, between those of 1 KB to 25 MB, and more for each further array. They are measured on these ranks, once.

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
    speed = _speed(backend) if program.entries else None
    result = Explanation(program.function.title, program.entries, backend, speed.seconds_of if speed else None)
    if backend.place.rank == 0:
        sys.stdout.write(result.text)
        sys.stdout.flush()
    return result


def _speed(backend: Backend) -> Speed | None:
    """Of the messages between these ranks, measured once; None where there is only one process."""
    size = backend.place.size
    if size == 1 or backend.simulates:
        return None
    if (speed := session.speed()) is None:
        taken = [_seconds([(count // 4,)], times) for count, times in PROBED.items()]
        several = _seconds([(4,)] * MANY, PROBED[1 << 10])
        *taken, several = map(float, tree_allreduce([*taken, several]))  # equal on every rank
        sent_bytes = [2 * (size - 1) / size * count for count in PROBED]
        session.set_speed(speed := Speed(sent_bytes, taken, max(0.0, several - taken[0]) / (MANY - 1)))
    return speed


def _seconds(shapes: Sequence[tuple[int, ...]], times: int) -> float:
    """Of a mean in the place of the last one, in a loop of a compiled step: the step itself does not count."""
    step = jit(lambda tree: lax.fori_loop(0, times, lambda _, tree: tree_allreduce(tree), tree), donate_argnums=0)
    tree, taken = [jnp.zeros(shape) for shape in shapes], []
    for _ in range(TURNS + 1):  # the first one compiles
        jax.block_until_ready(tree)
        barrier()
        start = time.perf_counter()
        tree = jax.block_until_ready(step(tree))
        taken.append((time.perf_counter() - start) / times)
    return sorted(taken[1:])[TURNS // 2]
