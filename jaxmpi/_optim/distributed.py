"""`distributed`: an optimizer that gets the gradients of all ranks.

tx = jaxmpi.distributed(optax.adam(1e-3))
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.arrays import axis_size, check_axis
from jaxmpi._collectives.tree_calls import OPS
from jaxmpi._collectives.trees import Caller, tree_allreduce
from jaxmpi._jit.api import compiled
from jaxmpi._leaves import PyTree
from jaxmpi._optim.adasum import adasum
from jaxmpi._optim.average import mean, mean_of_all, rounded
from jaxmpi._optim.codec import Codec, check_codec
from jaxmpi._optim.deterministic import canonical_mean, invariant_update
from jaxmpi._optim.float_leaves import check_in_step, check_shapes, check_transform, made_of
from jaxmpi._optim.objective import ExtraArgs, over_ranks
from jaxmpi._optim.sharded_array import refuse_shards
from jaxmpi._optim.weights import Weight, as_weight, check_total, divided, scaled
from jaxmpi._per_rank_state import PerRankState
from jaxmpi._world import session

__all__ = ["DistributedState", "distributed"]


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
    _check(inner, op, codec, micro_batches, axis)
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> PyTree:
        refuse_shards("distributed", params, AXIS if op == "adasum" else axis)
        if codec is None:
            return inner.init(params)
        return DistributedState(inner.init(params), PerRankState(made_of(params, codec.init)))

    def over_all(fun: Callable[..., PyTree], weight: Weight | None) -> Callable[..., PyTree]:
        return (
            over_ranks(fun, partial(tree_allreduce, op="sum"))
            if op == "sum"
            else mean_of_all("distributed", fun, weight)
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
        _check_extra(extra, weight, op, micro_batches)
        extra.check_axis("distributed", axis)
        before, sent = (state.inner, state.codec.per_rank) if codec else (state, None)
        if codec:
            grads, sent = _coded(codec, updates, sent, weight)
            local = mean("distributed", extra.local, weight, axis) if extra.local else {}
        else:
            grads, local = _reduced(op, updates, extra.local, weight, micro_batches, axis)
        apply = invariant_update(inner) if micro_batches else inner.update
        out, after = apply(
            grads,
            *extra.marked((before, params)),
            **extra.reduced(grads, local, lambda f: over_all(f, weight)),
        )
        check_shapes("distributed", grads, out)
        return out, DistributedState(after, PerRankState(sent)) if codec else after

    whole_step = compiled(step, "distributed") if micro_batches else step

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


def _check(
    inner: optax.GradientTransformation,
    op: str,
    codec: Codec | None,
    micro_batches: int | None,
    axis: Axis,
) -> None:
    """Raise an error for wrong arguments, or arguments that exclude each other."""
    if op not in (*OPS, "adasum"):
        raise ValueError(
            f"distributed: op {op!r} is unknown. Use one of {', '.join(OPS)} and adasum."
        )
    check_transform("distributed", "inner", inner)
    if codec is not None:
        check_codec("distributed", codec, axis)
    if micro_batches is not None and micro_batches < 1:
        raise ValueError(
            f"distributed: micro_batches is {micro_batches}. It is how many all ranks have "
            "together: 1 or more."
        )
    special = [
        name
        for name, given in (("a codec", codec), ("micro_batches", micro_batches))
        if given is not None
    ]
    if len(special) > 1 or (special and op != "mean"):
        raise ValueError(
            f"distributed: {' and '.join([*special, f'op {op!r}'])} do not go together. Use op "
            "'mean', and one of them."
        )


def _check_extra(
    extra: ExtraArgs, weight: Weight | None, op: str, micro_batches: int | None
) -> None:
    """Raise a ValueError for arguments of `update` that an option of `distributed` excludes."""
    other = "micro_batches" if micro_batches else f"op {op!r}"
    if weight is not None and (micro_batches or op != "mean"):
        raise ValueError(
            f"distributed: weight does not go together with {other}. Leave one of them out."
        )
    if extra.functions and (micro_batches or op not in ("mean", "sum")):
        raise ValueError(
            f"distributed: {' and '.join(extra.functions)} does not go together with {other}. Use "
            "op 'mean'."
        )


def _reduced(
    op: str,
    updates: PyTree,
    local: dict[str, PyTree],
    weight: Weight | None,
    micro_batches: int | None,
    axis: Axis,
) -> tuple[PyTree, PyTree]:
    """Return the gradients, and `value` and `grad`, reduced over the ranks."""
    if op not in ("mean", "sum"):
        grads = (
            adasum(updates, axis)
            if op == "adasum"
            else Caller("distributed").allreduce(updates, op=op, axis=axis)
        )
        return grads, Caller("distributed").allreduce(local, op="mean", axis=axis)
    tree = (updates, local) if local else updates  # errors name the leaf by its path
    if micro_batches:
        tree = canonical_mean(tree, micro_batches, axis)
    else:
        tree = (
            mean("distributed", tree, weight, axis)
            if op == "mean"
            else Caller("distributed").allreduce(tree, op="sum", axis=axis)
        )
    return tree if local else (tree, {})


def _coded(
    codec: Codec, updates: PyTree, state: PyTree, weight: Weight | None
) -> tuple[PyTree, PyTree]:
    """Return the mean by a codec, and its state.

    The state stays as it was on one rank, and if all weights are 0.
    """
    if axis_size(codec.axis, session.current("distributed")) == 1:
        return mean("distributed", updates, weight, codec.axis), state
    check_in_step("distributed")
    if weight is None:
        return codec.mean(updates, state)
    w, problem = as_weight("distributed", weight, updates)
    total = Caller("distributed").allreduce(w, op="mean", axis=codec.axis)
    means, sent = codec.mean(scaled("distributed", updates, w), state)
    check_total("distributed", total, problem, codec.axis)
    kept = jax.tree.map(lambda new, old: jnp.where(total != 0, new, old), sent, state)
    return rounded("distributed", divided("distributed", means, total), updates), kept
