"""Equations put into a function that is being traced: as they stand where JAX allows it, or traced again."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax
from jax._src import ad_checkpoint, core, source_info_util
from jax._src.lax.lax import _convert_element_type
from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal
from jax.interpreters import ad
from jax.typing import ArrayLike

from jaxmpi._jaxcompat.jaxprs import AnyJaxpr, parts

try:
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace, DynamicJaxprTracer

    _ = DynamicJaxprTrace.emit_eqn, DynamicJaxprTrace.to_jaxpr_tracer, core.trace_ctx
except (ImportError, AttributeError):  # equations are traced again, which takes longer
    DynamicJaxprTrace = DynamicJaxprTracer = None  # type: ignore[assignment, misc]

__all__ = [
    "as_function",
    "as_weak",
    "at_source",
    "bind",
    "can_keep",
    "keep",
]


# The identities of `_axis` may stand in a linear function, such as the derivative of a mean; JAX
# has no rule for that.
ad.primitive_transposes.setdefault(ad_checkpoint.name_p, lambda cotangent, x, *, name: [cotangent])


def can_keep() -> bool:
    """Whether `keep` need not trace what it keeps."""
    return DynamicJaxprTrace is not None and type(core.trace_ctx.trace) is DynamicJaxprTrace


def keep(eqn: JaxprEqn, args: Sequence[ArrayLike]) -> list[jax.Array]:
    """Put an equation, as it stands, into the function that is being traced, with `args` for its operands.

    Nothing of it is traced again, unless it has effects, or this is no plain trace, as under
    `vmap`, or a JAX in which that is not possible.
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
    """An equation without effects, in a plain trace and inside of the names `around`."""
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
    """Trace an equation again, on `args` and with other `params`."""
    with at_source(eqn):
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params({**eqn.params, **params}))
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def at_source(eqn: JaxprEqn) -> Iterator[None]:
    """What is traced here gets the source line and the context of an equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def as_function(jaxpr: AnyJaxpr) -> Callable[..., list[ArrayLike]]:
    """A jaxpr as a function of arrays. That of `jax.extend.core` turns `jax_debug_nans` off, for the whole thread."""
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
    """The same numbers with a weak type, as Python's numbers have."""
    return _convert_element_type(x, x.dtype, weak_type=True)
