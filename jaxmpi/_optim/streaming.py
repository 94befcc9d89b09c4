"""`local_sgd` whose ranks exchange a part of the parameters at a time, while they go on."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import Axis, bound, equal_on_all_ranks, may_differ, with_parameters
from jaxmpi._backends import sent_ahead
from jaxmpi._backends.base import Collective
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.exact_updates import update_to
from jaxmpi._optim.compression import Codec, OneMessage
from jaxmpi._optim.float_leaves import either, equal_types, floats, made_of
from jaxmpi._per_rank_state import PerRankState
from jaxmpi._world import session

__all__ = ["Fragment", "StreamingState", "Streams", "no_negative_zeros"]

AS_THEY_ARE = OneMessage(
    lambda params: (), lambda xs, state: (xs, state), lambda means, like: means, averages=True
)


class Fragment(NamedTuple):
    """Some of the parameters, and what the ranks know of them together.

    Attributes:
      anchor: the parameters that all ranks have agreed on last.
      outer: the state of the outer transform; () without one.
      codec: that of the codec, a `PerRankState`.
      left: this rank's parameters when it sent them, a `PerRankState`; () without a delay.
      sent: what it sent, a `PerRankState`; () without a delay.
      number: of the message, a uint32 `[2]`; () without a delay.
      on_its_way: whether there is one; () without a delay.
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
      calls: of `update`, modulo `every`: an int32 that is equal on all ranks.
      inner: the state of the inner transform, a `PerRankState`.
      fragments: of the parameters.
    """

    calls: jax.Array
    inner: PerRankState
    fragments: tuple[Fragment, ...]


class Streams(NamedTuple):
    """When which parameters are sent, and what is done with them."""

    inner: optax.GradientTransformationExtraArgs
    every: int
    outer: optax.GradientTransformation | None
    codec: Codec | None
    axis: Axis
    fragments: int
    delay: int

    @property
    def message(self) -> OneMessage:
        """What is sent."""
        return (self.codec and self.codec.one_message) or AS_THEY_ARE

    def init(self, params: PyTree) -> StreamingState:
        """Nothing is on its way."""
        fragments = made_of(params, self._cut)
        return StreamingState(
            jnp.zeros((), jnp.int32), PerRankState(self.inner.init(params)), fragments
        )

    def _cut(self, params: PyTree) -> tuple[Fragment, ...]:
        leaves, _ = floats("local_sgd", params)
        parts = _parts(leaves, self.fragments)
        return tuple(self._fragment([jnp.array(leaves[i]) for i in part]) for part in parts)

    def _fragment(self, xs: list[jax.Array]) -> Fragment:
        codec = self.message.init(xs)
        fragment = Fragment(xs, self.outer.init(xs) if self.outer else (), PerRankState(codec))
        if not self.delay:
            return fragment
        coded = jax.eval_shape(self.message.encode, xs, codec)[0]
        nothing = [jnp.zeros(x.shape, x.dtype) for x in coded]
        left = PerRankState([jnp.copy(x) for x in xs])
        return fragment._replace(
            left=left,
            sent=PerRankState(nothing),
            number=sent_ahead.none(),
            on_its_way=jnp.zeros((), bool),
        )

    def update(
        self, updates: PyTree, state: StreamingState, params: PyTree, **extra_args: object
    ) -> tuple[PyTree, StreamingState]:
        """This rank's own step, and what the others have to do with it."""
        own_updates, own = self.inner.update(updates, state.inner.per_rank, params, **extra_args)
        before, put = floats("local_sgd", params)
        here, _ = floats("local_sgd", optax.apply_updates(params, own_updates))
        calls = (equal_on_all_ranks(state.calls) + 1) % self.every
        parts, outs, after = _parts(here, self.fragments), list(here), []
        for number, (part, fragment) in enumerate(zip(parts, state.fragments, strict=True)):
            first = number * self.every // len(parts)  # the fragments take turns
            xs, fragment = self._meet([here[i] for i in part], fragment, calls, first)
            for i, x in zip(part, xs, strict=True):
                outs[i] = x
            after.append(fragment)
        guesses, _ = floats("local_sgd", own_updates)
        theres = may_differ([to.astype(x.dtype) for x, to in zip(before, outs, strict=True)])
        return put([*map(update_to, before, theres, guesses)]), StreamingState(
            calls, PerRankState(own), tuple(after)
        )

    def _meet(
        self, here: list[jax.Array], fragment: Fragment, calls: jax.Array, first: int
    ) -> tuple[list[jax.Array], Fragment]:
        """A fragment's parameters after this call."""
        if not self.delay:
            return self._taken(here, fragment, calls == first)
        here, fragment = self._taken(
            here, fragment, (calls == (first + self.delay) % self.every) & fragment.on_its_way
        )
        return here, either(
            calls == first,
            lambda: equal_types(self._send(here, fragment), fragment),
            lambda: fragment,
        )

    def _taken(
        self, here: list[jax.Array], fragment: Fragment, now: jax.Array
    ) -> tuple[list[jax.Array], Fragment]:
        """What has arrived if it is `now`; without a delay, it is sent before."""

        def taken() -> tuple[list[jax.Array], Fragment]:
            return equal_types(
                self._take(here, fragment if self.delay else self._send(here, fragment)),
                (here, fragment),
            )

        out: tuple[list[jax.Array], Fragment] = either(
            equal_on_all_ranks(now), taken, lambda: (may_differ(here), fragment)
        )
        return out

    def _send(self, here: list[jax.Array], fragment: Fragment) -> Fragment:
        here = with_parameters(here, f"local_sgd outer={'a transform' if self.outer else None}")
        delta = (
            [a - x for a, x in zip(fragment.anchor, here, strict=True)]
            if self.outer or self.codec
            else here
        )
        coded, codec = self.message.encode(delta, fragment.codec.per_rank)
        fragment = fragment._replace(
            codec=PerRankState(codec), sent=PerRankState(coded), left=PerRankState(here)
        )
        if not self.delay:
            return fragment
        number = self._start(coded)
        return fragment._replace(number=equal_on_all_ranks(number), on_its_way=jnp.ones((), bool))

    def _start(self, coded: Sequence[jax.Array]) -> jax.Array:
        if not bound(self.axis) or axis_size(self.axis, session.current("local_sgd")) == 1:
            return sent_ahead.none()
        call = (
            Collective("allreduce", op="mean") if self.message.averages else Collective("allgather")
        )
        return sent_ahead.send_ahead(call, coded, self.axis)

    def _take(self, here: list[jax.Array], fragment: Fragment) -> tuple[list[jax.Array], Fragment]:
        """What all ranks go on from, and this rank's own way since it has sent its part of that."""
        coded = fragment.sent.per_rank
        if self.delay:
            coded = sent_ahead.sent_ahead(coded, fragment.number)
        caller = Caller("local_sgd")
        exchange = caller.allreduce if self.message.averages else caller.allgather
        delta = self.message.decode(exchange(coded, axis=self.axis), fragment.anchor)
        anchor, outer = delta, fragment.outer
        if self.outer:
            step, outer = self.outer.update(delta, fragment.outer, fragment.anchor)
            anchor = optax.apply_updates(fragment.anchor, step)
        elif self.codec:
            anchor = [(x - d).astype(x.dtype) for x, d in zip(fragment.anchor, delta, strict=True)]
        anchor = no_negative_zeros(anchor)
        since = [x - left for x, left in zip(here, fragment.left.per_rank, strict=True)]
        there = [a + s for a, s in zip(anchor, since, strict=True)] if self.delay else anchor
        if not self.delay:
            return there, fragment._replace(anchor=anchor, outer=outer, left=(), sent=())
        return there, fragment._replace(anchor=anchor, outer=outer, on_its_way=jnp.zeros((), bool))


def no_negative_zeros(tree: PyTree) -> PyTree:
    """Arrays with 0 in the place of -0, which no update leads to from any other number."""
    return jax.tree.map(lambda x: jnp.where(x == 0, jnp.zeros_like(x), x), tree)


def _parts(leaves: Sequence[jax.Array], fragments: int) -> list[list[int]]:
    """The numbers of each fragment's leaves: each has some of all depths, and about as many bytes."""
    parts: list[list[int]] = [[] for _ in range(min(fragments, max(1, len(leaves))))]
    sizes = [0] * len(parts)
    for i, x in enumerate(leaves):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(i)
        sizes[smallest] += x.size * x.dtype.itemsize
    return parts
