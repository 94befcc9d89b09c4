"""A message from one call of a program to a later one, in JAX's own words: what it was started with, and what takes it.

`send_ahead_p` starts a collective on some arrays and returns its number, which is state of the
program. A later call carries out the same collective on the same arrays, behind `sent_ahead_p`,
which is an identity: a backend that has started the message takes what it has brought. Any other
one, and a job that has gone on from a checkpoint meanwhile, sends it then. So the results are the
same either way.
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
NUMBER = jax.ShapeDtypeStruct((2,), np.dtype("uint32"))

send_ahead_p, sent_ahead_p = Primitive(SEND), Primitive(SENT)
sent_ahead_p.multiple_results = True


def none() -> jax.Array:
    """The number of no message."""
    return jnp.zeros(NUMBER.shape, NUMBER.dtype)


def send_ahead(call: Collective, xs: Sequence[jax.Array], axis: Axis) -> jax.Array:
    """Start an allreduce or allgather of `xs`, where the axis is bound; nothing differentiates through it.

    Returns:
      A uint32 `[2]` that is equal on all ranks.
    """
    return send_ahead_p.bind(
        *xs, kind=call.kind, op=call.op, axis_name=names(axis), axis_index_groups=None
    )


def sent_ahead(xs: Sequence[jax.Array], number: jax.Array) -> list[jax.Array]:
    """`xs`, with which the message of this number was started."""
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
