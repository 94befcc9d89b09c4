"""`distributed` and `average_gradients`: the gradients of all ranks for an optimizer.

tx = jaxmpi.distributed(optax.adam(1e-3))
tx = optax.chain(jaxmpi.average_gradients(), optax.clip_by_global_norm(1.0), optax.adam(1e-3))
"""

from typing import NamedTuple

import optax

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.arrays import check_axis
from jaxmpi._collectives.tree_calls import OPS
from jaxmpi._jit.api import compiled
from jaxmpi._leaves import PyTree
from jaxmpi._optim.adasum import Adasum
from jaxmpi._optim.codec import Codec, CodecMean, check_codec
from jaxmpi._optim.deterministic import MicroBatchMean, invariant_update
from jaxmpi._optim.float_leaves import check_shapes, check_transform, made_of
from jaxmpi._optim.loss import ExtraArgs
from jaxmpi._optim.mean import Allreduce, Mean, Weight
from jaxmpi._optim.sharded_array import refuse_shards
from jaxmpi._per_rank_state import PerRankState
from jaxmpi._world import session

__all__ = ["DistributedState", "average_gradients", "distributed"]


class DistributedState(NamedTuple):
    """The state of `distributed` with a codec.

    Attributes:
      inner: the state of the inner transform, equal on all ranks.
      codec: the state of the codec, a `PerRankState`.
    """

    inner: PyTree
    codec: PerRankState


def distributed(
    inner: optax.GradientTransformation,
    *,
    op: str = "mean",
    codec: Codec | None = None,
    micro_batches: int | None = None,
    axis: Axis = AXIS,
) -> optax.GradientTransformationExtraArgs:
    """Give `inner` the mean of the gradients of all ranks.

    g ← (1/p) · Σ_r g_r for "mean"; then `inner`. The state is that of `inner`, and stays equal on
    all ranks as long as it and the parameters start equal: see `synchronize`. With a codec the
    state is a `DistributedState`.

    `update(grads, state, params, weight=w)` gives g ← Σ_r w_r·g_r / Σ_r w_r, where w_r is the
    number of samples, or tokens, that rank r has averaged its gradient over: the exact mean over
    all samples, however unevenly they are spread. A weight is one finite number, 0 or more; all
    ranks pass one, or none does. A rank with weight 0 does not count, whatever its gradients are;
    if all weights are 0, so are the gradients. With weights, short floats travel as float32.

    `update` takes the extra arguments of optax's transforms, with this rank's values: `value`, the
    loss, and `grad` become means over the ranks, too; callables of the parameters, such as
    `value_fn` of a line search, become their `average_loss`. `inner` gets any other argument as it
    is: it must be equal on all ranks, or used by `value_fn` only.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** in `update` only, that of `tree_allreduce` or of the codec; weights and
    `value` travel in the same message. A callable communicates each time `inner` calls it.

    Args:
      inner: any optax transform.
      op: "mean" for losses that average over the rank's batch, "sum" for losses that sum; also
        "max", "min", "prod", and "adasum" (Maleki et al. 2020, "Scaling distributed training with
        adaptive summation"), leaf by leaf.
      codec: one of `jaxmpi.codecs`, for a mean in fewer bytes. On one rank it changes nothing.
      micro_batches: M, for the same bits on any number of ranks: the gradients have an additional
        first axis, of this rank's M/p micro-batches, as `jaxmpi.micro_batch_grads` returns them.
        Their mean, and the sums of `inner`, are formed in one order; an `inner` that multiplies
        matrices, such as Muon, is refused.
      axis: as in `tree_allreduce`: the ranks of each group use the gradients of their group, and
        stay equal within it. A codec has the same axis, and M is the number of micro-batches of a
        group. `update` then takes no callables such as `value_fn`.

    Raises:
      ValueError: an unknown op; a codec, a weight or micro-batches with another op than "mean", or
        with each other; an axis with a callable, or a codec for another axis; a callable with
        micro-batches or another op than "mean" and "sum"; an `inner` that takes the gradients of
        single samples; when called, an unknown axis; when called with micro-batches, an `inner`
        that multiplies matrices; when called eagerly, on all ranks, a weight of any rank that is
        not one finite number of 0 or more. In a traced step, such a weight makes all updates NaN on
        all ranks.
      TypeError: `inner` is no optax transform, or `codec` no codec; a leaf cannot be averaged; with
        its path.

    >>> import jax.numpy as jnp
    >>> tx = distributed(optax.sgd(0.5))
    >>> updates, state = tx.update(jnp.array([2.0]), tx.init(jnp.array([0.0])))
    >>> updates
    Array([-1.], dtype=float32)
    """
    check_transform("distributed", "inner", inner)
    mean = _mean_of(op, codec, micro_batches, axis)
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> PyTree:
        refuse_shards("distributed", params, axis if mean.traits.shards else AXIS)
        if not mean.traits.has_state:
            return inner.init(params)
        return DistributedState(inner.init(params), PerRankState(made_of(params, mean.init)))

    def step(
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        weight: Weight | None,
        extra_args: dict[str, object],
    ) -> tuple[PyTree, PyTree]:
        check_axis("distributed", axis, session.current("distributed"))
        extra = ExtraArgs(extra_args, updates)
        mean.check(weight, [*extra.functions])
        before, mean_state = state, ()
        if mean.traits.has_state:
            before, mean_state = state.inner, state.codec.per_rank
        # the gradients, `value` and `grad` of all ranks
        grads, local, mean_state = mean.average(updates, extra.local, weight, mean_state)
        # one step of `inner` with them
        apply = invariant_update(inner) if mean.traits.one_order else inner.update
        args = extra.reduced(grads, local, mean, weight)
        out, after = apply(grads, *extra.marked((before, params)), **args)
        check_shapes("distributed", grads, out)
        if mean.traits.has_state:
            return out, DistributedState(after, PerRankState(mean_state))
        return out, after

    whole_step = compiled(step, "distributed") if mean.traits.one_order else step

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        weight: Weight | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, PyTree]:
        return whole_step(updates, state, params, weight, extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _mean_of(op: str, codec: Codec | None, micro_batches: int | None, axis: Axis) -> Mean:
    """Return the mean that the arguments of `distributed` ask for.

    Raises:
      ValueError: an argument is wrong, or the arguments ask for several means.
      TypeError: `codec` is no codec.
    """
    if op not in (*OPS, "adasum"):
        raise ValueError(
            f"distributed: op {op!r} is unknown. Use one of {', '.join(OPS)} and adasum."
        )
    plain: Mean = Adasum("distributed", axis)
    if op != "adasum":
        plain = Allreduce("distributed", op, axis)
    asked: list[Mean] = []
    if codec is not None:
        check_codec("distributed", codec, axis)
        asked.append(CodecMean("distributed", codec, axis))
    if micro_batches is not None:
        if micro_batches < 1:
            raise ValueError(
                f"distributed: micro_batches is {micro_batches}. It is how many all ranks have "
                "together: 1 or more."
            )
        asked.append(MicroBatchMean("distributed", micro_batches, axis))
    if len(asked) > 1 or (asked and op != "mean"):
        arguments = " and ".join(mean.traits.argument for mean in (*asked, plain))
        raise ValueError(
            f"distributed: {arguments} do not go together. Use op 'mean', and one of them."
        )
    return asked[0] if asked else plain


def average_gradients(*, axis: Axis = AXIS) -> optax.GradientTransformationExtraArgs:
    """Average gradients over the ranks: an optax transform for a chain.

    g ← (1/p) · Σ_r g_r; with the extra argument `weight` of `update`, g ← Σ_r w_r·g_r / Σ_r w_r as
    in `distributed`. Transforms before it in a chain get this rank's gradients, transforms after it
    the mean. Those after it would get this rank's `value`, `grad` and callables without a mean, so
    `update` refuses them: use `distributed` for those.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** that of `tree_allreduce`.

    Args:
      axis: as in `tree_allreduce`: the mean is over each group of ranks. The gradients may be
        shards of `fully_shard` over another axis.

    Raises:
      ValueError: `update` gets `value`, `grad` or a callable; gradients have other shapes than the
        parameters, such as those of single samples; weights as in `distributed`.

    >>> import jax.numpy as jnp
    >>> tx = optax.chain(average_gradients(), optax.sgd(0.5))
    >>> updates, state = tx.update(jnp.array([2.0]), tx.init(jnp.array([0.0])))
    >>> updates
    Array([-1.], dtype=float32)
    """
    mean = Allreduce("average_gradients", axis=axis)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        weight: Weight | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, PyTree]:
        extra = ExtraArgs(extra_args, None)
        if local := [*extra.local, *extra.functions]:
            raise ValueError(
                f"average_gradients: update got {' and '.join(local)}, and the transforms that "
                "follow would get this rank's value as if it were equal on all ranks. Use "
                "jaxmpi.distributed(inner) instead, with those transforms as inner."
            )
        if params is not None:
            check_shapes("average_gradients", updates, params)
        means, _, _ = mean.average(updates, (), weight, ())
        return means, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
