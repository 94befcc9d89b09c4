"""The gradient noise scale, measured in the message of the mean."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import squared_norm, sum_of
from jaxmpi._optim.loss import refuse_per_rank
from jaxmpi._optim.mean import Allreduce, Weight
from jaxmpi._optim.transform_arguments import check_shapes
from jaxmpi._world import session

__all__ = ["NoiseScaleState", "measure_noise_scale"]


class NoiseScaleState(NamedTuple):
    """The state of `measure_noise_scale`.

    Attributes:
      signal: |G|², the squared norm of the true gradient, averaged over steps.
      noise: tr Σ of one rank's batch, averaged over steps.
      steps: the number of steps measured; 0 on one rank, where nothing is measured. A step whose
        gradients, or their squares, are not finite is not measured.
      decay: the decay of the two averages.
    """

    signal: jax.Array
    noise: jax.Array
    steps: jax.Array
    decay: jax.Array

    def scale(self, batch_size: int = 1) -> jax.Array:
        """Return B = tr Σ / |G|² in samples, a float32.

        It is infinite while no gradient is found in the noise, and NaN before the first
        measurement.

        Args:
          batch_size: the number of samples in one rank's batch; 1 gives B in batches of a rank.
        """
        scale = batch_size * self.noise / jnp.where(self.signal > 0, self.signal, 1)
        return jnp.where(self.signal > 0, scale, jnp.where(self.steps > 0, jnp.inf, jnp.nan))


def measure_noise_scale(decay: float = 0.99) -> optax.GradientTransformationExtraArgs:
    """Average gradients as `average_gradients` does, and measure how much they differ.

    With g_r the gradient of rank r's batch and ḡ their mean over p ranks:

        |G|² ≈ (p·|ḡ|² - mean |g_r|²) / (p - 1)
        tr Σ ≈ (mean |g_r|² - |ḡ|²) · p / (p - 1)
        B = tr Σ / |G|²

    More samples in a step than about B stop helping (McCandlish et al. 2018, "An empirical model of
    large-batch training", appendix A.1). The batches of all ranks must be equally large. On one
    rank there is nothing to compare: the updates stay as they are, and the scale is NaN. A step
    with a NaN or an infinity in the norms is left out of the averages.

    As in `average_gradients`, `update` takes no `value`, `grad` or callables. For an optimizer that
    needs them, call the `update` of `measure_noise_scale` by itself, and give the updates that it
    returns to `distributed(inner)`.

        tx = optax.chain(jaxmpi.measure_noise_scale(), optax.adam(1e-3))
        state[0].scale(batch_size_of_a_rank)

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** that of `tree_allreduce`; the squared norms travel in the same message.

    Args:
      decay: the decay of the averages of |G|² and tr Σ over steps: at least 0, below 1.

    Raises:
      ValueError: decay is not in this range; `update` gets a weight, `value`, `grad` or a callable,
        or gradients of single samples, which have one axis more than the parameters.
    """
    if not 0 <= decay < 1:
        raise ValueError(
            f"measure_noise_scale: decay is {decay}. It must be at least 0 and below 1."
        )

    all_ranks = Allreduce("measure_noise_scale")

    def init(params: PyTree) -> NoiseScaleState:
        return NoiseScaleState(
            jnp.zeros((), jnp.float32),
            jnp.zeros((), jnp.float32),
            jnp.zeros((), jnp.int32),
            jnp.full((), decay, jnp.float32),
        )

    def update(
        updates: PyTree,
        state: NoiseScaleState,
        params: PyTree = None,
        *,
        weight: Weight | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, NoiseScaleState]:
        if weight is not None:
            raise ValueError(
                "measure_noise_scale: update got a weight, and the batches must be equally large. "
                "Leave it out, or use average_gradients."
            )
        refuse_per_rank("measure_noise_scale", extra_args)
        if params is not None:
            check_shapes("measure_noise_scale", updates, params)
        size = session.size()
        if size == 1:
            return updates, state
        mean, small, _ = all_ranks.mean(updates, _squared_tree_norm(updates), ())
        large = _squared_tree_norm(mean)
        signal = (size * large - small) / (size - 1)
        noise = (small - large) * size / (size - 1)
        # A NaN would stay in the averages for ever. The norms are equal on all ranks.
        is_finite = jnp.isfinite(signal) & jnp.isfinite(noise)
        # averages over steps: a plain mean at first, until `decay` takes over
        rate = jnp.maximum(1 - state.decay, 1 / (state.steps.astype(jnp.float32) + 1))
        signal = state.signal + rate * (signal - state.signal)
        noise = state.noise + rate * (noise - state.noise)
        signal = jnp.where(is_finite, signal, state.signal)
        noise = jnp.where(is_finite, noise, state.noise)
        steps = state.steps + is_finite.astype(jnp.int32)
        return mean, NoiseScaleState(signal, noise, steps, state.decay)

    return optax.GradientTransformationExtraArgs(init, update)


def _squared_tree_norm(tree: PyTree) -> jax.Array:
    """Return the squared norm of all numbers of a tree, a float32."""
    squares = []
    for x in jax.tree.leaves(tree):
        if jnp.result_type(x) != jax.dtypes.float0:
            squares.append(squared_norm(x))
    return sum_of(squares).astype(jnp.float32)
