"""Non-finite gradients: votes of the ranks, skipped steps, dynamic loss scaling for float16."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from jaxmpi._barriers import computed_once
from jaxmpi._collectives.trees import Caller
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PyTree
from jaxmpi._marks import with_parameters
from jaxmpi._optim.float_leaves import equal_types, map_floats, wide
from jaxmpi._optim.loss import have_identical_leaves
from jaxmpi._optim.mean import Weight, as_weight
from jaxmpi._optim.transform_arguments import check_transform, checked_count

__all__ = ["LossScaleState", "SkipState", "any_rank", "dynamic_loss_scale", "skip_nonfinite"]


def any_rank(flag: ArrayLike) -> jax.Array:
    """Return whether a condition holds on any rank: a bool that is equal on all of them.

    For votes: a rank that wants to stop or to save, or that has seen an error. In a `jaxmpi.jit` it
    travels with the means of the step that do not depend on it, and takes no extra message.

    **Collective:** every rank calls it.
    **Communication:** 4 bytes.

    >>> any_rank(False)
    Array(False, dtype=bool)
    """
    # JAX might turn a number that is too small for its dtype into 0
    if isinstance(flag, np.ndarray | np.generic | int | float):
        flag = np.asarray(flag, np.bool_)
    return _vote(flag)


@partial(anywhere, name="any_rank", sends=True)
def _vote(flag: ArrayLike) -> jax.Array:
    # as a float mean, it can share the message of the means of gradients
    vote = jnp.asarray(flag).astype(jnp.bool_).astype(jnp.float32)
    return Caller("any_rank").allreduce(vote, op="mean") > 0


class SkipState(NamedTuple):
    """The state of `skip_nonfinite`.

    Attributes:
      inner: the state of the inner transform.
      skipped: how many steps were skipped, an int32 that is equal on all ranks.
      last: whether the last step was skipped.
    """

    inner: PyTree
    skipped: jax.Array
    last: jax.Array


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skip a step on all ranks if the gradient of any rank has a NaN or an infinity.

    `value` and `grad` count like the gradient, where `update` gets them. In a skipped step the
    updates are zero, the state of `inner` stays as it was, and `skipped` goes up by one. The state
    of `inner` keeps the dtypes of its `init`. Put it around the transform that communicates:

        tx = jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.adam(1e-3)))

    **Collective:** every rank calls `update`.
    **Communication:** 4 bytes, which in a `jaxmpi.jit` travel with the mean of the gradients, and
    what `inner` sends.

    Raises:
      TypeError: `inner` is no optax transform; a leaf of integers, with its path.
    """
    check_transform("skip_nonfinite", "inner", inner)
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> SkipState:
        return SkipState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.bool_))

    def update(
        updates: PyTree, state: SkipState, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, SkipState]:
        reduced = [extra_args.get("value"), extra_args.get("grad")]
        finite = _finite((updates, reduced), extra_args.get("weight"))
        bad = computed_once(any_rank(~finite))
        # The step is always computed, and then kept or not: the vote travels in one message with
        # the mean of the gradients, so the mean cannot wait for it.
        out, after = inner.update(updates, state.inner, params, **extra_args)
        out, after = _unless(bad, out, after, state.inner)
        return out, SkipState(after, state.skipped + bad.astype(jnp.int32), bad)

    return optax.GradientTransformationExtraArgs(init, update)


class LossScaleState(NamedTuple):
    """The state of `dynamic_loss_scale`.

    Attributes:
      inner: the state of the inner transform.
      scale: the factor for the next loss, a float32.
      good: the number of finite steps since the scale last changed.
      skipped: how many steps were skipped.
    """

    inner: PyTree
    scale: jax.Array
    good: jax.Array
    skipped: jax.Array


def dynamic_loss_scale(
    inner: optax.GradientTransformation, *, initial: float = 2.0**15, growth_every: int = 2000
) -> optax.GradientTransformationExtraArgs:
    """Divide gradients by the scale of the loss, and adapt the scale on all ranks alike.

    For float16, in which small gradients become zero: multiply the loss by `state.scale` before you
    differentiate it. If the gradient of any rank is not finite, all ranks skip the step and halve
    the scale; after `growth_every` finite steps they double it (Micikevicius et al. 2018, "Mixed
    precision training"). `inner` gets short floats as float32, or they would become zero again; for
    its state, it gets short parameters as float32, too.

    `update` divides `grad` as it does the gradients. `value` and functions such as `value_fn` are
    those of the loss itself, without the scale.

    **Collective:** every rank calls `update`.
    **Communication:** as in `skip_nonfinite`.

    Args:
      inner: any optax transform, such as `distributed(...)`.
      initial: the first scale, above 0.
      growth_every: the number of finite steps after which the scale doubles.

    Raises:
      ValueError: `initial` is not above 0, or `growth_every` is below 1.
      TypeError: `growth_every` is no integer; as in `skip_nonfinite`.
    """
    if not initial > 0:
        raise ValueError(f"dynamic_loss_scale: initial is {initial}. It must be above 0.")
    growth_every = checked_count(
        "dynamic_loss_scale", "growth_every", growth_every, "a number of steps"
    )
    check_transform("dynamic_loss_scale", "inner", inner)
    guarded = skip_nonfinite(inner)

    def init(params: PyTree) -> LossScaleState:
        # `inner` gets float32 gradients, whose squares do not fit into a float16 state.
        inner_state = inner.init(jax.tree.map(_widened, params))
        scale = jnp.full((), initial, jnp.float32)
        return LossScaleState(
            inner_state, scale, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        )

    def update(
        updates: PyTree, state: LossScaleState, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, LossScaleState]:
        grad_is_updates = have_identical_leaves(extra_args.get("grad"), updates)
        updates = with_parameters(updates, f"dynamic_loss_scale growth_every={growth_every}")

        def unscale(x: jax.Array) -> jax.Array:
            return x.astype(wide(x.dtype)) / state.scale.astype(wide(x.dtype))

        plain = map_floats("dynamic_loss_scale", unscale, updates)
        if grad_is_updates:  # `distributed` finds the same arrays again, and sends them once
            extra_args = extra_args | {"grad": plain}
        elif "grad" in extra_args:
            grad = map_floats("dynamic_loss_scale", unscale, extra_args["grad"])
            extra_args = extra_args | {"grad": grad}
        before = SkipState(state.inner, state.skipped, jnp.zeros((), jnp.bool_))
        out, (after, skipped, bad) = guarded.update(plain, before, params, **extra_args)
        good = jnp.where(bad, 0, state.good + 1)
        grows = good >= growth_every
        scale = jnp.where(bad, state.scale / 2, jnp.where(grows, state.scale * 2, state.scale))
        return out, LossScaleState(
            after,
            jnp.clip(scale, 2.0**-24, max(2.0**24, initial)),
            jnp.where(grows, 0, good),
            skipped,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _widened(x: PyTree) -> PyTree:
    """Return an array of short floats in 32 bits, and anything else as it is."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or wide(dtype) == dtype:
        return x
    return jnp.asarray(x, wide(dtype))


def _finite(updates: PyTree, weight: Weight | None) -> jax.Array:
    """Return whether all numbers are finite; a rank without samples does not count."""
    finite_leaves = []
    for x in jax.tree.leaves(updates):
        if jnp.result_type(x) != jax.dtypes.float0:
            finite_leaves.append(jnp.all(jnp.isfinite(x)))
    finite = jnp.all(jnp.stack(finite_leaves)) if finite_leaves else jnp.array(True)
    if weight is None:
        return finite
    w, _ = as_weight("skip_nonfinite", weight, updates)
    return (finite & jnp.isfinite(w)) | (w == 0)


def _unless(bad: jax.Array, out: PyTree, after: PyTree, before: PyTree) -> tuple[PyTree, PyTree]:
    """Return updates and state of a step, or zero updates and the state before it."""
    still = map_floats("skip_nonfinite", lambda x: lax.select(bad, jnp.zeros_like(x), x), out)
    return still, jax.tree.map(
        lambda new, old: lax.select(bad, jnp.asarray(old), jnp.asarray(new)),
        equal_types(after, before),
        before,
    )
