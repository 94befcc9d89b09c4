"""Few numbers that are summed or averaged over the ranks share the message of another collective of their round.

A flag, a loss, a number of samples: alone, each would cost a message.

| the collective | the numbers in it |
|---|---|
| an allreduce that sums | those of a mean, divided on arrival |
| a reduce_scatter | rows `[size, ...]`, one for each rank |
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi._backends import Collective
from jaxmpi._program.translate import Translation

__all__ = ["share_messages"]

FEW_BYTES = 1024  # of one collective's arrays together


def share_messages(groups: list[Any], size: int) -> list[Any]:
    """The collectives of a round, without those whose few numbers another one carries.

    Args:
      groups: of `schedule`, independent of each other.
      size: the number of ranks.
    """
    kept = sorted(groups, key=lambda group: group.call.op != "mean")  # what carries a sum can carry a mean, too
    for group in list(kept):
        host = next((other for other in kept if other is not group and _carries(other.call, group.call)), None)
        if host is not None and _is_small(group):
            host.eqns.extend(group.eqns)
            host.translations.extend(_inside(host.call, translation, size) for translation in group.translations)
            kept.remove(group)
    return [group for group in groups if any(group is other for other in kept)]


def _carries(host: Collective, call: Collective) -> bool:
    if call.kind != "allreduce" or call.op not in ("sum", "mean") or host.kind not in ("allreduce", "reduce_scatter"):
        return False
    return host.op == "sum" if call.op == "mean" and host.op != "mean" else host.op == call.op


def _is_small(group: Any) -> bool:
    avals = [t.operand(eqn.invars[0].aval) for eqn, t in zip(group.eqns, group.translations, strict=True)]
    return sum(aval.size * aval.dtype.itemsize for aval in avals) <= FEW_BYTES


def _inside(host: Collective, translation: Translation, size: int) -> Translation:
    """The same collective as a part of `host`."""
    call, before, after = translation
    divides = call.op == "mean" and host.op == "sum"

    def rows(x: jax.Array) -> jax.Array:
        x = before(x)
        if divides and x.dtype.itemsize < 4:
            x = x.astype(jnp.float32)
        return jnp.broadcast_to(x, (size, *x.shape)) if host.kind == "reduce_scatter" else x

    return Translation(host, rows, lambda y: after(y / size if divides else y))
