"""Tests of programs for several ranks: simulated, real, and with faults on purpose.

    @jaxmpi.testing.run_ranks(1, 2, 3, 4)
    def test_allreduce_sum():
        out = jaxmpi.tree_allreduce(jaxmpi.rank() + 1, op="sum")
        assert out == sum(range(1, jaxmpi.size() + 1))

Under pytest this is four tests. The ranks are started once for each number and then wait, without
using a core, for the next test; a test that hangs or kills a rank ends them, as a minute without a
test does, and the next test starts new ones.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jaxmpi._backends.simulate import PerRank
from jaxmpi._collectives.objects import allgather_object
from jaxmpi._jit.api import jit, local
from jaxmpi._jit.function import Leaf, is_per_rank
from jaxmpi._jit.step import Step
from jaxmpi._job.launch.pool import RankFailure, Task, pool
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._world import session
from jaxmpi._world.simulate import simulate
from jaxmpi.testing import faults as faults

__all__ = ["RankFailure", "assert_equivalent", "assert_replicated", "faults", "run_ranks"]

IDLE_SECONDS = 60.0  # a suite that kept the ranks of every number and backend would fill the memory


def run_ranks(
    *sizes: int,
    backend: str = "auto",
    timeout_seconds: float = 120.0,
    axes: Mapping[str, int] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test function on each of these numbers of ranks, after `jaxmpi.init()`.

    The function must stand at the top level of its module. Its arguments may come from
    `pytest.mark.parametrize` (they are pickled), not from fixtures. An environment variable that
    the outer process has when the ranks start, they have, too.

    Args:
      *sizes: numbers of ranks; 1 runs without MPI.
      backend: as in `jaxmpi.init`; ranks of different backends are started apart from each other.
      timeout_seconds: after which all ranks are ended and the test fails.
      axes: as in `jaxmpi.init`; ranks with other axes are started apart, too.

    Returns:
      A decorator; the test gets one more parameter, `ranks`, over which it is parametrized.

    Raises:
      ValueError: no sizes, or one below 1; the function has a parameter `ranks` of its own.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(
            f"run_ranks: sizes are {sizes}. Name one or more numbers of ranks, such as "
            "run_ranks(1, 2, 3)."
        )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        import pytest

        @wraps(function)
        def test(ranks: int, **kwargs: object) -> None:
            job = pool(ranks, backend, IDLE_SECONDS, axes)
            job.run(Task(inspect.getfile(function), function.__qualname__, kwargs, timeout_seconds))

        own = list(inspect.signature(function).parameters.values())
        if any(parameter.name == "ranks" for parameter in own):
            raise ValueError(
                f"run_ranks: {function.__qualname__} has a parameter ranks, which run_ranks adds "
                "itself. Take it out: inside, "
                "jaxmpi.size() is the number of ranks."
            )
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*own, inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)]
        )
        return pytest.mark.parametrize("ranks", sizes)(test)

    return decorate


def assert_equivalent(
    step: Callable[..., object],
    sizes: Sequence[int],
    *args: PyTree,
    batch_argnums: int | Sequence[int] = (),
    rtol: float = 1e-5,
    atol: float = 1e-7,
) -> None:
    """Assert that a step, or a whole training loop, gives the same on these numbers of ranks for the same global batch.

    n ranks with batch b must do what one rank does with batch n·b. The ranks are simulated, in this
    process. float32 sums in another order: 1e-5 leaves room for that; with `jax_enable_x64` and
    float64 arrays take 1e-12.

    Args:
      step: what is tested. With arguments, a function that `jaxmpi.jit` has wrapped or could wrap.
        Without, any function: it may call `jaxmpi.batches` and as many steps as it likes.
      sizes: numbers of ranks; the first one sets the standard.
      *args: the arguments, equal on all ranks.
      batch_argnums: which of them are global batches instead: each rank gets its part of their
        first axis.
      rtol: relative tolerance, as in `np.testing.assert_allclose`.
      atol: absolute tolerance.

    Raises:
      AssertionError: an output differs, with its path and the number of ranks; or each rank has one
        of its own, which is no part of a batch.
      ValueError: a batch that the ranks cannot share equally, no sizes, or an argument that is not
        there.

    >>> import jax, jaxmpi, numpy as np
    >>> def step(w, x):
    ...     grad = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    ...     return w - 0.1 * jax.lax.pmean(grad, jaxmpi.AXIS)
    >>> assert_equivalent(step, [1, 2, 4], np.ones(3), np.arange(24.0).reshape(8, 3), batch_argnums=1)
    """
    run = step if isinstance(step, Step) or not args else jit(step)
    numbers = [batch_argnums] if isinstance(batch_argnums, int) else list(batch_argnums)
    if not sizes:
        raise ValueError(
            "assert_equivalent: sizes is empty. Name numbers of ranks, such as [1, 2, 4]."
        )
    if not all(-len(args) <= i < len(args) for i in numbers):
        raise ValueError(
            f"assert_equivalent: batch_argnums is {batch_argnums}, and there are {len(args)} "
            "arguments."
        )
    split = {i % len(args) for i in numbers}
    standard: dict[str, np.ndarray] | None = None
    for size in sizes:
        with simulate(size):
            outs = run(*(_parts(arg, size) if i in split else arg for i, arg in enumerate(args)))
        paths, _ = jax.tree_util.tree_flatten_with_path(
            outs, is_leaf=lambda x: isinstance(x, PerRank)
        )
        got = {leaf_name(path): _whole(leaf_name(path), leaf) for path, leaf in paths}
        standard = standard or got
        assert got.keys() == standard.keys(), (
            f"the outputs on {size} ranks are {list(got)}, and {list(standard)} on {sizes[0]}"
        )
        for name, x in got.items():
            message = f"output {name} on {size} ranks, beside that on {sizes[0]}"
            chex.assert_trees_all_close(
                x, standard[name], rtol=rtol, atol=atol, custom_message=message
            )


def assert_replicated(tree: PyTree, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Assert that a pytree is the same on all ranks: its structure, shapes, dtypes and values.

    For tests; in a training loop `jaxmpi.watch_replicas` compares checksums. What is in a
    `PerRankState` is compared, too: take it out of the tree if it may differ.

    **Collective:** every rank calls it.
    **Communication:** the whole tree of every rank goes to all.

    Args:
      tree: any pytree of arrays and numbers.
      rtol: relative tolerance, as in `chex.assert_trees_all_close`; equal bits by default.
      atol: absolute tolerance.

    Raises:
      AssertionError: on every rank, with the path of a leaf and the two ranks.

    >>> import jaxmpi, numpy as np
    >>> assert_replicated(jaxmpi.tree_allreduce({"w": np.arange(3.0) * jaxmpi.rank()}))
    """
    backend = session.current("assert_replicated")
    if backend.simulates:
        ranks = [
            jax.tree.map(partial(_on_host, rank), tree, is_leaf=is_per_rank)
            for rank in range(backend.place.size)
        ]
    else:
        ranks = allgather_object(jax.tree.map(partial(_on_host, backend.place.rank), local(tree)))
    for rank, theirs in enumerate(ranks):
        message = f"the tree of rank {rank}, beside that of rank 0"
        chex.assert_trees_all_equal_structs(theirs, ranks[0])
        chex.assert_trees_all_equal_shapes_and_dtypes(theirs, ranks[0])
        chex.assert_trees_all_close(theirs, ranks[0], rtol=rtol, atol=atol, custom_message=message)


def _on_host(rank: int, x: Leaf) -> np.ndarray:
    """Return a rank's value of a leaf as a NumPy array."""
    if is_per_rank(x):
        x = x[rank]
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _parts(batch: PyTree, size: int) -> PyTree:
    def part(path: KeyPath, x: ArrayLike) -> PerRank:
        if np.ndim(x) == 0 or len(x) % size:
            shape = list(np.shape(x))
            raise ValueError(
                f"assert_equivalent: batch {leaf_name(path)} has shape {shape}, which {size} ranks "
                "cannot share."
            )
        return PerRank(np.stack(np.split(np.asarray(x), size)))

    return jax.tree_util.tree_map_with_path(part, batch)


def _whole(name: str, leaf: PyTree) -> np.ndarray:
    if not isinstance(leaf, PerRank):
        return np.asarray(leaf)
    stack = np.asarray(leaf)
    assert stack.ndim > 1, (
        f"output {name} differs between the ranks: {stack}. Average it, to compare it"
    )
    return stack.reshape(-1, *stack.shape[2:])
