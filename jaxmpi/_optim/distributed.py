"""`distributed` and `average_gradients`: data-parallel training with an optax optimizer.

`distributed(inner)` is a whole optimizer; `average_gradients()` is a link of a chain:

    tx = jaxmpi.distributed(optax.adam(1e-3))
    tx = optax.chain(jaxmpi.average_gradients(), optax.clip_by_global_norm(1.0), optax.adam(1e-3))

The arguments of `distributed` select one `Mean` (see mean.py), which forms the mean of the
gradients. Then every rank calls `inner` with that mean, and gets the same updates.
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
from jaxmpi._optim.loss import ExtraArgs, refuse_per_rank
from jaxmpi._optim.mean import Allreduce, Mean, Weight
from jaxmpi._optim.sharded_array import refuse_shards
from jaxmpi._optim.transform_arguments import (
    check_shapes,
    check_transform,
    checked_count,
    hidden_from_map_params,
)
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

        g ← (1/p) · Σ_r g_r  for "mean"
        updates, state ← inner(g, state)

    g_r are the gradients that rank r passes to `update`, and p is the number of ranks. The state is
    that of `inner`, and stays equal on all ranks as long as it and the parameters start equal: see
    `synchronize`. With a codec the state is a `DistributedState`.

    With a weight, `update(grads, state, params, weight=w)`,

        g ← Σ_r w_r·g_r / Σ_r w_r

    where w_r is the number of samples, or tokens, that rank r has averaged its gradient over. This
    is the exact mean over all samples, however unevenly they are spread. A weight is one finite
    number, 0 or more; all ranks pass one, or none does. A rank with weight 0 does not count,
    whatever its gradients are; if all weights are 0, so are the gradients. With weights, floats
    below 32 bits travel as float32.

    `update` takes the extra arguments of optax's transforms, with this rank's values. `value`, the
    loss, and `grad` become means over the ranks, too. Callables of the parameters, such as
    `value_fn` of a line search, become their `average_loss`. With op "sum", these are sums. `inner`
    gets any other argument as it is: it must be equal on all ranks, or used by `value_fn` only.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** in `update` only. For "mean" and "sum", that of one `tree_allreduce`; the
    weight and `value` travel in the same message, and `grad` is sent only if it is not the same
    arrays as the gradients. For the other ops and with a codec they take a message of their own.
    What "adasum", a codec and micro-batches send is at their arguments. A callable communicates
    each time `inner` calls it. An eager call with a weight and an axis sends one number more, to
    all ranks.

    Args:
      inner: any optax transform.
      op: "mean" for losses that average over the rank's batch, "sum" for losses that sum; also
        "max", "min", "prod", and "adasum" (Maleki et al. 2020, "Scaling distributed training with
        adaptive summation"), leaf by leaf. "adasum" sends an alltoall and an allgather of the
        gradients' bytes, and p² inner products for each leaf.
      codec: one of `jaxmpi.codecs`, for a mean in fewer bytes. On one rank it changes nothing.
      micro_batches: M, for the same bits on any number of ranks: the gradients have an additional
        first axis, of this rank's M/p micro-batches, as `jaxmpi.micro_batch_grads` returns them:
        leaves `[M/p, ...]`. Their mean, and the sums of `inner`, are formed in one order; an
        `inner` that multiplies matrices, such as Muon, is refused. The messages are an alltoall and
        an allgather.
      axis: as in `tree_allreduce`: the ranks of each group use the gradients of their group, and
        stay equal within it. A codec has the same axis, and M is the number of micro-batches of a
        group. `update` then takes no callables such as `value_fn`.

    Returns:
      An optax transform whose updates have the shapes and dtypes that `inner` gives them, equal on
      the ranks along the axis.

    Raises:
      ValueError: an unknown op; a codec or micro-batches with another op than "mean", or with each
        other; `micro_batches` below 1; a codec for another axis.

        `init`: a `ShardedArray` of `fully_shard` over the ranks of the axis, with its path.

        `update`: a weight with micro-batches or another op than "mean"; a callable with
        micro-batches, an axis, or another op than "mean" and "sum"; an unknown axis; an `inner`
        that takes the gradients of single samples, or, with micro-batches, multiplies matrices; a
        number of micro-batches that the ranks cannot share equally, or gradients without their
        axis; called eagerly, on all ranks, a weight of any rank that is not one finite number of 0
        or more. In a traced step, such a weight makes all updates NaN on all ranks.
      TypeError: `inner` is no optax transform, `codec` no codec, or `micro_batches` no integer; a
        leaf cannot be averaged, with its path.

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
        return DistributedState(
            inner.init(params), PerRankState(hidden_from_map_params(params, mean.init))
        )

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
        inner_state, mean_state = state, ()
        if mean.traits.has_state:
            inner_state, mean_state = state.inner, state.codec.per_rank
        # The means over the ranks, in one message where that is possible: of the gradients, and of
        # `value` and `grad`.
        grads, averaged, mean_state = mean.weighted_mean(updates, extra.local, weight, mean_state)
        # Every rank takes the same step of `inner`.
        inner_update = invariant_update(inner) if mean.traits.one_order else inner.update
        args = extra.reduced(grads, averaged, mean, weight)
        inner_state, params = extra.mark_equal((inner_state, params))
        out, inner_state = inner_update(grads, inner_state, params, **args)
        check_shapes("distributed", grads, out)
        if mean.traits.has_state:
            return out, DistributedState(inner_state, PerRankState(mean_state))
        return out, inner_state

    # The sums of `invariant_update` have one order in a compiled program only: compile eager calls.
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
    """Return the mean that the arguments of `distributed` select.

    Raises:
      ValueError: an argument is wrong, or the arguments select several means.
      TypeError: `codec` is no codec, or `micro_batches` no integer.
    """
    if op not in (*OPS, "adasum"):
        raise ValueError(
            f"distributed: op {op!r} is unknown. Use one of {', '.join(OPS)} and adasum."
        )
    mean_of_op: Mean
    if op == "adasum":
        mean_of_op = Adasum("distributed", axis)
    else:
        mean_of_op = Allreduce("distributed", op, axis)
    selected: list[Mean] = []  # by arguments that need op "mean"
    if codec is not None:
        check_codec("distributed", codec, axis)
        selected.append(CodecMean("distributed", codec, axis))
    if micro_batches is not None:
        micro_batches = checked_count(
            "distributed", "micro_batches", micro_batches, "how many all ranks have together"
        )
        selected.append(MicroBatchMean("distributed", micro_batches, axis))
    if len(selected) > 1 or (selected and op != "mean"):
        arguments = " and ".join(mean.traits.argument for mean in (*selected, mean_of_op))
        raise ValueError(
            f"distributed: {arguments} do not go together. Use op 'mean', and one of them."
        )
    return selected[0] if selected else mean_of_op


def average_gradients(*, axis: Axis = AXIS) -> optax.GradientTransformationExtraArgs:
    """Average gradients over the ranks: an optax transform for a chain.

        g ← (1/p) · Σ_r g_r
        g ← Σ_r w_r·g_r / Σ_r w_r  if `update` gets the extra argument `weight`, as in `distributed`

    Transforms before it in a chain get this rank's gradients, transforms after it the mean. In a
    chain, `value`, `grad` and callables such as `value_fn` reach all transforms as they are, and
    those after it would use this rank's values. So `update` refuses them: use `distributed`.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** that of `tree_allreduce`; a weight travels in the same message.

    Args:
      axis: as in `tree_allreduce`: the mean is over each group of ranks. The gradients may be
        shards of `fully_shard` over another axis.

    Returns:
      An optax transform with an empty state. Its updates have the shapes and dtypes of the
      gradients, and are equal on the ranks along the axis.

    Raises:
      ValueError: `update` gets `value`, `grad` or a callable; gradients of single samples, which
        have one axis more than the parameters; an unknown axis; weights as in `distributed`.
      TypeError: a leaf of the gradients cannot be averaged, with its path.

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
        refuse_per_rank("average_gradients", extra_args)
        if params is not None:
            check_shapes("average_gradients", updates, params)
        means, _, _ = mean.weighted_mean(updates, (), weight, ())
        return means, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
