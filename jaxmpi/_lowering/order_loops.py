"""Loops that communicate, in one order with the other collectives on every rank: XLA on CPUs keeps none between them.

XLA's executor for CPUs starts a collective once the loop before it has started, whether that has
sent its messages or not, unless it reads what the loop computes (jaxlib 0.10 to 0.12: collectives
are ordered by "scheduling edges", and a loop that waits for its own kernels counts as scheduled).
Which of the two sends first is then a matter of time, on each rank for itself, and gloo, which
tells messages apart by their order, waits for ever or takes one for the other. So a loop reads a
number of the collectives before it, and hands one on to those after it.
"""

from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._lowering.dependency import depending_on, token_of
from jaxmpi._lowering.primitives import Op, op_of

__all__ = ["Order", "in_order"]

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
        """The operands of a collective, the same numbers, ready once the last loop has ended."""
        return list(xs) if self._token is None else depending_on(self._token, xs)

    def received(self, outs: Sequence[jax.Array]) -> None:
        """Count these in, the results of a collective."""
        self._received += outs

    def through(
        self, loop: Callable[[jax.Array], tuple[jax.Array, list[ArrayLike]]]
    ) -> list[ArrayLike]:
        """The outputs of a loop, which is given a token and returns one."""
        self._token, outs = loop(self.token)
        self._received = []
        return outs

    @property
    def token(self) -> jax.Array:
        """Ready once everything so far has ended."""
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
