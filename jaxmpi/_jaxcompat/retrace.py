"""Equations put into a function that is being traced, unchanged if JAX allows it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax
from jax._src import core, source_info_util
from jax._src.lax.lax import _convert_element_type
from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal
from jax.typing import ArrayLike

from jaxmpi._jaxcompat.jaxprs import AnyJaxpr, parts

try:
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace, DynamicJaxprTracer

    _ = DynamicJaxprTrace.emit_eqn, DynamicJaxprTrace.to_jaxpr_tracer, core.trace_ctx
except (ImportError, AttributeError):  # equations are traced again, which takes longer
    DynamicJaxprTrace = DynamicJaxprTracer = None  # type: ignore[assignment, misc]


def can_keep() -> bool:
    """Return whether `keep` adds equations without tracing them again."""
    return DynamicJaxprTrace is not None and type(core.trace_ctx.trace) is DynamicJaxprTrace


def keep(eqn: JaxprEqn, args: Sequence[ArrayLike]) -> list[jax.Array]:
    """Add an equation, with `args` as its operands, to the function that is being traced.

    The equation is traced again only if it has effects, in a trace such as that of `vmap`, or in a
    JAX that cannot add equations.
    """
    if eqn.effects or not can_keep():
        return bind(eqn, args)
    return _emit(core.trace_ctx.trace, source_info_util.current_name_stack(), eqn, args)


def _emit(
    trace: "DynamicJaxprTrace",
    around: source_info_util.NameStack,
    eqn: JaxprEqn,
    args: Sequence[ArrayLike],
) -> list[jax.Array]:
    """Add an equation without effects to a plain trace, inside of the names `around`."""
    source = (
        eqn.source_info.replace(name_stack=around + eqn.source_info.name_stack)
        if len(around)
        else eqn.source_info
    )
    operands = []
    for v, x in zip(eqn.invars, args, strict=True):
        if isinstance(v, Literal):
            operands.append(DynamicJaxprTracer(trace, v.aval, v, source))
        elif isinstance(x, core.Tracer):
            operands.append(x if x._trace is trace else trace.to_jaxpr_tracer(x, source))
        else:  # a number in its place now
            return bind(eqn, args)
    return list(
        trace.emit_eqn(
            operands,
            [v.aval for v in eqn.outvars],
            eqn.primitive,
            eqn.params,
            eqn.effects,
            source,
            eqn.ctx,
        )
    )


def bind(eqn: JaxprEqn, args: Sequence[ArrayLike], **params: object) -> list[jax.Array]:
    """Trace an equation again with `args` as its operands and some other parameters."""
    with at_source(eqn):
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params({**eqn.params, **params}))
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def at_source(eqn: JaxprEqn) -> Iterator[None]:
    """Give the source line and the context of an equation to everything traced in the block."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def as_function(jaxpr: AnyJaxpr) -> Callable[..., list[ArrayLike]]:
    """Return a jaxpr as a function of arrays.

    The one of `jax.extend.core` turns off `jax_debug_nans` for the whole thread.
    """
    inner, consts = parts(jaxpr)

    def function(*args: ArrayLike) -> list[ArrayLike]:
        if not can_keep():
            return list(core.eval_jaxpr(inner, consts, *args))
        values = dict(zip((*inner.constvars, *inner.invars), (*consts, *args), strict=True))
        trace, around = core.trace_ctx.trace, source_info_util.current_name_stack()

        def read(atoms: Sequence[Atom]) -> list[ArrayLike]:
            return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]

        for eqn in inner.eqns:
            xs = read(eqn.invars)
            values.update(
                zip(
                    eqn.outvars,
                    bind(eqn, xs) if eqn.effects else _emit(trace, around, eqn, xs),
                    strict=True,
                )
            )
        return read(inner.outvars)

    return function


def as_weak(x: jax.Array) -> jax.Array:
    """Return an array with a weak type, as Python numbers have."""
    return _convert_element_type(x, x.dtype, weak_type=True)
