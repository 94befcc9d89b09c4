"""One communication for several steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxmpi._axis import equal_on_all_ranks
from jaxmpi._leaves import PyTree, widest
from jaxmpi._optim.float_leaves import check_transform, either, equal_types, map_floats, wide
from jaxmpi._optim.weights import Weight, as_weight, scaled
from jaxmpi._per_rank_state import PerRankState

__all__ = ["AccumulateState", "accumulate"]


class AccumulateState(NamedTuple):
    """The state of `accumulate`.

    Attributes:
      calls: of `update` since the last communication, an int32 that is equal on all ranks.
      sums: a `PerRankState` of the sum of this rank's gradients times their weights, in 32 bits at
        least, and that of their weights.
      inner: the state of the inner transform.
    """

    calls: jax.Array
    sums: PerRankState
    inner: PyTree


def accumulate(
    inner: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Add up gradients, and give `inner` their mean at every `every`-th call of `update`; in between the updates are zero.

    ḡ = Σ_i w_i·g_i / Σ_i w_i over `every` calls, with w_i = 1 where `update` gets no `weight`.
    Where it does, `inner` gets the sum of the weights as its own: around `distributed` the mean is
    exact over all micro-batches of all ranks.

    tx = jaxmpi.accumulate(jaxmpi.distributed(optax.adam(1e-3)), every=4)

    `update(..., flush=True)` gives `inner` the mean over the calls so far, this one included, and
    begins anew. In the last call of an epoch or of the training, no sample is left over: the step
    is that of a batch of the samples that were.

    `inner` communicates in one call out of `every`; `optax.MultiSteps` would communicate in all of
    them. Works in a `lax.scan` in a step, too. `accumulate(inner, 1)` is `inner`.

    **Collective:** every rank calls `update` equally often, with equal `flush`.
    **Communication:** that of `inner`, every `every` calls, and where `flush` is True.

    Args:
      inner: any optax transform, such as `distributed(...)` or `sharded(...)`.
      every: calls of `update` for one of `inner`'s.

    Raises:
      ValueError: `every` is below 1; a weight that is negative or no scalar, as in `distributed`.
      TypeError: `inner` is no optax transform; a leaf of integers, with its path; a `flush` that is
        no boolean. As an argument of a step it needs `replicated_argnums` or `static_argnums`.

    >>> tx = accumulate(optax.sgd(1.0), every=4)
    >>> state = tx.init(jnp.array(0.0))
    >>> for gradient, last in [(2.0, False), (4.0, True)]:
    ...     updates, state = tx.update(jnp.array(gradient), state, flush=last)
    >>> updates
    Array(-3., dtype=float32)
    """
    check_transform("accumulate", "inner", inner)
    if every < 1:
        raise ValueError(
            f"accumulate: every is {every}. It is the number of steps for one communication: 1 or "
            "more."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> AccumulateState:
        total = widest(*(jnp.abs(x).dtype for x in jax.tree.leaves(params)))
        zeros = map_floats(
            "accumulate", lambda x: jnp.zeros_like(x, dtype=wide(jnp.result_type(x))), params
        )
        return AccumulateState(
            jnp.zeros((), jnp.int32),
            PerRankState((zeros, jnp.zeros((), total))),
            inner.init(params),
        )

    def update(
        updates: PyTree,
        state: AccumulateState,
        params: PyTree = None,
        *,
        weight: Weight | None = None,
        flush: ArrayLike = False,
        **extra_args: object,
    ) -> tuple[PyTree, AccumulateState]:
        _check_flush(flush)
        # NaN tells the other ranks, in inner
        w, _ = as_weight("accumulate", 1 if weight is None else weight, updates)
        gradients, weights = state.sums.per_rank
        new = scaled("accumulate", updates, w)
        sums = map_floats("accumulate", _add, gradients, new)
        total = weights + w.astype(weights.dtype)
        calls = equal_on_all_ranks(state.calls) + 1

        def go(total: jax.Array) -> tuple[PyTree, PyTree]:
            safe = jnp.where(total != 0, total, 1)
            mean = map_floats(
                "accumulate", lambda s, x: (s / safe.astype(s.dtype)).astype(x.dtype), sums, updates
            )
            given = {} if weight is None else {"weight": total}
            out, after = inner.update(mean, state.inner, params, **given, **extra_args)
            return out, equal_types(after, state.inner)

        shapes, _ = jax.eval_shape(go, total)

        def wait(total: jax.Array) -> tuple[PyTree, PyTree]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), state.inner

        full = (calls == every) | flush
        out, after = either(full, go, wait, total)
        calls, sums, total = jax.tree.map(
            lambda x: jnp.where(full, jnp.zeros_like(x), x), (calls, sums, total)
        )
        return out, AccumulateState(calls, PerRankState((sums, total)), after)

    def update_at_once(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        flush: ArrayLike = False,
        **extra_args: object,
    ) -> tuple[PyTree, PyTree]:
        _check_flush(flush)
        return inner.update(updates, state, params, **extra_args)

    if every == 1:
        return optax.GradientTransformationExtraArgs(inner.init, update_at_once)
    return optax.GradientTransformationExtraArgs(init, update)


def _check_flush(flush: ArrayLike) -> None:
    dtype, shape = getattr(flush, "dtype", type(flush)), getattr(flush, "shape", ())
    if dtype not in (bool, np.dtype(bool)) or shape != ():
        what = (
            repr(flush)
            if isinstance(flush, int | float | str)
            else f"an array of {dtype} and shape {list(shape)}"
        )
        raise TypeError(
            f"accumulate: flush is {what}, not one boolean. Pass True in the last call of an epoch."
        )


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.shape != y.shape:
        raise ValueError(
            f"accumulate: a gradient has shape {list(y.shape)}, and its parameter {list(x.shape)}. "
            "They must be equal; stacks "
            "of micro-batches are added up by jaxmpi.distributed(..., micro_batches=M) alone."
        )
    return x + y.astype(x.dtype)
