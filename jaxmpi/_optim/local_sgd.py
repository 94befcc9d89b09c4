"""Local SGD and DiLoCo: each rank steps alone, and parameters are averaged every H steps.

For links on which not every step can communicate. With fragments or a delay, streaming_diloco.py
does the work.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.arrays import axis_size, check_axis
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.exact_updates import update_to
from jaxmpi._marks import equal_on_all_ranks, may_differ, with_parameters
from jaxmpi._optim.codec import Codec, check_codec
from jaxmpi._optim.float_leaves import check_transform, either, equal_types, made_of, map_floats
from jaxmpi._optim.streaming_diloco import Streaming, StreamingState, no_negative_zeros
from jaxmpi._per_rank_state import PerRankState
from jaxmpi._world import session

__all__ = ["LocalSGDState", "local_sgd"]


class LocalSGDState(NamedTuple):
    """The state of `local_sgd`.

    Attributes:
      calls: calls of `update` since the last averaging, an int32 that is equal on all ranks.
      inner: the state of the inner transform, a `PerRankState`.
      anchor: the parameters θ₀ after the last averaging; () without an outer transform and a codec.
      outer: the state of the outer transform; () without one.
      codec: the state of the codec, a `PerRankState`.
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
    """Step with `inner` on each rank alone, and average the parameters at every `every`-th call.

    Without `outer`, the parameters θ become their mean over the ranks (Stich 2019, "Local SGD
    converges fast and communicates little"). With it (Douillard et al. 2023, "DiLoCo"), the change
    since the last averaging is a gradient for `outer`:

        Δ = θ₀ - mean θ
        θ ← θ₀ + outer(Δ)

    DiLoCo uses `optax.sgd(0.7, momentum=0.9, nesterov=True)` as `outer`, and AdamW as `inner`.

    With `fragments`, the ranks exchange one fragment of the parameters at a time: each fragment
    every `every` calls, and the fragments in turn. With `delay`, a message arrives that many calls
    after it was sent, and the ranks step on meanwhile (on the native transport between nodes, see
    `JAXMPI_OVERLAP`; the results are the same everywhere). A rank then keeps the steps that it took
    since it sent θ_s: θ ← mean θ_s + (θ - θ_s). (Douillard et al. 2025, "Streaming DiLoCo"; Shen et
    al. 2019, "Computation and communication decoupled SGD".) The state is then a `StreamingState`.

    Between averagings the ranks' parameters differ, so they are not a replicated output of a
    `jaxmpi.jit`. After an averaging without a delay they have the same bits on all ranks, if
    `optax.apply_updates` is in the same `jaxmpi.jit` as `update`: evaluate and save there, or take
    the mean first. Either may be in an inner `jax.jit`, and `local_sgd` in `skip_nonfinite` or
    `accumulate`: between the two an update u may pass through `lax.cond` and `jnp.where(p, u, 0)`.
    The parameters may differ by a rounding error if the update is changed on its way
    (`optax.scale`, `optax.MultiSteps`), made outside of the branch or loop that adds it, or made in
    a loop, `jax.checkpoint` or custom derivative that it leaves, and if it is applied outside of
    the `jaxmpi.jit`.

    With a delay the parameters differ at all times, and the `anchor` of each fragment has the same
    bits on all ranks. The state of `inner` always differs between ranks.

    **Collective:** every rank calls `update` equally often, with parameters.
    **Communication:** a mean of the parameters every `every` calls: 1/every of the bytes of
    `distributed`; with a codec, the bytes of the codec.

    Args:
      inner: any optax transform that does not communicate, or only over another axis, see `axis`.
      every: the number of calls of `update` from one averaging to the next.
      outer: an optax transform for the averaged parameters, or None for their mean.
      codec: one of `jaxmpi.codecs`, for Δ, with the same axis.
      axis: as in `tree_allreduce`: parameters are averaged over each group of ranks along it. With
        `jaxmpi.init(axes={"island": 2, "member": -1})`, `local_sgd(distributed(inner,
        axis="member"), every, outer, axis="island")` averages gradients over the island in every
        step, and parameters over the islands in every `every`-th.
      fragments: the number of fragments, with about as many bytes each.
      delay: the number of calls from when a fragment is sent to when it is received, below `every`.
        It takes as much memory again as the parameters and the message.

    Raises:
      ValueError: `every` or `fragments` is below 1; the delay is negative or not below `every`; the
        codec is for another axis, or has no `one_message` and there are fragments or a delay;
        `update` gets no parameters; the axis is unknown.
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
        return _streaming(Streaming(inner, every, outer, codec, axis, fragments, delay))

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
        local_updates, inner_state = inner.update(
            updates, state.inner.per_rank, params, **extra_args
        )
        calls = equal_on_all_ranks(state.calls) + 1

        here = optax.apply_updates(params, local_updates)

        def average() -> tuple[PyTree, PyTree]:
            there, outer_state, codec_state = _average(here, state, outer, codec, axis)
            after = (there if outer or codec else (), outer_state, codec_state)
            return equal_types(there, params), equal_types(after, state[2:])

        def go_on() -> tuple[PyTree, PyTree]:
            return may_differ(here), tuple(state[2:])

        # Both branches return parameters, not updates, so that the update is made outside of the
        # branches, where the caller's step adds it to the parameters: there the sum is replaced by
        # what the branch returned.
        there, after = either(calls == every, average, go_on)
        out = map_floats("local_sgd", update_to, params, may_differ(there), local_updates)
        calls = jnp.where(calls == every, 0, calls)
        return out, LocalSGDState(calls, PerRankState(inner_state), *after)

    return optax.GradientTransformationExtraArgs(init, update)


def _average(
    here: PyTree,
    state: LocalSGDState,
    outer: optax.GradientTransformation | None,
    codec: Codec | None,
    axis: Axis,
) -> tuple[PyTree, PyTree, PyTree]:
    """Return the averaged parameters, and the states of the outer transform and the codec.

    Args:
      here: this rank's parameters θ.
      state: the state before, with θ₀ in `state.anchor`.
      outer: as in `local_sgd`.
      codec: as in `local_sgd`.
      axis: as in `local_sgd`.
    """
    here = with_parameters(here, f"local_sgd outer={'a transform' if outer else None}")
    if not outer and not codec:
        mean = Caller("local_sgd").allreduce(here, op="mean", axis=axis)
        return no_negative_zeros(mean), (), state.codec
    # Δ = θ₀ - mean θ, as the mean of θ₀ - θ
    delta = jax.tree.map(lambda x, y: x - y, state.anchor, here)
    if codec and axis_size(axis, session.current("local_sgd")) > 1:
        delta, coded = codec.mean(delta, state.codec.per_rank)
        coded = PerRankState(coded)
    else:
        delta, coded = Caller("local_sgd").allreduce(delta, op="mean", axis=axis), state.codec
    if not outer:
        there = jax.tree.map(lambda x, d: (x - d).astype(x.dtype), state.anchor, delta)
        return no_negative_zeros(there), (), coded
    # θ ← θ₀ + outer(Δ)
    step, outer_state = outer.update(delta, state.outer, state.anchor)
    return no_negative_zeros(optax.apply_updates(state.anchor, step)), outer_state, coded


def _streaming(streaming: Streaming) -> optax.GradientTransformationExtraArgs:
    """Check the arguments, and return the transform."""
    if not 1 <= streaming.fragments <= streaming.every:
        raise ValueError(
            f"local_sgd: fragments is {streaming.fragments}. It must be at least 1, and at most "
            f"every={streaming.every}."
        )
    if not 0 <= streaming.delay < streaming.every:
        raise ValueError(
            f"local_sgd: delay is {streaming.delay}. It must be 0 or more, and below "
            f"every={streaming.every}."
        )
    if streaming.codec and not streaming.codec.one_message:
        raise ValueError(
            "local_sgd: this codec takes several messages, and with fragments or a delay it must "
            "take one. Use bf16, f16, int8 or topk of jaxmpi.codecs."
        )

    def update(
        updates: PyTree, state: StreamingState, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, StreamingState]:
        if params is None:
            raise ValueError(
                "local_sgd: update needs the parameters. Call update(grads, state, params)."
            )
        check_axis("local_sgd", streaming.axis, session.current("local_sgd"))
        return streaming.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(streaming.init, update)
