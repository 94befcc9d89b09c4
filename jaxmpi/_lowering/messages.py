"""Messages of a round: collectives that are one call, and few numbers in the message of another.

All collectives of a round are independent of each other. Those of one kind become one call. A flag,
a loss, a number of samples would cost a message each, and so few numbers that are summed or
averaged share the message of another collective of their round:

| the collective | the numbers x in it |
|---|---|
| an allreduce that sums | those of a mean are divided on arrival |
| a reduce_scatter | column r of `[size, size, ...]`, else zeros: every rank gets all ranks' x, and adds them in one order |

A message may have been sent ahead, by an earlier call of the program.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Var
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Collective
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.classify import kind
from jaxmpi._lowering.primitives import Op, op_of
from jaxmpi._lowering.translate import Translation, translate

__all__ = ["Group", "call_ahead", "groups_of", "number_ahead"]

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
