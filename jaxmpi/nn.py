"""Layers, statistics and steps of models over all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxmpi._consistency.findings import allowed_names
from jaxmpi._jit.api import describe
from jaxmpi._jit.nnx import InPlace
from jaxmpi._nn.running_stats import average_batch_stats

if TYPE_CHECKING:
    from jaxmpi._nn import linen
    from jaxmpi._nn.batch_norm import BatchNorm

__all__ = ["BatchNorm", "average_batch_stats", "jit", "linen"]


def __getattr__(name: str) -> Any:
    """Import the layers when they are first used: Flax takes longer to import than all else."""
    if name == "BatchNorm":
        return import_module("jaxmpi._nn.batch_norm").BatchNorm
    if name == "linen":
        return import_module("jaxmpi._nn.linen")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def jit(
    fun: Callable[..., object] | None = None,
    *,
    replicated_argnums: int | Sequence[int] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
    allow: str | Sequence[str] = (),
    **jit_kwargs: Any,
) -> Any:
    """`flax.nnx.jit` over the ranks: `jaxmpi.jit` for a step that changes nnx arguments in place.

    What the function does to Modules, Optimizers, Rngs and Metrics among its arguments they hold
    after the call. Their arrays go in and come out; which variables there are must not change.
    Variables of type `nnx.BatchStat`, `MetricState` and `RngState` are each rank's own, as if they
    stood in a `PerRankState`; all others are equal on all ranks, if the gradients are averaged.

    **Collective:** as `jaxmpi.jit`.
    **Communication:** as `jaxmpi.jit`.

    Args:
      fun: the function; a decorator is returned without it.
      replicated_argnums: positions of arguments that are equal on all ranks, such as the model and
        the optimizer, and must be after the call.
      graph: as in newer versions of `nnx.jit`. Modules may share variables either way.
      graph_updates: as in newer versions of `nnx.jit`. A function that adds variables or removes
        some is refused either way.
      allow: names of checks to turn off, as in `jaxmpi.jit`.
      **jit_kwargs: those of `jax.jit`; `donate_argnums=(0, 1)` spares a copy of a model and an
        optimizer.

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
        return partial(
            jit,
            replicated_argnums=replicated_argnums,
            graph=graph,
            graph_updates=graph_updates,
            allow=allow,
            **jit_kwargs,
        )
    function = describe(fun, replicated_argnums, replicated_argnums, jit_kwargs)
    allowed = allowed_names("jaxmpi.nn.jit", allow)
    return InPlace(replace(function, api="jaxmpi.nn.jit", allowed=allowed), jit_kwargs)
