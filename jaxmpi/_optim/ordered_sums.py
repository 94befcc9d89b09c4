"""Functions whose sums are formed in one order, whatever number of threads a rank has.

XLA's CPU backend gives sums of arrays to a library that splits them among its threads, so the same
program has other bits with two threads than with one. It keeps a sum in one loop where the sum has
to do arithmetic on the way: here, a multiplication with a number that is always 1, which XLA cannot
know. Matrix products stay as they are.
"""

from collections.abc import Callable, Iterator
from itertools import count

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxmpi import _jaxcompat
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.classify import CALLS, LOOPS, callee, map_subjaxprs, subjaxprs
from jaxmpi._lowering.trace import evaluate

__all__ = ["equations", "in_one_order"]

Check = Callable[[ClosedJaxpr], None]


def in_one_order(fun: Callable[..., PyTree], check: Check) -> Callable[..., PyTree]:
    """The same function of pytrees of arrays, with its sums in one order; `check` may refuse what it does."""

    def run(*args: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(args)
        tree: PyTree = None

        def flat(*xs: jax.Array) -> list[jax.Array]:
            nonlocal tree
            outs, tree = jax.tree.flatten(fun(*treedef.unflatten(xs)))
            return outs

        jaxpr = jax.make_jaxpr(flat)(*leaves)
        check(jaxpr)
        return tree.unflatten(evaluate(jaxpr, _InOrder(), *leaves))

    return run


def equations(
    jaxpr: Jaxpr | ClosedJaxpr, callers: tuple[JaxprEqn, ...] = ()
) -> Iterator[tuple[JaxprEqn, ...]]:
    """All equations, inner ones included, each behind those that contain it."""
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        yield (*callers, eqn)
        for inner in subjaxprs(eqn):
            yield from equations(inner, (*callers, eqn))


class _InOrder:
    """A rule for each equation: sums multiply their operand by a number of their own, or XLA would share one product."""

    def __init__(self) -> None:
        self._numbers = count()

    def __call__(self, eqn: JaxprEqn, xs: list[jax.Array]) -> list[jax.Array]:
        name = eqn.primitive.name
        if (
            name == "reduce_sum"
            and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact)
            and eqn.invars[0].aval.size
        ):
            return _jaxcompat.bind(eqn, [xs[0] * _one(xs[0], next(self._numbers))])
        if name not in (*CALLS, *LOOPS) or not any(
            path[-1].primitive.name == "reduce_sum" for path in _inside(eqn)
        ):
            return _jaxcompat.bind(eqn, xs)
        if name in LOOPS:
            return _jaxcompat.bind(eqn, xs, **map_subjaxprs(eqn, self._inner))
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            xs = lax.optimization_barrier(xs)  # or XLA would undo the rematerialization
        with _jaxcompat.at_source(eqn):
            jaxpr, operands = callee(eqn, xs)
            return evaluate(jaxpr, self, *operands)

    def _inner(self, jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
        avals = [v.aval for v in _jaxcompat.parts(jaxpr)[0].invars]
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        return jax.make_jaxpr(lambda *xs: evaluate(jaxpr, self, *xs))(*structs)


def _inside(eqn: JaxprEqn) -> Iterator[tuple[JaxprEqn, ...]]:
    return (path for jaxpr in subjaxprs(eqn) for path in equations(jaxpr))


def _one(x: jax.Array, k: int) -> jax.Array:
    """The number 1: n² + n is even for n = x[0] + k."""
    n = x.reshape(-1)[0].real.astype(jnp.int32) + k
    return jnp.where((n * n + n) % 2 == 0, 1, -1).astype(x.dtype)
