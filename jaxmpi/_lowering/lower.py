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
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS
from jaxmpi._backends import on_axis, packing, primitive
from jaxmpi._backends.base import Backend, Collective
from jaxmpi._backends.simulate import PerRank
from jaxmpi._backends.single import Single
from jaxmpi._backends.within_groups import through_all
from jaxmpi._lowering.classify import has_collective
from jaxmpi._lowering.replication import may_vary
from jaxmpi._lowering.rewrite import Target, rewrite
from jaxmpi._lowering.summary import Entry
from jaxmpi._lowering.trace import make_jaxpr

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    from jaxmpi._backends.xla import Xla

__all__ = ["build"]

Flat = Callable[..., list[ArrayLike]]  # of arrays, to arrays
Finish = Callable[[list[ArrayLike]], list[ArrayLike | PerRank]]
P = ParamSpec("P")
T = TypeVar("T")


def build(
    jaxpr: ClosedJaxpr,
    backend: Backend,
    stacked: Sequence[bool],
    entries: Sequence[Entry],
    fingerprint: int,
    *,
    hide: bool,
) -> tuple[Flat, Finish]:
    """Make a traced program one of `backend`.

    Args:
      jaxpr: of `trace.trace`.
      backend: the ranks.
      stacked: for simulated ranks, which of the arguments each rank has its own of.
      entries: what it sends.
      fingerprint: what the ranks compare, where the transport does; 0 where there is nothing to.
      hide: for MPI, whether its effect may stay inside. Any effect on the outside sends every call
        of a jitted function through Python, at tens of microseconds for each array; but inside of
        another function it is what keeps the order.

    Returns:
      The program, and what is done to its outputs.
    """
    if backend.simulates:
        differ = may_vary(jaxpr, stacked)
        return _simulated(jaxpr, backend, stacked), partial(
            _marked, [own and backend.place.size > 1 for own in differ]
        )
    if not has_collective(jaxpr):
        return _jaxcompat.as_function(jaxpr), list
    if backend.place.size == 1:
        single = Single()
        return _jaxcompat.as_function(rewrite(jaxpr, Target(1, single.run, single.index))), list
    if backend.global_arrays:
        return _on_mesh(jaxpr, cast("Xla", backend)), list
    return _on_mpi(jaxpr, backend, entries, fingerprint, hide), list


def _on_mpi(
    jaxpr: ClosedJaxpr, backend: Backend, entries: Sequence[Entry], fingerprint: int, hide: bool
) -> Flat:
    places = itertools.count(1)

    def known(
        f: Callable[Concatenate[Collective, P], T],
    ) -> Callable[Concatenate[Collective, P], T]:
        """Return a function whose messages know their program, and their index in it."""

        def sent(call: Collective, /, *rest: P.args, **named: P.kwargs) -> T:
            return f(call._replace(fingerprint=fingerprint, place=next(places)), *rest, **named)

        return sent

    def run(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        return primitive.run(call, xs, backend)

    # what is differentiated yet cannot be started: a start has no derivative
    overlap = backend.overlap if hide else None
    if overlap is not None:
        start, send_ahead, take = overlap.start, overlap.send_ahead, overlap.take
        overlap = overlap._replace(
            start=known(start),
            send_ahead=send_ahead and known(send_ahead),
            take=take and known(take),
        )
    program = rewrite(jaxpr, Target(backend.place.size, known(run), backend.index, overlap=overlap))
    if backend.compares_inline and fingerprint and not _compares_itself(entries, backend):
        program = _behind_a_comparison(program, backend, entries, fingerprint)
    effects = set(_jaxcompat.parts(program)[0].effects)
    # Callbacks have effects that must be seen; and without outputs, an effect is what keeps a
    # program from being dropped.
    others = effects - set(backend.effects) or not _jaxcompat.parts(program)[0].outvars
    if not hide or not effects or others:
        return _jaxcompat.as_function(program)
    if not _jaxcompat.can_hide_effects():
        warnings.warn(
            f"This jaxmpi was not tested with jax {jax.__version__}: results are right, but calls "
            "of programs are dispatched more slowly. Update jaxmpi, or use one of jax "
            f"{', '.join(_jaxcompat.TESTED)}.",
            stacklevel=2,
        )
        return _jaxcompat.as_function(program)
    return lambda *xs: program_p.bind(*xs, program=_Program(program))


def _compares_itself(entries: Sequence[Entry], backend: Backend) -> bool:
    """Return whether the first message is unconditional and goes to all ranks, which compare the program with it."""
    return bool(entries and entries[0].times and backend.carries(entries[0].call))


def _behind_a_comparison(
    program: ClosedJaxpr, backend: Backend, entries: Sequence[Entry], fingerprint: int
) -> ClosedJaxpr:
    """The program behind a comparison of its fingerprint.

    After the first call it travels with the next message, if all ranks take part in that. Otherwise
    a rank could wait for those of its group, and these, which have called something else, for all
    ranks.
    """
    later = all(backend.carries(entry.call) for entry in entries)

    def whole(*xs: jax.Array) -> list[ArrayLike]:
        primitive.compare_fingerprint(fingerprint, backend, later=later)
        return _jaxcompat.as_function(program)(*xs)

    return make_jaxpr(
        whole, backend.place.size, [v.aval for v in _jaxcompat.parts(program)[0].invars]
    )


def _on_mesh(jaxpr: ClosedJaxpr, backend: "Xla") -> Flat:
    target = Target(
        backend.place.size,
        packing.run,
        backend.index,
        backend.combines,
        keeps_order=backend.keeps_order,
    )
    program = _jaxcompat.as_function(rewrite(jaxpr, target))
    spec = PartitionSpec()
    return jax.shard_map(
        lambda *xs: program(*xs), mesh=backend.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )


def _simulated(jaxpr: ClosedJaxpr, backend: Backend, stacked: Sequence[bool]) -> Flat:
    def run(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        return (
            through_all(on_axis.run, call, xs, backend.index())
            if call.groups
            else on_axis.run(call, xs)
        )

    program = _jaxcompat.as_function(rewrite(jaxpr, Target(backend.place.size, run, backend.index)))
    axes = tuple(0 if own else None for own in stacked)
    return jax.vmap(program, in_axes=axes, axis_name=AXIS, axis_size=backend.place.size)


def _marked(differ: Sequence[bool], outs: Sequence[jax.Array]) -> list[ArrayLike | PerRank]:
    """`PerRank` where the ranks have their own values, and one array where they don't."""
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
