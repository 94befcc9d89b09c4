"""Overlap: the messages of a round that travel while the program computes.

A message is started when its arrays are there, and waited for at the end of the round. It is worth
that where the program has something to compute meanwhile, which these arrays do not need: for the
mean of gradients, the rest of the backward pass. So a large message is cut into buckets, in the
order in which their arrays are made. That order is read from the program: an array is there when
the last product, convolution or loop that it depends on is; what is done to it behind that takes
next to nothing.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

import jax.numpy as jnp
from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Overlap
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.inner_jaxprs import subjaxprs
from jaxmpi._lowering.messages import Group, number_ahead
from jaxmpi._lowering.primitives import Trait, has

__all__ = ["Bucket", "Messages", "messages_of"]

WORTH = 8  # arrays so much larger than a message take about as long to make


class Bucket(NamedTuple):
    """A part of a message, or all of it."""

    group: Group
    numbers: list[int]  # of its equations
    is_part: bool
    ready: int  # after which equation of the round its arrays are there


class Messages(NamedTuple):
    """The messages of a round."""

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
        """In the order of their first message."""
        return [
            *{id(bucket.group): bucket.group for bucket in self.started}.values(),
            *self.at_once,
        ]

    def counts(self, group: Group) -> tuple[int, int]:
        """Return how many messages of a group are started, and how many overlap with computation."""
        mine = [bucket for bucket in self.started if bucket.group is group]
        return len(mine), sum(bucket.ready < self.busy_until for bucket in mine)


class Takers(IntEnum):
    """Equations that take a value: none but the program's results, those that place numbers, or any."""

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
    """The buckets of a group. One ends where it is large enough and what comes next is there later."""
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
    """For each value, the number of the last equation that takes time among those that it depends on.

    Where no equation takes time, the number of the one that makes it.
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
    """The equations of these that the values depend on, if none takes time: XLA would copy the arrays of one that does."""
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
    """Return whether XLA keeps a value as it is between two loops; those of 16 bits it may keep in 32 within one."""
    return getattr(v.aval, "dtype", None) in (
        jnp.float32,
        jnp.float64,
        jnp.complex64,
        jnp.complex128,
    )
