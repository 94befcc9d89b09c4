"""Few numbers that are summed or averaged over the ranks share the message of another collective of their round.

A flag, a loss, a number of samples: alone, each would cost a message.

| the collective | the numbers x in it |
|---|---|
| an allreduce that sums | those of a mean are divided on arrival |
| a reduce_scatter | column r of `[size, size, ...]`, else zeros: every rank gets all ranks' x, and adds them in one order |
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmpi._backends.base import Collective
from jaxmpi._lowering.translate import Group, Translation

__all__ = ["share_messages"]

FEW_BYTES = 1024  # of one collective's arrays together
FEW_ROWS_BYTES = 16 * 1024  # the same in a reduce_scatter


def share_messages(groups: list[Group], size: int) -> list[Group]:
    """The collectives of a round, without those whose few numbers another one of the same ranks carries.

    Args:
      groups: of `schedule`, independent of each other.
      size: the number of ranks.
    """
    # what carries a sum can carry a mean, too
    kept = sorted(groups, key=lambda group: group.call.op != "mean")
    for group in list(kept):
        hosts = (other for other in kept if other is not group and _carries(other.call, group.call))
        host = next((other for other in hosts if _is_small(group, other.call, size)), None)
        if host is not None:
            host.eqns.extend(group.eqns)
            host.translations.extend(
                _inside(host.call, translation, size) for translation in group.translations
            )
            kept.remove(group)
    return [group for group in groups if any(group is other for other in kept)]


def _carries(host: Collective, call: Collective) -> bool:
    if host.groups != call.groups or (host.groups and host.kind != "allreduce"):
        return False
    if (
        call.kind != "allreduce"
        or call.op not in ("sum", "mean")
        or host.kind not in ("allreduce", "reduce_scatter")
    ):
        return False
    return host.op == "sum" if call.op == "mean" and host.op != "mean" else host.op == call.op


def _is_small(group: Group, host: Collective, size: int) -> bool:
    avals = [
        t.operand(eqn.invars[0].aval) for eqn, t in zip(group.eqns, group.translations, strict=True)
    ]
    total = sum(aval.size * aval.dtype.itemsize for aval in avals)
    return total <= FEW_BYTES and (
        host.kind == "allreduce" or total * size * size <= FEW_ROWS_BYTES
    )


def _inside(host: Collective, inner: Translation, size: int) -> Translation:
    """Return the collective as a part of the message of `host`."""
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
