"""From a traced function to what `jax.jit` compiles, for each of the ways to run.

| backend | the program becomes |
|---|---|
| single | itself: collectives over one rank are the identity |
| mpi | FFI calls of the native extension or of mpi4jax, which tokens in its module keep in order |
| xla | a `shard_map` over one device a rank, with XLA's collectives |
| simulate | a `vmap` over the ranks, with JAX's reductions in one process |
"""

import itertools
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import has_collective
from jaxmpi._analysis.replication import may_vary
from jaxmpi._axis import AXIS
from jaxmpi._backends.base import Collective, Target
from jaxmpi._backends.interface import Lowering, Ranks, Transport
from jaxmpi._backends.one_process import PerRank
from jaxmpi._lowering.plan import Entry, Plan, plan_of
from jaxmpi._lowering.rewrite import rewrite
from jaxmpi._lowering.trace import make_jaxpr

if TYPE_CHECKING:
    from jaxlib.mlir import ir

__all__ = ["build"]

Flat = Callable[..., list[ArrayLike]]  # of arrays, to arrays
Finish = Callable[[list[ArrayLike]], list[ArrayLike | PerRank]]
Lowered: TypeAlias = tuple[Flat, Finish]
P = ParamSpec("P")
T = TypeVar("T")


def build(
    jaxpr: ClosedJaxpr,
    plan: Plan | None,
    backend: Ranks,
    stacked: Sequence[bool],
    entries: Sequence[Entry],
    fingerprint: int,
    *,
    hide: bool,
) -> Lowered:
    """Make a traced program one of `backend`.

    Args:
      jaxpr: of `trace.trace`.
      plan: of the program, if it was planned for these ranks.
      backend: the ranks.
      stacked: for simulated ranks, which of the arguments each rank has its own of.
      entries: the collectives of the plan.
      fingerprint: what the ranks compare, where the transport does; 0 where there is nothing to.
      hide: for MPI, whether its effect may stay inside. Any effect on the outside sends every call
        of a jitted function through Python, at tens of microseconds for each array; but inside of
        another function it is what keeps the order.

    Returns:
      The program, and what is done to its outputs.
    """
    return backend.lower(_Ways(jaxpr, plan, stacked, entries, fingerprint, hide))


class _Ways(Lowering[Lowered]):
    """The ways to make one traced program one of a transport; the fields are those of `build`."""

    def __init__(
        self,
        jaxpr: ClosedJaxpr,
        plan: Plan | None,
        stacked: Sequence[bool],
        entries: Sequence[Entry],
        fingerprint: int,
        hide: bool,
    ) -> None:
        self._jaxpr, self._plan, self._stacked = jaxpr, plan, stacked
        self._entries, self._fingerprint, self._hide = entries, fingerprint, hide

    def as_it_is(self, target: Target) -> Lowered:
        """Return the program of one rank, whose collectives are `target.run`."""
        return _jaxcompat.as_function(self._rewritten(target)), list

    def stacked(self, target: Target) -> Lowered:
        """Return a `vmap` over stacked arrays, whose outputs are stacked where they may differ."""
        differ = may_vary(self._jaxpr, self._stacked)
        program = _jaxcompat.as_function(rewrite(self._plan_for(target), target))
        axes = tuple(0 if own else None for own in self._stacked)
        mapped = jax.vmap(program, in_axes=axes, axis_name=AXIS, axis_size=target.size)
        return mapped, partial(_marked, [own and target.size > 1 for own in differ])

    def on_mesh(self, target: Target, mesh: Mesh) -> Lowered:
        """Return a `shard_map` of the program; one without a collective runs on each device."""
        program = _jaxcompat.as_function(self._rewritten(target))
        if not has_collective(self._jaxpr):
            return program, list
        spec = PartitionSpec()
        mapped = jax.shard_map(
            lambda *xs: program(*xs), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return mapped, list

    def in_order(self, target: Target, transport: Transport) -> Lowered:
        """Return the program with its messages in order, behind a comparison if it needs one."""
        if not has_collective(self._jaxpr):
            return _jaxcompat.as_function(self._jaxpr), list
        program = rewrite(self._plan_for(target), self._numbered(target))
        if compare := self._comparison(transport):
            program = _behind(program, compare, target.size)
        return self._with_effects(program, transport.effects), list

    def _rewritten(self, target: Target) -> ClosedJaxpr:
        """Return the program with the collectives of `target`, if it has any."""
        if not has_collective(self._jaxpr):
            return self._jaxpr
        return rewrite(self._plan_for(target), target)

    def _plan_for(self, target: Target) -> Plan:
        if self._plan is None:
            self._plan = plan_of(self._jaxpr, target.size, combine=target.combine)
        return self._plan

    def _numbered(self, target: Target) -> Target:
        """Return operations whose messages know their program, and their index in it."""
        places = itertools.count(1)

        def known(
            f: Callable[Concatenate[Collective, P], T],
        ) -> Callable[Concatenate[Collective, P], T]:
            def sent(call: Collective, /, *rest: P.args, **named: P.kwargs) -> T:
                place = next(places)
                return f(call._replace(fingerprint=self._fingerprint, place=place), *rest, **named)

            return sent

        # what is differentiated yet cannot be started: a start has no derivative
        overlap = target.overlap if self._hide else None
        if overlap is not None:
            start, send_ahead, take = overlap.start, overlap.send_ahead, overlap.take
            overlap = overlap._replace(
                start=known(start),
                send_ahead=send_ahead and known(send_ahead),
                take=take and known(take),
            )
        return target._replace(run=known(target.run), overlap=overlap)

    def _comparison(self, transport: Transport) -> Callable[[], None] | None:
        """Return what must compare the program at its start; None where nothing must."""
        if not self._fingerprint:
            return None
        calls = [entry.call for entry in self._entries]
        first = calls[0] if self._entries and self._entries[0].times else None
        return transport.compare(self._fingerprint, first, calls)

    def _with_effects(self, program: ClosedJaxpr, of_transport: frozenset[Hashable]) -> Flat:
        """Return the program as a function, with the effects of its messages inside if they may."""
        effects = set(_jaxcompat.parts(program)[0].effects)
        # Callbacks have effects that must be seen; and without outputs, an effect is what keeps a
        # program from being dropped.
        others = effects - set(of_transport) or not _jaxcompat.parts(program)[0].outvars
        if not self._hide or not effects or others:
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
    """Return the program behind a comparison of its fingerprint."""

    def whole(*xs: jax.Array) -> list[ArrayLike]:
        compare()
        return _jaxcompat.as_function(program)(*xs)

    return make_jaxpr(whole, size, [v.aval for v in _jaxcompat.parts(program)[0].invars])


def _marked(differ: Sequence[bool], outs: Sequence[jax.Array]) -> list[ArrayLike | PerRank]:
    """Return a `PerRank` where the ranks have values of their own, and one array elsewhere."""
    return [PerRank(out) if own else out[0] for own, out in zip(differ, outs, strict=True)]


# a whole program as one primitive without effects

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
# under jax.disable_jit
program_p.def_impl(lambda *xs, program: _jaxcompat.as_function(program.jaxpr)(*xs))
mlir.register_lowering(program_p, _lower)
