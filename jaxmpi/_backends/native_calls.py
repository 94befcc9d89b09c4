"""The calls of `jaxmpi._native` in a program: a message that is carried out at once, or is started and waited for.

A start returns the arrays that it sends, in place, and a wait takes them: so XLA neither changes
nor moves them while the message is on its way. What arrives is, in an allreduce, in the same
memory; otherwise it is in arrays that the start returns, too, with nothing in them yet. A message
that is sent ahead, for a later call of the program, is one of copies. The tokens keep all calls of
a program in order.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Collective, Place
from jaxmpi._backends.sent_ahead import NUMBER

__all__ = ["compare", "run", "send_ahead", "start", "take"]

# By position, as in `Kind` of transport.h and `Op` of reduce.h. A "mean" is a sum with a divisor.
KINDS = ("allreduce", "reduce_scatter", "allgather", "bcast", "alltoall", "permute")
OPS = ("sum", "max", "min", "prod")

# of a primitive, and its effects
Outputs: TypeAlias = tuple[list[ShapedArray], frozenset[Hashable]]


class Transport(Protocol):
    """Interface of the backend that the calls need."""

    place: Place

    @property
    def effects(self) -> frozenset[Hashable]:
        """The JAX effects of the calls."""

    def transport_of(self, call: Collective) -> int:
        """The number of the transport that carries it."""


def compare(backend: Transport, fingerprint: int, *, later: bool) -> None:
    """Compare the program that begins with this; `later`: but for its first call, with the next message."""
    compare_p.bind(backend=backend, fingerprint=fingerprint, later=later)


def run(
    xs: Sequence[jax.Array], call: Collective, backend: Transport, fingerprint: int
) -> list[jax.Array]:
    """Carry out `call` on arrays of the types that the transport knows: one message."""
    return native_p.bind(*xs, call=call, backend=backend, fingerprint=fingerprint)


def start(
    xs: Sequence[jax.Array],
    call: Collective,
    backend: Transport,
    fingerprint: int,
    *,
    bucket: bool,
    first: bool,
) -> tuple[Sequence[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]:
    """Start the same, and return its arrays, in place, and the function that waits for it.

    That function takes arrays that are to be computed before, and returns them behind the results.

    Args:
      xs: the arrays.
      call: the collective.
      backend: that of the native transport.
      fingerprint: of what the message says.
      bucket: whether it is a part of a large message, and gives the bits that this would give.
      first: whether it is the first of those that are started before any is waited for.
    """
    started = start_p.bind(
        *xs, call=call, backend=backend, fingerprint=fingerprint, bucket=bucket, first=first
    )
    wait = lambda before: wait_p.bind(
        *started, *before, started=len(started), arrays=len(xs), backend=backend
    )
    return started[: len(xs)], wait


def send_ahead(
    xs: Sequence[jax.Array], call: Collective, backend: Transport, fingerprint: int
) -> jax.Array:
    """Start the same with copies of the arrays, and return the message's number, for `take` in a later call of the program."""
    return send_ahead_p.bind(*xs, call=call, backend=backend, fingerprint=fingerprint)[0]


def take(
    xs: Sequence[jax.Array],
    number: jax.Array,
    call: Collective,
    backend: Transport,
    fingerprint: int,
) -> list[jax.Array]:
    """Return the result of the message with this number; without one, do `run`."""
    return take_p.bind(*xs, number, call=call, backend=backend, fingerprint=fingerprint)


def _abstract(*xs: ShapedArray, call: Collective, backend: Transport, fingerprint: int) -> Outputs:
    return [
        ShapedArray(call.out_shape(x.shape, backend.place.size), x.dtype) for x in xs
    ], backend.effects


def _abstract_compare(*, backend: Transport, fingerprint: int, later: bool) -> Outputs:
    return [], backend.effects


def _abstract_start(
    *xs: ShapedArray,
    call: Collective,
    backend: Transport,
    fingerprint: int,
    bucket: bool,
    first: bool,
) -> Outputs:
    sent = [ShapedArray(x.shape, x.dtype) for x in xs]
    outs, effects = _abstract(*xs, call=call, backend=backend, fingerprint=fingerprint)
    return (sent if call.kind == "allreduce" else [*sent, *outs]), effects


def _abstract_wait(*xs: ShapedArray, started: int, arrays: int, backend: Transport) -> Outputs:
    return [ShapedArray(x.shape, x.dtype) for x in xs[started - arrays :]], backend.effects


def _abstract_send_ahead(
    *xs: ShapedArray, call: Collective, backend: Transport, fingerprint: int
) -> Outputs:
    return [ShapedArray(NUMBER.shape, NUMBER.dtype)], backend.effects


def _abstract_take(
    *args: ShapedArray, call: Collective, backend: Transport, fingerprint: int
) -> Outputs:
    return _abstract(*args[:-1], call=call, backend=backend, fingerprint=fingerprint)


def _peers(call: Collective, size: int) -> tuple[list[int], list[int]]:
    """From and to which rank each one's arrays go; -1 for none."""
    to, of = dict(call.pairs), {q: p for p, q in call.pairs}
    sources = [call.root if call.kind == "bcast" else of.get(rank, -1) for rank in range(size)]
    return sources, [to.get(rank, -1) for rank in range(size)]


def _attributes(
    call: Collective, backend: Transport, fingerprint: int
) -> dict[str, np.generic | np.ndarray]:
    size = call.count(backend.place.size)
    sources, dests = _peers(call, size)
    return {
        "group": np.int32(backend.transport_of(call)),
        "kind": np.int32(KINDS.index(call.kind)),
        "op": np.int32(OPS.index(call.op if call.op in OPS else "sum")),
        "divisor": np.int32(size if call.op == "mean" else 1),
        "sources": np.array(sources, np.int32),
        "dests": np.array(dests, np.int32),
        "word": np.int64(fingerprint),
    }


def _lower(
    ctx: mlir.LoweringRuleContext,
    *xs: mlir.ir.Value,
    target: str,
    call: Collective,
    backend: Transport,
    fingerprint: int,
) -> Sequence[mlir.ir.Value]:
    (effect,) = backend.effects
    in_place = (
        {i: i for i in range(len(ctx.avals_out))}
        if call.kind == "allreduce" and target != "send_ahead"
        else {}
    )
    return _jaxcompat.ffi_call_in_order(
        ctx, f"jaxmpi_{target}", xs, effect, in_place, _attributes(call, backend, fingerprint)
    )


def _lower_compare(
    ctx: mlir.LoweringRuleContext, *, backend: Transport, fingerprint: int, later: bool
) -> Sequence[mlir.ir.Value]:
    (effect,) = backend.effects
    attributes = {"word": np.int64(fingerprint), "later": np.bool_(later)}
    return _jaxcompat.ffi_call_in_order(ctx, "jaxmpi_compare", (), effect, {}, attributes)


def _lower_start(
    ctx: mlir.LoweringRuleContext,
    *xs: mlir.ir.Value,
    call: Collective,
    backend: Transport,
    fingerprint: int,
    bucket: bool,
    first: bool,
) -> Sequence[mlir.ir.Value]:
    (effect,) = backend.effects
    attributes = _attributes(call, backend, fingerprint) | {
        "bucket": np.bool_(bucket),
        "first": np.bool_(first),
    }
    return _jaxcompat.ffi_call_in_order(
        ctx, "jaxmpi_start", xs, effect, {i: i for i in range(len(xs))}, attributes
    )


def _lower_wait(
    ctx: mlir.LoweringRuleContext, *xs: mlir.ir.Value, started: int, arrays: int, backend: Transport
) -> Sequence[mlir.ir.Value]:
    (effect,) = backend.effects
    first = started - arrays
    in_place = {first + i: i for i in range(len(xs) - first)}
    return _jaxcompat.ffi_call_in_order(
        ctx, "jaxmpi_wait", xs, effect, in_place, {"started": np.int32(started)}
    )


def _primitive(
    name: str, abstract: Callable[..., Outputs], lower: Callable[..., Sequence[mlir.ir.Value]]
) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(abstract)
    mlir.register_lowering(primitive, lower)
    return primitive


compare_p = _primitive("jaxmpi_compare", _abstract_compare, _lower_compare)
native_p = _primitive("jaxmpi_native", _abstract, partial(_lower, target="collective"))
send_ahead_p = _primitive(
    "jaxmpi_native_send_ahead", _abstract_send_ahead, partial(_lower, target="send_ahead")
)
take_p = _primitive("jaxmpi_native_take", _abstract_take, partial(_lower, target="take"))
start_p = _primitive("jaxmpi_start", _abstract_start, _lower_start)
wait_p = _primitive("jaxmpi_wait", _abstract_wait, _lower_wait)
