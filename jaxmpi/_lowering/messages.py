"""Messages of a round: which collectives share one call, and when each message is sent.

All collectives of a round are independent of each other. `coalesce` joins equal collectives into
one call on many arrays. A flag, a loss or a number of samples would still cost a message each, so
a call on few bytes, a sum or a mean, travels inside another call of the same round:

| the other call | how x travels in it |
|---|---|
| an allreduce that sums | as one more array; for a mean, the sum is divided on arrival |
| a reduce_scatter | as `[size, size, ...]` with x in column r and zeros elsewhere |

A reduce_scatter gives every rank the x of all ranks, and each adds them in the order of the ranks.

Some messages travel while the program computes (`messages_of`). Such a message is started as soon
as its arrays are ready, and waited for at the end of the round. That pays where the round has
computation that these arrays do not need: for the mean of gradients, the rest of the backward pass.
So a large call is cut into buckets, in the order in which their arrays become ready. That order is
read from the program: an array is ready when the last product, convolution or loop that it depends
on has ended; the elementwise work after that takes next to no time.

A message may have been sent ahead, by an earlier call of the program (`sent_ahead_request`). Then
the round only receives its result.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Atom, ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import Role, other_effects, role
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._analysis.primitives import Op, Trait, has, op_of
from jaxmpi._backends.base import Collective, Overlap
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.collectives import Translation, is_short, translate

__all__ = [
    "Bucket",
    "CoalescedCall",
    "Messages",
    "coalesce",
    "collective_sent_ahead",
    "messages_of",
    "sent_ahead_request",
]


FEW_BYTES = 1024  # largest call that travels inside an allreduce
FEW_ROWS_BYTES = 16 * 1024  # the same for a reduce_scatter, counted as `[size, size, ...]`


class CoalescedCall(NamedTuple):
    """Collectives that are one call: the same `call` on the operand of each equation."""

    call: Collective
    eqns: list[JaxprEqn]
    translations: list[Translation]  # for each equation

    def operands(self) -> list[ShapedArray | jax.ShapeDtypeStruct]:
        """Return shape and dtype of the operand of each equation, as it is sent."""
        pairs = zip(self.eqns, self.translations, strict=True)
        return [translation.operand_type(eqn.invars[0].aval) for eqn, translation in pairs]


def coalesce(eqns: Iterable[JaxprEqn], size: int, combine: bool) -> list[CoalescedCall]:
    """Return the calls that carry the collectives of a round.

    Args:
      eqns: the equations of the round that communicate, independent of each other.
      size: the number of ranks.
      combine: False where every collective is to stay a call by itself.
    """
    calls: dict[Collective | int, CoalescedCall] = {}
    for i, eqn in enumerate(eqns):
        if role(eqn) is Role.COLLECTIVE:
            translation = translate(eqn, size)
            key = translation.call if combine else i
            coalesced = calls.setdefault(key, CoalescedCall(translation.call, [], []))
            coalesced.eqns.append(eqn)
            coalesced.translations.append(translation)
    return _share_messages(list(calls.values()), size) if combine else list(calls.values())


# Small calls inside the message of another call


def _share_messages(calls: list[CoalescedCall], size: int) -> list[CoalescedCall]:
    """Move each small call into another one over the same ranks; return the calls that are left."""
    # Means come first, so that they move into sums: a call that sums can carry a mean, too.
    left = sorted(calls, key=lambda coalesced: coalesced.call.op != "mean")
    for coalesced in list(left):
        host = _host_for(coalesced, left, size)
        if host is not None:
            host.eqns.extend(coalesced.eqns)
            for translation in coalesced.translations:
                host.translations.append(_inside(host.call, translation, size))
            left.remove(coalesced)
    # in the order of the program
    return [coalesced for coalesced in calls if any(coalesced is other for other in left)]


def _host_for(
    coalesced: CoalescedCall, others: Sequence[CoalescedCall], size: int
) -> CoalescedCall | None:
    """Return the call whose message carries the arrays of a small one; None if none does."""
    for other in others:
        can_carry = other is not coalesced and _can_carry(other.call, coalesced.call)
        if can_carry and _is_small(coalesced, other.call, size):
            return other
    return None


def _can_carry(host: Collective, call: Collective) -> bool:
    """Return whether a message of `host` can also carry the operands of `call`."""
    if host.groups != call.groups or (host.groups and host.kind != "allreduce"):
        return False
    if call.kind != "allreduce" or host.kind not in ("allreduce", "reduce_scatter"):
        return False
    if call.op == "mean":
        return host.op in ("mean", "sum")
    return call.op == "sum" and host.op == "sum"


def _is_small(coalesced: CoalescedCall, host: Collective, size: int) -> bool:
    total_bytes = sum(aval.size * aval.dtype.itemsize for aval in coalesced.operands())
    fits = host.kind == "allreduce" or total_bytes * size * size <= FEW_ROWS_BYTES
    return total_bytes <= FEW_BYTES and fits


def _inside(host: Collective, inner: Translation, size: int) -> Translation:
    """Return a collective as one that travels in the message of `host`."""
    divisor = host.count(size) if inner.call.op == "mean" and host.op == "sum" else 1

    def widened(x: jax.Array) -> jax.Array:
        x = jnp.asarray(inner.before(x))  # a literal is a number
        return x.astype(jnp.float32) if is_short(x.dtype) else x  # so that a mean is rounded once

    def column(x: jax.Array, rank: ArrayLike) -> jax.Array:
        x = widened(x)
        is_mine = jnp.arange(size).reshape(size, *[1] * x.ndim) == rank
        return jnp.broadcast_to(jnp.where(is_mine, x, jnp.zeros_like(x)), (size, size, *x.shape))

    def divided(y: jax.Array) -> jax.Array:
        return inner.after(y / divisor if divisor > 1 else y)

    if host.kind == "allreduce":
        return Translation(host, widened, divided)
    return Translation(
        host, column, lambda y: divided(jnp.sum(y, axis=0, dtype=y.dtype)), needs_rank=True
    )


# Messages that one call of a program sends, and a later call receives


def collective_sent_ahead(eqn: JaxprEqn) -> Collective:
    """Return the collective that an equation whose role is SEND_AHEAD sends."""
    groups = eqn.params["axis_index_groups"] or ()
    return Collective(eqn.params["kind"], eqn.params["op"], groups=groups)


def sent_ahead_request(coalesced: CoalescedCall, jaxpr: AnyJaxpr) -> Var | None:
    """Return the variable with the request number of a call that an earlier step has sent.

    `sent_ahead_p` marks the operands of such a call, and has the number as its last operand. None
    if the operands of this call are not exactly the results of one `sent_ahead_p`.
    """
    operands = [eqn.invars[0] for eqn in coalesced.eqns]
    for eqn in _sent_ahead(jaxpr):
        if len(eqn.outvars) == len(operands) and all(map(_is_same, eqn.outvars, operands)):
            number: Var = eqn.invars[-1]
            return number
    return None


@_jaxcompat.kept_with_jaxpr
def _sent_ahead(jaxpr: AnyJaxpr) -> list[JaxprEqn]:
    """Return the equations that mark the arrays of a message that was sent ahead."""
    inner, _ = _jaxcompat.parts(jaxpr)
    return [eqn for eqn in inner.eqns if op_of(eqn) is Op.SENT_AHEAD]


def _is_same(x: object, y: object) -> bool:
    return x is y


# Overlap with computation


# Elementwise work on arrays that are this many times larger than the message takes about as long
# as the message.
ELEMENTWISE_BYTES_PER_SENT_BYTE = 8


class Bucket(NamedTuple):
    """Arrays of a call that travel in one message.

    Attributes:
      coalesced: the call.
      indices: which of its equations.
      is_one_of_several: whether the call is cut into more than one bucket.
      ready_after: the index of the round's local equation after which the arrays are ready; -1 if
        they are ready when the round begins.
    """

    coalesced: CoalescedCall
    indices: list[int]
    is_one_of_several: bool
    ready_after: int


class Messages(NamedTuple):
    """Messages of a round.

    Attributes:
      started: messages that are started in this order, and waited for once all are started.
      busy_until: the index of the last local equation of the round that takes time; if none does,
        the number of local equations, as elementwise work overlaps, too.
      at_once: calls that are started and waited for together, after those above.
      before_waits: values to compute before the first wait. Otherwise XLA would compute them in one
        loop with what follows the waits or, where a rank has one thread, after a wait.
      after_start: the equations that compute these values. Otherwise XLA would compute them before
        the first start.
    """

    started: list[Bucket]
    busy_until: int
    at_once: list[CoalescedCall]
    before_waits: list[Var]
    after_start: list[JaxprEqn]

    @property
    def calls(self) -> list[CoalescedCall]:
        """Return the calls in the order of their first message."""
        started = {id(bucket.coalesced): bucket.coalesced for bucket in self.started}
        return [*started.values(), *self.at_once]

    def counts(self, coalesced: CoalescedCall) -> tuple[int, int]:
        """Return how many messages of a call are started, and how many overlap computation."""
        buckets = [bucket for bucket in self.started if bucket.coalesced is coalesced]
        return len(buckets), sum(bucket.ready_after < self.busy_until for bucket in buckets)


class Consumers(IntEnum):
    """Readers of a value.

    NONE: only the outputs of the program. PLACE_NUMBERS: also equations that move its numbers
    without computing (`Trait.PLACES_NUMBERS`). COMPUTE: any other equation.
    """

    NONE = 0
    PLACE_NUMBERS = 1
    COMPUTE = 2


class _Overlapped(NamedTuple):
    """Computation of a round that overlaps its messages.

    Attributes:
      is_worth_it: whether it takes long enough to start a message before it.
      values: its results that must be computed before the first wait.
      eqns: its equations, the last one first.
    """

    is_worth_it: bool
    values: list[Var]
    eqns: list[JaxprEqn]


def messages_of(
    calls: list[CoalescedCall], local: list[JaxprEqn], jaxpr: AnyJaxpr, overlap: Overlap | None
) -> Messages:
    """Return the messages of a round.

    Args:
      calls: its collectives.
      local: its local equations, which come first.
      jaxpr: the program that the round is of.
      overlap: of the transport; None where all messages are carried out at once.
    """
    nothing_started = Messages([], -1, calls, [], [])
    can_start: list[CoalescedCall] = []
    for coalesced in calls:
        is_sent_ahead = sent_ahead_request(coalesced, jaxpr) is not None
        if overlap and overlap.can_start(coalesced.call) and not is_sent_ahead:
            can_start.append(coalesced)
    if overlap is None or not can_start:
        return nothing_started
    # Cut the calls into buckets, the first one that is ready first.
    ready_after = _ready_after(local)
    buckets: list[Bucket] = []
    for coalesced in can_start:
        buckets += _cut(coalesced, ready_after, overlap)
    started = sorted(buckets, key=lambda bucket: bucket.ready_after)
    # Start none if nothing worth it can be computed while even the first one travels.
    consumers = _consumers(jaxpr)
    if not _overlapped(local, started[:1], consumers, overlap).is_worth_it:
        return nothing_started
    at_once = [call for call in calls if not any(call is other for other in can_start)]
    takes_time = [i for i, eqn in enumerate(local) if _takes_time(eqn)]
    busy_until = max(takes_time, default=len(local))
    # Keep the computation that no bucket needs between the last start and the first wait.
    overlapped = _overlapped(local, started, consumers, overlap)
    return Messages(started, busy_until, at_once, overlapped.values, _after_start(overlapped))


def _cut(
    coalesced: CoalescedCall, ready_after: Mapping[Var, int], overlap: Overlap
) -> list[Bucket]:
    """Return the buckets of a call.

    A bucket ends where it is large enough and the next array is ready later.
    """

    def when(i: int) -> int:
        return _when(coalesced.eqns[i], ready_after)

    if _bytes(coalesced) <= overlap.small_bytes:
        everything = [*range(len(coalesced.eqns))]
        return [Bucket(coalesced, everything, False, max(map(when, everything)))]
    # An array that several equations send is sent once: these stay together.
    by_array: dict[int, list[int]] = {}
    for i, eqn in enumerate(coalesced.eqns):
        by_array.setdefault(id(eqn.invars[0]), []).append(i)
    buckets: list[list[int]] = [[]]
    bucket_bytes, last = 0, -1
    for indices in sorted(by_array.values(), key=lambda indices: when(indices[0])):
        now = when(indices[0])
        if bucket_bytes >= overlap.bucket_bytes and now > last:
            buckets.append([])
            bucket_bytes = 0
        buckets[-1] += indices
        bucket_bytes += _array_bytes(coalesced.eqns[indices[0]])
        last = now
    is_one_of_several = len(buckets) > 1
    return [
        Bucket(coalesced, indices, is_one_of_several, max(map(when, indices)))
        for indices in buckets
    ]


def _ready_after(local: Iterable[JaxprEqn]) -> dict[Var, int]:
    """Return, for each value, the index of the last equation it depends on that takes time.

    Where no equation of the round takes time, it is the index of the equation that makes the value.
    """
    by_time: dict[Var, int] = {}
    by_order: dict[Var, int] = {}
    for index, eqn in enumerate(local):
        after = index
        if not _takes_time(eqn):
            after = max((by_time.get(v, -1) for v in eqn.invars if _is_variable(v)), default=-1)
        for v in eqn.outvars:
            by_time[v], by_order[v] = after, index
    return by_time if any(after >= 0 for after in by_time.values()) else by_order


def _takes_time(eqn: JaxprEqn) -> bool:
    """Return whether an equation takes as long as a message: a product, convolution or loop."""
    return has(eqn, Trait.TAKES_TIME) or any(map(_takes_time_inside, subjaxprs(eqn)))


@_jaxcompat.kept_with_jaxpr
def _takes_time_inside(jaxpr: AnyJaxpr) -> bool:
    return any(map(_takes_time, _jaxcompat.parts(jaxpr)[0].eqns))


@_jaxcompat.kept_with_jaxpr
def _consumers(jaxpr: AnyJaxpr) -> dict[Var, Consumers]:
    """Return what consumes each value of a program that is consumed or is a result."""
    inner, _ = _jaxcompat.parts(jaxpr)
    consumers = {v: Consumers.NONE for v in inner.outvars if _is_variable(v)}
    for eqn in inner.eqns:
        places = has(eqn, Trait.PLACES_NUMBERS)
        for v in filter(_is_variable, eqn.invars):
            known = consumers.get(v, Consumers.NONE)
            consumers[v] = max(known, Consumers.PLACE_NUMBERS if places else Consumers.COMPUTE)
    return consumers


def _overlapped(
    local: list[JaxprEqn],
    buckets: Iterable[Bucket],
    consumers: Mapping[Var, Consumers],
    overlap: Overlap,
) -> _Overlapped:
    """Return the computation of a round that the buckets do not need.

    It is worth a message where it has a product, convolution or loop, or is large compared with the
    message. Its `values` are results that XLA rounds in the same way whether it computes them with
    what follows or separately.
    """
    # Split the local equations, from the last to the first: the buckets need some, the others can
    # overlap.
    needed: set[Var] = set()
    for bucket in buckets:
        for i in bucket.indices:
            needed.update(v for v in bucket.coalesced.eqns[i].invars if _is_variable(v))
    sent_bytes = sum(map(_bytes_of, needed))
    eqns: list[JaxprEqn] = []
    for eqn in reversed(local):
        if needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
        else:
            needed.update(v for v in eqn.invars if _is_variable(v))
    # Find their results that are used elsewhere, with the equations that make them.
    used_here = {v for eqn in eqns for v in eqn.invars if _is_variable(v)}
    results: list[tuple[Var, JaxprEqn]] = []
    for eqn in reversed(eqns):
        for v in eqn.outvars:
            if v in consumers and v not in used_here and _is_kept_between_loops(v):
                results.append((v, eqn))
    # Products, convolutions and loops round their results by themselves, whatever follows.
    products = [v for v, eqn in results if _takes_time(eqn)]
    if products or any(map(_takes_time, eqns)):
        return _Overlapped(True, products, eqns)
    # Elementwise results are safe if what consumes them computes nothing; those that may end with a
    # multiplication only if they are results of the program, because XLA would fuse that
    # multiplication with an addition.
    safe: list[Var] = []
    for v, eqn in results:
        limit = Consumers.NONE if has(eqn, Trait.MAY_SCALE) else Consumers.PLACE_NUMBERS
        if consumers[v] <= limit:
            safe.append(v)
    least_bytes = ELEMENTWISE_BYTES_PER_SENT_BYTE * max(sent_bytes, overlap.small_bytes)
    is_worth_it = sum(map(_bytes_of, safe)) > least_bytes
    return _Overlapped(is_worth_it, safe if is_worth_it else [], eqns)


def _after_start(overlapped: _Overlapped) -> list[JaxprEqn]:
    """Return the equations to compute after the first start, in their order.

    They are those that the values depend on and that can wait: they have no effects, whose order
    would change, and nothing that is computed before the start depends on them. There are none if
    one of them takes time, because XLA would copy its arrays.
    """
    needed, needed_before = {*overlapped.values}, set[Var]()
    found: list[JaxprEqn] = []
    for eqn in overlapped.eqns:  # from the last to the first
        can_wait = needed_before.isdisjoint(eqn.outvars) and not other_effects(eqn)
        if can_wait and not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update(filter(_is_variable, eqn.invars))
        else:
            needed_before.update(filter(_is_variable, eqn.invars))
    return [] if any(map(_takes_time, found)) else found[::-1]


def _when(eqn: JaxprEqn, ready_after: Mapping[Var, int]) -> int:
    """Return the index after which the operand of a collective is ready."""
    v = eqn.invars[0]
    return ready_after.get(v, -1) if _is_variable(v) else -1


def _is_variable(v: Atom) -> bool:
    return not isinstance(v, Literal)


def _bytes(coalesced: CoalescedCall) -> int:
    """Return the bytes of the arrays of a call, each counted once."""
    distinct = {id(eqn.invars[0]): eqn for eqn in coalesced.eqns}
    return sum(map(_array_bytes, distinct.values()))


def _array_bytes(eqn: JaxprEqn) -> int:
    return _bytes_of(eqn.invars[0])


def _bytes_of(v: Atom) -> int:
    return v.aval.size * v.aval.dtype.itemsize if hasattr(v.aval, "dtype") else 0


def _is_kept_between_loops(v: Var) -> bool:
    """Return whether XLA passes a value unchanged from one loop to the next.

    Within one loop it may keep 16-bit values in 32 bits, so that a split would round them.
    """
    return getattr(v.aval, "dtype", None) in (
        jnp.float32,
        jnp.float64,
        jnp.complex64,
        jnp.complex128,
    )
