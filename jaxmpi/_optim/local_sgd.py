"""Local SGD and DiLoCo: each rank steps alone, and parameters are averaged every H steps.

For links on which not every step can communicate. The ranks exchange one fragment of the parameters
at a time, and may go on with their own steps while the message travels. For a fragment with
parameters θ, sent at step s and received `delay` steps later (Douillard et al. 2025, "Streaming
DiLoCo"; Shen et al. 2019, "Computation and communication decoupled SGD"):

    Δ = mean over ranks of (anchor - θ_s)
    anchor ← anchor + outer(Δ)
    θ ← anchor + (θ - θ_s)

Without `outer`, the new anchor is the mean of θ_s. θ - θ_s are the steps of this rank since it
sent; without a delay there are none. Local SGD and DiLoCo are the case of one fragment, which is
all of the parameters, without a delay.
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
from jaxmpi._optim.float_leaves import (
    check_transform,
    either,
    equal_types,
    floats,
    made_of,
    map_floats,
)
from jaxmpi._optim.mean import Allreduce, Mean
from jaxmpi._per_rank_state import PerRankState
from jaxmpi._world import session

__all__ = ["Fragment", "LocalSGDState", "StreamingState", "local_sgd"]


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


class Fragment(NamedTuple):
    """The state of some of the parameters, which the ranks exchange together.

    Attributes:
      anchor: the parameters that all ranks last agreed on, equal on all ranks.
      outer: the state of the outer transform; () without one.
      codec: the state of the codec, a `PerRankState`.
      left: this rank's parameters θ_s when it sent them, a `PerRankState`; () without a delay.
      sent: the encoded arrays that it sent, a `PerRankState`; () without a delay.
      number: the number of the message, a uint32 `[2]`; () without a delay.
      on_its_way: whether a message was sent and not received yet; () without a delay.
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
    if not 1 <= fragments <= every:
        raise ValueError(
            f"local_sgd: fragments is {fragments}. It must be at least 1, and at most "
            f"every={every}."
        )
    if not 0 <= delay < every:
        raise ValueError(
            f"local_sgd: delay is {delay}. It must be 0 or more, and below every={every}."
        )
    sends_changes = outer is not None or codec is not None
    message = UNCODED if codec is None else codec.one_message
    layout: Layout = InFragments(fragments)
    mean: Mean
    if fragments == 1 and delay == 0:
        # the mean may take several rounds
        layout = InOnePiece(keeps_anchor=sends_changes)
        mean = Allreduce("local_sgd", axis=axis)
        if codec is not None:
            mean = CodecMean("local_sgd", codec, axis)
    elif message is not None:
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
      mean: forms the mean of what the ranks send.
      message: the same mean in one message, for a delay.
      delay: the number of calls from when a fragment is sent to when it is received.
    """

    inner: optax.GradientTransformationExtraArgs
    every: int
    outer: optax.GradientTransformation | None
    sends_changes: bool
    layout: "Layout"
    mean: Mean
    message: OneMessageMean
    delay: int

    def init(self, params: PyTree) -> PyTree:
        """Return the state before the first call: no message is on its way."""
        fragments = self.layout.make(params, self._make_fragment)
        return self.layout.state(
            jnp.zeros((), jnp.int32), PerRankState(self.inner.init(params)), fragments
        )

    def _make_fragment(self, xs: PyTree) -> Fragment:
        mean_state = made_of(xs, self.mean.init)
        fragment = Fragment(
            jax.tree.map(jnp.array, xs) if self.layout.keeps_anchor else (),
            self.outer.init(xs) if self.outer else (),
            PerRankState(mean_state),
        )
        if not self.delay:
            return fragment
        coded, _ = jax.eval_shape(self.message.encode, xs, mean_state)
        return fragment._replace(
            left=PerRankState([jnp.copy(x) for x in xs]),
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
        local_updates, inner = self.inner.update(
            updates, state.inner.per_rank, params, **extra_args
        )
        here = optax.apply_updates(params, local_updates)
        calls = (equal_on_all_ranks(state.calls) + 1) % self.every
        # The fragments take turns: of F, fragment f is sent at call f·every/F of each round.
        parts, fragments = self.layout.split(here), [*self.layout.fragments(state)]
        for i, (part, fragment) in enumerate(zip(parts, fragments, strict=True)):
            first = i * self.every // len(parts)
            parts[i], fragments[i] = self._exchange(part, fragment, calls, first)
        # The updates must lead from the parameters to `there` bit by bit, so that the parameters or
        # anchors stay equal on all ranks. They are made here, outside of the branches, where the
        # caller's step adds them to the parameters: that sum is replaced by `there`, see
        # `update_to`.
        there = may_differ(self.layout.join(parts, here))
        exact_updates = map_floats("local_sgd", update_to, params, there, local_updates)
        return exact_updates, self.layout.state(calls, PerRankState(inner), tuple(fragments))

    def _exchange(
        self, here: PyTree, fragment: Fragment, calls: jax.Array, first: int
    ) -> tuple[PyTree, Fragment]:
        """Return a fragment's parameters and state after this call.

        It is sent at call `first`, and received at call `first + delay`.
        """
        is_due = calls == (first + self.delay) % self.every
        finish = self._average
        if self.delay:
            is_due, finish = is_due & fragment.on_its_way, self._receive
        here, fragment = either(
            equal_on_all_ranks(is_due),
            lambda: equal_types(finish(here, fragment), (here, fragment)),
            lambda: (may_differ(here), fragment),
        )
        if not self.delay:
            return here, fragment
        return here, either(
            calls == first,
            lambda: equal_types(self._send(here, fragment), fragment),
            lambda: fragment,
        )

    def _average(self, here: PyTree, fragment: Fragment) -> tuple[PyTree, Fragment]:
        """Return the new anchor for a fragment's parameters, and its state: without a delay."""
        change = self._change(here, fragment)
        delta, _, mean_state = self.mean.mean(change, (), fragment.codec.per_rank)
        anchor, outer = self._step(delta, fragment)
        return anchor, fragment._replace(
            anchor=anchor if self.layout.keeps_anchor else (),
            outer=outer,
            codec=PerRankState(mean_state),
        )

    def _send(self, here: PyTree, fragment: Fragment) -> Fragment:
        """Return the state of a fragment whose message is on its way."""
        change = self._change(here, fragment)
        coded, mean_state = self.message.encode(change, fragment.codec.per_rank)
        return fragment._replace(
            codec=PerRankState(mean_state),
            left=PerRankState(here),
            sent=PerRankState(coded),
            number=equal_on_all_ranks(self.message.send(coded)),
            on_its_way=jnp.ones((), bool),
        )

    def _receive(self, here: PyTree, fragment: Fragment) -> tuple[PyTree, Fragment]:
        """Return θ = anchor + (θ - θ_s) with the new anchor, and the state of the fragment."""
        coded = sent_ahead.sent_ahead(fragment.sent.per_rank, fragment.number)
        delta = self.message.receive(coded, fragment.anchor)
        anchor, outer = self._step(delta, fragment)
        since = jax.tree.map(lambda x, left: x - left, here, fragment.left.per_rank)
        there = jax.tree.map(lambda a, s: a + s, anchor, since)
        return there, fragment._replace(anchor=anchor, outer=outer, on_its_way=jnp.zeros((), bool))

    def _change(self, here: PyTree, fragment: Fragment) -> PyTree:
        """Return anchor - θ of this rank, whose mean is Δ; or θ, if its mean is all we need."""
        label = f"local_sgd outer={'a transform' if self.outer else None}"
        here = with_parameters(here, label)
        if not self.sends_changes:
            return here
        return jax.tree.map(lambda a, x: a - x, fragment.anchor, here)

    def _step(self, delta: PyTree, fragment: Fragment) -> tuple[PyTree, PyTree]:
        """Return the new anchor, and the state of the outer transform.

        anchor ← anchor + outer(Δ); without `outer`, anchor - Δ, which is the mean of θ.
        """
        anchor, outer = delta, fragment.outer
        if self.outer:
            step, outer = self.outer.update(delta, fragment.outer, fragment.anchor)
            anchor = optax.apply_updates(fragment.anchor, step)
        elif self.sends_changes:
            anchor = jax.tree.map(lambda a, d: (a - d).astype(a.dtype), fragment.anchor, delta)
        # no update leads from another number to -0
        return jax.tree.map(lambda x: jnp.where(x == 0, jnp.zeros_like(x), x), anchor), outer


# --- the fragments, and the state that holds them ------------------------------------------------


class Layout(ABC):
    """The way in which the parameters are divided into fragments, and held in the state.

    Attributes:
      keeps_anchor: whether the fragments keep the anchor from one averaging to the next.
    """

    keeps_anchor: bool

    @abstractmethod
    def split(self, tree: PyTree) -> list[PyTree]:
        """Return the fragments of a tree like the parameters."""

    @abstractmethod
    def join(self, parts: list[PyTree], like: PyTree) -> PyTree:
        """Return the tree of these fragments, in the structure of `like`."""

    @abstractmethod
    def make(
        self, params: PyTree, make_fragment: Callable[[PyTree], Fragment]
    ) -> tuple[Fragment, ...]:
        """Return the state of each fragment of the parameters."""

    @abstractmethod
    def state(
        self, calls: jax.Array, inner: PerRankState, fragments: tuple[Fragment, ...]
    ) -> PyTree:
        """Return the state of the transform."""

    @abstractmethod
    def fragments(self, state: PyTree) -> tuple[Fragment, ...]:
        """Return the state of each fragment."""


@final
@dataclass(frozen=True)
class InOnePiece(Layout):
    """All of the parameters, as they are: the state is a `LocalSGDState`."""

    keeps_anchor: bool

    def split(self, tree: PyTree) -> list[PyTree]:
        return [tree]

    def join(self, parts: list[PyTree], like: PyTree) -> PyTree:
        return parts[0]

    def make(
        self, params: PyTree, make_fragment: Callable[[PyTree], Fragment]
    ) -> tuple[Fragment, ...]:
        return (make_fragment(params),)

    def state(
        self, calls: jax.Array, inner: PerRankState, fragments: tuple[Fragment, ...]
    ) -> PyTree:
        (whole,) = fragments
        return LocalSGDState(calls, inner, whole.anchor, whole.outer, whole.codec)

    def fragments(self, state: PyTree) -> tuple[Fragment, ...]:
        return (Fragment(state.anchor, state.outer, state.codec),)


@final
@dataclass(frozen=True)
class InFragments(Layout):
    """Lists of the parameters' leaves, as many as `count`: the state is a `StreamingState`."""

    count: int
    keeps_anchor: bool = True

    def split(self, tree: PyTree) -> list[PyTree]:
        leaves, _ = floats("local_sgd", tree)
        return [[leaves[i] for i in group] for group in self._groups(leaves)]

    def join(self, parts: list[PyTree], like: PyTree) -> PyTree:
        leaves, put = floats("local_sgd", like)
        for group, part in zip(self._groups(leaves), parts, strict=True):
            for i, x in zip(group, part, strict=True):
                leaves[i] = x
        return put(leaves)

    def make(
        self, params: PyTree, make_fragment: Callable[[PyTree], Fragment]
    ) -> tuple[Fragment, ...]:
        fragments: tuple[Fragment, ...] = made_of(
            params, lambda params: tuple(map(make_fragment, self.split(params)))
        )
        return fragments

    def state(
        self, calls: jax.Array, inner: PerRankState, fragments: tuple[Fragment, ...]
    ) -> PyTree:
        return StreamingState(calls, inner, fragments)

    def fragments(self, state: PyTree) -> tuple[Fragment, ...]:
        found: tuple[Fragment, ...] = state.fragments
        return found

    def _groups(self, leaves: Sequence[jax.Array]) -> list[list[int]]:
        """Return the indices of each fragment's leaves.

        Each leaf goes to the fragment with the fewest bytes so far, so all fragments have about as
        many bytes, and leaves from all depths of the model.
        """
        groups: list[list[int]] = [[] for _ in range(min(self.count, max(1, len(leaves))))]
        sizes_bytes = [0] * len(groups)
        for i, x in enumerate(leaves):
            smallest = sizes_bytes.index(min(sizes_bytes))
            groups[smallest].append(i)
            sizes_bytes[smallest] += x.size * x.dtype.itemsize
        return groups
