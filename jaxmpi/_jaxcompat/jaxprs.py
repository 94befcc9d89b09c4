"""Jaxprs: their parts, constants, effects, and edited copies.

jax 0.12 has one class of jaxpr; earlier versions have an open and a closed one.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import jax
from jax._src import core, effects, util
from jax._src.interpreters import partial_eval
from jax._src.state.types import AbstractRef
from jax.core import AbstractValue, Atom
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
J = TypeVar("J", bound=AnyJaxpr)
F = TypeVar("F", bound=Callable[..., object])


def parts(jaxpr: AnyJaxpr) -> tuple[Jaxpr, Sequence[ArrayLike]]:
    """Return (open jaxpr, constants) of a jaxpr of either class."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", None) or ()


def closed(traced: jax.stages.Traced) -> ClosedJaxpr | None:
    """Return a traced jaxpr with the arrays that the function captures as its constants.

    It is None if this JAX has changed.
    """
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
    """Cache the results of a function of a jaxpr, its first argument, while the jaxpr lives.

    A JAX without such a cache calls the function each time.
    """
    try:
        return util.weakref_lru_cache(function, trace_context_in_key=False)  # type: ignore[no-any-return]
    except (AttributeError, TypeError):
        return function


def with_equations(jaxpr: J, eqns: Sequence[JaxprEqn], outvars: Sequence[Atom] | None = None) -> J:
    """Return a copy of a jaxpr with other equations and, if given, other output variables."""
    inner, _ = parts(jaxpr)
    edited = inner.replace(
        eqns=list(eqns), outvars=list(inner.outvars if outvars is None else outvars)
    )
    return edited if inner is jaxpr else jaxpr.replace(jaxpr=edited)


def behind(jaxpr: J, function: Callable[[], None]) -> J:
    """Return a copy of a jaxpr with the equations of a function without arguments before its own.

    The function uses no arrays from outside. The effects of its equations are those of the jaxpr,
    or of another branch beside it.
    """
    before, _ = parts(jax.make_jaxpr(function)())
    return with_equations(jaxpr, [*before.eqns, *parts(jaxpr)[0].eqns])


def new_variable(like: Var) -> Var:
    """Return a new variable of the type of another one."""
    return Var(like.aval)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many are carries."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def axis_effect(name: str) -> Hashable:
    """Return the effect of a jaxpr that requires a bound axis of this name."""
    return core.NamedAxisEffect(name)


def is_axis_effect(effect: Hashable) -> bool:
    """Return whether an effect only requires a bound axis."""
    return isinstance(effect, core.NamedAxisEffect)


def needs_one_device(effect: Hashable) -> bool:
    """Return whether JAX supports an effect, such as an ordered print, on one device only."""
    ordered, shardable = (
        effects.ordered_effects,
        getattr(effects, "shardable_ordered_effects", None),
    )
    return ordered.contains(effect) and not (shardable and shardable.contains(effect))


def with_axis_renamed(jaxpr: J, old: str, new: str) -> J:
    """Return a copy of a jaxpr with collectives over axis `new` instead of `old`, at all depths.

    The derivative rules of custom functions are Python functions, and still use the old name.
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
    """Return whether a type is that of a reference, as `jax.new_ref` returns, not of an array."""
    return isinstance(aval, AbstractRef)


def has_forward_rule(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call of a `jax.custom_jvp` function."""
    return "jvp_jaxpr_fun" in eqn.params


def has_reverse_rule(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call of a `jax.custom_vjp` function."""
    return "fwd_jaxpr_thunk" in eqn.params


def definition(eqn: JaxprEqn) -> str:
    """Return name, file and line of the function that a call with a derivative rule calls.

    It is "" in a JAX that does not tell.
    """
    inner, _ = parts(eqn.params["call_jaxpr"])
    return str(getattr(getattr(inner, "debug_info", None), "func_src_info", "") or "")


def may_have_rule(jaxpr: Jaxpr) -> bool:
    """Return whether JAX lets a function with these effects have derivative rules."""
    return not effects.custom_derivatives_allowed_effects.filter_not_in(jaxpr.effects)
