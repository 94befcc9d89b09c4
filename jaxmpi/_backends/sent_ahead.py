"""Primitives for a message that one call of a program sends and a later call takes.

`send_ahead_p` sends a collective on some arrays and returns its number, which is state of the
program. A later call carries out the same collective on the same arrays, behind `sent_ahead_p`,
which is an identity: a backend that has sent the message takes its results. Any other backend, and
a job that was restored from a checkpoint meanwhile, carries the collective out then. So the results
are the same either way.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxmpi._axis import Axis, names
from jaxmpi._backends.base import Collective

__all__ = ["NUMBER", "SEND", "SENT", "none", "send_ahead", "sent_ahead"]

SEND, SENT = "jaxmpi_send_ahead", "jaxmpi_sent_ahead"
# the two halves of a 64-bit number, because JAX has no 64-bit integers by default
NUMBER = jax.ShapeDtypeStruct((2,), np.dtype("uint32"))

send_ahead_p, sent_ahead_p = Primitive(SEND), Primitive(SENT)
sent_ahead_p.multiple_results = True


def none() -> jax.Array:
    """Return the number that no message has."""
    return jnp.zeros(NUMBER.shape, NUMBER.dtype)


def send_ahead(call: Collective, xs: Sequence[jax.Array], axis: Axis) -> jax.Array:
    """Send an allreduce or allgather of `xs`, where the axis is bound.

    Nothing differentiates through it.

    Returns:
      A uint32 `[2]` that is equal on all ranks.
    """
    return send_ahead_p.bind(
        *xs, kind=call.kind, op=call.op, axis_name=names(axis), axis_index_groups=None
    )


def sent_ahead(xs: Sequence[jax.Array], number: jax.Array) -> list[jax.Array]:
    """Return `xs`, with which the message of this number was sent."""
    return sent_ahead_p.bind(*xs, number)


def _batch_send(
    xs: Sequence[jax.Array], dims: Sequence[int | None], **params: object
) -> tuple[jax.Array, None]:
    return send_ahead_p.bind(*xs, **params), None


def _batch_sent(
    args: Sequence[jax.Array], dims: Sequence[int | None]
) -> tuple[list[jax.Array], Sequence[int | None]]:
    return sent_ahead_p.bind(*args), dims[:-1]


send_ahead_p.def_abstract_eval(lambda *xs, **params: ShapedArray(NUMBER.shape, NUMBER.dtype))
sent_ahead_p.def_abstract_eval(lambda *args: [ShapedArray(x.shape, x.dtype) for x in args[:-1]])
batching.primitive_batchers[send_ahead_p] = _batch_send
batching.primitive_batchers[sent_ahead_p] = _batch_sent
mlir.register_lowering(
    send_ahead_p, mlir.lower_fun(lambda *xs, **params: none(), multiple_results=False)
)
mlir.register_lowering(
    sent_ahead_p, mlir.lower_fun(lambda *args: list(args[:-1]), multiple_results=True)
)
