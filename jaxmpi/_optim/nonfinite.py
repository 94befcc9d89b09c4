"""Decisions that all ranks take together, on what one of them has seen."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from jaxmpi._axis import with_parameters
from jaxmpi._collectives.trees import Caller
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import check_transform, computed_once, equal_types, map_floats, wide
from jaxmpi._optim.weights import Weight, as_weight

__all__ = ["LossScaleState", "SkipState", "any_rank", "dynamic_loss_scale", "skip_nonfinite"]


def any_rank(flag: ArrayLike) -> jax.Array:
    """Whether a condition holds on any rank: a bool that is equal on all of them.

    For votes: a rank that wants to stop, to save, or that has seen something wrong. In a
    `jaxmpi.jit` it travels with the means of the step that do not depend on it, and costs no
    message of its own.

    **Collective:** every rank calls it.
    **Communication:** 4 bytes.

    >>> any_rank(False)
    Array(False, dtype=bool)
    """
    # JAX might make 0 of a number that it cannot hold
    if isinstance(flag, np.ndarray | np.generic | int | float):
        flag = np.asarray(flag, np.bool_)
    return _vote(flag)


@partial(anywhere, name="any_rank", sends=True)
def _vote(flag: ArrayLike) -> jax.Array:
    return (
        Caller("any_rank").allreduce(
            jnp.asarray(flag).astype(jnp.bool_).astype(jnp.float32), op="mean"
        )
        > 0
    )


class SkipState(NamedTuple):
    """The state of `skip_nonfinite`.

    Attributes:
      inner: the state of the inner transform.
      skipped: how many steps were skipped, an int32 that is equal on all ranks.
      last: whether the last step was.
    """

    inner: PyTree
    skipped: jax.Array
    last: jax.Array


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skip a step on all ranks where the gradient of any rank has a NaN or an infinity.

    The updates are zero then, and the state of `inner` stays as it was; `skipped` counts. Put it
    outside of what communicates:

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
        bad = computed_once(any_rank(~_finite(updates, extra_args.get("weight"))))
        out, after = inner.update(updates, state.inner, params, **extra_args)
        out, after = _unless(bad, out, after, state.inner)
        return out, SkipState(after, state.skipped + bad.astype(jnp.int32), bad)

    return optax.GradientTransformationExtraArgs(init, update)


class LossScaleState(NamedTuple):
    """The state of `dynamic_loss_scale`.

    Attributes:
      inner: the state of the inner transform.
      scale: what the next loss is to be multiplied by, a float32.
      good: steps since the scale last changed.
      skipped: how many steps were skipped.
    """

    inner: PyTree
    scale: jax.Array
    good: jax.Array
    skipped: jax.Array


def dynamic_loss_scale(
    inner: optax.GradientTransformation, *, initial: float = 2.0**15, growth_every: int = 2000
) -> optax.GradientTransformationExtraArgs:
    """Divide gradients by the scale of the loss, and find the largest scale at which they are finite on all ranks.

    For float16, whose small gradients would be zero: multiply the loss by `state.scale` before you
    differentiate it. Where the gradient of any rank is not finite, all skip the step and halve the
    scale; after `growth_every` good steps they double it (Micikevicius et al. 2018, "Mixed
    precision training"). `inner` gets float32 for short floats, or they would be zero again.

    **Collective:** every rank calls `update`.
    **Communication:** that of `skip_nonfinite`.

    Args:
      inner: any optax transform, such as `distributed(...)`.
      initial: the first scale, above 0.
      growth_every: good steps before it doubles.

    Raises:
      ValueError: `initial` is not above 0, or `growth_every` is below 1.
      TypeError: as `skip_nonfinite`.
    """
    if not initial > 0:
        raise ValueError(f"dynamic_loss_scale: initial is {initial}. It must be above 0.")
    if growth_every < 1:
        raise ValueError(
            f"dynamic_loss_scale: growth_every is {growth_every}. It is a number of steps: 1 or "
            "more."
        )
    check_transform("dynamic_loss_scale", "inner", inner)
    guarded = skip_nonfinite(inner)

    def init(params: PyTree) -> LossScaleState:
        scale = jnp.full((), initial, jnp.float32)
        return LossScaleState(
            guarded.init(params).inner, scale, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        )

    def update(
        updates: PyTree, state: LossScaleState, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, LossScaleState]:
        updates = with_parameters(updates, f"dynamic_loss_scale growth_every={growth_every}")
        plain = map_floats(
            "dynamic_loss_scale",
            lambda x: x.astype(wide(x.dtype)) / state.scale.astype(wide(x.dtype)),
            updates,
        )
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


def _finite(updates: PyTree, weight: Weight | None) -> jax.Array:
    """Whether all numbers are; those of a rank without samples do not count."""
    leaves = [x for x in jax.tree.leaves(updates) if x.dtype != jax.dtypes.float0]
    finite = (
        jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))
        if leaves
        else jnp.array(True)
    )
    if weight is None:
        return finite
    w, _ = as_weight("skip_nonfinite", weight, updates)
    return (finite & jnp.isfinite(w)) | (w == 0)


def _unless(bad: jax.Array, out: PyTree, after: PyTree, before: PyTree) -> tuple[PyTree, PyTree]:
    """The updates and the state after a step, or zero and the state before it."""
    still = map_floats("skip_nonfinite", lambda x: lax.select(bad, jnp.zeros_like(x), x), out)
    return still, jax.tree.map(
        lambda new, old: lax.select(bad, jnp.asarray(old), jnp.asarray(new)),
        equal_types(after, before),
        before,
    )
