"""Loops that communicate: with one predicate for all lanes of a `vmap`, and in one order.

**Lanes.** `vmap` gives a `while_loop` a predicate with a value for each lane. JAX keeps the state
of the lanes that are done when it lowers the loop, but not where the condition has ordered effects,
as messages are (jax 0.10 to 0.12). So the loop is written out with a scalar predicate
(`with_scalar_predicate`) before it gets there, which the order needs, too.

**Order.** XLA's executor for CPUs starts a collective once the loop before it has started, whether
that has sent its messages or not, unless it reads what the loop computes (jaxlib 0.10 to 0.12:
collectives are ordered by "scheduling edges", and a loop that waits for its own kernels counts as
scheduled). Which of the two sends first is then a matter of time, on each rank for itself. gloo
tells messages apart by their order, and waits for ever or takes one for the other. So a loop reads
a number of the collectives before it, and hands one on to those after it (`Order`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import has_collective
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._barriers import depending_on, token_of

__all__ = ["Order", "batched_predicate", "in_order", "with_scalar_predicate"]


# Lanes


Carry: TypeAlias = tuple[list[jax.Array], list[jax.Array]]  # the predicate alone, and the state


def batched_predicate(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a communicating while_loop with a predicate for each lane."""
    if op_of(eqn) is not Op.WHILE:
        return False
    inner, _ = _jaxcompat.parts(eqn.params["cond_jaxpr"])
    return bool(inner.outvars[0].aval.shape) and any(
        map(has_collective, (inner, eqn.params["body_jaxpr"]))
    )


def with_scalar_predicate(params: Mapping[str, Any], xs: Sequence[ArrayLike]) -> list[jax.Array]:
    """Carry out a while_loop of these parameters until all lanes are done.

    A lane that is done keeps its state.
    """
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, state = (
        xs[:of_cond],
        xs[of_cond : of_cond + of_body],
        xs[of_cond + of_body :],
    )
    cond, body = (
        _jaxcompat.as_function(params["cond_jaxpr"]),
        _jaxcompat.as_function(params["body_jaxpr"]),
    )

    def turn(carry: Carry) -> Carry:
        (on,), before = carry
        after = [_where(on, y, x) for x, y in zip(before, body(*body_consts, *before), strict=True)]
        return cond(*cond_consts, *after), after

    _, outs = lax.while_loop(
        lambda carry: jnp.any(carry[0][0]), turn, (cond(*cond_consts, *state), list(state))
    )
    return outs


def _where(on: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `x` in the lanes that are on, else `y`; the lanes are the first axes."""
    return lax.select(lax.broadcast_in_dim(on, x.shape, tuple(range(on.ndim))), x, y)


# Order


# of a jaxpr, a token and arguments: a token that is ready after it
Evaluate = Callable[..., tuple[jax.Array, list[ArrayLike]]]


class Order:
    """State of the order of one jaxpr: the messages sent so far.

    Its token is an int32 of any value, computed from what was received.
    """

    def __init__(self, token: jax.Array | None = None) -> None:
        """`token` is that of the loop whose part the jaxpr is."""
        self._token = token
        self._received: list[jax.Array] = []  # since the last loop

    def after(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the operands of a collective, available once the last loop has ended."""
        return list(xs) if self._token is None else depending_on(self._token, xs)

    def received(self, outs: Sequence[jax.Array]) -> None:
        """Record the results of a collective, which the next loop waits for."""
        self._received += outs

    def through(
        self, loop: Callable[[jax.Array], tuple[jax.Array, list[ArrayLike]]]
    ) -> list[ArrayLike]:
        """Return the outputs of a loop, which gets a token and returns one."""
        self._token, outs = loop(self.token)
        self._received = []
        return outs

    @property
    def token(self) -> jax.Array:
        """Return a token that is ready once everything so far has ended."""
        return token_of(self._received, 0 if self._token is None else self._token)


def in_order(
    eqn: JaxprEqn, xs: Sequence[ArrayLike], token: jax.Array, evaluate: Evaluate
) -> tuple[jax.Array, list[ArrayLike]]:
    """Carry out a loop that communicates, with a token in its state."""
    with _jaxcompat.at_source(eqn):
        return _IN_ORDER[op_of(eqn)](eqn, xs, token, evaluate)


def _scan(
    eqn: JaxprEqn, args: Sequence[ArrayLike], token: jax.Array, evaluate: Evaluate
) -> tuple[jax.Array, list[ArrayLike]]:
    of_consts, of_carry = _jaxcompat.scan_counts(eqn)
    consts, carry, xs = (
        args[:of_consts],
        args[of_consts : of_consts + of_carry],
        args[of_consts + of_carry :],
    )

    def turn(
        before: list[jax.Array], x: list[jax.Array]
    ) -> tuple[list[ArrayLike], list[ArrayLike]]:
        token, outs = evaluate(eqn.params["jaxpr"], before[0], *consts, *before[1:], *x)
        return [token, *outs[:of_carry]], outs[of_carry:]

    settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    (token, *after), ys = lax.scan(turn, [token, *carry], list(xs), **settings)
    return token, [*after, *ys]


def _while(
    eqn: JaxprEqn, args: Sequence[ArrayLike], token: jax.Array, evaluate: Evaluate
) -> tuple[jax.Array, list[ArrayLike]]:
    of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts, state = (
        args[:of_cond],
        args[of_cond : of_cond + of_body],
        args[of_cond + of_body :],
    )

    def on(carry: list[jax.Array]) -> ArrayLike:
        return evaluate(eqn.params["cond_jaxpr"], carry[0], *cond_consts, *carry[1:])[1][0]

    def turn(carry: list[jax.Array]) -> list[ArrayLike]:
        token, outs = evaluate(eqn.params["body_jaxpr"], carry[0], *body_consts, *carry[1:])
        # or XLA would see that a body that sends nothing leaves it as it is
        return [token + 1, *outs]

    token, *outs = lax.while_loop(on, turn, [token, *state])
    return token, outs


def _cond(
    eqn: JaxprEqn, args: Sequence[ArrayLike], token: jax.Array, evaluate: Evaluate
) -> tuple[jax.Array, list[ArrayLike]]:
    index, *operands = args
    branches = [
        lambda token, *xs, branch=branch: evaluate(branch, token, *xs)
        for branch in eqn.params["branches"]
    ]
    return lax.switch(index, branches, token, *operands)


_IN_ORDER = {Op.SCAN: _scan, Op.WHILE: _while, Op.COND: _cond}
