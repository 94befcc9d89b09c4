"""XLA's collectives on several arrays: small ones of a dtype share one, as each costs a round between the processes.

An allreduce of several arrays is one of XLA's collectives; the others take one array. Dtypes below
8 bits travel as bytes: between CPUs, the all_gather of int2 of JAX 0.10 gives wrong rows and writes
beyond its memory.
"""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi._axis import AXIS
from jaxmpi._backends import bucketing, on_axis
from jaxmpi._backends.base import Collective
from jaxmpi._backends.wire_dtypes import carried, carried_shapes, is_sub_byte, received

__all__ = ["messages", "run"]

# of an operand, of a result
ROWS = {"reduce_scatter": (True, False), "alltoall": (True, True), "allgather": (False, True)}


def run(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Carry out `call` on every array, where the axis is bound."""
    xs = [jnp.asarray(x) for x in xs]
    return received(call, xs, _packed(call, carried(call, xs, _fits)))


def _fits(dtype: np.dtype) -> bool:
    """Return whether XLA's collectives can take a dtype."""
    return not is_sub_byte(dtype)


def _packed(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Carry out `call`, with the small arrays of each dtype in one."""
    if call.kind not in ROWS:
        return on_axis.run(call, xs)
    size = call.count(int(lax.axis_size(AXIS)))
    rows_in, rows_out = ([size] if by_rank else [] for by_rank in ROWS[call.kind])
    outs = [jnp.zeros(call.out_shape(x.shape, size), x.dtype) for x in xs]
    for leaves in _groups(call, xs, size):
        if len(leaves) == 1:
            (outs[leaves[0]],) = on_axis.run(call, [xs[leaves[0]]])
            continue
        parts = [xs[i].reshape(*rows_in, -1) for i in leaves]
        (got,) = on_axis.run(call, [jnp.concatenate(parts, axis=-1)])
        ends = np.cumsum([part.shape[-1] for part in parts])[:-1]
        for i, part in zip(
            leaves, jnp.split(got.reshape(*rows_out, -1), ends, axis=-1), strict=True
        ):
            outs[i] = part.reshape(outs[i].shape)
    return outs


def messages(call: Collective, arrays: Sequence[jax.ShapeDtypeStruct], size: int) -> list[int]:
    """The bytes of each of XLA's collectives that `run` makes for arrays like these."""
    size = call.count(size)
    arrays = carried_shapes(call, arrays, _fits)
    each = [prod(x.shape) * x.dtype.itemsize for x in arrays]
    if call.kind == "allreduce":
        return [sum(each)]
    if call.kind not in ROWS:
        return each
    return [sum(each[i] for i in leaves) for leaves in _groups(call, arrays, size)]


def _groups(
    call: Collective, arrays: Sequence[jax.Array] | Sequence[jax.ShapeDtypeStruct], size: int
) -> list[list[int]]:
    """Return the indices of the arrays of each message; empty arrays are in none."""
    rows = size if ROWS[call.kind][0] else 1
    groups: list[list[int]] = []
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        columns = [prod(x.shape) // rows if x.dtype == dtype else 0 for x in arrays]
        for pieces in bucketing.messages(columns, dtype.itemsize, max_items=max(columns)):
            groups.append([piece.leaf for piece in pieces])
    return groups
