"""Calls of `jaxmpi._native` in a program: at once, by a start and a wait, or sent ahead and taken.

A start returns the arrays that it sends, in place, and a wait takes them: so XLA neither changes
nor moves them while the message is in transit. Only where the program fails before the wait, XLA
frees them. So what makes it fail, a call of these or a callback in Python (`_lowering/lower.py`),
ends the started messages first. The results of an allreduce are in the same memory;
those of other collectives are in arrays that the start returns, too, with nothing in them yet. A
message that is sent ahead, for a later call of the program, sends copies. Tokens keep all calls of
a program in order.

The numbers of kinds and operations, and the attributes of a call, are those of `CallAttributes` in
native/handlers.cc, which refuses any others.
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
from jaxmpi._backends.extension import Extension
from jaxmpi._backends.sent_ahead import NUMBER

__all__ = ["compare_fingerprint", "record_branch", "run", "send_ahead", "start", "take"]

# what a primitive returns, and its effects
Outputs: TypeAlias = tuple[list[ShapedArray], frozenset[Hashable]]


class NativeTransport(Protocol):
    """The native transport, as far as the calls need it."""

    place: Place
    native: Extension

    @property
    def effects(self) -> frozenset[Hashable]:
        """Return the JAX effects of the calls."""

    def transport_of(self, call: Collective) -> int:
        """Return the extension's number of the transport for a collective."""


def compare_fingerprint(transport: NativeTransport, fingerprint: int, *, later: bool) -> None:
    """Compare a program's fingerprint at its start.

    With `later`, calls after the first one of a program are compared with the next message.
    """
    compare_p.bind(transport=transport, fingerprint=fingerprint, later=later)


def record_branch(transport: NativeTransport, fingerprint: int) -> None:
    """Record the branch that a program takes, for the comparison in the next message."""
    branch_p.bind(transport=transport, fingerprint=fingerprint)


def run(
    xs: Sequence[jax.Array], call: Collective, transport: NativeTransport, fingerprint: int
) -> list[jax.Array]:
    """Carry out `call` as one message, on arrays of dtypes that the transport knows."""
    return native_p.bind(*xs, call=call, transport=transport, fingerprint=fingerprint)


def start(
    xs: Sequence[jax.Array],
    call: Collective,
    transport: NativeTransport,
    fingerprint: int,
    *,
    bucket: bool,
    first: bool,
) -> tuple[Sequence[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]:
    """Start a message, and return its arrays, in place, and the function that waits for it.

    That function takes arrays that must be computed first, and returns them behind the results.

    Args:
      xs: the arrays.
      call: the collective.
      transport: the native transport.
      fingerprint: the message's, which the ranks compare.
      bucket: whether it is a part of a large message, and gives the bits that this would give.
      first: whether it is the first message that is started before any is waited for.
    """
    started = start_p.bind(
        *xs, call=call, transport=transport, fingerprint=fingerprint, bucket=bucket, first=first
    )
    wait = lambda before: wait_p.bind(
        *started, *before, started=len(started), arrays=len(xs), transport=transport
    )
    return started[: len(xs)], wait


def send_ahead(
    xs: Sequence[jax.Array], call: Collective, transport: NativeTransport, fingerprint: int
) -> jax.Array:
    """Send copies of the arrays; return the number with which a later call takes the results."""
    return send_ahead_p.bind(*xs, call=call, transport=transport, fingerprint=fingerprint)[0]


def take(
    xs: Sequence[jax.Array],
    number: jax.Array,
    call: Collective,
    transport: NativeTransport,
    fingerprint: int,
) -> list[jax.Array]:
    """Return the results of the message of this number; where there is none, `run` it now."""
    return take_p.bind(*xs, number, call=call, transport=transport, fingerprint=fingerprint)


def _abstract(
    *xs: ShapedArray, call: Collective, transport: NativeTransport, fingerprint: int
) -> Outputs:
    return [
        ShapedArray(call.out_shape(x.shape, transport.place.size), x.dtype) for x in xs
    ], transport.effects


def _abstract_compare(*, transport: NativeTransport, fingerprint: int, later: bool) -> Outputs:
    return [], transport.effects


def _abstract_branch(*, transport: NativeTransport, fingerprint: int) -> Outputs:
    return [], transport.effects


def _abstract_start(
    *xs: ShapedArray,
    call: Collective,
    transport: NativeTransport,
    fingerprint: int,
    bucket: bool,
    first: bool,
) -> Outputs:
    sent = [ShapedArray(x.shape, x.dtype) for x in xs]
    outs, effects = _abstract(*xs, call=call, transport=transport, fingerprint=fingerprint)
    return (sent if call.kind == "allreduce" else [*sent, *outs]), effects


def _abstract_wait(
    *xs: ShapedArray, started: int, arrays: int, transport: NativeTransport
) -> Outputs:
    return [ShapedArray(x.shape, x.dtype) for x in xs[started - arrays :]], transport.effects


def _abstract_send_ahead(
    *xs: ShapedArray, call: Collective, transport: NativeTransport, fingerprint: int
) -> Outputs:
    return [ShapedArray(NUMBER.shape, NUMBER.dtype)], transport.effects


def _abstract_take(
    *args: ShapedArray, call: Collective, transport: NativeTransport, fingerprint: int
) -> Outputs:
    return _abstract(*args[:-1], call=call, transport=transport, fingerprint=fingerprint)


def _peers(call: Collective, size: int) -> tuple[list[int], list[int]]:
    """Return, for each rank, the rank from which its results come and to which it sends, or -1."""
    to, of = dict(call.pairs), {q: p for p, q in call.pairs}
    sources = [call.root if call.kind == "bcast" else of.get(rank, -1) for rank in range(size)]
    return sources, [to.get(rank, -1) for rank in range(size)]


def _attributes(
    call: Collective,
    transport: NativeTransport,
    fingerprint: int,
    *,
    bucket: bool = False,
    first: bool = False,
) -> dict[str, np.generic | np.ndarray]:
    """Return the attributes of a call.

    Raises:
      ValueError: the extension has no such kind of collective, or no such operation.
    """
    size = call.count(transport.place.size)
    sources, dests = _peers(call, size)
    kinds, operations = transport.native.kinds, transport.native.operations
    # a mean is a sum with a divisor, and collectives that reduce nothing ignore the operation
    operation = "sum" if call.op in ("", "mean") else call.op
    if call.kind not in kinds:
        raise ValueError(
            f"The native transport has no collective {call.kind!r}. Use one of {', '.join(kinds)}."
        )
    if operation not in operations:
        raise ValueError(
            f"The native transport has no operation {operation!r}. "
            f"Use one of {', '.join(operations)}, mean."
        )
    return {
        "group": np.int32(transport.transport_of(call)),
        "kind": np.int32(kinds[call.kind]),
        "op": np.int32(operations[operation]),
        "divisor": np.int32(size if call.op == "mean" else 1),
        "sources": np.array(sources, np.int32),
        "dests": np.array(dests, np.int32),
        "fingerprint": np.int64(fingerprint),
        "bucket": np.bool_(bucket),
        "first": np.bool_(first),
    }


def _lower(
    ctx: mlir.LoweringRuleContext,
    *xs: mlir.ir.Value,
    target: str,
    call: Collective,
    transport: NativeTransport,
    fingerprint: int,
) -> Sequence[mlir.ir.Value]:
    (effect,) = transport.effects
    in_place = (
        {i: i for i in range(len(ctx.avals_out))}
        if call.kind == "allreduce" and target != "send_ahead"
        else {}
    )
    return _jaxcompat.ffi_call_in_order(
        ctx, f"jaxmpi_{target}", xs, effect, in_place, _attributes(call, transport, fingerprint)
    )


def _lower_compare(
    ctx: mlir.LoweringRuleContext, *, transport: NativeTransport, fingerprint: int, later: bool
) -> Sequence[mlir.ir.Value]:
    (effect,) = transport.effects
    attributes = {"fingerprint": np.int64(fingerprint), "later": np.bool_(later)}
    return _jaxcompat.ffi_call_in_order(ctx, "jaxmpi_compare", (), effect, {}, attributes)


def _lower_branch(
    ctx: mlir.LoweringRuleContext, *, transport: NativeTransport, fingerprint: int
) -> Sequence[mlir.ir.Value]:
    (effect,) = transport.effects
    attributes = {"fingerprint": np.int64(fingerprint)}
    return _jaxcompat.ffi_call_in_order(ctx, "jaxmpi_branch", (), effect, {}, attributes)


def _lower_start(
    ctx: mlir.LoweringRuleContext,
    *xs: mlir.ir.Value,
    call: Collective,
    transport: NativeTransport,
    fingerprint: int,
    bucket: bool,
    first: bool,
) -> Sequence[mlir.ir.Value]:
    (effect,) = transport.effects
    attributes = _attributes(call, transport, fingerprint, bucket=bucket, first=first)
    return _jaxcompat.ffi_call_in_order(
        ctx, "jaxmpi_start", xs, effect, {i: i for i in range(len(xs))}, attributes
    )


def _lower_wait(
    ctx: mlir.LoweringRuleContext,
    *xs: mlir.ir.Value,
    started: int,
    arrays: int,
    transport: NativeTransport,
) -> Sequence[mlir.ir.Value]:
    (effect,) = transport.effects
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
branch_p = _primitive("jaxmpi_branch", _abstract_branch, _lower_branch)
native_p = _primitive("jaxmpi_native", _abstract, partial(_lower, target="collective"))
send_ahead_p = _primitive(
    "jaxmpi_native_send_ahead", _abstract_send_ahead, partial(_lower, target="send_ahead")
)
take_p = _primitive("jaxmpi_native_take", _abstract_take, partial(_lower, target="take"))
start_p = _primitive("jaxmpi_start", _abstract_start, _lower_start)
wait_p = _primitive("jaxmpi_wait", _abstract_wait, _lower_wait)
