"""Gradient accumulation: one step of an optimizer, and one communication, for several gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxmpi._leaves import PyTree, widest
from jaxmpi._marks import equal_on_all_ranks
from jaxmpi._optim.float_leaves import check_transform, either, equal_types, map_floats, wide
from jaxmpi._optim.mean import Weight, as_weight, scaled
from jaxmpi._per_rank_state import PerRankState

__all__ = ["AccumulateState", "accumulate"]


class AccumulateState(NamedTuple):
    """The state of `accumulate`.

    Attributes:
      calls: calls of `update` since the last call of `inner`, an int32 that is equal on all ranks.
      sums: a `PerRankState` of (Σ_i w_i·g_i, Σ_i w_i) over these calls, on this rank. The sums of
        gradients have the shapes of the parameters, and 32 bits at least.
      inner: the state of the inner transform.
    """

    calls: jax.Array
    sums: PerRankState
    inner: PyTree


def accumulate(
    inner: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Give `inner` the mean of `every` gradients; between its calls the updates are zero.

        ḡ = Σ_i w_i·g_i / Σ_i w_i

    over `every` calls of `update`, with w_i = 1 if `update` gets no `weight`. If it gets weights,
    `inner` gets their sum as its `weight`: around `distributed` the mean is exact over all
    micro-batches of all ranks.

        tx = jaxmpi.accumulate(jaxmpi.distributed(optax.adam(1e-3)), every=4)

    `update(..., flush=True)` gives `inner` the mean over the calls so far, this one included, and
    starts again. Use it in the last call of an epoch or of the training, so that no sample is left
    out.

    `inner` communicates in one call out of `every`; `optax.MultiSteps` would communicate in all of
    them. `update` may be called in a `lax.scan` in a step, too. `accumulate(inner, 1)` has the
    state and the updates of `inner`.

    **Collective:** every rank calls `update` equally often, with equal `flush`.
    **Communication:** that of `inner`, in every `every`-th call and where `flush` is True; else
    none.

    Args:
      inner: any optax transform, such as `distributed(...)` or `sharded(...)`.
      every: the number of calls of `update` for one call of `inner`.

    Returns:
      An optax transform with an `AccumulateState`. Its `update` takes one boolean `flush`, equal on
      all ranks: as an argument of a step, it needs `replicated_argnums` or `static_argnums`.

    Raises:
      ValueError: `every` is below 1; in `update`, a gradient has another shape than its parameter,
        or a weight is negative or no scalar, as in `distributed`. Called eagerly on several ranks,
        `distributed` as `inner` raises the latter on all ranks, in the call that takes a step.
      TypeError: `inner` is no optax transform; a leaf of integers, with its path; `flush` is no
        boolean.

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
        total_dtype = widest(*(jnp.abs(x).dtype for x in jax.tree.leaves(params)))
        zeros = map_floats(
            "accumulate", lambda x: jnp.zeros_like(x, dtype=wide(jnp.result_type(x))), params
        )
        sums = PerRankState((zeros, jnp.zeros((), total_dtype)))
        return AccumulateState(jnp.zeros((), jnp.int32), sums, inner.init(params))

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
        # Σ_i w_i·g_i and Σ_i w_i. A wrong weight is NaN here, and reaches the other ranks in the
        # mean of `inner`.
        w, _ = as_weight("accumulate", 1 if weight is None else weight, updates)
        sums, total_weight = state.sums.per_rank
        sums = map_floats("accumulate", _add, sums, scaled("accumulate", updates, w))
        total_weight = total_weight + w.astype(total_weight.dtype)
        calls = equal_on_all_ranks(state.calls) + 1

        def take_step(total_weight: jax.Array) -> tuple[PyTree, PyTree]:
            # Without any sample the sums are 0, and so is the mean.
            divisor = jnp.where(total_weight != 0, total_weight, 1)
            mean = map_floats(
                "accumulate",
                lambda s, x: (s / divisor.astype(s.dtype)).astype(x.dtype),
                sums,
                updates,
            )
            weight_args = {} if weight is None else {"weight": total_weight}
            out, inner_state = inner.update(mean, state.inner, params, **weight_args, **extra_args)
            return out, equal_types(inner_state, state.inner)

        # The other branch returns zeros in the shapes and dtypes that `inner` would return.
        shapes, _ = jax.eval_shape(take_step, total_weight)

        def wait(total_weight: jax.Array) -> tuple[PyTree, PyTree]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), state.inner

        # `calls` and `flush` are equal on all ranks, so all take the branch that communicates.
        is_due = (calls == every) | flush
        out, inner_state = either(is_due, take_step, wait, total_weight)
        # After a step, start again from zero.
        calls, sums, total_weight = jax.tree.map(
            lambda x: jnp.where(is_due, jnp.zeros_like(x), x), (calls, sums, total_weight)
        )
        return out, AccumulateState(calls, PerRankState((sums, total_weight)), inner_state)

    def update_every_call(
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
        return optax.GradientTransformationExtraArgs(inner.init, update_every_call)
    return optax.GradientTransformationExtraArgs(init, update)


def _check_flush(flush: ArrayLike) -> None:
    """Raise a TypeError unless `flush` is one boolean, of Python, NumPy or JAX."""
    dtype, shape = getattr(flush, "dtype", type(flush)), getattr(flush, "shape", ())
    if dtype in (bool, np.dtype(bool)) and shape == ():
        return
    if isinstance(flush, int | float | str):
        found = repr(flush)
    else:
        found = f"an array of {dtype} and shape {list(shape)}"
    raise TypeError(
        f"accumulate: flush is {found}, not one boolean. Pass True in the last call of an epoch."
    )


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the sum x plus the gradient y; a ValueError unless they have one shape."""
    if x.shape != y.shape:
        raise ValueError(
            f"accumulate: a gradient has shape {list(y.shape)}, and its parameter {list(x.shape)}. "
            "Make the shapes equal; for stacks of micro-batches use jaxmpi.distributed(..., "
            "micro_batches=M) without accumulate."
        )
    return x + y.astype(x.dtype)
