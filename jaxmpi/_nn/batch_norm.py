"""Batch normalization with the statistics of the valid rows of all ranks.

Flax's BatchNorm with an axis name averages the ranks' means. With masks, or batches of different
sizes, that is not the mean of all rows, and it is NaN where one rank has no valid row. Here sums
and counts are added.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import widest

__all__ = ["BatchNorm", "Moments", "moments", "normalized", "split_axes", "updated"]

Groups: TypeAlias = Sequence[Sequence[int]] | None  # of ranks, as JAX's `axis_index_groups`


# Flax's class is extended, and not wrapped: the names of its variables are those of checkpoints
class BatchNorm(nnx.BatchNorm):  # type: ignore[misc]
    """`flax.nnx.BatchNorm` over the valid rows of all ranks.

    With the mask m and the rows x of each rank r,

        N = Σ_r Σ_i m_ri
        μ = Σ_r Σ_i m_ri · x_ri / N
        σ² = Σ_r Σ_i m_ri · |x_ri - μ|² / N

    so n ranks have the statistics, outputs and gradients of one rank with all valid rows. Ranks may
    have different numbers of rows, or no valid row at all. The running statistics are equal on all
    ranks, and stay as they are where N is 0. The mask is that of `jaxmpi.batches(...,
    remainder="mask")`, broadcast against x: `norm(x, mask=mask[:, None])`. Outputs of rows that are
    not valid mean nothing; leave them out of the loss.

    It has the arguments, attributes and variables of `flax.nnx.BatchNorm`, and takes its place in a
    model and in checkpoints. With `use_running_average` it is the same.

    **Collective:** every rank calls it, in a step or eagerly; nobody has to with
    `use_running_average` or with `axis_name=None`.
    **Communication:** 3 numbers for each feature, in one message; two messages with
    `use_fast_variance=False`.

    Args:
      num_features: the number of features.
      axis_name: the ranks whose rows count, as `axis` in `jaxmpi.tree_allreduce`: all by default.
        None for this rank's alone.
      **kwargs: those of `flax.nnx.BatchNorm`.

    >>> from flax import nnx
    >>> norm = jaxmpi.nn.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    >>> x = jnp.array([[1.0, 2.0], [3.0, 6.0], [99.0, 99.0]])
    >>> y = norm(x, mask=jnp.array([True, True, False])[:, None])
    >>> norm.mean[...]
    Array([1., 2.], dtype=float32)
    """

    def __init__(self, num_features: int, *, axis_name: Axis | None = AXIS, **kwargs: Any) -> None:
        # Flax's annotation knows one name, and its code hands on what is given
        super().__init__(num_features, axis_name=axis_name, **kwargs)  # type: ignore[arg-type]

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize the input, and update the running statistics unless they are used.

        Args:
          x: the rows.
          use_running_average: as in `flax.nnx.BatchNorm`.
          mask: which elements count, broadcast against x; all by default.

        Returns:
          The normalized rows, in the shape of x.
        """
        frozen = self.use_running_average if use_running_average is None else use_running_average
        if frozen in (True, None) or self.axis_name is None:  # Flax says what None lacks
            return super().__call__(x, use_running_average, mask=mask)
        features, reduced = split_axes(x.ndim, self.axis)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        arrays = (x, self.mean[...], self.var[...], scale, bias)
        x, _, _, scale, bias = self.promote_dtype(arrays, dtype=self.dtype)
        dtype = widest(x.dtype if self.dtype is None else self.dtype)
        axis, groups = self.axis_name, self.axis_index_groups
        now = moments(x.astype(dtype), mask, reduced, axis, groups, fast=self.use_fast_variance)
        # a Variable that is a reference keeps no derivative; Flax stops it there, too
        by_reference = any(getattr(x, "_can_update", False) for x in (self.mean, self.var))
        for stat, value in ((self.mean, now.mean), (self.var, now.var)):
            new = updated(stat[...], value, now.number, self.momentum)
            stat[...] = lax.stop_gradient(new) if by_reference else new
        return normalized(x, now, scale, bias, features, self.epsilon, self.dtype)


class Moments(NamedTuple):
    """Statistics of a batch, of shape `[features]`."""

    mean: jax.Array
    var: jax.Array
    number: jax.Array  # of valid rows; with a mask of single elements, of those


def split_axes(ndim: int, axis: int | Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of features, and those over which the statistics are."""
    axes = (axis,) if isinstance(axis, int) else axis
    features = tuple(sorted({i % ndim for i in axes}))
    return features, tuple(i for i in range(ndim) if i not in features)


def moments(
    x: jax.Array,
    mask: ArrayLike | None,
    axes: tuple[int, ...],
    axis_name: Axis,
    groups: Groups,
    *,
    fast: bool,
) -> Moments:
    """Return the mean and variance of all elements on all ranks for which the mask holds."""
    valid = jnp.broadcast_to(True if mask is None else jnp.asarray(mask, bool), x.shape)
    real = jnp.finfo(x.dtype).dtype

    def over_ranks(*sums: jax.Array) -> tuple[jax.Array, ...]:
        if groups is not None:
            return lax.psum(sums, axis_name, axis_index_groups=groups)
        return Caller("nn.BatchNorm").allreduce(sums, op="sum", axis=axis_name)

    def total(values: jax.Array) -> jax.Array:
        # by a choice, not a product: rows that are not valid may hold NaN
        return jnp.sum(jnp.where(valid, values, 0), axes)

    n = jnp.sum(valid, axes, dtype=jnp.int32).astype(real)
    if fast:
        n, mean, square = over_ranks(n, total(x), total(_abs2(x)))
        rows = jnp.maximum(n, 1)
        mean = mean / rows
        # the difference of rounded numbers may be below 0
        return Moments(mean, jnp.maximum(0, square / rows - _abs2(mean)), n)
    n, mean = over_ranks(n, total(x))
    rows = jnp.maximum(n, 1)
    mean = mean / rows
    (square,) = over_ranks(total(_abs2(x - jnp.expand_dims(mean, axes))))
    return Moments(mean, square / rows, n)


def updated(old: jax.Array, new: jax.Array, count: jax.Array, momentum: float) -> jax.Array:
    """Return a running statistic after a batch; unchanged if no rank has a valid row."""
    return jnp.where(count > 0, momentum * old + (1 - momentum) * new, old)


def normalized(
    x: jax.Array,
    now: Moments,
    scale: jax.Array | None,
    bias: jax.Array | None,
    features: tuple[int, ...],
    epsilon: float,
    dtype: DTypeLike | None,
) -> jax.Array:
    """Return y = (x - μ) / √(σ² + ε) · scale + bias, in the precision of the statistics."""
    shape = [x.shape[i] if i in features else 1 for i in range(x.ndim)]
    factor = lax.rsqrt(now.var.reshape(shape) + epsilon)
    given = [p for p in (x, scale, bias) if p is not None]
    if scale is not None:
        factor = factor * scale.reshape(shape)
    y = (x - now.mean.reshape(shape)) * factor
    if bias is not None:
        y = y + bias.reshape(shape)
    if dtype is None:
        dtype = jnp.result_type(*given)
        # integers, without a scale and a bias, are normalized to floats, as by Flax
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else widest(dtype)
    return y.astype(np.dtype(dtype))


def _abs2(x: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(x):
        return jnp.square(x)
    return jnp.square(jnp.real(x)) + jnp.square(jnp.imag(x))
