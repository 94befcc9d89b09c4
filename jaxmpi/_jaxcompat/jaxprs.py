"""Jaxprs, and what stands in them: jax 0.12 has one class where there were two."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import jax
from jax._src import core, effects, util
from jax._src.interpreters import partial_eval
from jax._src.state.types import AbstractRef
from jax.core import AbstractValue, Atom
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

__all__ = [
    "AnyJaxpr",
    "axis_effect",
    "closed",
    "is_axis_effect",
    "is_reference",
    "kept_with_jaxpr",
    "needs_one_device",
    "new_variable",
    "parts",
    "scan_counts",
    "with_axis_renamed",
    "with_equations",
]

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
J = TypeVar("J", bound=AnyJaxpr)
F = TypeVar("F", bound=Callable[..., object])


def parts(jaxpr: AnyJaxpr) -> tuple[Jaxpr, Sequence[ArrayLike]]:
    """An open jaxpr and its constants, of either class; jax 0.12 has one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", None) or ()


def closed(traced: jax.stages.Traced) -> ClosedJaxpr | None:
    """What was traced, with the arrays that the function has from outside as its constants; None where this JAX has changed."""
    try:
        if not traced._consts:
            return traced.jaxpr
        if hasattr(traced.jaxpr, "with_consts"):  # jax 0.12
            return traced.jaxpr.with_consts(traced._consts)
        inner = partial_eval.convert_invars_to_constvars(traced.jaxpr.jaxpr, len(traced._consts))
        return ClosedJaxpr(inner, traced._consts)
    except (AttributeError, TypeError):
        return None


def kept_with_jaxpr(function: F) -> F:
    """Keep what a function says of a jaxpr, its first argument, as long as that lives; some JAX has no such cache."""
    try:
        return util.weakref_lru_cache(function, trace_context_in_key=False)  # type: ignore[no-any-return]
    except (AttributeError, TypeError):
        return function


def with_equations(jaxpr: J, eqns: Sequence[JaxprEqn], outvars: Sequence[Atom] | None = None) -> J:
    """The same jaxpr with other equations, and other variables for its outputs."""
    inner, _ = parts(jaxpr)
    edited = inner.replace(
        eqns=list(eqns), outvars=list(inner.outvars if outvars is None else outvars)
    )
    return edited if inner is jaxpr else jaxpr.replace(jaxpr=edited)


def new_variable(like: Var) -> Var:
    """Return a variable of the type of another one."""
    return Var(like.aval)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many its carry; the rest it scans over."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def axis_effect(name: str) -> Hashable:
    """The effect that says that an axis of this name must be bound."""
    return core.NamedAxisEffect(name)


def is_axis_effect(effect: Hashable) -> bool:
    """Whether it says no more than that an axis must be bound."""
    return isinstance(effect, core.NamedAxisEffect)


def needs_one_device(effect: Hashable) -> bool:
    """Return whether JAX keeps the order of this effect in programs of one device only, as that of an ordered print."""
    ordered, shardable = (
        effects.ordered_effects,
        getattr(effects, "shardable_ordered_effects", None),
    )
    return ordered.contains(effect) and not (shardable and shardable.contains(effect))


def with_axis_renamed(jaxpr: J, old: str, new: str) -> J:
    """The same jaxpr whose collectives over the axis `old` are over `new`, in its loops and calls, too.

    The derivative rules of custom functions are Python functions, and still name the old axis.
    """
    inner, _ = parts(jaxpr)
    eqns = []
    for eqn in inner.eqns:
        params = dict(eqn.params)
        for key, value in eqn.params.items():
            if key in ("axes", "axis_name"):
                params[key] = _renamed(value, old, new)
            elif hasattr(value, "eqns"):
                params[key] = with_axis_renamed(value, old, new)
            elif isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
                items = [
                    with_axis_renamed(item, old, new) if hasattr(item, "eqns") else item
                    for item in value
                ]
                params[key] = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        eqns.append(eqn.replace(params=params, effects=_renamed_effects(eqn.effects, old, new)))
    edited = inner.replace(eqns=eqns, effects=_renamed_effects(inner.effects, old, new))
    return edited if inner is jaxpr else jaxpr.replace(jaxpr=edited)


def _renamed(axes: object, old: str, new: str) -> object:
    if isinstance(axes, tuple | list | frozenset):
        return type(axes)(new if axis == old else axis for axis in axes)
    return new if axes == old else axes


def _renamed_effects(effects: Iterable[Hashable], old: str, new: str) -> frozenset[Hashable]:
    return frozenset(
        axis_effect(new) if effect == axis_effect(old) else effect for effect in effects
    )


def is_reference(aval: AbstractValue) -> bool:
    """Whether it is the type of a reference, as `jax.new_ref` makes them, and not of an array."""
    return isinstance(aval, AbstractRef)
