"""Rewrite a planned program with the operations of a transport, round by round.

A round runs in this order: local equations, starts of messages, local equations that overlap them,
waits, messages that are carried out at once, messages for a later call, loops. Values are read and
written by the variables of the old jaxpr (`trace.Env`), while `make_jaxpr` records the new one.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import Role
from jaxmpi._analysis.inner_jaxprs import map_subjaxprs
from jaxmpi._backends.base import Target
from jaxmpi._backends.sent_ahead import none
from jaxmpi._barriers import inputs_depending_on, token_of
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.collectives import translate
from jaxmpi._lowering.loops import Order, in_order
from jaxmpi._lowering.messages import (
    Bucket,
    CoalescedCall,
    collective_sent_ahead,
    sent_ahead_request,
)
from jaxmpi._lowering.plan import Plan
from jaxmpi._lowering.trace import Env, make_jaxpr

__all__ = ["rewrite"]


def rewrite(plan: Plan, target: Target) -> ClosedJaxpr:
    """Return a planned program with the collectives of `target` instead of JAX's.

    Args:
      plan: the program.
      target: the operations of a transport.
    """
    # Where the executor does not keep loops in order, values must do it; see `loops`.
    order = Order() if plan.has_loops and not target.keeps_order else None
    return make_jaxpr(
        lambda *args: _rounds(plan, target, order, *args),
        target.size,
        [v.aval for v in _jaxcompat.parts(plan.jaxpr)[0].invars],
    )


def _rounds(plan: Plan, target: Target, order: Order | None, *args: ArrayLike) -> list[ArrayLike]:
    env = Env(plan.jaxpr, args)
    for each in plan.rounds:
        messages = each.messages
        after_start = {id(eqn) for eqn in messages.after_start}
        _compute([eqn for eqn in each.local if id(eqn) not in after_start], plan, target, env)
        started = [
            _start(bucket, target, env, first=not i) for i, bucket in enumerate(messages.started)
        ]
        if after_start:
            # Make the equations after the start depend on one array of the first message that is
            # started. A dependence on all n arrays takes n² operations to compile.
            one = next((x for x in started[0][0] if x.size), None)
            token = token_of([] if one is None else [one])
            with inputs_depending_on(token, messages.after_start, env.values):
                _compute(messages.after_start, plan, target, env)
        before = messages.before_waits
        for _, finish in started:
            finish(before)
            before = []  # only the first wait needs to come after them
        for coalesced in messages.at_once:
            request = sent_ahead_request(coalesced, plan.jaxpr)
            _carry_out(coalesced, target, order, env, request)
        for eqn in each.ahead:
            env.write(eqn, [_send_ahead(eqn, target, env(eqn.invars))])
        for eqn in each.loops:
            env.write(eqn, _loop(eqn, plan, target, order, env(eqn.invars)))
    return env.outs()


def _compute(eqns: Iterable[JaxprEqn], plan: Plan, target: Target, env: Env) -> None:
    """Evaluate local equations."""
    for eqn in eqns:
        xs = env(eqn.invars)
        is_plain = id(eqn) not in plan.roles
        env.write(eqn, _jaxcompat.keep(eqn, xs) if is_plain else _local(eqn, plan, target, xs))


def _loop(
    eqn: JaxprEqn, plan: Plan, target: Target, order: Order | None, xs: list[ArrayLike]
) -> list[ArrayLike]:
    """Evaluate a loop or a branch that has to do with the ranks, with its jaxprs rewritten."""
    if order:
        return order.through(lambda token: in_order(eqn, xs, token, partial(_inside, plan, target)))
    return _jaxcompat.bind(eqn, xs, **map_subjaxprs(eqn, lambda x: rewrite(plan.of(x), target)))


def _inside(
    plan: Plan, target: Target, jaxpr: AnyJaxpr, token: jax.Array, *args: ArrayLike
) -> tuple[jax.Array, list[ArrayLike]]:
    """Evaluate a jaxpr of a loop behind a token; return the token behind it, and its outputs."""
    order = Order(token)
    outs = _rounds(plan.of(jaxpr), target, order, *args)
    return order.token, outs


def _local(eqn: JaxprEqn, plan: Plan, target: Target, xs: list[ArrayLike]) -> list[ArrayLike]:
    """Evaluate an equation that has to do with the ranks, but sends nothing."""
    match plan.roles[id(eqn)]:
        case Role.RANK:
            return [target.rank()]
        case Role.CONTROL_FLOW:  # it asks for the rank
            return _loop(eqn, plan, target, None, xs)
        case _:  # a sum of a number that all ranks know (`constant_sums`)
            translation = translate(eqn, target.size)
            total = translation.before(xs[0]) * translation.call.count(target.size)
            return [translation.after(total)]


def _start(
    bucket: Bucket, target: Target, env: Env, *, first: bool
) -> tuple[Sequence[jax.Array], Callable[[list[Var]], None]]:
    """Start a message.

    Returns:
      The arrays that the start returns, and a function that computes the given variables of the
      program, waits for the message, and writes its results into `env`.
    """
    overlap = target.overlap
    assert overlap is not None  # or nothing would be started
    coalesced = bucket.coalesced
    with _jaxcompat.at_source(coalesced.eqns[bucket.indices[0]]):
        users, operands = _operands(coalesced, bucket.indices, target, env)
        sent, wait = overlap.start(coalesced.call, operands, bucket.is_one_of_several, first)

    def finish(before: list[Var]) -> None:
        with _jaxcompat.at_source(coalesced.eqns[bucket.indices[0]]):
            outs, values = wait(env(before))
            env.values.update(zip(before, values, strict=True))
            _write(coalesced, users, outs, env)

    return sent, finish


def _send_ahead(eqn: JaxprEqn, target: Target, xs: list[jax.Array]) -> jax.Array:
    """Send a message for a later call; return its request number, none() if it cannot be sent."""
    call = collective_sent_ahead(eqn)
    if (
        target.overlap is None
        or target.overlap.send_ahead is None
        or not target.overlap.can_start(call)
    ):
        return none()
    with _jaxcompat.at_source(eqn):
        return target.overlap.send_ahead(call, xs)


def _carry_out(
    coalesced: CoalescedCall, target: Target, order: Order | None, env: Env, request: Var | None
) -> None:
    """Carry out a call, or receive its results if it was sent ahead.

    `request` is the variable with the request number under which it was sent.
    """
    with _jaxcompat.at_source(coalesced.eqns[0]):
        users, operands = _operands(coalesced, range(len(coalesced.eqns)), target, env)
        # The message on its way has one array for each equation. If two are the same here,
        # `_operands` has joined them, and the message does not match: send them anew, as the other
        # ranks do.
        is_same_message = len(users) == len(coalesced.eqns)
        if request is not None and target.overlap and target.overlap.take and is_same_message:
            outs = target.overlap.take(coalesced.call, operands, env([request])[0])
            _write(coalesced, users, outs, env)
            return
        outs = target.run(coalesced.call, order.after(operands) if order else operands)
        if order:
            order.received(outs)
        _write(coalesced, users, outs, env)


def _operands(
    coalesced: CoalescedCall, indices: Iterable[int], target: Target, env: Env
) -> tuple[list[list[int]], list[jax.Array]]:
    """Return the arrays to send for equations of a call, each array once.

    Returns:
      For each array, the indices of the equations that use its result; and the arrays.
    """
    users: dict[tuple[int, str], list[int]] = {}
    for i in indices:
        eqn = coalesced.eqns[i]
        users.setdefault((id(env(eqn.invars)[0]), str(eqn.params)), []).append(i)
    operands = [
        coalesced.translations[i].operand(env(coalesced.eqns[i].invars)[0], target.rank)
        for i, *_ in users.values()
    ]
    return [*users.values()], operands


def _write(
    coalesced: CoalescedCall, users: list[list[int]], outs: Sequence[jax.Array], env: Env
) -> None:
    """Write the results of a message, `outs[k]` for the equations of the indices `users[k]`."""
    for indices, out in zip(users, outs, strict=True):
        for i in indices:
            eqn = coalesced.eqns[i]
            y = coalesced.translations[i].after(out)
            dtype = eqn.outvars[0].aval.dtype
            env.write(eqn, [y if y.dtype == dtype else y.astype(dtype)])
