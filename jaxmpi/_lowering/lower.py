"""Lower a traced program to the function that `jax.jit` compiles, for each backend.

| backend | the program becomes |
|---|---|
| single | itself: collectives over one rank are the identity |
| mpi | FFI calls of the native extension or of mpi4jax, kept in order by tokens in its module |
| xla | a `shard_map` over one device a rank, with XLA's collectives |
| simulate | a `vmap` over the ranks, with JAX's reductions in one process |
"""

import itertools
import operator
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import involves_ranks
from jaxmpi._analysis.inner_jaxprs import map_subjaxprs
from jaxmpi._analysis.replication import may_vary
from jaxmpi._axis import AXIS
from jaxmpi._backends.base import Collective, Target, fingerprint_of
from jaxmpi._backends.interface import Lowering, Ranks, Transport
from jaxmpi._backends.one_process import PerRank
from jaxmpi._consistency.compare import register_program
from jaxmpi._consistency.mismatch import Call
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.derivatives import FlatFunction, with_derivatives
from jaxmpi._lowering.plan import Entry, Plan, entries_of, plan_of
from jaxmpi._lowering.rewrite import rewrite
from jaxmpi._lowering.signature import Signature
from jaxmpi._lowering.trace import Traced, make_jaxpr, trace

if TYPE_CHECKING:
    from jaxlib.mlir import ir

__all__ = ["build"]

Finish = Callable[[Sequence[ArrayLike]], list[ArrayLike | PerRank]]  # applied to its outputs
Lowered: TypeAlias = tuple[FlatFunction, Finish]
J = TypeVar("J", bound=AnyJaxpr)
P = ParamSpec("P")
T = TypeVar("T")


def build(
    traced: Traced,
    plan: Plan | None,
    backend: Ranks,
    stacked: Sequence[bool],
    entries: Sequence[Entry],
    fingerprint: int,
    *,
    title: str,
    hide_effects: bool,
) -> Lowered:
    """Lower a traced program for a backend.

    Args:
      traced: of `trace.trace`.
      plan: of the program, if it was planned for these ranks.
      backend: the ranks.
      stacked: for simulated ranks, which arguments are per-rank, with a leading axis `[size]`.
      entries: the collectives of the plan.
      fingerprint: of the program's signature; 0 where there is nothing to compare.
      title: the name of the function, for an error.
      hide_effects: True for a program that is called by itself. The effects of its messages are
        hidden, as JAX dispatches every call of a function with effects through Python, at tens of
        microseconds for each array; and messages may be started early. False for one inside of
        another traced function: there the effects keep the messages of several programs in order,
        and it gets the derivatives of its function (`with_derivatives`).

    Returns:
      A function from arrays to arrays, and a function to apply to its outputs, such as `PerRank`.
    """
    lowering = _ProgramLowering(traced.program, plan, stacked, entries, fingerprint, hide_effects)
    program, finish = backend.lower(lowering)
    if hide_effects:
        return program, finish

    def lower_derivative(
        function: FlatFunction, types: Sequence[ShapedArray], *, is_forward: bool
    ) -> FlatFunction:
        derivative = trace(function, backend.axes, types)
        plan: Plan | None = None
        compared: tuple[Sequence[Entry], int] = (), 0
        if is_forward and backend.place.size > 1:
            size, target = backend.place.size, backend.transport.target()
            plan = plan_of(derivative.program, size, combine=target.combine)
            compared = _compared_forward(derivative, plan, types, backend, fingerprint, title)
        per_rank = [False] * (len(derivative.captured) + len(types))
        lowered, _ = build(
            derivative, plan, backend, per_rank, *compared, title=title, hide_effects=False
        )
        return lambda *xs: lowered(*derivative.captured, *xs)

    differentiable = with_derivatives(
        lambda *xs: finish(program(*xs)),
        traced.function,
        backend.axes,
        lower_derivative,
        can_lower=not any(stacked),
        title=title,
    )
    # `finish` is a part of what is differentiated: nothing is left to apply but `list`.
    return differentiable, list


def _compared_forward(
    derivative: Traced,
    plan: Plan,
    types: Sequence[ShapedArray],
    backend: Ranks,
    fingerprint: int,
    title: str,
) -> tuple[Sequence[Entry], int]:
    """Return the collectives of the forward program of a derivative, and its fingerprint.

    It may send other messages than the program, so a rank that runs it and one that runs the
    program are a mismatch. The program is registered for its error.

    Args:
      derivative: the forward program, traced.
      plan: of that program.
      types: of its arguments.
      backend: the ranks.
      fingerprint: of the program that is differentiated; 0 if that sends nothing.
      title: the name of the function.
    """
    entries = [*entries_of(plan)]
    if not entries:
        return entries, 0
    title = f"the derivative of {title}"
    signature = Signature(
        title,
        entries,
        (),
        parameters=derivative.parameters,
        arguments=[x.str_short() for x in types],
        weak=[x.weak_type for x in types],
    )
    call = Call(fingerprint_of(f"forward {fingerprint} {signature.fingerprint}"), title)
    register_program(backend, call, signature.sent, signature.details)
    return entries, call.fingerprint


class _ProgramLowering(Lowering[Lowered]):
    """Lowers one traced program, in the way that a transport asks for.

    The arguments are those of `build`, with the program of `traced`.
    """

    def __init__(
        self,
        jaxpr: ClosedJaxpr,
        plan: Plan | None,
        stacked: Sequence[bool],
        entries: Sequence[Entry],
        fingerprint: int,
        hide_effects: bool,
    ) -> None:
        self._jaxpr, self._plan, self._stacked = jaxpr, plan, stacked
        self._entries, self._fingerprint = entries, fingerprint
        self._hide_effects = hide_effects

    def as_it_is(self, target: Target) -> Lowered:
        """Return the program of one rank, whose collectives are `target.run`."""
        if not involves_ranks(self._jaxpr):
            return _jaxcompat.as_function(self._jaxpr), list
        return _jaxcompat.as_function(rewrite(self._plan_for(target), target)), list

    def stacked(self, target: Target) -> Lowered:
        """Return a `vmap` over stacked arrays, whose outputs are stacked where they may differ."""
        # One process has one copy of each constant.
        differs = may_vary(self._jaxpr, self._stacked, constants=False)
        program = _jaxcompat.as_function(rewrite(self._plan_for(target), target))
        axes = tuple(0 if per_rank else None for per_rank in self._stacked)
        mapped = jax.vmap(program, in_axes=axes, axis_name=AXIS, axis_size=target.size)
        per_rank_outputs = [each and target.size > 1 for each in differs]
        return mapped, partial(_as_per_rank, per_rank_outputs)

    def on_mesh(self, target: Target, mesh: Mesh) -> Lowered:
        """Return a `shard_map` of the program; one without a collective runs on each device."""
        if not involves_ranks(self._jaxpr):
            return _jaxcompat.as_function(self._jaxpr), list
        rewritten = rewrite(self._plan_for(target), target)
        # one equation: `shard_map` traces its function, and the program has been traced already
        program = self._with_effects(rewritten, frozenset({_jaxcompat.axis_effect(AXIS)}))
        spec = PartitionSpec()
        mapped = jax.shard_map(
            lambda *xs: program(*xs), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return mapped, list

    def in_order(self, target: Target, transport: Transport) -> Lowered:
        """Return the program with its messages in order, behind a comparison if it needs one."""
        if not involves_ranks(self._jaxpr):
            return _jaxcompat.as_function(self._jaxpr), list
        program = rewrite(self._plan_for(target), self._numbered(target))
        if target.overlap is not None:
            program = _ending_started(program, target.overlap.end_started)
        if compare := self._comparison(transport):
            program = _behind(program, compare, target.size)
        return self._with_effects(program, transport.effects), list

    def _plan_for(self, target: Target) -> Plan:
        """Return the plan of the program, which is made here if `build` got none."""
        if self._plan is None:
            self._plan = plan_of(self._jaxpr, target.size, combine=target.combine)
        return self._plan

    def _numbered(self, target: Target) -> Target:
        """Return operations whose messages have the program's fingerprint and their index in it."""
        indices = itertools.count(1)

        def numbered(
            f: Callable[Concatenate[Collective, P], T],
        ) -> Callable[Concatenate[Collective, P], T]:
            def call_numbered(call: Collective, /, *rest: P.args, **named: P.kwargs) -> T:
                call = call._replace(fingerprint=self._fingerprint, message_index=next(indices))
                return f(call, *rest, **named)

            return call_numbered

        # A start has no derivative, so a program that is differentiated later starts no message.
        overlap = target.overlap if self._hide_effects else None
        if overlap is not None:
            start, send_ahead, take = overlap.start, overlap.send_ahead, overlap.take
            overlap = overlap._replace(
                start=numbered(start),
                send_ahead=send_ahead and numbered(send_ahead),
                take=take and numbered(take),
            )
        return target._replace(run=numbered(target.run), overlap=overlap)

    def _comparison(self, transport: Transport) -> Callable[[], None] | None:
        """Return a function that compares the fingerprint at the program's start.

        None where no such message is needed: there is nothing to compare, or the transport compares
        the program in another way.
        """
        if not self._fingerprint:
            return None
        calls = [entry.call for entry in self._entries]
        # the first message, if it is carried out in every run
        first = calls[0] if self._entries and self._entries[0].times else None
        return transport.compare(self._fingerprint, first, calls)

    def _with_effects(
        self, program: ClosedJaxpr, of_transport: frozenset[Hashable]
    ) -> FlatFunction:
        """Return the program as a function, with the effects of its messages hidden if possible."""
        inner, _ = _jaxcompat.parts(program)
        effects = set(inner.effects)
        # JAX must see the effects of callbacks. And it drops a program that has neither outputs nor
        # effects.
        has_others = bool(effects - of_transport)
        if not self._hide_effects or not effects or has_others or not inner.outvars:
            return _jaxcompat.as_function(program)
        if not _jaxcompat.can_hide_effects():
            warnings.warn(
                f"This jaxmpi was not tested with jax {jax.__version__}: results are right, but "
                "calls of programs are dispatched more slowly. Update jaxmpi, or use one of jax "
                f"{', '.join(_jaxcompat.TESTED)}.",
                stacklevel=2,
            )
            return _jaxcompat.as_function(program)
        return lambda *xs: program_p.bind(*xs, program=_Program(program))


def _behind(program: ClosedJaxpr, compare: Callable[[], None], size: int) -> ClosedJaxpr:
    """Return a program that compares its fingerprint, and then does what `program` does."""

    def compare_and_run(*xs: jax.Array) -> list[ArrayLike]:
        compare()
        return _jaxcompat.as_function(program)(*xs)

    return make_jaxpr(compare_and_run, size, [v.aval for v in _jaxcompat.parts(program)[0].invars])


class _EndingStarted:
    """A Python callback that ends the started messages of its program before it makes it fail.

    XLA frees the arrays of a program that fails, and a started message works on these.
    """

    def __init__(self, callback: Callable[..., object], end_started: Callable[[], None]) -> None:
        self._callback, self._end_started = callback, end_started

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return self._callback(*args, **kwargs)
        except BaseException:
            self._end_started()
            raise


def _ending_started(program: ClosedJaxpr, end_started: Callable[[], None]) -> ClosedJaxpr:
    """Return a program whose Python callbacks call `end_started` before they make it fail.

    A jaxpr that several calls share is rewritten once, so that they share what becomes of it: JAX
    lowers it once, too.
    """
    rewritten: dict[int, tuple[AnyJaxpr, AnyJaxpr]] = {}  # by its id: (jaxpr, what becomes of it)

    def rewrite_once(jaxpr: J) -> J:
        if id(jaxpr) not in rewritten:
            rewritten[id(jaxpr)] = jaxpr, rewrite_new(jaxpr)
        return cast("J", rewritten[id(jaxpr)][1])

    def rewrite_new(jaxpr: J) -> J:
        inner, _ = _jaxcompat.parts(jaxpr)
        if inner is not jaxpr:  # closed jaxprs may share an open one
            edited = rewrite_once(inner)
            return jaxpr if edited is inner else jaxpr.replace(jaxpr=edited)
        eqns, is_changed = [], False
        for eqn in inner.eqns:
            params: dict[str, object] = {}
            for name, value in map_subjaxprs(eqn, rewrite_once).items():
                if not is_same(value, eqn.params[name]):
                    params[name] = value
            if callable(callback := eqn.params.get("callback")):
                params["callback"] = _EndingStarted(callback, end_started)
            eqns.append(eqn.replace(params={**eqn.params, **params}) if params else eqn)
            is_changed = is_changed or bool(params)
        return _jaxcompat.with_equations(jaxpr, eqns) if is_changed else jaxpr

    def is_same(one: AnyJaxpr | tuple[AnyJaxpr, ...], other: object) -> bool:
        if not isinstance(one, tuple):
            return one is other
        return isinstance(other, tuple) and all(map(operator.is_, one, other))

    return rewrite_once(program)


def _as_per_rank(per_rank: Sequence[bool], outs: Sequence[jax.Array]) -> list[ArrayLike | PerRank]:
    """Return stacked outputs as `PerRank` where they may differ, and as one rank's elsewhere."""
    return [
        PerRank(out) if differs else out[0] for differs, out in zip(per_rank, outs, strict=True)
    ]


# A whole program as one primitive, which has no effects for JAX. Its lowering rule creates the
# tokens that keep its messages in order.

program_p = Primitive("jaxmpi_program")
program_p.multiple_results = True


class _Program:
    """A jaxpr as a parameter, compared by identity."""

    def __init__(self, jaxpr: ClosedJaxpr) -> None:
        self.jaxpr = jaxpr


def _abstract(*_: ShapedArray, program: _Program) -> list[ShapedArray]:
    outs = _jaxcompat.parts(program.jaxpr)[0].outvars
    return [ShapedArray(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in outs]


def _lower(
    ctx: mlir.LoweringRuleContext, *xs: "ir.Value", program: _Program
) -> Sequence["ir.Value"]:
    return _jaxcompat.lower_with_tokens(ctx, *xs, jaxpr=program.jaxpr)


program_p.def_abstract_eval(_abstract)
# `jax.disable_jit` runs it equation by equation.
program_p.def_impl(lambda *xs, program: _jaxcompat.as_function(program.jaxpr)(*xs))
mlir.register_lowering(program_p, _lower)
