"""Order of messages in a program: an effect of jaxmpi, and modules that create its tokens."""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax._src import core
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.ffi import ffi_lowering
from jax.interpreters import mlir
from jax.lax import cond_p, while_p

from jaxmpi._jaxcompat.jaxprs import parts
from jaxmpi._jaxcompat.lanes import has_lanes, with_scalar_predicate
from jaxmpi._jaxcompat.retrace import as_function

if TYPE_CHECKING:
    from jaxlib.mlir import ir

try:
    from jax._src import effects
    from jax._src.interpreters.mlir import TokenSet
except ImportError:
    # a JAX in which they moved: programs keep their effects, and are dispatched more slowly
    effects = TokenSet = None  # type: ignore[assignment, misc]

try:
    from jax._src.interpreters.mlir import ir_consts, jaxpr_subcomp

    if not {"dim_var_values", "const_lowering", "outer_traceback"} <= set(
        inspect.signature(jaxpr_subcomp).parameters
    ):
        jaxpr_subcomp = None
except ImportError:  # programs are traced again to be lowered, which takes longer
    jaxpr_subcomp = None  # type: ignore[assignment]

try:
    from jax._src.interpreters.mlir import _lowerings as lowerings
except ImportError:  # branches and loops are lowered as they are
    lowerings = {}


def can_hide_effects() -> bool:
    """Return whether this JAX has what `lower_with_tokens` needs."""
    return TokenSet is not None


@functools.cache
def ordered_effect() -> Hashable:
    """Return the JAX effect that keeps calls of a primitive in program order.

    The order also holds from one program to the next.
    """

    class InOrder(effects.Effect):  # type: ignore[misc]
        __str__ = lambda self: "jaxmpi"

    kinds = (effects.ordered_effects, effects.lowerable_effects)
    for allowed in (
        *kinds,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
    ):
        allowed.add_type(InOrder)
    return allow_in_checkpoint(InOrder())


def allow_in_checkpoint(effect: Hashable) -> Hashable:
    """Allow an effect inside `jax.checkpoint`, and return it.

    `jax.checkpoint` may run its primitives again; that is safe, because all ranks do.
    """
    if effects is not None:
        effects.remat_allowed_effects.add_type(type(effect))
    return effect


def ffi_call_in_order(
    ctx: mlir.LoweringRuleContext,
    name: str,
    xs: Sequence["ir.Value"],
    effect: Hashable,
    in_place: Mapping[int, int],
    attributes: Mapping[str, object],
) -> list["ir.Value"]:
    """Lower a primitive with an ordered effect to an FFI call behind the call before it.

    Args:
      ctx: the context of the lowering rule.
      name: the name of the FFI target.
      xs: the operands.
      effect: the ordered effect.
      in_place: for an operand's number, the number of the result that reuses its memory.
      attributes: the attributes of the FFI call.
    """
    lower = ffi_lowering(name, operand_output_aliases=dict(in_place), has_side_effect=True)
    avals_in, avals_out = ((*avals, core.abstract_token) for avals in (ctx.avals_in, ctx.avals_out))
    *outs, token = lower(
        ctx.replace(avals_in=avals_in, avals_out=avals_out),
        *xs,
        ctx.tokens_in.get(effect),
        **attributes,
    )
    ctx.set_tokens_out(mlir.TokenSet({effect: token}))
    return outs


def lower_with_tokens(
    ctx: mlir.LoweringRuleContext, *args: "ir.Value", jaxpr: ClosedJaxpr
) -> Sequence["ir.Value"]:
    """Lower a program with ordered effects into a module that creates its own tokens.

    No effect shows outside, so JAX dispatches the program from C++.
    """
    inner, consts = parts(jaxpr)
    tokens = TokenSet.create(list(effects.ordered_effects.filter_in(inner.effects)))
    if not _lowers_as_it_is(inner):
        return mlir.lower_fun(as_function(jaxpr))(
            ctx.replace(tokens_in=tokens, tokens_out=None), *args
        )
    module = (
        ctx.module_context
        if ctx.platforms is None
        else ctx.module_context.replace(platforms=ctx.platforms)
    )
    numbers = ir_consts(consts, [v.aval for v in inner.constvars])
    given = {name: getattr(ctx, name) for name in ("dim_var_values", "const_lowering")}
    outs, _ = jaxpr_subcomp(
        module, inner, ctx.name_stack, tokens, numbers, *args, outer_traceback=None, **given
    )
    return outs


def _lowers_as_it_is(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr needs no second trace to be lowered: no references or high types."""
    plain = all(
        isinstance(effect, core.NamedAxisEffect) or effects.ordered_effects.contains(effect)
        for effect in jaxpr.effects
    )
    return jaxpr_subcomp is not None and plain and not getattr(jaxpr, "is_high", False)


def rewrite_branches(
    rewrite: Callable[[Sequence[ClosedJaxpr]], Sequence[ClosedJaxpr]],
    before_loop: Callable[[ClosedJaxpr], Callable[[], None] | None],
) -> None:
    """Change how `lax.cond` and `lax.while_loop` with effects are lowered, from now on.

    The last functions that were given are used. A JAX in which the rules have moved lowers both as
    they are.

    Args:
      rewrite: returns the branches of a `lax.cond` as they are lowered.
      before_loop: returns what a program calls before a loop with this body; None for nothing.
    """
    rule_of_cond, rule_of_while = _rule(cond_p), _rule(while_p)
    if rule_of_cond is None or rule_of_while is None:
        return

    def lower_cond(
        ctx: mlir.LoweringRuleContext, *args: "ir.Value", **params: Any
    ) -> Sequence["ir.Value"]:
        branches = params.get("branches", ())
        if any(branch.effects for branch in branches):
            params["branches"] = tuple(rewrite(branches))
        return rule_of_cond(ctx, *args, **params)

    def lower_while(
        ctx: mlir.LoweringRuleContext, *args: "ir.Value", **params: Any
    ) -> Sequence["ir.Value"]:
        if _needs_scalar_predicate(params):
            # Its loop has a scalar predicate, and comes back to this rule.
            by_all_lanes = mlir.lower_fun(lambda *xs: with_scalar_predicate(params, xs))
            return by_all_lanes(ctx, *args)
        body = params.get("body_jaxpr")
        call = before_loop(body) if body is not None and body.effects else None
        if call is None:
            return rule_of_while(ctx, *args, **params)
        # the call, then the loop with the tokens of the call
        first = ctx.replace(avals_in=(), avals_out=(), tokens_out=None)
        mlir.lower_fun(lambda: (call(), [])[1])(first)
        then = ctx.replace(tokens_in=first.tokens_out, tokens_out=None)
        outs = rule_of_while(then, *args, **params)
        ctx.set_tokens_out(then.tokens_out)
        return outs

    mlir.register_lowering(cond_p, lower_cond)
    mlir.register_lowering(while_p, lower_while)


def _needs_scalar_predicate(params: Mapping[str, Any]) -> bool:
    """Return whether a `while` equation has ordered effects in its condition, and lanes.

    That is a predicate for each lane. JAX lowers such a loop so that lanes that are done compute
    on.
    """
    condition = params.get("cond_jaxpr")
    if condition is None or effects is None:
        return False
    return bool(effects.ordered_effects.filter_in(condition.effects)) and has_lanes(params)


@functools.cache
def _rule(primitive: Primitive) -> Callable[..., Sequence["ir.Value"]] | None:
    """Return JAX's own rule that lowers a primitive, as it was before `rewrite_branches`."""
    return getattr(lowerings.get(primitive), "rule", None)
