"""Local SGD and DiLoCo: each rank steps alone, and parameters are averaged every `every` steps.

This is for links that are too slow to communicate in every step. The parameters are divided into
fragments, and the ranks exchange one fragment at a time. They may go on with their steps while the
message travels. For a fragment with parameters θ on this rank, sent at step s as θ_s and received
`delay` steps later (Douillard et al. 2025, "Streaming DiLoCo"; Shen et al. 2019, "Computation and
communication decoupled SGD"):

    Δ = mean over ranks of (anchor - θ_s)
    anchor ← anchor + outer(Δ)
    θ ← anchor + (θ - θ_s)

The anchor is equal on all ranks: it is what they last agreed on. Without `outer`, the new anchor is
the mean of θ_s. θ - θ_s are the steps of this rank since it sent; without a delay there are none.
Local SGD and DiLoCo are the case of one fragment, which is all of the parameters, without a delay.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import AXIS, Axis
from jaxmpi._backends import sent_ahead
from jaxmpi._collectives.arrays import check_axis
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.exact_updates import update_to
from jaxmpi._marks import equal_on_all_ranks, may_differ, with_parameters
from jaxmpi._optim.codec import UNCODED, Codec, CodecMean, OneMessageMean, check_codec
from jaxmpi._optim.float_leaves import equal_types, floats, map_floats
from jaxmpi._optim.mean import Allreduce, Mean
from jaxmpi._optim.transform_arguments import (
    check_transform,
    checked_count,
    cond_or_call,
    hidden_from_map_params,
)
from jaxmpi._per_rank_state import PerRankState
from jaxmpi._world import session

__all__ = ["Fragment", "LocalSGDState", "StreamingState", "local_sgd"]


class LocalSGDState(NamedTuple):
    """The state of `local_sgd`.

    Attributes:
      calls: calls of `update` since the last averaging, an int32 that is equal on all ranks.
      inner: the state of the inner transform, a `PerRankState`.
      anchor: the parameters θ₀ after the last averaging, equal on all ranks; () if there is neither
        an outer transform nor a codec.
      outer: the state of the outer transform; () without one.
      codec: the state of the codec, a `PerRankState`.
    """

    calls: jax.Array
    inner: PerRankState
    anchor: PyTree
    outer: PyTree
    codec: PerRankState


class Fragment(NamedTuple):
    """The state of one fragment: of parameters that the ranks exchange together.

    Attributes:
      anchor: the parameters that all ranks last agreed on, equal on all ranks. (In a
        `LocalSGDState`, () if neither an outer transform nor a codec needs it.)
      outer: the state of the outer transform; () without one.
      codec: the state of the codec, a `PerRankState`.
      left: this rank's parameters θ_s when it sent them, a `PerRankState`; () without a delay.
      sent: the encoded arrays that it sent, a `PerRankState`; () without a delay.
      number: the number of the message, a uint32 `[2]`; () without a delay.
      on_its_way: whether a message was sent and not received yet, a bool `[]` that is equal on all
        ranks; () without a delay.
    """

    anchor: PyTree
    outer: PyTree
    codec: PerRankState
    left: PyTree = ()
    sent: PyTree = ()
    number: PyTree = ()
    on_its_way: PyTree = ()


class StreamingState(NamedTuple):
    """The state of `local_sgd` with fragments or a delay.

    Attributes:
      calls: calls of `update`, modulo `every`: an int32 that is equal on all ranks.
      inner: the state of the inner transform, a `PerRankState`.
      fragments: the state of each fragment of the parameters.
    """

    calls: jax.Array
    inner: PerRankState
    fragments: tuple[Fragment, ...]


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
    since it sent θ_s: θ ← mean θ_s + (θ - θ_s), or with `outer`, θ ← θ₀ + outer(Δ) + (θ - θ_s).
    (Douillard et al. 2025, "Streaming DiLoCo"; Shen et al. 2019, "Computation and communication
    decoupled SGD".) With either, the state is a `StreamingState`, else a `LocalSGDState`.

    Between averagings the ranks' parameters differ, so they are not a replicated output of a
    `jaxmpi.jit`. After an averaging without a delay they have the same bits on all ranks if
    `optax.apply_updates` is in the same `jaxmpi.jit` as `update`: evaluate and save then, or take
    the mean first. Both calls may be in an inner `jax.jit`, and `local_sgd` in `skip_nonfinite` or
    `accumulate`: between the two calls an update u may pass through `lax.cond` and
    `jnp.where(p, u, 0)`. The parameters may differ by a rounding error

    - if the update is changed before it is applied (`optax.scale`, `optax.MultiSteps`),
    - if it is made outside of the branch or loop in which it is applied,
    - if it is made in a loop, `jax.checkpoint` or custom derivative, and applied outside of it,
    - if it is applied outside of the `jaxmpi.jit`.

    With fragments, only the fragment that is averaged becomes equal. With a delay the parameters
    differ at all times, and the `anchor` of each fragment has the same bits on all ranks. The state
    of `inner` always differs between ranks.

    **Collective:** every rank calls `update` equally often, with parameters of the same structure,
    shapes and dtypes.
    **Communication:** a mean of each parameter once in `every` calls, as an allreduce: 1/every of
    the bytes of `distributed`; with a codec, the bytes of the codec, or of its `one_message` with
    fragments or a delay. All other calls send nothing.

    Args:
      inner: any optax transform that does not communicate, or only over another axis, see `axis`.
      every: the number of calls of `update` from one averaging to the next.
      outer: an optax transform for the averaged parameters, or None for their mean. It gets Δ,
        which is equal on all ranks, and makes the same step on each of them.
      codec: one of `jaxmpi.codecs`, for Δ, with the same axis.
      axis: as in `tree_allreduce`: parameters are averaged over each group of ranks along it. With
        `jaxmpi.init(axes={"island": 2, "member": -1})`, `local_sgd(distributed(inner,
        axis="member"), every, outer, axis="island")` averages gradients over the island in every
        step, and parameters over the islands in every `every`-th.
      fragments: the number of fragments, with about as many bytes each.
      delay: the number of calls from when a fragment is sent to when it is received, below `every`.
        It takes as much memory again as the parameters and the message.

    Returns:
      An optax transform. Its updates have the shapes of the parameters, and lead to the parameters
      after this call.

    Raises:
      ValueError: `every` is below 1; `fragments` is below 1 or above `every`; the delay is negative
        or not below `every`; the codec is for another axis, or has no `one_message` and there are
        fragments or a delay; in `update`, no parameters, or an unknown axis.
      TypeError: `inner` or `outer` is no optax transform, `codec` no codec; `every`, `fragments` or
        `delay` is no integer; a leaf of integers, or of complex numbers with a codec, fragments or
        a delay, with its path.
    """
    check_transform("local_sgd", "inner", inner)
    if outer is not None:
        check_transform("local_sgd", "outer", outer)
    if codec is not None:
        check_codec("local_sgd", codec, axis)
    every = checked_count("local_sgd", "every", every, "the number of steps between averagings")
    fragments = checked_count("local_sgd", "fragments", fragments, "a number of pieces")
    delay = checked_count("local_sgd", "delay", delay, "a number of calls", least=0)
    if fragments > every:
        raise ValueError(
            f"local_sgd: fragments is {fragments}. It must be at least 1, and at most "
            f"every={every}."
        )
    if delay >= every:
        raise ValueError(
            f"local_sgd: delay is {delay}. It must be 0 or more, and below every={every}."
        )
    sends_changes = outer is not None or codec is not None
    message = UNCODED if codec is None else codec.one_message
    layout: FragmentLayout
    mean: Mean
    if fragments == 1 and delay == 0:
        # Any mean will do, also one that needs several rounds of messages.
        layout = SingleFragment(keeps_anchor=sends_changes)
        if codec is None:
            mean = Allreduce("local_sgd", axis=axis)
        else:
            mean = CodecMean("local_sgd", codec, axis)
    elif message is not None:
        layout = SeveralFragments(fragments)
        mean = OneMessageMean("local_sgd", message, axis)
    else:
        raise ValueError(
            "local_sgd: this codec takes several messages, and with fragments or a delay it must "
            "take one. Use bf16, f16, int8 or topk of jaxmpi.codecs."
        )
    transform = LocalSGD(
        optax.with_extra_args_support(inner),
        every,
        outer,
        sends_changes,
        layout,
        mean,
        OneMessageMean("local_sgd", message or UNCODED, axis),
        delay,
    )
    return optax.GradientTransformationExtraArgs(transform.init, transform.update)


@final
@dataclass(frozen=True)
class LocalSGD:
    """The transform that `local_sgd` returns.

    Attributes:
      inner: makes the steps of each rank.
      every: the number of calls from one averaging of a fragment to the next.
      outer: makes a step of Δ; None for the mean of the parameters.
      sends_changes: whether the ranks send anchor - θ, and not θ.
      layout: the fragments, and the state that holds them.
      mean: forms the mean of what the ranks send, without a delay.
      message: forms the same mean in one message, with a delay.
      delay: the number of calls from when a fragment is sent to when it is received.
    """

    inner: optax.GradientTransformationExtraArgs
    every: int
    outer: optax.GradientTransformation | None
    sends_changes: bool
    layout: "FragmentLayout"
    mean: Mean
    message: OneMessageMean
    delay: int

    def init(self, params: PyTree) -> PyTree:
        """Return the state before the first call: no message is on its way."""
        fragments = self.layout.init_fragments(params, self._init_fragment)
        return self.layout.make_state(
            jnp.zeros((), jnp.int32), PerRankState(self.inner.init(params)), fragments
        )

    def _init_fragment(self, params: PyTree) -> Fragment:
        """Return the state of a fragment with these parameters."""
        mean_state = hidden_from_map_params(params, self.mean.init)
        fragment = Fragment(
            jax.tree.map(jnp.array, params) if self.layout.keeps_anchor else (),
            self.outer.init(params) if self.outer else (),
            PerRankState(mean_state),
        )
        if not self.delay:
            return fragment
        # Placeholders in the shapes and dtypes of the first message.
        coded, _ = jax.eval_shape(self.message.encode, params, mean_state)
        return fragment._replace(
            left=PerRankState([jnp.copy(x) for x in params]),
            sent=PerRankState([jnp.zeros(x.shape, x.dtype) for x in coded]),
            number=sent_ahead.none(),
            on_its_way=jnp.zeros((), bool),
        )

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        """Return the updates of one call: a step with `inner`, then the exchange that is due."""
        if params is None:
            raise ValueError(
                "local_sgd: update needs the parameters. Call update(grads, state, params)."
            )
        check_axis("local_sgd", self.mean.axis, session.current("local_sgd"))
        # 1. This rank's step.
        local_updates, inner = self.inner.update(
            updates, state.inner.per_rank, params, **extra_args
        )
        local_params = optax.apply_updates(params, local_updates)
        # 2. The fragments take turns: of F, fragment f is sent at call f·every/F of each round.
        calls = (equal_on_all_ranks(state.calls) + 1) % self.every
        pieces = self.layout.split(local_params)  # the parameters of each fragment
        fragments = [*self.layout.fragments_of(state)]
        for i, (piece, fragment) in enumerate(zip(pieces, fragments, strict=True)):
            send_call = i * self.every // len(pieces)
            pieces[i], fragments[i] = self._exchange(piece, fragment, calls, send_call)
        new_params = may_differ(self.layout.join(pieces, local_params))
        # 3. The updates must lead from the parameters to the new ones bit by bit, so that the
        #    parameters or anchors stay equal on all ranks. They are made here, outside of the
        #    branches, where the caller's step adds them to the parameters: that sum is replaced by
        #    the new parameters, see `update_to`.
        exact_updates = map_floats("local_sgd", update_to, params, new_params, local_updates)
        return exact_updates, self.layout.make_state(calls, PerRankState(inner), tuple(fragments))

    def _exchange(
        self, params: PyTree, fragment: Fragment, calls: jax.Array, send_call: int
    ) -> tuple[PyTree, Fragment]:
        """Return a fragment's parameters and state after this call, (θ, fragment).

        It is sent at call `send_call` of each round, and received `delay` calls later. Without a
        delay both happen at once, in `_average`.
        """
        is_due = calls == (send_call + self.delay) % self.every
        finish = self._average
        if self.delay:
            is_due = is_due & fragment.on_its_way  # in the first round there is no message yet
            finish = self._receive
        # `calls` and `on_its_way` are equal on all ranks, so all take the branch that communicates.
        params, fragment = cond_or_call(
            equal_on_all_ranks(is_due),
            lambda: equal_types(finish(params, fragment), (params, fragment)),
            lambda: (may_differ(params), fragment),
        )
        if not self.delay:
            return params, fragment
        return params, cond_or_call(
            calls == send_call,
            lambda: equal_types(self._send(params, fragment), fragment),
            lambda: fragment,
        )

    def _average(self, params: PyTree, fragment: Fragment) -> tuple[PyTree, Fragment]:
        """Return (new anchor, fragment) without a delay: the anchor is the new θ."""
        to_send = self._to_send(params, fragment)
        delta, _, mean_state = self.mean.mean(to_send, (), fragment.codec.per_rank)
        anchor, outer = self._outer_step(delta, fragment)
        return anchor, fragment._replace(
            anchor=anchor if self.layout.keeps_anchor else (),
            outer=outer,
            codec=PerRankState(mean_state),
        )

    def _send(self, params: PyTree, fragment: Fragment) -> Fragment:
        """Send a fragment, and return its state with the message on its way."""
        to_send = self._to_send(params, fragment)
        coded, mean_state = self.message.encode(to_send, fragment.codec.per_rank)
        return fragment._replace(
            codec=PerRankState(mean_state),
            left=PerRankState(params),
            sent=PerRankState(coded),
            number=equal_on_all_ranks(self.message.send(coded)),
            on_its_way=jnp.ones((), bool),
        )

    def _receive(self, params: PyTree, fragment: Fragment) -> tuple[PyTree, Fragment]:
        """Receive the message that is on its way, and return (θ, fragment).

        θ ← anchor + (θ - θ_s), with the new anchor.
        """
        coded = sent_ahead.sent_ahead(fragment.sent.per_rank, fragment.number)
        delta = self.message.receive(coded, fragment.anchor)
        anchor, outer = self._outer_step(delta, fragment)
        steps_since = jax.tree.map(lambda x, left: x - left, params, fragment.left.per_rank)
        params = jax.tree.map(lambda a, steps: a + steps, anchor, steps_since)
        return params, fragment._replace(anchor=anchor, outer=outer, on_its_way=jnp.zeros((), bool))

    def _to_send(self, params: PyTree, fragment: Fragment) -> PyTree:
        """Return anchor - θ, whose mean is Δ; or θ, if the new anchor is the mean of θ."""
        # Whether there is an outer transform changes no message, so the ranks compare it as text.
        # `every` and `delay` are compared as predicates of the branches.
        label = f"local_sgd outer={'a transform' if self.outer else None}"
        params = with_parameters(params, label)
        if not self.sends_changes:
            return params
        return jax.tree.map(lambda a, x: a - x, fragment.anchor, params)

    def _outer_step(self, delta: PyTree, fragment: Fragment) -> tuple[PyTree, PyTree]:
        """Return (new anchor, state of the outer transform).

        anchor ← anchor + outer(Δ); without `outer`, anchor - Δ, which is the mean of θ.

        Args:
          delta: Δ, or the mean of θ without `sends_changes`.
          fragment: the state before the step.
        """
        anchor, outer = delta, fragment.outer
        if self.outer:
            step, outer = self.outer.update(delta, fragment.outer, fragment.anchor)
            anchor = optax.apply_updates(fragment.anchor, step)
        elif self.sends_changes:
            anchor = jax.tree.map(lambda a, d: (a - d).astype(a.dtype), fragment.anchor, delta)
        # Make -0 a +0: θ + u is -0 only if both are, so a rank with another θ cannot reach it.
        return jax.tree.map(lambda x: jnp.where(x == 0, jnp.zeros_like(x), x), anchor), outer


# --- the fragments, and the state that holds them ------------------------------------------------


class FragmentLayout(ABC):
    """Division of the parameters into fragments, and the state that holds these.

    Attributes:
      keeps_anchor: whether the fragments keep the anchor from one averaging to the next.
    """

    keeps_anchor: bool

    @abstractmethod
    def split(self, tree: PyTree) -> list[PyTree]:
        """Return the pieces of a tree like the parameters, one for each fragment."""

    @abstractmethod
    def join(self, pieces: list[PyTree], like: PyTree) -> PyTree:
        """Return the tree of these pieces, in the structure of `like`: `split` undone."""

    @abstractmethod
    def init_fragments(
        self, params: PyTree, init_fragment: Callable[[PyTree], Fragment]
    ) -> tuple[Fragment, ...]:
        """Return the first state of each fragment; `init_fragment` makes it of a piece."""

    @abstractmethod
    def make_state(
        self, calls: jax.Array, inner: PerRankState, fragments: tuple[Fragment, ...]
    ) -> PyTree:
        """Return the state of the transform."""

    @abstractmethod
    def fragments_of(self, state: PyTree) -> tuple[Fragment, ...]:
        """Return the state of each fragment, from the state of the transform."""


@final
@dataclass(frozen=True)
class SingleFragment(FragmentLayout):
    """One fragment, the whole tree of the parameters; the state is a `LocalSGDState`."""

    keeps_anchor: bool

    def split(self, tree: PyTree) -> list[PyTree]:
        return [tree]

    def join(self, pieces: list[PyTree], like: PyTree) -> PyTree:
        return pieces[0]

    def init_fragments(
        self, params: PyTree, init_fragment: Callable[[PyTree], Fragment]
    ) -> tuple[Fragment, ...]:
        return (init_fragment(params),)

    def make_state(
        self, calls: jax.Array, inner: PerRankState, fragments: tuple[Fragment, ...]
    ) -> PyTree:
        (fragment,) = fragments
        return LocalSGDState(calls, inner, fragment.anchor, fragment.outer, fragment.codec)

    def fragments_of(self, state: PyTree) -> tuple[Fragment, ...]:
        return (Fragment(state.anchor, state.outer, state.codec),)


@final
@dataclass(frozen=True)
class SeveralFragments(FragmentLayout):
    """Lists of the parameters' leaves, at most `count`; the state is a `StreamingState`."""

    count: int
    keeps_anchor: bool = True

    def split(self, tree: PyTree) -> list[PyTree]:
        leaves, _ = floats("local_sgd", tree)
        return [[leaves[i] for i in group] for group in self._groups(leaves)]

    def join(self, pieces: list[PyTree], like: PyTree) -> PyTree:
        leaves, put = floats("local_sgd", like)
        for group, piece in zip(self._groups(leaves), pieces, strict=True):
            for i, x in zip(group, piece, strict=True):
                leaves[i] = x
        return put(leaves)

    def init_fragments(
        self, params: PyTree, init_fragment: Callable[[PyTree], Fragment]
    ) -> tuple[Fragment, ...]:
        fragments: tuple[Fragment, ...] = hidden_from_map_params(
            params, lambda params: tuple(map(init_fragment, self.split(params)))
        )
        return fragments

    def make_state(
        self, calls: jax.Array, inner: PerRankState, fragments: tuple[Fragment, ...]
    ) -> PyTree:
        return StreamingState(calls, inner, fragments)

    def fragments_of(self, state: PyTree) -> tuple[Fragment, ...]:
        fragments: tuple[Fragment, ...] = state.fragments
        return fragments

    def _groups(self, leaves: Sequence[jax.Array]) -> list[list[int]]:
        """Return the indices of each fragment's leaves.

        Each leaf goes to the fragment with the fewest bytes so far, so all fragments have about as
        many bytes, and leaves from all depths of the model. There are no more fragments than
        leaves.
        """
        groups: list[list[int]] = [[] for _ in range(min(self.count, max(1, len(leaves))))]
        sizes_bytes = [0] * len(groups)
        for i, x in enumerate(leaves):
            smallest = sizes_bytes.index(min(sizes_bytes))
            groups[smallest].append(i)
            sizes_bytes[smallest] += x.size * x.dtype.itemsize
        return groups
