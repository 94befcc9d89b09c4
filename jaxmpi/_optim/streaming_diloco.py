"""Streaming DiLoCo: `local_sgd` with fragments or a delay.

The ranks exchange one fragment of the parameters at a time, and go on with their own steps while
the message travels. For a fragment with parameters θ, sent at step s and received `delay` steps
later (Douillard et al. 2025, "Streaming DiLoCo"; Shen et al. 2019, "Computation and communication
decoupled SGD"):

    Δ = mean over ranks of (anchor - θ_s)
    anchor ← anchor + outer(Δ)
    θ ← anchor + (θ - θ_s)

Without `outer`, the new anchor is the mean of θ_s. θ - θ_s are the steps of this rank since it
sent; without a delay there are none.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import Axis, bound
from jaxmpi._backends import sent_ahead
from jaxmpi._backends.base import Collective
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.exact_updates import update_to
from jaxmpi._marks import equal_on_all_ranks, may_differ, with_parameters
from jaxmpi._optim.codec import Codec, OneMessage
from jaxmpi._optim.float_leaves import either, equal_types, floats, made_of
from jaxmpi._per_rank_state import PerRankState
from jaxmpi._world import session

__all__ = ["Fragment", "Streaming", "StreamingState", "no_negative_zeros"]

# the message without a codec: the parameters as they are
UNCODED = OneMessage(
    lambda params: (), lambda xs, state: (xs, state), lambda means, like: means, averages=True
)


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


class Streaming(NamedTuple):
    """The transform: its arguments are those of `local_sgd`."""

    inner: optax.GradientTransformationExtraArgs
    every: int
    outer: optax.GradientTransformation | None
    codec: Codec | None
    axis: Axis
    fragments: int
    delay: int

    @property
    def message(self) -> OneMessage:
        """The encoding of the message."""
        return (self.codec and self.codec.one_message) or UNCODED

    def init(self, params: PyTree) -> StreamingState:
        """Return the state before the first call: no message is on its way."""
        fragments = made_of(params, self._make_fragments)
        return StreamingState(
            jnp.zeros((), jnp.int32), PerRankState(self.inner.init(params)), fragments
        )

    def _make_fragments(self, params: PyTree) -> tuple[Fragment, ...]:
        leaves, _ = floats("local_sgd", params)
        fragments = []
        for indices in _leaves_of_fragments(leaves, self.fragments):
            fragments.append(self._make_fragment([jnp.array(leaves[i]) for i in indices]))
        return tuple(fragments)

    def _make_fragment(self, xs: list[jax.Array]) -> Fragment:
        codec = self.message.init(xs)
        fragment = Fragment(xs, self.outer.init(xs) if self.outer else (), PerRankState(codec))
        if not self.delay:
            return fragment
        coded = jax.eval_shape(self.message.encode, xs, codec)[0]
        return fragment._replace(
            left=PerRankState([jnp.copy(x) for x in xs]),
            sent=PerRankState([jnp.zeros(x.shape, x.dtype) for x in coded]),
            number=sent_ahead.none(),
            on_its_way=jnp.zeros((), bool),
        )

    def update(
        self, updates: PyTree, state: StreamingState, params: PyTree, **extra_args: object
    ) -> tuple[PyTree, StreamingState]:
        """Return the updates of one call: a step with `inner`, then the exchange that is due."""
        local_updates, inner = self.inner.update(
            updates, state.inner.per_rank, params, **extra_args
        )
        before, put = floats("local_sgd", params)
        here, _ = floats("local_sgd", optax.apply_updates(params, local_updates))
        calls = (equal_on_all_ranks(state.calls) + 1) % self.every
        # The fragments take turns: of F, fragment f is sent at call f·every/F of each round.
        groups, outs, fragments = _leaves_of_fragments(here, self.fragments), list(here), []
        for number, (indices, fragment) in enumerate(zip(groups, state.fragments, strict=True)):
            first = number * self.every // len(groups)
            xs, fragment = self._exchange([here[i] for i in indices], fragment, calls, first)
            for i, x in zip(indices, xs, strict=True):
                outs[i] = x
            fragments.append(fragment)
        # The updates must lead from the parameters to `outs` bit by bit, so that the anchors stay
        # equal on all ranks: see `update_to`.
        guesses, _ = floats("local_sgd", local_updates)
        targets = may_differ([to.astype(x.dtype) for x, to in zip(before, outs, strict=True)])
        exact_updates = [*map(update_to, before, targets, guesses)]
        return put(exact_updates), StreamingState(calls, PerRankState(inner), tuple(fragments))

    def _exchange(
        self, here: list[jax.Array], fragment: Fragment, calls: jax.Array, first: int
    ) -> tuple[list[jax.Array], Fragment]:
        """Return a fragment's parameters and state after this call.

        It is sent at call `first`, and received at call `first + delay`.
        """
        if not self.delay:
            return self._receive_if(calls == first, here, fragment)
        is_due = (calls == (first + self.delay) % self.every) & fragment.on_its_way
        here, fragment = self._receive_if(is_due, here, fragment)
        return here, either(
            calls == first,
            lambda: equal_types(self._send(here, fragment), fragment),
            lambda: fragment,
        )

    def _receive_if(
        self, is_due: jax.Array, here: list[jax.Array], fragment: Fragment
    ) -> tuple[list[jax.Array], Fragment]:
        """Receive a fragment if it is due; without a delay, send it first."""

        def receive() -> tuple[list[jax.Array], Fragment]:
            sent = fragment if self.delay else self._send(here, fragment)
            return equal_types(self._receive(here, sent), (here, fragment))

        out: tuple[list[jax.Array], Fragment] = either(
            equal_on_all_ranks(is_due), receive, lambda: (may_differ(here), fragment)
        )
        return out

    def _send(self, here: list[jax.Array], fragment: Fragment) -> Fragment:
        """Encode Δ, or θ if its mean is all that is needed; with a delay, start the message."""
        here = with_parameters(here, f"local_sgd outer={'a transform' if self.outer else None}")
        delta = here
        if self.outer or self.codec:
            delta = [a - x for a, x in zip(fragment.anchor, here, strict=True)]
        coded, codec = self.message.encode(delta, fragment.codec.per_rank)
        fragment = fragment._replace(
            codec=PerRankState(codec), sent=PerRankState(coded), left=PerRankState(here)
        )
        if not self.delay:
            return fragment
        number = self._start_message(coded)
        return fragment._replace(number=equal_on_all_ranks(number), on_its_way=jnp.ones((), bool))

    def _start_message(self, coded: Sequence[jax.Array]) -> jax.Array:
        """Return the number of a message that a later call completes."""
        if not bound(self.axis) or axis_size(self.axis, session.current("local_sgd")) == 1:
            return sent_ahead.none()
        call = (
            Collective("allreduce", op="mean") if self.message.averages else Collective("allgather")
        )
        return sent_ahead.send_ahead(call, coded, self.axis)

    def _receive(
        self, here: list[jax.Array], fragment: Fragment
    ) -> tuple[list[jax.Array], Fragment]:
        """Return θ = anchor + (θ - θ_s) with the new anchor, and the fragment's state."""
        # Δ: a message that was started is completed here; without one the collective runs now
        coded = fragment.sent.per_rank
        if self.delay:
            coded = sent_ahead.sent_ahead(coded, fragment.number)
        caller = Caller("local_sgd")
        exchange = caller.allreduce if self.message.averages else caller.allgather
        delta = self.message.decode(exchange(coded, axis=self.axis), fragment.anchor)
        # anchor ← anchor + outer(Δ); without `outer`, the mean
        anchor, outer = delta, fragment.outer
        if self.outer:
            step, outer = self.outer.update(delta, fragment.outer, fragment.anchor)
            anchor = optax.apply_updates(fragment.anchor, step)
        elif self.codec:
            anchor = [(x - d).astype(x.dtype) for x, d in zip(fragment.anchor, delta, strict=True)]
        anchor = no_negative_zeros(anchor)
        if not self.delay:
            return anchor, fragment._replace(anchor=anchor, outer=outer, left=(), sent=())
        # θ ← anchor + (θ - θ_s)
        since = [x - left for x, left in zip(here, fragment.left.per_rank, strict=True)]
        there = [a + s for a, s in zip(anchor, since, strict=True)]
        return there, fragment._replace(anchor=anchor, outer=outer, on_its_way=jnp.zeros((), bool))


def no_negative_zeros(tree: PyTree) -> PyTree:
    """Return arrays with 0 for -0: no update leads from another number to -0."""
    return jax.tree.map(lambda x: jnp.where(x == 0, jnp.zeros_like(x), x), tree)


def _leaves_of_fragments(leaves: Sequence[jax.Array], fragments: int) -> list[list[int]]:
    """Return the indices of each fragment's leaves.

    Each leaf goes to the fragment with the fewest bytes so far, so all fragments have about as many
    bytes, and leaves from all depths of the model.
    """
    groups: list[list[int]] = [[] for _ in range(min(fragments, max(1, len(leaves))))]
    sizes = [0] * len(groups)
    for i, x in enumerate(leaves):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(i)
        sizes[smallest] += x.size * x.dtype.itemsize
    return groups
