"""Simulated ranks: a World of several ranks in one process, for a `with` block."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from jaxmpi._backends.one_process import Simulated
from jaxmpi._world import session
from jaxmpi._world.leftover_pmap import notice_pmaps
from jaxmpi._world.world import World, checked_axes, sized_axes

__all__ = ["simulate"]


@contextmanager
def simulate(n: int, axes: Mapping[str, int] | None = None) -> Iterator[World]:
    """Run a `with` block on n ranks in one process, without MPI: to try a program in a notebook.

        with jaxmpi.simulate(8):
            params, state, loss = step(params, state, batch)

    Inside, `init` gives a World of n ranks, and a function that `jaxmpi.jit` has wrapped runs on
    all of them at once, as `jax.vmap` over the axis. Arrays are equal on all ranks, unless they are
    a `jaxmpi.PerRank`: `jaxmpi.batches` yields those, and a step returns them where its outputs
    differ between the ranks. Python itself runs once, as rank 0.

    Args:
      n: the number of ranks.
      axes: as in `init`.

    Raises:
      ValueError: n is below 1; axes as in `init`.
      RuntimeError: this process is one of several ranks, or another thread is in such a block.

    >>> import jax, jaxmpi, numpy as np
    >>> with jaxmpi.simulate(3):
    ...     step = jaxmpi.jit(lambda x: jax.lax.psum(x, jaxmpi.AXIS))
    ...     print(step(jaxmpi.PerRank(np.arange(3.0))))
    3.0
    """
    if n < 1:
        raise ValueError(f"simulate: n is {n}. Name a number of ranks above 0.")
    outside = session.world()
    if outside is not None and outside.size > 1 and outside.backend != "simulate":
        raise RuntimeError(
            f"simulate: this is one of {outside.size} real ranks. Start a single process for "
            "simulated ones."
        )
    named = sized_axes("simulate", checked_axes("simulate", axes), n)
    backend = _ranks(n, tuple(named.items()))
    notice_pmaps()
    with session.within(
        session.Session(backend, World(*backend.place, backend="simulate", axes=named))
    ) as world:
        yield world


# the same backend for every such block, so that a step compiles once for all of them
_ranks = cache(Simulated)
