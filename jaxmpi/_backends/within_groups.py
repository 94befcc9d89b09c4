"""Collectives within groups of ranks by collectives of all ranks, each of which takes its group's part.

For what knows no groups, such as `jax.vmap`, and for groups that have no communicator of their own.
It sends more than the group needs: with p ranks in groups of g, p/g times as much as an allgather,
or an alltoall, of the group.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._backends.base import Collective
from jaxmpi._backends.wire_dtypes import reduce_rows

__all__ = ["of_all", "through_all"]

Run = Callable[[Collective, Sequence[jax.Array]], list[jax.Array]]


def through_all(
    run: Run, call: Collective, xs: Sequence[jax.Array], rank: jax.Array | np.int32
) -> list[jax.Array]:
    """Carry out `call`, in groups, with a `run` for collectives of all ranks, in traced code; `rank` is this rank's number."""
    size = sum(map(len, call.groups))
    members = jnp.asarray(_members(call.groups, size))[rank]  # of this rank's group
    if call.kind in ("alltoall", "reduce_scatter"):
        spread = [jnp.zeros((size, *x.shape[1:]), x.dtype).at[members].set(x) for x in xs]
        rows = [
            y[members] for y in run(Collective("alltoall", fingerprint=call.fingerprint), spread)
        ]
        return [reduce_rows(y, call.op) for y in rows] if call.op else rows
    rows = [y[members] for y in run(Collective("allgather", fingerprint=call.fingerprint), xs)]
    if call.kind == "bcast":
        return [y[call.root] for y in rows]
    return [reduce_rows(y, call.op) for y in rows] if call.op else rows


def of_all(
    call: Collective, arrays: Sequence[jax.ShapeDtypeStruct], size: int
) -> tuple[Collective, list[jax.ShapeDtypeStruct]]:
    """The collective that `through_all` sends for arrays like these."""
    if call.kind not in ("alltoall", "reduce_scatter"):
        return Collective("allgather"), list(arrays)
    return Collective("alltoall"), [
        jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in arrays
    ]


def _members(groups: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """`[size, ranks of a group]`: the group of each rank."""
    table = np.zeros((size, len(groups[0])), np.int32)
    for group in groups:
        table[list(group)] = group
    return table
