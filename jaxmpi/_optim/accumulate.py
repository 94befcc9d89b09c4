"""Gradient accumulation: one step of an optimizer, and one communication, for several gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxmpi._job.process import stderr
from jaxmpi._leaves import PyTree, widest
from jaxmpi._marks import equal_on_all_ranks
from jaxmpi._optim.float_leaves import equal_types, map_floats, wide
from jaxmpi._optim.loss import as_floats
from jaxmpi._optim.mean import Weight, as_weight, scaled, weight_error
from jaxmpi._optim.transform_arguments import check_transform, checked_count, cond_or_call
from jaxmpi._per_rank_state import PerRankState

__all__ = ["AccumulateState", "accumulate"]


class AccumulateState(NamedTuple):
    """The state of `accumulate`.

    Attributes:
      calls: calls of `update` since the last call of `inner`, an int32 that is equal on all ranks.
      sums: a `PerRankState` of (Σ_i w_i·g_i, Σ_i w_i) over these calls, on this rank. The sums of
        gradients have the shapes of the parameters, and 32 bits at least.
      value_sums: a `PerRankState` of (Σ_i w_i·v_i, Σ_i w_i) over those of these calls that got a
        `value` v_i, on this rank: two scalars.
      inner: the state of the inner transform.
    """

    calls: jax.Array
    sums: PerRankState
    value_sums: PerRankState
    inner: PyTree


def accumulate(
    inner: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Give `inner` the mean of `every` gradients; between its calls the updates are zero.

        ḡ = Σ_i w_i·g_i / Σ_i w_i

    over `every` calls of `update`, with w_i = 1 if `update` gets no `weight`. If it gets weights,
    `inner` gets their sum as its `weight`: around `distributed` the mean is exact over all
    micro-batches of all ranks.

    The `value` that `inner` gets is the same mean of the values of these calls. `grad` stands for
    the gradients: `inner` gets ḡ for it, whatever was given. Functions such as `value_fn` are those
    of the call that takes the step, whose samples they see: use `every=1` for a line search.

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
        `value` is no scalar, or a weight is negative or no scalar, as in `distributed`. Called
        eagerly on several ranks, `distributed` as `inner` raises the latter on all ranks, in the
        call that takes a step.
      TypeError: `inner` is no optax transform; `every` is no integer; a leaf of integers, with its
        path; `flush` is no boolean.

    Called eagerly on several ranks, a rank whose weight is wrong says so in a line on stderr.

    >>> tx = accumulate(optax.sgd(1.0), every=4)
    >>> state = tx.init(jnp.array(0.0))
    >>> for gradient, last in [(2.0, False), (4.0, True)]:
    ...     updates, state = tx.update(jnp.array(gradient), state, flush=last)
    >>> updates
    Array(-3., dtype=float32)
    """
    check_transform("accumulate", "inner", inner)
    every = checked_count("accumulate", "every", every, "the number of steps for one communication")
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> AccumulateState:
        zeros = map_floats("accumulate", lambda x: jnp.zeros_like(x, dtype=wide(x.dtype)), params)
        # Weights are real. Three separate arrays: a step may donate the state, and a buffer once.
        sums = [x for x in jax.tree.leaves(zeros) if x.dtype != jax.dtypes.float0]
        dtype = widest(*(jnp.finfo(x.dtype).dtype for x in sums))
        total_weight, *value_sums = (jnp.zeros((), dtype) for _ in range(3))
        return AccumulateState(
            jnp.zeros((), jnp.int32),
            PerRankState((zeros, total_weight)),
            PerRankState((*value_sums,)),
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
        value, grad = extra_args.get("value"), extra_args.get("grad")
        _check_value(value)
        # Σ_i w_i·g_i and Σ_i w_i. A wrong weight is NaN here, and reaches the other ranks in the
        # mean of `inner`.
        w, problem = as_weight("accumulate", 1 if weight is None else weight, updates)
        if problem:  # this rank alone knows it, and its state holds numbers only
            # No warning, which may be an error here, while the other ranks go on.
            stderr.say(
                f"jaxmpi: {weight_error('accumulate', problem)} The call that takes the step "
                "raises an error on all ranks.\n"
            )
        sums, total_weight = state.sums.per_rank
        sums = map_floats("accumulate", _add, sums, scaled("accumulate", updates, w))
        total_weight = total_weight + w.astype(total_weight.dtype)
        value_sum, value_weight = state.value_sums.per_rank
        if value is not None:
            value = as_floats(value)
            value_sum = value_sum + scaled("accumulate", value, w).astype(value_sum.dtype)
            value_weight = value_weight + w.astype(value_weight.dtype)
        calls = equal_on_all_ranks(state.calls) + 1

        def take_step(total_weight: jax.Array) -> tuple[PyTree, PyTree]:
            mean = map_floats("accumulate", partial(_divided, total_weight), sums, updates)
            args = dict(extra_args)
            if weight is not None:
                args["weight"] = total_weight
            if value is not None:
                args["value"] = _divided(value_weight, value_sum, value)
            if grad is not None:
                args["grad"] = mean
            out, inner_state = inner.update(mean, state.inner, params, **args)
            return out, equal_types(inner_state, state.inner)

        # The other branch returns zeros in the shapes and dtypes that `inner` would return.
        shapes, _ = jax.eval_shape(take_step, total_weight)

        def wait(total_weight: jax.Array) -> tuple[PyTree, PyTree]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), state.inner

        # `calls` and `flush` are equal on all ranks, so all take the branch that communicates.
        is_due = (calls == every) | flush
        out, inner_state = cond_or_call(is_due, take_step, wait, total_weight)
        # After a step, start again from zero.
        calls, sums, value_sums = jax.tree.map(
            lambda x: jnp.where(is_due, jnp.zeros_like(x), x),
            (calls, (sums, total_weight), (value_sum, value_weight)),
        )
        return out, AccumulateState(
            calls, PerRankState(sums), PerRankState(value_sums), inner_state
        )

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


def _divided(total_weight: jax.Array, total: jax.Array, like: jax.Array) -> jax.Array:
    """Return the mean of weighted numbers from their sum, in the dtype of `like`.

    Without any sample the sum is 0, and so is the mean.
    """
    divisor = jnp.where(total_weight != 0, total_weight, 1)
    return (total / divisor.astype(total.dtype)).astype(like.dtype)


def _check_value(value: ArrayLike | None) -> None:
    """Raise a ValueError unless the `value` of an update can be accumulated."""
    if value is not None and jnp.shape(value) != ():
        raise ValueError(
            f"accumulate: update got value of shape {list(jnp.shape(value))}. Pass the loss, one "
            "number."
        )


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
