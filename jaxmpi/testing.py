"""Tests on several ranks, each counted as a test of its own.

    @jaxmpi.testing.run_ranks(1, 2, 3, 4)
    def test_allreduce_sum():
        out = jaxmpi.tree_allreduce(jaxmpi.rank() + 1, op="sum")
        assert out == sum(range(1, jaxmpi.size() + 1))

Under pytest this is four tests. The ranks are started once for each number and then wait, without using a core, for the next
test; a test that hangs or kills a rank ends them, and the next test starts new ones.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from jaxmpi._pool import RankFailure, Task, pool

__all__ = ["RankFailure", "run_ranks"]


def run_ranks(
    *sizes: int, backend: str = "auto", timeout_seconds: float = 60.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test function on each of these numbers of ranks, after `jaxmpi.init()`.

    The function must stand at the top level of its module. Its arguments may come from `pytest.mark.parametrize` (they are
    pickled), not from fixtures. An environment variable that the outer process has when the ranks start, they have, too.

    Args:
      *sizes: numbers of ranks; 1 runs without MPI.
      backend: as in `jaxmpi.init`; ranks of different backends are started apart from each other.
      timeout_seconds: after which all ranks are ended and the test fails.

    Returns:
      A decorator; the test gets one more parameter, `ranks`, over which it is parametrized.

    Raises:
      ValueError: no sizes, or one below 1.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"run_ranks: sizes are {sizes}. Name one or more numbers of ranks, such as run_ranks(1, 2, 3).")

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        import pytest

        @wraps(function)
        def test(ranks: int, **kwargs: Any) -> None:
            pool(ranks, backend).run(Task(inspect.getfile(function), function.__qualname__, kwargs, timeout_seconds))

        own = list(inspect.signature(function).parameters.values())
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*own, inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)]
        )
        return pytest.mark.parametrize("ranks", sizes)(test)

    return decorate
