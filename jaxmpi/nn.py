"""What models need of the other ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyEntry

from jaxmpi._collectives.trees import tree_allreduce
from jaxmpi._jit.api import describe
from jaxmpi._jit.nnx import InPlace
from jaxmpi._leaves import PyTree

__all__ = ["average_batch_stats", "jit"]


def jit(
    fun: Callable[..., object] | None = None,
    *,
    replicated_argnums: int | Sequence[int] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **jit_kwargs: Any,
) -> Any:
    """`flax.nnx.jit`, with the ranks as a named axis: `jaxmpi.jit` for a step that changes its nnx arguments in place.

    What the function does to Modules, Optimizers, Rngs and Metrics among its arguments they hold after the call. Their
    arrays go in and come out; which variables there are must not change. Variables of type
    `nnx.BatchStat`, `MetricState` and `RngState` are each rank's own, as if they stood in a `PerRankState`; all others
    are equal on all ranks, if the gradients are averaged.

    **Collective:** as `jaxmpi.jit`.
    **Communication:** as `jaxmpi.jit`.

    Args:
      fun: the function; a decorator is returned without it.
      replicated_argnums: positions of arguments that are equal on all ranks, such as the model and the optimizer, and must be
        after the call.
      graph: as in newer versions of `nnx.jit`. Modules may share variables either way.
      graph_updates: as in newer versions of `nnx.jit`. A function that adds variables or removes some is refused either way.
      **jit_kwargs: those of `jax.jit`; `donate_argnums=(0, 1)` spares a copy of a model and an optimizer.

    Returns:
      The jitted function, with `lower`, `trace` and `eval_shape` as that of `jax.jit`.

    Raises:
      ValueError: when traced, if the function adds variables or removes some; and as `jaxmpi.jit`.
      RankMismatchError: as `jaxmpi.jit`.

    >>> import jaxmpi, optax
    >>> from flax import nnx
    >>> @jaxmpi.nn.jit
    ... def step(model, optimizer, x):
    ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, jaxmpi.distributed(optax.sgd(0.1)), wrt=nnx.Param)
    >>> bool(step(model, optimizer, jnp.ones((4, 2))) > step(model, optimizer, jnp.ones((4, 2))))
    True
    """
    if fun is None:
        return partial(jit, replicated_argnums=replicated_argnums, graph=graph, graph_updates=graph_updates, **jit_kwargs)
    return InPlace(describe(fun, replicated_argnums, replicated_argnums, jit_kwargs), jit_kwargs)


def average_batch_stats(stats: PyTree) -> PyTree:
    """Batch statistics of all ranks as one, before evaluation or saving.

    Each rank's BatchNorm keeps running statistics of its own batches, unless it has `axis_name=jaxmpi.AXIS`. Where a "var"
    stands beside a "mean" of the same shape, as in Flax linen and nnx, μ = mean_r μ_r and σ² = mean_r (σ_r² + (μ_r - μ)²):
    those of all ranks' samples together. Other floats become their mean; integers, such as counters, stay this rank's.

    **Collective:** every rank calls it, with the same structure, shapes and dtypes.
    **Communication:** the bytes of the statistics, in two rounds.

    Args:
      stats: Flax's "batch_stats", an `nnx.State` of `nnx.BatchStat`, or any pytree.

    >>> average_batch_stats({"mean": jnp.zeros(1), "var": jnp.ones(1)})["var"]
    Array([1.], dtype=float32)
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(stats)
    names = {tuple(map(_name, path)): i for i, (path, _) in enumerate(paths)}
    leaves = [x for _, x in paths]
    partner = {}  # the number of a mean, by that of its variance
    for name, i in names.items():
        last = max((k for k, part in enumerate(name) if part == "var"), default=None)
        j = None if last is None else names.get((*name[:last], "mean", *name[last + 1 :]))
        if (
            j is not None
            and jnp.shape(leaves[i]) == jnp.shape(leaves[j])
            and jnp.issubdtype(jnp.result_type(leaves[i]), jnp.inexact)
        ):
            partner[i] = j
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    wide = {i: jnp.asarray(leaves[i]).astype(jnp.promote_types(jnp.result_type(leaves[i]), jnp.float32)) for i in floats}
    means = tree_allreduce({i: x for i, x in wide.items() if i not in partner}, op="mean")
    # not of the squares, whose difference would be the rounding of μ²
    around = {i: wide[i] + jnp.square(wide[j] - means[j]) for i, j in partner.items()}
    for i, x in (means | tree_allreduce(around, op="mean")).items():
        leaves[i] = x.astype(jnp.result_type(leaves[i]))
    return treedef.unflatten(leaves)


def _name(key: KeyEntry) -> str:
    """What a part of a path is called."""
    return str(next((getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field)), key))
