"""Trace a function to a jaxpr in which every collective is at the top or in a loop.

jaxpr = jax.make_jaxpr(function)     with the named axes bound
inlined = inline calls around collectives; sub-axes -> groups within AXIS; broadcast -> sum
program = apply_exactly(inlined)     where it adds an update of `update_to`
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
from jax import lax
from jax.core import Atom, ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import BRANCHES_AND_LOOPS, Role, involves_ranks, role
from jaxmpi._analysis.inner_jaxprs import callee, map_subjaxprs, subjaxprs, substituted
from jaxmpi._analysis.primitives import op_of, properties
from jaxmpi._analysis.text import is_note, parameters
from jaxmpi._axis import AXIS
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.collectives import broadcast, coordinate, has_groups, over_all_ranks
from jaxmpi._lowering.exact_updates import apply_exactly, has_updates, is_update
from jaxmpi._lowering.loops import batched_predicate
from jaxmpi._lowering.refuse import refuse_meshes, with_clear_errors

__all__ = [
    "Env",
    "Traced",
    "evaluate",
    "inline_traced",
    "inlined",
    "is_local",
    "make_jaxpr",
    "make_jaxpr_over",
    "trace",
]


class Traced(NamedTuple):
    """A traced function.

    Attributes:
      program: the function as a program.
      captured: the arrays that it captured from outside, which are the first arguments of the
        program.
      parameters: the parameters of jaxmpi's functions in it, as `text.parameters` does.
      function: the function as it was traced, with its derivative rules.
    """

    program: ClosedJaxpr
    captured: Sequence[ArrayLike]
    parameters: list[tuple[str, str]]
    function: Jaxpr


Aval: TypeAlias = ShapedArray | jax.ShapeDtypeStruct  # shape and dtype of an argument


def trace(
    function: Callable[..., Sequence[ArrayLike]], axes: Mapping[str, int], avals: Sequence[Aval]
) -> Traced:
    """Trace a function of flat arrays with the axes bound, and inline calls with a collective.

    Args:
      function: of arrays like `avals`.
      axes: the names of the axes and their sizes, with AXIS among them. The program that is
        returned has only AXIS.
      avals: shape and dtype of each argument.

    Raises:
      NameError, NotImplementedError, TypeError, ValueError: the function uses a collective that is
        not supported, with its source line.
    """
    return inline_traced(make_jaxpr_over(axes, with_clear_errors(function, axes), avals), axes)


def inline_traced(traced: ClosedJaxpr, axes: Mapping[str, int]) -> Traced:
    """Inline a function that is already traced with the axes bound; return what `trace` does."""
    inner, captured = _jaxcompat.parts(traced)
    if axes[AXIS] > 1:
        refuse_meshes(inner)
    notes = [*parameters(inner)]
    if not captured:
        traced = _without_notes(traced)
    updates = has_updates(traced)
    if captured or updates or _needs_inlining(traced):
        # Captured arrays become arguments, so that they are no constants of the program.
        arguments = [v.aval for v in (*inner.constvars, *inner.invars)]
        traced = make_jaxpr(
            lambda *args: _inline(inner, axes, *args, jits=updates), axes[AXIS], arguments
        )
    return Traced(apply_exactly(traced), captured, notes, inner)


def make_jaxpr(
    function: Callable[..., Sequence[ArrayLike]], size: int, avals: Sequence[Aval]
) -> ClosedJaxpr:
    """Trace a function of arrays like `avals` with AXIS bound to `size` ranks."""
    return make_jaxpr_over({AXIS: size}, function, avals)


def make_jaxpr_over(
    axes: Mapping[str, int], function: Callable[..., object], avals: Sequence[Aval]
) -> ClosedJaxpr:
    """Trace a function of arrays like `avals` with the axes of these names and sizes bound."""
    structs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
        if isinstance(a, ShapedArray)
        else a
        for a in avals
    ]
    return jax.make_jaxpr(function, axis_env=[*axes.items()])(*structs)


def inlined(jaxpr: AnyJaxpr, axes: Mapping[str, int], *, jits: bool = False) -> ClosedJaxpr:
    """Return the program over AXIS alone, with calls around collectives inlined.

    `jits` is as in `_inline`.
    """
    avals = [v.aval for v in _jaxcompat.parts(jaxpr)[0].invars]
    return make_jaxpr(lambda *args: _inline(jaxpr, axes, *args, jits=jits), axes[AXIS], avals)


def _without_notes(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program without the notes at its top, which are identities.

    A note records a parameter of a function of jaxmpi (`text.parameters`).
    """
    inner, _ = _jaxcompat.parts(jaxpr)
    replacements: dict[Var, Atom] = {}  # for the result of each note, its operand
    eqns = []
    for eqn in inner.eqns:
        invars = substituted(eqn.invars, replacements)
        if is_note(eqn):
            replacements[eqn.outvars[0]] = invars[0]
        else:
            eqns.append(eqn.replace(invars=invars) if replacements else eqn)
    if not replacements:
        return jaxpr
    return _jaxcompat.with_equations(jaxpr, eqns, substituted(inner.outvars, replacements))


def is_local(jaxpr: ClosedJaxpr) -> bool:
    """Return whether nothing in a program has to do with the ranks: plain JAX can run it."""
    return not involves_ranks(jaxpr) and not _needs_inlining(jaxpr)


@_jaxcompat.kept_with_jaxpr
def _needs_inlining(jaxpr: AnyJaxpr) -> bool:
    """Return whether `_inline` would change a program, because of a call, a broadcast or a note."""
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        role_of_eqn = role(eqn)
        if role_of_eqn in (Role.CALL, Role.BROADCAST) or is_note(eqn) or batched_predicate(eqn):
            return True
        if role_of_eqn in (Role.RANK, Role.COLLECTIVE, Role.SEND_AHEAD) and has_groups(eqn):
            return True
        if role_of_eqn is Role.CONTROL_FLOW and any(map(_needs_inlining, subjaxprs(eqn))):
            return True
    return False


def _inline(
    jaxpr: AnyJaxpr, axes: Mapping[str, int], *args: ArrayLike, jits: bool = False
) -> list[ArrayLike]:
    """Evaluate a program, with the calls that contain a collective inlined.

    With `jits`, calls of `jax.jit` without a collective are inlined, too, because `apply_exactly`
    finds an update and the sum that adds it only in the same jaxpr.
    """

    def step(eqn: JaxprEqn, xs: list[ArrayLike]) -> list[ArrayLike]:
        match role(eqn):
            case Role.CALL:
                # The backward pass of `jax.checkpoint`. Without the barrier, XLA would find that
                # the forward pass computes the same, and undo the rematerialization.
                if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                    xs = lax.optimization_barrier(xs)
                with _jaxcompat.at_source(eqn):
                    jaxpr, operands = callee(eqn, xs)
                    return _inline(jaxpr, axes, *operands, jits=jits)
            case Role.CONTROL_FLOW:
                inside = map_subjaxprs(eqn, lambda inner: inlined(inner, axes, jits=jits))
                if batched_predicate(eqn):
                    with _jaxcompat.at_source(eqn):
                        return _jaxcompat.with_scalar_predicate({**eqn.params, **inside}, xs)
                return _jaxcompat.bind(eqn, xs, **inside)
            case Role.BROADCAST:
                with _jaxcompat.at_source(eqn):
                    return [broadcast(eqn, xs[0], axes)]
            case Role.RANK if has_groups(eqn):
                with _jaxcompat.at_source(eqn):
                    return [coordinate(eqn, axes)]
            case Role.COLLECTIVE | Role.SEND_AHEAD if has_groups(eqn):
                return over_all_ranks(eqn, xs, axes)
            case Role.LOCAL if jits and _is_jit(eqn) and not is_update(eqn):
                with _jaxcompat.at_source(eqn):
                    return _inline(eqn.params["jaxpr"], axes, *xs, jits=jits)
            case Role.LOCAL if (
                jits and op_of(eqn) in BRANCHES_AND_LOOPS and any(map(has_updates, subjaxprs(eqn)))
            ):
                return _jaxcompat.bind(
                    eqn, xs, **map_subjaxprs(eqn, lambda inner: inlined(inner, axes, jits=jits))
                )
            case _:
                return xs if is_note(eqn) else _jaxcompat.keep(eqn, xs)

    return evaluate(jaxpr, step, *args)


def _is_jit(eqn: JaxprEqn) -> bool:
    return properties(eqn.primitive.name).is_jit


class Env:
    """The values of a jaxpr's variables while it is evaluated; called to read some of them."""

    def __init__(self, jaxpr: AnyJaxpr, args: Sequence[ArrayLike]) -> None:
        inner, consts = _jaxcompat.parts(jaxpr)
        # The constants are those of the jaxpr, unless they are the first arguments.
        if len(args) == len(inner.invars):
            args = (*consts, *args)
        self.values = dict(zip((*inner.constvars, *inner.invars), args, strict=True))
        self.outvars = inner.outvars

    def __call__(self, atoms: Sequence[Atom]) -> list[ArrayLike]:
        """Return the values of variables and literals."""
        return [atom.val if isinstance(atom, Literal) else self.values[atom] for atom in atoms]

    def outs(self) -> list[ArrayLike]:
        """Return the outputs, as weak in type as the jaxpr has them.

        What stands for an equation may give another weak type than the equation: a collective of
        ours keeps that of its operand, and a literal has lost its own.
        """
        outs = self(self.outvars)
        for i, (x, v) in enumerate(zip(outs, self.outvars, strict=True)):
            weak = getattr(v.aval, "weak_type", None)
            if isinstance(v, Literal) or weak in (None, getattr(jax.typeof(x), "weak_type", None)):
                continue
            outs[i] = _jaxcompat.as_weak(x) if weak else lax.convert_element_type(x, v.aval.dtype)
        return outs

    def write(self, eqn: JaxprEqn, outs: Sequence[ArrayLike]) -> None:
        """Set the values of an equation's results."""
        self.values.update(zip(eqn.outvars, outs, strict=True))


def evaluate(
    jaxpr: AnyJaxpr,
    step: Callable[[JaxprEqn, list[ArrayLike]], Sequence[ArrayLike]],
    *args: ArrayLike,
) -> list[ArrayLike]:
    """Evaluate a jaxpr with `step(eqn, operands) -> results` for each equation."""
    env = Env(jaxpr, args)
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        env.write(eqn, step(eqn, env(eqn.invars)))
    return env.outs()
