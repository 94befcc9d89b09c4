"""What a mean takes on these ranks: in the place of the last one, in a loop of a compiled step, as in training."""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi._backends.base import Backend
from jaxmpi._collectives.objects import barrier
from jaxmpi._collectives.trees import Caller
from jaxmpi._jit.api import jit
from jaxmpi._lowering.costs import Speed
from jaxmpi._world import session

__all__ = ["speed"]

PROBED = 1 << 10, 1 << 18, 1 << 20, 25 << 20  # bytes of a mean of one array
MANY = 256  # arrays of 1 KB in one mean, as many bytes as PROBED[1]
TURNS = 3  # of each loop, of which the middle one counts
TURN_SECONDS = 0.02  # of a loop, about
MOST = 1000  # means in a loop


def speed(backend: Backend) -> Speed | None:
    """Of the messages between these ranks, measured once; None where there is only one process.

    **Collective:** every rank calls it.
    """
    size = backend.place.size
    if size == 1 or backend.simulates:
        return None
    if (known := session.speed()) is None:
        taken = [_seconds([(count // 4,)]) for count in PROBED]
        several = _seconds([(PROBED[1] // MANY // 4,)] * MANY)
        sent_bytes = [2 * (size - 1) / size * count for count in PROBED]
        session.set_speed(
            known := Speed(sent_bytes, taken, max(0.0, several - taken[1]) / (MANY - 1))
        )
    return known


def _seconds(shapes: Sequence[tuple[int, ...]]) -> float:
    """Of a mean of such arrays, equal on every rank."""
    step = jit(
        lambda tree, times: lax.fori_loop(
            0, times, lambda _, tree: Caller("explain").allreduce(tree), tree
        ),
        donate_argnums=0,
        replicated_argnums=1,
    )
    tree = [jnp.zeros(shape) for shape in shapes]

    def turn(times: int) -> float:
        nonlocal tree
        barrier()
        start = time.perf_counter()
        tree = jax.block_until_ready(step(tree, times))
        return (time.perf_counter() - start) / times

    def agreed(seconds: float) -> float:
        return float(Caller("explain").allreduce(np.float64(seconds)))

    turn(1)  # compiles
    times = int(np.clip(TURN_SECONDS / agreed(turn(3)), 1, MOST))
    return agreed(sorted(turn(times) for _ in range(TURNS))[TURNS // 2])
