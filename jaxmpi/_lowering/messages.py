"""Messages of a round: collectives that are one call, and when each is sent.

All collectives of a round are independent of each other. Those of one kind become one call
(`groups_of`). A flag, a loss, a number of samples would cost a message each. So few numbers that
are summed or averaged share the message of another collective of their round:

| the collective | the numbers x in it |
|---|---|
| an allreduce that sums | those of a mean are divided on arrival |
| a reduce_scatter | column r of `[size, size, ...]`, else zeros: all ranks add all x in one order |

Some messages travel while the program computes (`messages_of`). Such a message is started when its
arrays are there, and waited for at the end of the round. It is worth that where the program has
something to compute meanwhile, which these arrays do not need: for the mean of gradients, the rest
of the backward pass. So a large message is cut into buckets, in the order in which their arrays are
made. That order is read from the program: an array is there when the last product, convolution or
loop that it depends on is; what is done to it behind that takes next to nothing.

A message may have been sent ahead, by an earlier call of the program (`number_ahead`).
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
from jaxmpi._analysis.classify import kind
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._analysis.primitives import Op, Trait, has, op_of
from jaxmpi._backends.base import Collective, Overlap
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.collectives import Translation, translate

__all__ = ["Bucket", "Group", "Messages", "call_ahead", "groups_of", "messages_of", "number_ahead"]


FEW_BYTES = 1024  # of one collective's arrays together
FEW_ROWS_BYTES = 16 * 1024  # the same in a reduce_scatter


class Group(NamedTuple):
    """Collectives that are one call: the same `call` on the operand of each equation."""

    call: Collective
    eqns: list[JaxprEqn]
    translations: list[Translation]

    def operands(self) -> list[ShapedArray | jax.ShapeDtypeStruct]:
        """Return shape and dtype of the operand of each equation, as it is sent."""
        pairs = zip(self.eqns, self.translations, strict=True)
        return [translation.operand(eqn.invars[0].aval) for eqn, translation in pairs]


def groups_of(eqns: Iterable[JaxprEqn], size: int, combine: bool) -> list[Group]:
    """Return the calls that carry the collectives of a round.

    Args:
      eqns: the equations of the round that communicate, independent of each other.
      size: the number of ranks.
      combine: False where every collective is to stay a call of its own.
    """
    groups: dict[Collective | int, Group] = {}
    for i, eqn in enumerate(eqns):
        if kind(eqn) == "collective":
            translation = translate(eqn, size)
            key = translation.call if combine else i
            group = groups.setdefault(key, Group(translation.call, [], []))
            group.eqns.append(eqn)
            group.translations.append(translation)
    return _share_messages(list(groups.values()), size) if combine else list(groups.values())


# Few numbers in the message of another collective


def _share_messages(groups: list[Group], size: int) -> list[Group]:
    """Return the groups without those whose few numbers another one carries for the same ranks."""
    # what carries a sum can carry a mean, too
    kept = sorted(groups, key=lambda group: group.call.op != "mean")
    for group in list(kept):
        host = _host_for(group, kept, size)
        if host is not None:
            host.eqns.extend(group.eqns)
            for translation in group.translations:
                host.translations.append(_inside(host.call, translation, size))
            kept.remove(group)
    return [group for group in groups if any(group is other for other in kept)]


def _host_for(group: Group, others: Sequence[Group], size: int) -> Group | None:
    """Return the group whose message carries the numbers of another one; None if none does."""
    for other in others:
        can_carry = other is not group and _can_carry(other.call, group.call)
        if can_carry and _is_small(group, other.call, size):
            return other
    return None


def _can_carry(host: Collective, call: Collective) -> bool:
    if host.groups != call.groups or (host.groups and host.kind != "allreduce"):
        return False
    if call.kind != "allreduce" or host.kind not in ("allreduce", "reduce_scatter"):
        return False
    if call.op == "mean":
        return host.op in ("mean", "sum")
    return call.op == "sum" and host.op == "sum"


def _is_small(group: Group, host: Collective, size: int) -> bool:
    total = sum(aval.size * aval.dtype.itemsize for aval in group.operands())
    is_few = host.kind == "allreduce" or total * size * size <= FEW_ROWS_BYTES
    return total <= FEW_BYTES and is_few


def _inside(host: Collective, inner: Translation, size: int) -> Translation:
    """Return a collective as one that travels in the message of `host`."""
    divisor = host.count(size) if inner.call.op == "mean" and host.op == "sum" else 1

    def widened(x: jax.Array) -> jax.Array:
        x = inner.before(x)
        short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return x.astype(jnp.float32) if short else x  # a mean is rounded once

    def column(x: jax.Array, rank: ArrayLike) -> jax.Array:
        x = widened(x)
        mine = jnp.arange(size).reshape(size, *[1] * x.ndim) == rank
        return jnp.broadcast_to(jnp.where(mine, x, jnp.zeros_like(x)), (size, size, *x.shape))

    def divided(y: jax.Array) -> jax.Array:
        return inner.after(y / divisor if divisor > 1 else y)

    if host.kind == "allreduce":
        return Translation(host, widened, divided)
    return Translation(
        host, column, lambda y: divided(jnp.sum(y, axis=0, dtype=y.dtype)), needs_rank=True
    )


# Messages that one call of a program sends, and a later call receives


def call_ahead(eqn: JaxprEqn) -> Collective:
    """Return the collective that an equation of kind "ahead" sends."""
    groups = eqn.params["axis_index_groups"] or ()
    return Collective(eqn.params["kind"], eqn.params["op"], groups=groups)


def number_ahead(group: Group, jaxpr: AnyJaxpr) -> Var | None:
    """Return the number of the message in which the collectives of a group were sent ahead.

    It is a variable of the program; None if they were not.
    """
    operands = [eqn.invars[0] for eqn in group.eqns]
    for eqn in _sent_ahead(jaxpr):
        if len(eqn.outvars) == len(operands) and all(map(_is_same, eqn.outvars, operands)):
            number: Var = eqn.invars[-1]
            return number
    return None


@_jaxcompat.kept_with_jaxpr
def _sent_ahead(jaxpr: AnyJaxpr) -> list[JaxprEqn]:
    """Return the equations whose results are the arrays of a message that was sent ahead."""
    inner, _ = _jaxcompat.parts(jaxpr)
    return [eqn for eqn in inner.eqns if op_of(eqn) is Op.SENT_AHEAD]


def _is_same(x: object, y: object) -> bool:
    return x is y


# Overlap with computation


WORTH = 8  # arrays so much larger than a message take about as long to make


class Bucket(NamedTuple):
    """Arrays of a group that travel in one message."""

    group: Group
    numbers: list[int]  # of its equations
    is_part: bool
    ready: int  # after which equation of the round its arrays are there


class Messages(NamedTuple):
    """Messages of a round."""

    started: list[Bucket]  # in this order, and waited for when all are
    busy_until: int  # the last equation of the round that takes time
    at_once: list[Group]  # behind these
    # Values that are computed before the first wait. XLA would compute them in one loop with what
    # comes behind the waits or, where a rank has one thread, behind a wait.
    before_waits: list[Var]
    # that make these; left to itself, XLA would compute them before the first start
    after_start: list[JaxprEqn]

    @property
    def groups(self) -> list[Group]:
        """Return the groups in the order of their first message."""
        return [
            *{id(bucket.group): bucket.group for bucket in self.started}.values(),
            *self.at_once,
        ]

    def counts(self, group: Group) -> tuple[int, int]:
        """Return how many messages of a group are started, and how many overlap computation."""
        mine = [bucket for bucket in self.started if bucket.group is group]
        return len(mine), sum(bucket.ready < self.busy_until for bucket in mine)


class Takers(IntEnum):
    """Equations that take a value: none but the results, those that place numbers, or any."""

    NOTHING = 0
    PLACES_NUMBERS = 1
    COMPUTES = 2


class _Beside(NamedTuple):
    is_worth_it: bool
    values: list[Var]  # that it ends with
    eqns: list[JaxprEqn]  # the last one first


def messages_of(
    groups: list[Group], local: list[JaxprEqn], jaxpr: AnyJaxpr, overlap: Overlap | None
) -> Messages:
    """Return the messages of a round.

    Args:
      groups: its collectives.
      local: its local equations, which come first.
      jaxpr: the program that the round is of.
      overlap: of the transport; None where all messages are carried out at once.
    """
    can_start: list[Group] = []
    for group in groups:
        if overlap and overlap.can_start(group.call) and number_ahead(group, jaxpr) is None:
            can_start.append(group)
    if overlap is None or not can_start:
        return Messages([], -1, groups, [], [])
    ready = _ready(local)
    buckets: list[Bucket] = []
    for group in can_start:
        buckets += _cut(group, ready, overlap)
    started = sorted(buckets, key=lambda bucket: bucket.ready)
    takers = _takers(jaxpr)
    if not _beside(local, started[:1], takers, overlap).is_worth_it:
        return Messages([], -1, groups, [], [])
    at_once = [group for group in groups if not any(group is other for other in can_start)]
    takes_time = [i for i, eqn in enumerate(local) if _takes_time(eqn)]
    busy_until = max(takes_time, default=len(local))
    beside = _beside(local, started, takers, overlap)
    return Messages(started, busy_until, at_once, beside.values, _making(beside))


def _cut(group: Group, ready: Mapping[Var, int], overlap: Overlap) -> list[Bucket]:
    """Return the buckets of a group.

    One ends where it is large enough, and the next array is there later.
    """
    if _bytes(group) <= overlap.small_bytes:
        everything = [*range(len(group.eqns))]
        return [Bucket(group, everything, False, _last(group, everything, ready))]
    same: dict[int, list[int]] = {}  # what is sent once stays together
    for i, eqn in enumerate(group.eqns):
        same.setdefault(id(eqn.invars[0]), []).append(i)
    arrays = sorted(same.values(), key=lambda numbers: _when(group.eqns[numbers[0]], ready))
    buckets: list[list[int]] = [[]]
    size, last = 0, -1
    for numbers in arrays:
        eqn = group.eqns[numbers[0]]
        when = _when(eqn, ready)
        if size >= overlap.bucket_bytes and when > last:
            buckets.append([])
            size = 0
        buckets[-1] += numbers
        size += _array_bytes(eqn)
        last = when
    return [
        Bucket(group, numbers, len(buckets) > 1, _last(group, numbers, ready))
        for numbers in buckets
    ]


def _last(group: Group, numbers: Iterable[int], ready: Mapping[Var, int]) -> int:
    return max(_when(group.eqns[i], ready) for i in numbers)


def _ready(local: Iterable[JaxprEqn]) -> dict[Var, int]:
    """Return, for each value, the number of the last equation it depends on that takes time.

    Where no equation takes time, it is the number of the one that makes the value.
    """
    by_time: dict[Var, int] = {}
    by_order: dict[Var, int] = {}
    for number, eqn in enumerate(local):
        after = (
            number
            if _takes_time(eqn)
            else max((by_time.get(v, -1) for v in eqn.invars if _is_value(v)), default=-1)
        )
        for v in eqn.outvars:
            by_time[v], by_order[v] = after, number
    return by_time if any(after >= 0 for after in by_time.values()) else by_order


def _takes_time(eqn: JaxprEqn) -> bool:
    return has(eqn, Trait.TAKES_TIME) or any(map(_takes_time_inside, subjaxprs(eqn)))


@_jaxcompat.kept_with_jaxpr
def _takes_time_inside(jaxpr: AnyJaxpr) -> bool:
    return any(map(_takes_time, _jaxcompat.parts(jaxpr)[0].eqns))


@_jaxcompat.kept_with_jaxpr
def _takers(jaxpr: AnyJaxpr) -> dict[Var, Takers]:
    """Return what takes each value of a program, its results included."""
    inner, _ = _jaxcompat.parts(jaxpr)
    takers = {v: Takers.NOTHING for v in inner.outvars if _is_value(v)}
    for eqn in inner.eqns:
        places = has(eqn, Trait.PLACES_NUMBERS)
        for v in filter(_is_value, eqn.invars):
            known = takers.get(v, Takers.NOTHING)
            takers[v] = max(known, Takers.PLACES_NUMBERS if places else Takers.COMPUTES)
    return takers


def _beside(
    local: list[JaxprEqn],
    buckets: Iterable[Bucket],
    takers: Mapping[Var, Takers],
    overlap: Overlap,
) -> _Beside:
    """Return the computation of a round that the buckets do not need.

    It is worth a message where it has a product, convolution or loop, or is large beside the
    message. The values are those that can be parted from what follows without XLA rounding that in
    another way.
    """
    needed = {
        v
        for bucket in buckets
        for i in bucket.numbers
        for v in bucket.group.eqns[i].invars
        if _is_value(v)
    }
    sent_bytes = sum(map(_bytes_of, needed))
    beside = []
    for eqn in reversed(local):
        if needed.isdisjoint(eqn.outvars):
            beside.append(eqn)
        else:
            needed.update(v for v in eqn.invars if _is_value(v))
    taken = {v for eqn in beside for v in eqn.invars if _is_value(v)}
    left = [
        (v, eqn)
        for eqn in reversed(beside)
        for v in eqn.outvars
        if v in takers and v not in taken and _is_parted(v)
    ]
    products = [v for v, eqn in left if _takes_time(eqn)]
    if products or any(map(_takes_time, beside)):
        return _Beside(True, products, beside)
    placed = [
        v
        for v, eqn in left
        if takers[v] <= (Takers.NOTHING if has(eqn, Trait.MAY_SCALE) else Takers.PLACES_NUMBERS)
    ]
    worth = sum(map(_bytes_of, placed)) > WORTH * max(sent_bytes, overlap.small_bytes)
    return _Beside(worth, placed if worth else [], beside)


def _making(beside: _Beside) -> list[JaxprEqn]:
    """Return the equations that the values depend on, if none of them takes time.

    XLA would copy the arrays of one that does.
    """
    needed, found = {*beside.values}, []
    for eqn in beside.eqns:
        if not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update(filter(_is_value, eqn.invars))
    return [] if any(map(_takes_time, found)) else found[::-1]


def _when(eqn: JaxprEqn, ready: Mapping[Var, int]) -> int:
    v = eqn.invars[0]
    return ready.get(v, -1) if _is_value(v) else -1


def _is_value(v: Atom) -> bool:
    return not isinstance(v, Literal)


def _bytes(group: Group) -> int:
    distinct = {id(eqn.invars[0]): eqn for eqn in group.eqns}
    return sum(map(_array_bytes, distinct.values()))


def _array_bytes(eqn: JaxprEqn) -> int:
    return _bytes_of(eqn.invars[0])


def _bytes_of(v: Atom) -> int:
    return v.aval.size * v.aval.dtype.itemsize if hasattr(v.aval, "dtype") else 0


def _is_parted(v: Var) -> bool:
    """Return whether XLA keeps a value as it is between two loops.

    Values of 16 bits it may keep in 32 within one loop.
    """
    return getattr(v.aval, "dtype", None) in (
        jnp.float32,
        jnp.float64,
        jnp.complex64,
        jnp.complex128,
    )
