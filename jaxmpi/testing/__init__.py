"""Testing programs for several ranks: simulated ranks, real ranks, and injected faults.

    @jaxmpi.testing.run_ranks(1, 2, 3, 4)
    def test_allreduce_sum():
        out = jaxmpi.tree_allreduce(jaxmpi.rank() + 1, op="sum")
        assert out == sum(range(1, jaxmpi.size() + 1))

Under pytest this is four tests. The ranks are started once for each number, and then wait for the
next test without using a core. A test that hangs or kills a rank ends them, and so does a minute
without a test; the next test starts new ones.
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

from jaxmpi._backends.one_process import PerRank
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

# After which the ranks of a number and a backend end: a suite that kept all would fill the memory.
IDLE_RANKS_SECONDS = 60.0


def run_ranks(
    *sizes: int,
    backend: str = "auto",
    timeout_seconds: float = 120.0,
    axes: Mapping[str, int] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test function on each of these numbers of ranks, after `jaxmpi.init()`.

    The function must be at the top level of its module. Its arguments may come from
    `pytest.mark.parametrize` (they are pickled), not from fixtures. The ranks have the environment
    variables that the outer process has when they start.

    Args:
      *sizes: numbers of ranks; 1 runs without MPI.
      backend: as in `jaxmpi.init`. Each backend has its own ranks.
      timeout_seconds: after this time all ranks are ended and the test fails.
      axes: as in `jaxmpi.init`. Other axes have their own ranks.

    Returns:
      A decorator. It adds a parameter, `ranks`, over which the test is parametrized.

    Raises:
      ValueError: there are no sizes, or one is below 1; the function already has a parameter
        `ranks`.
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
            job = pool(ranks, backend, IDLE_RANKS_SECONDS, axes)
            job.run(Task(inspect.getfile(function), function.__qualname__, kwargs, timeout_seconds))

        parameters = list(inspect.signature(function).parameters.values())
        if any(parameter.name == "ranks" for parameter in parameters):
            raise ValueError(
                f"run_ranks: {function.__qualname__} has a parameter ranks, which run_ranks adds "
                "itself. Take it out: inside, jaxmpi.size() is the number of ranks."
            )
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*parameters, inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)]
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
    """Assert that a step, or a training loop, has equal results on these numbers of ranks.

    n ranks with batches of b samples must compute what one rank computes with n·b samples. The
    ranks are simulated in this process. Ranks add float32 numbers in another order: rtol=1e-5
    leaves room for that. Use 1e-12 with `jax_enable_x64` and float64 arrays.

    Args:
      step: the function to test. With arguments, one that `jaxmpi.jit` has wrapped or could wrap.
        Without arguments, any function: it may call `jaxmpi.batches` and any number of steps.
      sizes: numbers of ranks; the others are compared with the first one.
      *args: the arguments, equal on all ranks.
      batch_argnums: positions of arguments that are global batches instead: each rank gets its
        shard of their first axis.
      rtol: relative tolerance, as in `np.testing.assert_allclose`.
      atol: absolute tolerance.

    Raises:
      AssertionError: an output differs; the error has its path and the number of ranks. Or each
        rank has another scalar, which is no shard of a batch.
      ValueError: the ranks cannot share a batch equally, there are no sizes, or `batch_argnums`
        names an argument that does not exist.

    >>> import jax, jaxmpi, numpy as np
    >>> def step(w, x):
    ...     grad = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    ...     return w - 0.1 * jax.lax.pmean(grad, jaxmpi.AXIS)
    >>> batch = np.arange(24.0).reshape(8, 3)
    >>> assert_equivalent(step, [1, 2, 4], np.ones(3), batch, batch_argnums=1)
    """
    run = step if isinstance(step, Step) or not args else jit(step)
    numbers = [batch_argnums] if isinstance(batch_argnums, int) else list(batch_argnums)
    if not sizes:
        raise ValueError(
            "assert_equivalent: sizes is empty. Name numbers of ranks, such as [1, 2, 4]."
        )
    if not all(-len(args) <= i < len(args) for i in numbers):
        advice = "Pass the arguments of the step, too."
        if args:
            advice = f"Name positions from 0 to {len(args) - 1}."
        raise ValueError(
            f"assert_equivalent: batch_argnums is {batch_argnums}, and there are {len(args)} "
            f"arguments. {advice}"
        )
    batches = {i % len(args) for i in numbers}
    expected: dict[str, np.ndarray] | None = None
    for size in sizes:
        sharded = [_shards(arg, size) if i in batches else arg for i, arg in enumerate(args)]
        with simulate(size):
            outs = run(*sharded)
        paths, _ = jax.tree_util.tree_flatten_with_path(
            outs, is_leaf=lambda x: isinstance(x, PerRank)
        )
        got = {leaf_name(path): _global(leaf_name(path), leaf) for path, leaf in paths}
        if expected is None:
            expected = got
        assert got.keys() == expected.keys(), (
            f"the outputs on {size} ranks are {list(got)}, and {list(expected)} on {sizes[0]}"
        )
        for name, x in got.items():
            message = f"output {name} on {size} ranks, compared with {sizes[0]}"
            chex.assert_trees_all_close(
                x, expected[name], rtol=rtol, atol=atol, custom_message=message
            )


def assert_replicated(tree: PyTree, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Assert that a pytree is the same on all ranks: its structure, shapes, dtypes and values.

    It is for tests; in a training loop `jaxmpi.watch_replicas` compares checksums. The content of a
    `PerRankState` is compared, too: take it out of the tree if it may differ.

    **Collective:** every rank calls it.
    **Communication:** one allgather of the whole tree.

    Args:
      tree: any pytree of arrays and numbers.
      rtol: relative tolerance, as in `chex.assert_trees_all_close`; exactly equal by default.
      atol: absolute tolerance.

    Raises:
      AssertionError: on every rank; the error has the path of a leaf and the two ranks.

    >>> import jaxmpi, numpy as np
    >>> assert_replicated(jaxmpi.tree_allreduce({"w": np.arange(3.0) * jaxmpi.rank()}))
    """
    backend = session.current("assert_replicated")
    here = [
        jax.tree.map(partial(_on_host, rank), local(tree), is_leaf=is_per_rank)
        for rank in backend.ranks_here
    ]
    ranks = here if len(here) == backend.place.size else allgather_object(here[0])
    for rank, theirs in enumerate(ranks):
        message = f"the tree of rank {rank}, compared with rank 0"
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


def _shards(batch: PyTree, size: int) -> PyTree:
    """Split each array of a global batch among simulated ranks."""

    def shards(path: KeyPath, x: ArrayLike) -> PerRank:
        if np.ndim(x) == 0 or len(x) % size:
            shape = list(np.shape(x))
            raise ValueError(
                f"assert_equivalent: batch {leaf_name(path)} has shape {shape}, which {size} ranks "
                f"cannot share. Pass a batch whose length is a multiple of {size}, or leave {size} "
                "out of sizes."
            )
        return PerRank(np.stack(np.split(np.asarray(x), size)))

    return jax.tree_util.tree_map_with_path(shards, batch)


def _global(name: str, leaf: PyTree) -> np.ndarray:
    """Join the shards of an output; return a replicated one as it is."""
    if not isinstance(leaf, PerRank):
        return np.asarray(leaf)
    stack = np.asarray(leaf)
    assert stack.ndim > 1, (
        f"output {name} differs between the ranks: {stack}. Average it before it is compared"
    )
    return stack.reshape(-1, *stack.shape[2:])
