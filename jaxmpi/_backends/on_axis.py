"""Collectives of XLA's programs and simulated ranks: JAX's, over the bound axis.

Short floats are summed in float32 and rounded once, and a NaN wins every max and min, as on the
other backends. On CPUs, reduce_scatter is an all_to_all and a sum: that of JAX's gloo gives wrong
numbers now and then for shares of 4 MB and more (https://github.com/jax-ml/jax/issues/40830), and
its other collectives do not.
"""

from collections.abc import Sequence

import jax
from jax import lax

from jaxmpi._axis import AXIS
from jaxmpi._backends import lax_collectives
from jaxmpi._backends.base import Collective
from jaxmpi._backends.wire_dtypes import from_carrier, mean_as_sum, reduce_rows, to_carrier

__all__ = ["run"]


def run(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Carry out `call` on every array, where the axis is bound and nothing is differentiated any more."""
    if call.kind == "reduce_scatter" and jax.default_backend() == "cpu":
        return [
            reduce_rows(rows, call.op)
            for rows in lax_collectives.run(Collective("alltoall", groups=call.groups), xs)
        ]
    if call.op == "mean":
        return mean_as_sum(run, call, xs, call.count(lax.axis_size(AXIS)))
    if call.kind == "allreduce":
        sums = lax_collectives.run(call, [to_carrier(x, call) for x in xs])
        return [from_carrier(y, x.dtype, call) for x, y in zip(xs, sums, strict=True)]
    if call.kind == "reduce_scatter":
        wide = Collective("allreduce", op="sum")
        return [
            y.astype(x.dtype)
            for x, y in zip(
                xs, lax_collectives.run(call, [to_carrier(x, wide) for x in xs]), strict=True
            )
        ]
    return lax_collectives.run(call, xs)
