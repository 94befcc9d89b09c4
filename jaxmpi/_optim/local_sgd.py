"""Steps of each rank's own, averaged now and then: for links where every step cannot communicate."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import AXIS, Axis, equal_on_all_ranks, may_differ, with_parameters
from jaxmpi._collectives.arrays import axis_size, check_axis
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.exact_updates import update_to
from jaxmpi._optim.compression import Codec, check_codec
from jaxmpi._optim.float_leaves import check_transform, either, equal_types, made_of, map_floats
from jaxmpi._optim.streaming import StreamingState, Streams, no_negative_zeros
from jaxmpi._per_rank_state import PerRankState
from jaxmpi._world import session

__all__ = ["LocalSGDState", "local_sgd"]


class LocalSGDState(NamedTuple):
    """The state of `local_sgd`.

    Attributes:
      calls: of `update` since the ranks last met, an int32 that is equal on all ranks.
      inner: the state of the inner transform, a `PerRankState`.
      anchor: the parameters where they last met; () without an outer transform and a codec.
      outer: the state of the outer transform; () without one.
      codec: that of the codec, a `PerRankState`.
    """

    calls: jax.Array
    inner: PerRankState
    anchor: PyTree
    outer: PyTree
    codec: PerRankState


def local_sgd(
    inner: optax.GradientTransformation,
    every: int,
    outer: optax.GradientTransformation | None = None,
    *,
    codec: Codec | None = None,
    axis: Axis = AXIS,
    fragments: int = 1,
    delay: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Let each rank take steps of its own with `inner`, and meet the others at every `every`-th call of `update`.

    Without `outer`, the parameters θ become their mean over the ranks (Stich 2019, "Local SGD
    converges fast and communicates little"). With it (Douillard et al. 2023, "DiLoCo"), Δ = θ₀ -
    mean θ, the way from where they last met, is a gradient for it: θ ← θ₀ + outer(Δ). DiLoCo's own
    is `optax.sgd(0.7, momentum=0.9, nesterov=True)`, around an AdamW.

    With `fragments`, the ranks exchange a part of the parameters at a time: each every `every`
    calls, but in turns. With `delay`, what a rank has sent arrives that many calls later, and the
    message is on its way while the ranks go on (on the native transport between nodes, see
    `JAXMPI_OVERLAP`; the results are the same everywhere). θ is then what all have agreed on, plus
    this rank's own way since it sent: θ ← mean θ_then + (θ - θ_then). (Douillard et al. 2025,
    "Streaming DiLoCo"; for the own way, Shen et al. 2019, "Computation and communication decoupled
    SGD".) The state is then a `StreamingState`.

    Between meetings the ranks' parameters differ, so they are not a replicated output of a
    `jaxmpi.jit`. After a meeting without a delay they have the same bits on all ranks, if
    `optax.apply_updates` is in the same `jaxmpi.jit` as `update`: evaluate and save there, or take
    the mean first. Either may be in an inner `jax.jit`, and `local_sgd` in `skip_nonfinite` or
    `accumulate`: between the two an update u may pass through `lax.cond` and `jnp.where(p, u, 0)`.
    The parameters may be a rounding apart where the update is changed on its way (`optax.scale`,
    `optax.MultiSteps`), made outside of the branch or loop that adds it, or made in a loop,
    `jax.checkpoint` or custom derivative that it leaves, and where it is applied outside of the
    `jaxmpi.jit`.

    With a delay each rank has its own way on top of what all have agreed on, and the `anchor` of
    each fragment has the same bits on all ranks. The state of `inner` stays each rank's own.

    **Collective:** every rank calls `update` equally often, with parameters.
    **Communication:** a mean of the parameters every `every` calls: 1/every of the bytes of
    `distributed`; with a codec, its.

    Args:
      inner: any optax transform, which does not communicate; or one that does with the ranks of
        another axis, see `axis`.
      every: calls of `update` from one meeting to the next.
      outer: an optax transform for the parameters where they meet, or None for their mean.
      codec: one of `jaxmpi.codecs`, for Δ, with the same axis.
      axis: as in `tree_allreduce`: each rank meets those of its group along it. With
        `jaxmpi.init(axes={"island": 2, "member": -1})`, `local_sgd(distributed(inner,
        axis="member"), every, outer, axis="island")` takes every step together with the ranks of
        its island, and meets the other islands now and then.
      fragments: how many parts the leaves are dealt into, of about as many bytes.
      delay: calls of `update` from when a part is sent to when it is used, below `every`. It takes
        as many bytes again as the parameters and what is sent.

    Raises:
      ValueError: `every` or `fragments` is below 1; a delay that is negative, or not below `every`;
        a codec for another axis, or without a `one_message` and with fragments or a delay; `update`
        gets no parameters, or the axis is unknown.
      TypeError: `inner` or `outer` is no optax transform, `codec` no codec; a leaf of integers,
        with its path.
    """
    check_transform("local_sgd", "inner", inner)
    if outer is not None:
        check_transform("local_sgd", "outer", outer)
    if codec is not None:
        check_codec("local_sgd", codec, axis)
    if every < 1:
        raise ValueError(
            f"local_sgd: every is {every}. It is the number of steps between averagings: 1 or more."
        )
    inner = optax.with_extra_args_support(inner)
    if fragments != 1 or delay != 0:
        return _streaming(Streams(inner, every, outer, codec, axis, fragments, delay))

    def init(params: PyTree) -> LocalSGDState:
        anchor = jax.tree.map(jnp.array, params) if outer or codec else ()
        coded = made_of(params, codec.init) if codec else ()
        return LocalSGDState(
            jnp.zeros((), jnp.int32),
            PerRankState(inner.init(params)),
            anchor,
            outer.init(params) if outer else (),
            PerRankState(coded),
        )

    def update(
        updates: PyTree, state: LocalSGDState, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, LocalSGDState]:
        if params is None:
            raise ValueError(
                "local_sgd: update needs the parameters. Call update(grads, state, params)."
            )
        check_axis("local_sgd", axis, session.current("local_sgd"))
        own_updates, own = inner.update(updates, state.inner.per_rank, params, **extra_args)
        calls = equal_on_all_ranks(state.calls) + 1

        here = optax.apply_updates(params, own_updates)

        def with_the_others() -> tuple[PyTree, PyTree]:
            there, outer_state, coded = _averaged(here, state, outer, codec, axis)
            after = (there if outer or codec else (), outer_state, coded)
            return equal_types(there, params), equal_types(after, state[2:])

        def alone() -> tuple[PyTree, PyTree]:
            return may_differ(here), tuple(state[2:])

        # Both branches return parameters, not updates, so that the update is made outside of the
        # branches, where the caller's step adds it to the parameters: there the sum is replaced by
        # what the branch returned.
        there, after = either(calls == every, with_the_others, alone)
        out = map_floats("local_sgd", update_to, params, may_differ(there), own_updates)
        return out, LocalSGDState(jnp.where(calls == every, 0, calls), PerRankState(own), *after)

    return optax.GradientTransformationExtraArgs(init, update)


def _averaged(
    here: PyTree,
    state: LocalSGDState,
    outer: optax.GradientTransformation | None,
    codec: Codec | None,
    axis: Axis,
) -> tuple[PyTree, PyTree, PyTree]:
    """The parameters that all go on from, and the states of the outer transform and the codec."""
    here = with_parameters(here, f"local_sgd outer={'a transform' if outer else None}")
    if not outer and not codec:
        return (
            no_negative_zeros(Caller("local_sgd").allreduce(here, op="mean", axis=axis)),
            (),
            state.codec,
        )
    delta = jax.tree.map(lambda x, y: x - y, state.anchor, here)
    if codec and axis_size(axis, session.current("local_sgd")) > 1:
        delta, coded = codec.mean(delta, state.codec.per_rank)
        coded = PerRankState(coded)
    else:
        delta, coded = Caller("local_sgd").allreduce(delta, op="mean", axis=axis), state.codec
    if not outer:
        there = jax.tree.map(lambda x, d: (x - d).astype(x.dtype), state.anchor, delta)
        return no_negative_zeros(there), (), coded
    step, outer_state = outer.update(delta, state.outer, state.anchor)
    return no_negative_zeros(optax.apply_updates(state.anchor, step)), outer_state, coded


def _streaming(streams: Streams) -> optax.GradientTransformationExtraArgs:
    if not 1 <= streams.fragments <= streams.every:
        raise ValueError(
            f"local_sgd: fragments is {streams.fragments}. It must be at least 1, and at most "
            f"every={streams.every}."
        )
    if not 0 <= streams.delay < streams.every:
        raise ValueError(
            f"local_sgd: delay is {streams.delay}. It must be 0 or more, and below "
            f"every={streams.every}."
        )
    if streams.codec and not streams.codec.one_message:
        raise ValueError(
            "local_sgd: this codec takes several messages, and with fragments or a delay there is "
            "one. Use bf16, f16, int8 or "
            "topk of jaxmpi.codecs."
        )

    def update(
        updates: PyTree, state: StreamingState, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, StreamingState]:
        if params is None:
            raise ValueError(
                "local_sgd: update needs the parameters. Call update(grads, state, params)."
            )
        check_axis("local_sgd", streams.axis, session.current("local_sgd"))
        return streams.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(streams.init, update)
