"""Branches and loops that send messages, in programs under plain `jax.jit`, eager ones included.

`jaxmpi.jit` refuses a collective in a branch whose predicate may differ between the ranks. Plain
`jax.jit` knows nothing of the ranks: with `optax.apply_if_finite(jaxmpi.distributed(inner), n)`, a
rank that skips an update leaves the others waiting in its mean, and its next mean meets theirs.
From then on the ranks average different steps. All messages look right.

So each branch of such a `lax.cond` begins with a record of which one it is, and the ranks compare
the records: on the native transport with the next message, which then carries a fingerprint of all
records before it; on mpi4jax by a message in the branch itself, as that transport compares all
programs. Branches that send the same messages, or messages within groups, need no comparison: ranks
may take different ones. A `while_loop` that sends messages begins with a record, too: a turn more
on one rank then meets no message of the next loop. It is compared on the native transport only.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import mlir

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Branch, Message
from jaxmpi._backends.primitive import collective_p
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._job.process import settings

__all__ = ["compare_branches", "only_together"]


def compare_branches() -> None:
    """Have the ranks compare branches, in programs that are lowered from now on."""
    _jaxcompat.rewrite_branches(_compared, _before_loop)


def _compared(branches: Sequence[ClosedJaxpr]) -> Sequence[ClosedJaxpr]:
    """Return the branches of a `lax.cond`, with a record before each that the ranks compare."""
    collectives = _uncompared(branches)
    if not collectives:
        return branches
    sent = [tuple(_messages(branch)) for branch in branches]
    if len(set(sent)) == 1:
        return branches
    function = _jaxcompat.library_function(collectives[0])
    line = _jaxcompat.source_line(collectives[0]) or _jaxcompat.lowered_line()
    line = line or _jaxcompat.called_at()  # of an eager call, which compiles a program of its own
    # branches that send the same count as one
    all_taken = [Branch(function, line, sent.index(messages), messages) for messages in sent]
    transport = collectives[0].params["transport"]
    compared = []
    for taken, branch in zip(all_taken, branches, strict=True):
        compared.append(transport.compare_branch(branch, taken, all_taken))
    return compared


def only_together(
    jaxpr: ClosedJaxpr,
    gather: Callable[[], jax.Array],
    explain: Callable[[np.ndarray], str],
) -> ClosedJaxpr:
    """Return a branch that runs if all ranks take it; else it raises on all, and sends nothing.

    Args:
      jaxpr: of the branch.
      gather: returns the numbers of the branches that the ranks take, in traced code.
      explain: returns the text of the error for these numbers.
    """
    inner, _ = _jaxcompat.parts(jaxpr)
    outputs = [v.aval for v in inner.outvars]
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) for aval in outputs):
        return jaxpr  # such as random keys, of which the branch that raises has none to return

    def raise_error(everyone: np.ndarray) -> None:
        raise RuntimeError(explain(everyone))

    def fail(everyone: jax.Array, *args: jax.Array) -> list[jax.Array]:
        apart_p.bind(everyone, raise_error=raise_error)
        return [lax.full(aval.shape, 0, aval.dtype) for aval in outputs]

    def compared(*args: jax.Array) -> list[jax.Array]:
        everyone = gather()
        together = everyone.max() == everyone.min()  # the same on all ranks
        run = lambda _, *args: _jaxcompat.as_function(jaxpr)(*args)
        return lax.cond(together, run, fail, everyone, *args)

    given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.invars]
    return jax.make_jaxpr(compared)(*given)


# in the branch in which the ranks have found that they are apart
apart_p = Primitive("jaxmpi_apart")
apart_p.multiple_results = True
apart_p.def_abstract_eval(lambda everyone, *, raise_error: [])


def _raise(everyone: jax.Array, *, raise_error: Callable[[np.ndarray], None]) -> list[jax.Array]:
    jax.debug.callback(raise_error, everyone)
    return []


mlir.register_lowering(apart_p, mlir.lower_fun(_raise, multiple_results=True))


def _before_loop(body: ClosedJaxpr) -> Callable[[], None] | None:
    """Return a function that records the start of a loop; None where no record is needed."""
    collectives = _uncompared([body])
    if not collectives:
        return None
    return collectives[0].params["transport"].compare_loop(tuple(_messages(body)))


def _uncompared(jaxprs: Sequence[ClosedJaxpr]) -> list[JaxprEqn]:
    """Return the collectives of branches or a loop, if nothing else compares them; else none."""
    if settings.get("JAXMPI_CHECK") == "0":
        return []
    collectives: list[JaxprEqn] = []
    for jaxpr in jaxprs:
        if any(eqn.primitive is apart_p for eqn in _jaxcompat.parts(jaxpr)[0].eqns):
            return []  # by `only_together`
        collectives.extend(_collectives(jaxpr))
    # messages of `jaxmpi.jit` have an index in their program, and are compared by it
    calls = [eqn.params["call"] for eqn in collectives]
    return [] if any(call.groups or call.message_index for call in calls) else collectives


def _inner(eqn: JaxprEqn) -> Iterator[AnyJaxpr]:
    """Yield the jaxprs of an equation with effects."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple) else (value,):
            if hasattr(item, "eqns"):
                yield item


def _collectives(jaxpr: AnyJaxpr) -> Iterator[JaxprEqn]:
    """Yield the collectives of a jaxpr, at all depths."""
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        if eqn.primitive is collective_p:
            yield eqn
        elif eqn.effects:
            for inner in _inner(eqn):
                yield from _collectives(inner)


def _messages(jaxpr: AnyJaxpr) -> Iterator[str]:
    """Yield the messages of a jaxpr as texts, in their order; a loop or a branch is one text."""
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        if eqn.primitive is collective_p:
            arrays = tuple((v.aval.shape, str(v.aval.dtype)) for v in eqn.invars)
            yield str(Message(eqn.params["call"].title, arrays))
        elif eqn.effects:
            inner = [tuple(_messages(each)) for each in _inner(eqn)]
            # a scan has a length, a while loop two jaxprs, and a cond one for each branch
            is_call = len(inner) == 1 and "length" not in eqn.params
            if is_call:
                yield from inner[0]
            elif any(inner):
                each = " or ".join(", ".join(texts) or "nothing" for texts in inner)
                yield f"{eqn.primitive.name} {eqn.params.get('length', '')} of {each}"
