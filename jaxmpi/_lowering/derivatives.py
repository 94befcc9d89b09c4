"""Derivatives of a program that another traced function differentiates: jax.grad(jaxmpi.jit(f)).

A program keeps the calls of its function that have nothing to do with the ranks, with their
derivative rules: JAX differentiates such a program by itself. But the calls around a collective are
inlined, so the program has lost their rules: those of `jax.custom_jvp`, `jax.custom_vjp` and
`custom_linear_solve`. It has also lost the rule of a broadcast on several ranks, which has become a
sum of bits. And a rule with a collective needs the axes, which are bound inside of the program
alone. Then the program gets a rule that uses the function as it was traced:

    the derivative of a program is the program of the function's derivative

It is built when JAX asks for it, with the axes bound, and so is the one of that program, for higher
derivatives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn
from jax.tree_util import Partial, PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import Role, involves_ranks, role
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.collectives import is_among_several
from jaxmpi._lowering.trace import evaluate, make_jaxpr_over

__all__ = ["FlatFunction", "with_derivatives"]

FlatFunction: TypeAlias = Callable[..., Sequence[ArrayLike]]  # from arrays to arrays
Array: TypeAlias = jax.Array
Differentiate: TypeAlias = Callable[..., tuple[Any, Callable[..., Any]]]


class Lower(Protocol):
    """Makes programs of derivatives."""

    def __call__(
        self, function: FlatFunction, types: Sequence[ShapedArray], *, is_forward: bool
    ) -> FlatFunction:
        """Trace a function of arrays of these types, with the axes bound, and lower it.

        Args:
          function: the function.
          types: of its arguments.
          is_forward: whether it runs instead of the program, so that the ranks compare it as they
            would the program.
        """


class Rules(Enum):
    """Derivative rules of a function that its program has lost."""

    NONE = auto()
    CUSTOM_JVP = auto()  # of `jax.custom_jvp` alone
    CUSTOM_VJP = auto()  # at least one that is for reverse mode, or for its transposition


def rules_in(function: Jaxpr, axes: Mapping[str, int]) -> Rules:
    """Return which derivative rules a traced function has that its program has lost.

    Args:
      function: the function.
      axes: the names of the axes and their sizes.
    """
    found = Rules.NONE
    for eqn in _with_lost_rules(function, axes, frozenset(), set()):
        if not _jaxcompat.has_forward_rule(eqn):
            return Rules.CUSTOM_VJP
        found = Rules.CUSTOM_JVP
    return found


def _with_lost_rules(
    jaxpr: AnyJaxpr, axes: Mapping[str, int], within: frozenset[str], seen: set[int]
) -> Iterator[JaxprEqn]:
    """Yield the equations, at all depths, whose derivative rules a program loses.

    Args:
      jaxpr: of the function.
      axes: as in `rules_in`.
      within: the functions in whose rules the jaxpr is, as `_jaxcompat.definition` returns them.
      seen: ids of jaxprs to leave out; the others are added.
    """
    inner, _ = _jaxcompat.parts(jaxpr)
    if id(inner) in seen:
        return
    seen.add(id(inner))
    for eqn in inner.eqns:
        op = op_of(eqn)
        is_custom = _jaxcompat.has_forward_rule(eqn) or _jaxcompat.has_reverse_rule(eqn)
        if op is Op.BROADCAST:
            if is_among_several(eqn, axes):
                yield eqn
        elif op is Op.LINEAR_SOLVE or is_custom:
            # The rule of a linear solve consists of its jaxprs, which are gone through below. Any
            # other rule is a Python function, which has to be traced.
            is_inlined = role(eqn) is Role.CALL
            if not is_inlined and not (is_custom and _rule_involves_ranks(eqn, axes, within)):
                continue  # it is kept, and its own rule stands for those inside of it
            yield eqn
        for inside in subjaxprs(eqn):
            yield from _with_lost_rules(inside, axes, within, seen)


def _rule_involves_ranks(eqn: JaxprEqn, axes: Mapping[str, int], within: frozenset[str]) -> bool:
    """Return whether the rule of a call communicates, or asks for the rank's number.

    The rule is traced here; JAX keeps that of a `jax.custom_jvp` for when it differentiates.
    """
    name = _jaxcompat.definition(eqn)
    types = [v.aval for v in eqn.invars]
    # The first operands are constants, for which there is no rule.
    start = eqn.params.get("num_consts", 0)
    live = [i for i, x in enumerate(types) if i >= start and _has_derivative(x)]
    if name in within or not live:  # the rule of `jax.nn.relu` calls `jax.nn.relu`
        return False

    def derivative(*xs: Array) -> object:
        def function(*some: Array) -> list[Array]:
            outs = _jaxcompat.bind(eqn, _with_items(xs, live, some))
            return [y for y in outs if _has_derivative(y)]

        primals = [xs[i] for i in live]
        if _jaxcompat.has_forward_rule(eqn):
            return jax.jvp(function, primals, primals)
        ys, pullback = jax.vjp(function, *primals)
        return pullback(ys)

    try:
        rule = make_jaxpr_over(axes, derivative, types)
        if involves_ranks(rule):
            return True
    except Exception:  # JAX raises it where the rule is used, if it is
        return False
    return any(True for _ in _with_lost_rules(rule, axes, within | {name}, set()))


def with_derivatives(
    program: FlatFunction,
    function: Jaxpr,
    axes: Mapping[str, int],
    lower: Lower,
    *,
    can_lower: bool,
    title: str,
) -> FlatFunction:
    """Return a program with the derivatives of its function.

    Args:
      program: of arrays.
      function: the function as it was traced, whose constants are the first arguments of `program`.
      axes: the names of the axes and their sizes.
      lower: makes programs of derivatives.
      can_lower: whether it can do so for these arguments; it cannot for those of simulated ranks.
      title: the name of the function, for an error.
    """
    rules = rules_in(function, axes)
    if rules is Rules.NONE:
        return program
    if not can_lower:
        return _without_derivatives(program, title, "for arguments that are jaxmpi.PerRank")
    if any(_jaxcompat.is_reference(v.aval) for v in (*function.constvars, *function.invars)):
        return _without_derivatives(program, title, "beside references (jax.new_ref)")
    if not _jaxcompat.may_have_rule(function):
        return _without_derivatives(program, title, "beside callbacks and other effects")
    both = _Differentiable(program, function, lower)
    return both.forward() if rules is Rules.CUSTOM_JVP else both.reverse()


def _without_derivatives(program: FlatFunction, title: str, cause: str) -> FlatFunction:
    """Return a program that raises where it is differentiated."""

    @jax.custom_jvp
    def inputs(*xs: Array) -> tuple[Array, ...]:
        return xs

    @inputs.defjvp
    def raise_error(*_: object) -> None:
        raise RuntimeError(
            f"jaxmpi.jit: the derivative of {title} is taken outside of it. It has a derivative "
            "rule around a collective, or with one, such as that of a jax.custom_vjp or of "
            f"jaxmpi.tree_bcast, which cannot be used outside {cause}. Put the jax.grad inside "
            "of the jaxmpi.jit."
        )

    return lambda *xs: program(*inputs(*xs)) if xs else program()


def _with_items(xs: Sequence[Array], indices: Sequence[int], items: Sequence[Array]) -> list[Array]:
    """Return `xs` with other items at these indices."""
    changed = [*xs]
    for i, x in zip(indices, items, strict=True):
        changed[i] = x
    return changed


class _Differentiable:
    """A program, and the function whose derivatives it gets.

    "Live" are the arguments with respect to which JAX differentiates, by their indices.

    Args:
      program: of arrays.
      function: the function as it was traced.
      lower: as in `with_derivatives`.
    """

    def __init__(self, program: FlatFunction, function: Jaxpr, lower: Lower) -> None:
        self._program, self._lower = program, lower
        self._function = partial(evaluate, function, _jaxcompat.keep)
        self._inputs = [v.aval for v in (*function.constvars, *function.invars)]
        self._outputs = [v.aval for v in function.outvars]

    def forward(self) -> FlatFunction:
        """Return the program with the rule dy = (∂f/∂x) dx, which JAX can transpose."""
        program = jax.custom_jvp(lambda *xs: tuple(self._program(*xs)))
        program.defjvp(self._jvp, symbolic_zeros=True)
        return program

    def reverse(self) -> FlatFunction:
        """Return the program with the rule x̄ = (∂f/∂x)ᵀ ȳ."""
        program = jax.custom_vjp(lambda *xs: tuple(self._program(*xs)))
        program.defvjp(self._outputs_and_pullback, self._pull_back, symbolic_zeros=True)
        return program

    def _run_forward(
        self, differentiate: Differentiate, live: Sequence[int], xs: Sequence[Array]
    ) -> tuple[list[ArrayLike], list[ArrayLike], PyTreeDef]:
        """Run the forward program on all arguments.

        Args:
          differentiate: `jax.linearize` or `jax.vjp`, with respect to the live arguments.
          live: the live arguments.
          xs: all arguments.

        Returns:
          The outputs, and the arrays and the structure of the derivative.
        """
        # known once the function below is traced; the last one counts, should it be traced again
        trees: list[PyTreeDef] = []

        def outputs_and_residuals(*xs: Array) -> list[Array]:
            of_live = lambda *some: list(self._function(*_with_items(xs, live, some)))
            ys, derivative = differentiate(of_live, *(xs[i] for i in live))
            residuals, tree = jax.tree.flatten(derivative)
            trees.append(tree)
            return [*ys, *residuals]

        outs = self._lower(outputs_and_residuals, self._inputs, is_forward=True)(*xs)
        return [*outs[: len(self._outputs)]], [*outs[len(self._outputs) :]], trees[-1]

    def _jvp(
        self, xs: Sequence[Array], dxs: Sequence[Array | SymbolicZero]
    ) -> tuple[tuple[Array, ...], tuple[Array | np.ndarray, ...]]:
        live = [
            i for i, dx in enumerate(dxs) if type(dx) is not SymbolicZero and _has_derivative(xs[i])
        ]
        # Outputs and tangents are two programs: one might send an output and a tangent in one
        # message, and JAX could not transpose the tangents alone.
        ys, residuals, tree = self._run_forward(jax.linearize, live, xs)
        n = len(residuals)

        def tangents(*args: Array) -> list[Array]:
            dys = jax.tree.unflatten(tree, args[:n])(*args[n:])
            return [dy for y, dy in zip(self._outputs, dys, strict=True) if _has_derivative(y)]

        values = [*residuals, *(dxs[i] for i in live)]
        types = [*map(jax.typeof, residuals), *(self._inputs[i] for i in live)]
        moved = iter(self._lower(tangents, types, is_forward=False)(*values))
        return tuple(ys), tuple(
            next(moved) if _has_derivative(y) else _float0_zeros(y) for y in self._outputs
        )

    def _outputs_and_pullback(self, *args: CustomVJPPrimal) -> tuple[tuple[Array, ...], Partial]:
        live = [i for i, x in enumerate(args) if x.perturbed and _has_derivative(self._inputs[i])]
        ys, residuals, tree = self._run_forward(jax.vjp, live, [x.value for x in args])
        # JAX keeps the arrays of a pytree between the two passes, and what else it has.
        return tuple(ys), Partial(partial(self._cotangents, tuple(live), tree), *residuals)

    def _pull_back(
        self, pullback: Partial, cts: Sequence[Array | SymbolicZero]
    ) -> tuple[Array | None, ...]:
        return pullback(cts=cts)

    def _cotangents(
        self,
        live: Sequence[int],
        tree: PyTreeDef,
        *residuals: Array,
        cts: Sequence[Array | SymbolicZero],
    ) -> tuple[Array | None, ...]:
        """Return the cotangents of the arguments, None for those that are not live."""
        given = [
            i
            for i, (ct, y) in enumerate(zip(cts, self._outputs, strict=True))
            if type(ct) is not SymbolicZero and _has_derivative(y)
        ]
        n = len(residuals)

        def live_cotangents(*args: Array) -> Sequence[Array]:
            # zeros are made here, where it is seen that their sums need no message
            every = [
                jnp.zeros(y.shape, y.dtype) if _has_derivative(y) else _float0_zeros(y)
                for y in self._outputs
            ]
            for i, ct in zip(given, args[n:], strict=True):
                every[i] = ct
            cotangents: Sequence[Array] = jax.tree.unflatten(tree, args[:n])(every)
            return cotangents

        values = [*residuals, *(cts[i] for i in given)]
        lowered = self._lower(live_cotangents, [jax.typeof(x) for x in values], is_forward=False)
        outs = iter(lowered(*values))
        return tuple(next(outs) if i in live else None for i in range(len(self._inputs)))


def _has_derivative(x: AbstractValue | Array) -> bool:
    """Return whether an array has a derivative: one of floats or complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _float0_zeros(x: ShapedArray) -> np.ndarray:
    """Return the tangent, or the cotangent, of an array without a derivative."""
    return np.zeros(x.shape, jax.dtypes.float0)
