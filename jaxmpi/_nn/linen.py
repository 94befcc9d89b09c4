"""Drop-ins for layers of `flax.linen`."""

import jax
import jax.numpy as jnp
from flax import linen

from jaxmpi._axis import AXIS, Axis
from jaxmpi._leaves import widest
from jaxmpi._nn.batch_norm import Moments, moments, normalized, split_axes, updated

__all__ = ["BatchNorm"]


class BatchNorm(linen.BatchNorm):  # type: ignore[misc]
    """`flax.linen.BatchNorm` over the valid rows of all ranks: see `jaxmpi.nn.BatchNorm`.

    **Collective:** as `jaxmpi.nn.BatchNorm`; `init` does not communicate.
    **Communication:** as `jaxmpi.nn.BatchNorm`.

    Attributes:
      axis_name: the ranks whose rows count; None for this rank's alone. The other attributes are
        those of `flax.linen.BatchNorm`.

    >>> norm = jaxmpi.nn.linen.BatchNorm(use_running_average=False)
    >>> variables = norm.init(jax.random.key(0), jnp.ones((3, 2)))
    >>> mask = jnp.array([True, True, False])[:, None]
    >>> y, stats = norm.apply(variables, jnp.ones((3, 2)), mask=mask, mutable=["batch_stats"])
    """

    axis_name: Axis | None = AXIS  # type: ignore[assignment]

    @linen.compact  # type: ignore[untyped-decorator]
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
          use_running_average: as in `flax.linen.BatchNorm`.
          mask: which elements count, broadcast against x; all by default.

        Returns:
          The normalized rows, in the shape of x.
        """
        frozen = self.use_running_average if use_running_average is None else use_running_average
        if frozen in (True, None) or self.axis_name is None or self.is_initializing():
            return super().__call__(x, use_running_average, mask=mask)
        features, reduced = split_axes(x.ndim, self.axis)
        shape = [x.shape[i] for i in features]
        wide = jnp.float32 if self.force_float32_reductions else self.param_dtype
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, wide)
        var = self.variable("batch_stats", "var", jnp.ones, shape, wide)
        dtype = jnp.result_type(x) if self.dtype is None else self.dtype
        # Sums and counts have 32 bits at least, as those within Flax's means: float16 ends at 65504
        # rows. The option is about the dtype of their quotients.
        sums = widest(dtype)
        is_wide = self.force_float32_reductions or not jnp.issubdtype(dtype, jnp.inexact)
        dtype = sums if is_wide else dtype
        x = jnp.asarray(x)
        axis, groups = self.axis_name, self.axis_index_groups
        now = moments(x.astype(sums), mask, reduced, axis, groups, fast=self.use_fast_variance)
        now = Moments(now.mean.astype(dtype), now.var.astype(jnp.finfo(dtype).dtype), now.number)
        mean.value = updated(mean.value, now.mean, now.number, self.momentum)
        var.value = updated(var.value, now.var, now.number, self.momentum)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        return normalized(x, now, scale, bias, features, self.epsilon, self.dtype)
