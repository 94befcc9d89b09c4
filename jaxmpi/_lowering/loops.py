"""Loops that communicate, in one order with other messages.

**Lanes.** `vmap` gives a `while_loop` a predicate with a value for each lane. `in_order` needs a
scalar predicate, and so do messages in the condition (`_jaxcompat/lanes`). So `trace` replaces the
loops of `batched_predicate`.

**Order.** XLA's executor for CPUs starts a collective once the loop before it has started, whether
that loop has sent its messages or not, unless the collective reads what the loop computes (jaxlib
0.10 to 0.12: collectives are ordered by "scheduling edges", and a loop that waits for its kernels
counts as scheduled). Then a race on each rank decides which of the two sends first. gloo tells
messages apart by their order alone: it would hang, or confuse one message with the other. So a loop
reads a token that is computed from the results of the collectives before it, and returns one for
the collectives after it (`Order`).
"""

from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import involves_ranks
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._barriers import depending_on, token_of

__all__ = ["Order", "batched_predicate", "in_order"]


# Lanes


def batched_predicate(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a communicating while_loop with a predicate for each lane."""
    if op_of(eqn) is not Op.WHILE:
        return False
    jaxprs = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    return _jaxcompat.has_lanes(eqn.params) and any(map(involves_ranks, jaxprs))


# Order


# evaluate(jaxpr, token, *args) -> (a token that is ready after it, outputs)
Evaluate = Callable[..., tuple[jax.Array, list[ArrayLike]]]


class Order:
    """Keeps the collectives and loops of one jaxpr in order, while it is traced.

    Collectives without a loop between them need nothing for that. A token is an int32 of any value,
    computed from what was received.
    """

    def __init__(self, token: jax.Array | None = None) -> None:
        """Begin with the token of the loop that the jaxpr is inside of; None at the top."""
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
        """Return the outputs of a loop.

        Args:
          loop: takes the token of all before it; returns the token of all so far, and its outputs.
        """
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
    """Carry out a loop or a branch that communicates, with a token in its state.

    Args:
      eqn: the `scan`, `while` or `cond`.
      xs: its operands.
      token: what its first message waits for.
      evaluate: evaluates a jaxpr of it behind a token.

    Returns:
      A token that is ready after its last message, and its outputs.
    """
    with _jaxcompat.at_source(eqn):
        return _IN_ORDER[op_of(eqn)](eqn, xs, token, evaluate)


def _scan(
    eqn: JaxprEqn, args: Sequence[ArrayLike], token: jax.Array, evaluate: Evaluate
) -> tuple[jax.Array, list[ArrayLike]]:
    n_consts, n_carry = _jaxcompat.scan_counts(eqn)
    consts, carry, xs = (
        args[:n_consts],
        args[n_consts : n_consts + n_carry],
        args[n_consts + n_carry :],
    )

    def body(
        before: list[jax.Array], x: list[jax.Array]
    ) -> tuple[list[ArrayLike], list[ArrayLike]]:
        token, outs = evaluate(eqn.params["jaxpr"], before[0], *consts, *before[1:], *x)
        return [token, *outs[:n_carry]], outs[n_carry:]

    settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    (token, *after), ys = lax.scan(body, [token, *carry], list(xs), **settings)
    return token, [*after, *ys]


def _while(
    eqn: JaxprEqn, args: Sequence[ArrayLike], token: jax.Array, evaluate: Evaluate
) -> tuple[jax.Array, list[ArrayLike]]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts, state = (
        args[:n_cond],
        args[n_cond : n_cond + n_body],
        args[n_cond + n_body :],
    )

    def predicate(carry: list[jax.Array]) -> ArrayLike:
        return evaluate(eqn.params["cond_jaxpr"], carry[0], *cond_consts, *carry[1:])[1][0]

    def body(carry: list[jax.Array]) -> list[ArrayLike]:
        token, outs = evaluate(eqn.params["body_jaxpr"], carry[0], *body_consts, *carry[1:])
        # A body that sends nothing returns the token as it is. XLA would see that and take the
        # token out of the loop, so change it.
        return [token + 1, *outs]

    token, *outs = lax.while_loop(predicate, body, [token, *state])
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
