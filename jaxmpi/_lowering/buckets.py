"""Which messages of a round travel while the program computes, and in which pieces.

A message is started when its arrays are there, and waited for at the end of the round. It is worth that where the program has
something to compute meanwhile, which these arrays do not need: for the mean of gradients, the rest of the backward pass. So a
large message is cut into buckets, in the order in which their arrays are made. That order is read from the program: an array is
there when the last product, convolution or loop that it depends on is; what is done to it behind that takes next to nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmpi._backends.base import Overlap
from jaxmpi._lowering.classify import LOOPS, subjaxprs
from jaxmpi._lowering.combine import Group, Level

__all__ = ["Bucket", "Messages", "messages_of"]

WORTH = 8  # arrays so much larger than a message take about as long to make
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ffi_call", "pallas_call")


class Bucket(NamedTuple):
    """A part of a message, or all of it."""

    group: Group
    numbers: list[int]  # of its equations
    is_part: bool


class Messages(NamedTuple):
    """The messages of a round."""

    started: list[Bucket]  # in this order, and waited for when all are
    at_once: list[Group]  # behind these
    # Values that are computed before the first wait. XLA would compute them in one loop with what comes behind the waits or,
    # where a rank has one thread, behind a wait.
    before_waits: list[Any]

    @property
    def groups(self) -> list[Group]:
        """In the order of their first message."""
        return [*{id(bucket.group): bucket.group for bucket in self.started}.values(), *self.at_once]


def messages_of(level: Level, overlap: Overlap | None) -> Messages:
    """How the groups of a round are sent.

    Args:
      level: the round.
      overlap: of the backend; None where all messages are carried out at once.
    """
    carried = [group for group in level.groups if overlap and overlap.carries(group.call)]
    if overlap is None or not carried:
        return Messages([], level.groups, [])
    ready = _ready(level.local)
    cut = [bucket for group in carried for bucket in _cut(group, ready, overlap)]
    started = sorted(cut, key=lambda bucket: max(_when(bucket.group.eqns[i], ready) for i in bucket.numbers))
    if not _beside(level.local, started[:1], overlap)[0]:
        return Messages([], level.groups, [])
    at_once = [group for group in level.groups if not any(group is other for other in carried)]
    return Messages(started, at_once, _beside(level.local, started, overlap)[1])


def _cut(group: Group, ready: Mapping[Any, int], overlap: Overlap) -> list[Bucket]:
    """The buckets of a group. One ends where it is large enough and what comes next is there later."""
    if _bytes(group) <= overlap.small_bytes:
        return [Bucket(group, [*range(len(group.eqns))], False)]
    same: dict[Any, list[int]] = {}  # what is sent once stays together
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
    return [Bucket(group, numbers, len(buckets) > 1) for numbers in buckets]


def _ready(local: Iterable[JaxprEqn]) -> dict[Any, int]:
    """After which equation each value is there, by its number: the last that takes time; any, where none does."""
    by_time: dict[Any, int] = {}
    by_order: dict[Any, int] = {}
    for number, eqn in enumerate(local):
        after = number if _takes_time(eqn) else max((by_time.get(v, -1) for v in eqn.invars if _is_value(v)), default=-1)
        for v in eqn.outvars:
            by_time[v], by_order[v] = after, number
    return by_time if any(after >= 0 for after in by_time.values()) else by_order


def _takes_time(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    return name in PRODUCTS or name in LOOPS or any(_takes_time(inner) for part in subjaxprs(eqn) for inner in part.eqns)


def _beside(local: list[JaxprEqn], buckets: Iterable[Bucket], overlap: Overlap) -> tuple[bool, list[Any]]:
    """Whether what a round computes beside what the buckets need is worth a message, and values that it ends with.

    It is where it has a product, convolution or loop, or is large beside the message. Of the former, only the results of these
    are named: to part what follows from them would change how XLA rounds it.
    """
    needed = {v for bucket in buckets for i in bucket.numbers for v in bucket.group.eqns[i].invars if _is_value(v)}
    sent_bytes = sum(map(_bytes_of, needed))
    beside = []
    for eqn in reversed(local):
        if needed.isdisjoint(eqn.outvars):
            beside.append(eqn)
        else:
            needed.update(v for v in eqn.invars if _is_value(v))
    late: set[Any] = set()  # what takes time
    left: dict[Any, None] = {}  # what no other equation takes
    for eqn in reversed(beside):
        operands = [v for v in eqn.invars if _is_value(v)]
        if _takes_time(eqn) or not late.isdisjoint(operands):
            late.update(eqn.outvars)
        for v in operands:
            left.pop(v, None)
        left.update(dict.fromkeys(eqn.outvars))
    if late:
        products = {v for eqn in beside if _takes_time(eqn) for v in eqn.outvars}
        return True, [v for v in left if v in products and _is_number(v)]
    worth = sum(map(_bytes_of, left)) > WORTH * max(sent_bytes, overlap.small_bytes)
    return worth, [v for v in left if worth and _is_number(v)]


def _when(eqn: JaxprEqn, ready: Mapping[Any, int]) -> int:
    v = eqn.invars[0]
    return ready.get(v, -1) if _is_value(v) else -1


def _is_value(v: Any) -> bool:
    return not isinstance(v, Literal)


def _bytes(group: Group) -> int:
    distinct = {id(eqn.invars[0]): eqn for eqn in group.eqns}
    return sum(map(_array_bytes, distinct.values()))


def _array_bytes(eqn: JaxprEqn) -> int:
    return _bytes_of(eqn.invars[0])


def _bytes_of(v: Any) -> int:
    return v.aval.size * v.aval.dtype.itemsize if hasattr(v.aval, "dtype") else 0


def _is_number(v: Any) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return isinstance(dtype, np.dtype) and (dtype.kind in "biufc" or dtype == jnp.bfloat16)
