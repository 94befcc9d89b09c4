"""Rewrite a program with the collectives of a backend."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import map_subjaxprs
from jaxmpi._analysis.primitives import is_sum
from jaxmpi._backends.base import Target
from jaxmpi._backends.sent_ahead import none
from jaxmpi._barriers import inputs_depending_on, token_of
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.collectives import translate
from jaxmpi._lowering.loops import Order, in_order
from jaxmpi._lowering.messages import Bucket, Group, call_ahead, number_ahead
from jaxmpi._lowering.plan import Plan
from jaxmpi._lowering.trace import Env, make_jaxpr

__all__ = ["rewrite"]


def rewrite(plan: Plan, target: Target) -> ClosedJaxpr:
    """Put `target`'s collectives in the place of JAX's in a planned program, round by round."""
    order = Order() if plan.has_loops and not target.keeps_order else None
    return make_jaxpr(
        lambda *args: _rounds(plan, target, order, *args),
        target.size,
        [v.aval for v in _jaxcompat.parts(plan.jaxpr)[0].invars],
    )


def _rounds(plan: Plan, target: Target, order: Order | None, *args: ArrayLike) -> list[ArrayLike]:
    read = Env(plan.jaxpr, args)
    for each in plan.rounds:
        sent = each.messages
        after_start = {id(eqn) for eqn in sent.after_start}
        _compute([eqn for eqn in each.local if id(eqn) not in after_start], plan, target, read)
        started = [
            _start(bucket, target, read, first=not i) for i, bucket in enumerate(sent.started)
        ]
        if after_start:
            # of all, n arrays would take n² operations to compile
            one = next((x for x in started[0][0] if x.size), None)
            with inputs_depending_on(
                token_of([] if one is None else [one]), sent.after_start, read.values
            ):
                _compute(sent.after_start, plan, target, read)
        before = sent.before_waits
        for _, arrive in started:
            arrive(before)
            before = []
        for group in sent.at_once:
            _carry_out(group, target, order, read, number_ahead(group, plan.jaxpr))
        for eqn in each.ahead:
            read.write(eqn, [_send_ahead(eqn, target, read(eqn.invars))])
        for eqn in each.loops:
            read.write(eqn, _loop(eqn, plan, target, order, read(eqn.invars)))
    return read.outs()


def _compute(eqns: Iterable[JaxprEqn], plan: Plan, target: Target, read: Env) -> None:
    for eqn in eqns:
        xs = read(eqn.invars)
        is_plain = id(eqn) not in plan.about_ranks
        read.write(eqn, _jaxcompat.keep(eqn, xs) if is_plain else _local(eqn, plan, target, xs))


def _loop(
    eqn: JaxprEqn, plan: Plan, target: Target, order: Order | None, xs: list[ArrayLike]
) -> list[ArrayLike]:
    if order:
        return order.through(lambda token: in_order(eqn, xs, token, partial(_inside, plan, target)))
    return _jaxcompat.bind(eqn, xs, **map_subjaxprs(eqn, lambda x: rewrite(plan.of(x), target)))


def _inside(
    plan: Plan, target: Target, jaxpr: AnyJaxpr, token: jax.Array, *args: ArrayLike
) -> tuple[jax.Array, list[ArrayLike]]:
    order = Order(token)
    outs = _rounds(plan.of(jaxpr), target, order, *args)
    return order.token, outs


def _local(eqn: JaxprEqn, plan: Plan, target: Target, xs: list[ArrayLike]) -> list[ArrayLike]:
    match plan.about_ranks[id(eqn)]:
        case "index":
            return [target.rank()]
        case "loop":  # that asks for the rank
            return _loop(eqn, plan, target, None, xs)
        case _:  # a collective of what all ranks know
            translation = translate(eqn, target.size)
            x = translation.before(xs[0])
            return [x * translation.call.count(target.size) if is_sum(eqn) else x]


def _start(
    bucket: Bucket, target: Target, read: Env, *, first: bool
) -> tuple[Sequence[jax.Array], Callable[[list[Var]], None]]:
    """Start a message.

    Returns:
      Its arrays, in place, and a function that waits for it after variables of the program.
    """
    overlap = target.overlap
    assert overlap is not None  # or nothing would be started
    group = bucket.group
    with _jaxcompat.at_source(group.eqns[bucket.numbers[0]]):
        same, operands = _operands(group, bucket.numbers, target, read)
        sent, wait = overlap.start(group.call, operands, bucket.is_part, first)

    def arrive(before: list[Var]) -> None:
        with _jaxcompat.at_source(group.eqns[bucket.numbers[0]]):
            outs, values = wait(read(before))
            read.values.update(zip(before, values, strict=True))
            _write(group, same, outs, read)

    return sent, arrive


def _send_ahead(eqn: JaxprEqn, target: Target, xs: list[jax.Array]) -> jax.Array:
    if (
        target.overlap is None
        or target.overlap.send_ahead is None
        or not target.overlap.can_start(call_ahead(eqn))
    ):
        return none()
    with _jaxcompat.at_source(eqn):
        return target.overlap.send_ahead(call_ahead(eqn), xs)


def _carry_out(
    group: Group, target: Target, order: Order | None, read: Env, number: Var | None
) -> None:
    """Carry out a message, or take its results if it was sent ahead.

    `number` is the variable with the number under which it was sent.
    """
    with _jaxcompat.at_source(group.eqns[0]):
        same, operands = _operands(group, range(len(group.eqns)), target, read)
        if (
            number is not None
            and target.overlap
            and target.overlap.take
            and len(same) == len(group.eqns)
        ):
            _write(group, same, target.overlap.take(group.call, operands, read([number])[0]), read)
            return
        outs = target.run(group.call, order.after(operands) if order else operands)
        if order:
            order.received(outs)
        _write(group, same, outs, read)


def _operands(
    group: Group, numbers: Iterable[int], target: Target, read: Env
) -> tuple[list[list[int]], list[jax.Array]]:
    """Return the arrays to send for equations of a group, each once, and who uses each."""
    same: dict[tuple[int, str], list[int]] = {}
    for i in numbers:
        eqn = group.eqns[i]
        same.setdefault((id(read(eqn.invars)[0]), str(eqn.params)), []).append(i)
    operands = [
        group.translations[i].carried(read(group.eqns[i].invars)[0], target.rank)
        for i, *_ in same.values()
    ]
    return [*same.values()], operands


def _write(group: Group, same: list[list[int]], outs: Sequence[jax.Array], read: Env) -> None:
    for numbers, out in zip(same, outs, strict=True):
        for i in numbers:
            eqn = group.eqns[i]
            y = group.translations[i].after(out)
            dtype = eqn.outvars[0].aval.dtype
            read.write(eqn, [y if y.dtype == dtype else y.astype(dtype)])
