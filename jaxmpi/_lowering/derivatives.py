"""Derivatives of a program that another traced function differentiates: jax.grad(jaxmpi.jit(f)).

A program is inlined, so it has lost the derivative rules of its function: those of
`jax.custom_jvp`, `jax.custom_vjp` and `custom_linear_solve`, and that of a broadcast, which
has become a sum of bits. So the program gets a rule that uses the function as it was traced:

    the derivative of a program is the program of the function's derivative

It is built when JAX asks for it, with the axes bound, and so is the one of that program, for higher
derivatives. A function without such rules needs none: JAX differentiates its program.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import Jaxpr
from jax.tree_util import Partial, PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import equations
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._lowering.trace import evaluate

__all__ = ["FlatFunction", "with_derivatives"]

FlatFunction: TypeAlias = Callable[..., Sequence[ArrayLike]]  # from arrays to arrays
Array: TypeAlias = jax.Array


class Lower(Protocol):
    """Makes programs of derivatives."""

    def __call__(
        self, function: FlatFunction, types: Sequence[ShapedArray], *, compared: bool
    ) -> FlatFunction:
        """Trace a function of arrays of these types, with the axes bound, and lower it.

        Args:
          function: the function.
          types: of its arguments.
          compared: whether it stands for the program, so that the ranks compare it as they would
            the program.
        """


class Rules(Enum):
    """Derivative rules in a function."""

    NONE = auto()
    FORWARD = auto()  # of `jax.custom_jvp` alone
    REVERSE = auto()  # at least one that is for reverse mode, or for its transposition


def rules_in(function: Jaxpr) -> Rules:
    """Return which derivative rules a traced function has that its program has not."""
    found = Rules.NONE
    for eqn in equations(function):
        if _jaxcompat.has_reverse_rule(eqn) or op_of(eqn) in (Op.LINEAR_SOLVE, Op.BROADCAST):
            return Rules.REVERSE
        if _jaxcompat.has_forward_rule(eqn):
            found = Rules.FORWARD
    return found


def with_derivatives(
    program: FlatFunction, function: Jaxpr, lower: Lower, *, can_lower: bool, title: str
) -> FlatFunction:
    """Return a program with the derivatives of its function.

    Args:
      program: of arrays.
      function: the function as it was traced, whose constants are the first arguments of `program`.
      lower: makes programs of derivatives.
      can_lower: whether it can do so for these arguments.
      title: the name of the function, for an error.
    """
    rules = rules_in(function)
    if rules is Rules.NONE:
        return program
    if not can_lower or not _jaxcompat.may_have_rule(function):
        return _without_derivatives(program, title)
    both = _Differentiable(program, function, lower)
    return both.forward() if rules is Rules.FORWARD else both.reverse()


def _without_derivatives(program: FlatFunction, title: str) -> FlatFunction:
    """Return a program that raises where it is differentiated."""

    @jax.custom_jvp
    def inputs(*xs: Array) -> tuple[Array, ...]:
        return xs

    @inputs.defjvp
    def raise_error(*_: object) -> None:
        raise RuntimeError(
            f"jaxmpi.jit: the derivative of {title} is taken outside of it. It has derivative "
            "rules of its own, such as those of jax.custom_vjp or of jaxmpi.tree_bcast, which get "
            "lost beside its callbacks or references. Put the jax.grad inside of the jaxmpi.jit."
        )

    return lambda *xs: program(*inputs(*xs)) if xs else program()


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

    def _of_live(self, live: Sequence[int], xs: Sequence[Array]) -> FlatFunction:
        """Return the function of the live arguments, the others being those of `xs`."""

        def function(*some: Array) -> list[Array]:
            arguments = [*xs]
            for i, x in zip(live, some, strict=True):
                arguments[i] = x
            return list(self._function(*arguments))

        return function

    def _jvp(
        self, xs: Sequence[Array], dxs: Sequence[Array | SymbolicZero]
    ) -> tuple[tuple[Array, ...], tuple[Array | np.ndarray, ...]]:
        live = [i for i, dx in enumerate(dxs) if type(dx) is not SymbolicZero and _varies(xs[i])]
        trees: list[PyTreeDef] = []

        # Two programs: in a message with both, JAX could not tell outputs from tangents.
        def outputs_and_residuals(*xs: Array) -> list[Array]:
            ys, derivative = jax.linearize(self._of_live(live, xs), *(xs[i] for i in live))
            residuals, tree = jax.tree.flatten(derivative)
            trees.append(tree)
            return [*ys, *residuals]

        outs = self._lower(outputs_and_residuals, self._inputs, compared=True)(*xs)
        ys, residuals = outs[: len(self._outputs)], outs[len(self._outputs) :]
        n = len(residuals)

        def tangents(*args: Array) -> list[Array]:
            dys = jax.tree.unflatten(trees[-1], args[:n])(*args[n:])
            return [dy for y, dy in zip(self._outputs, dys, strict=True) if _varies(y)]

        values = [*residuals, *(dxs[i] for i in live)]
        types = [*map(jax.typeof, residuals), *(self._inputs[i] for i in live)]
        moved = iter(self._lower(tangents, types, compared=False)(*values))
        return tuple(ys), tuple(
            next(moved) if _varies(y) else _no_tangent(y) for y in self._outputs
        )

    def _outputs_and_pullback(self, *args: CustomVJPPrimal) -> tuple[tuple[Array, ...], Partial]:
        live = [i for i, x in enumerate(args) if x.perturbed and _varies(self._inputs[i])]
        trees: list[PyTreeDef] = []

        def outputs_and_residuals(*xs: Array) -> list[Array]:
            ys, pullback = jax.vjp(self._of_live(live, xs), *(xs[i] for i in live))
            residuals, tree = jax.tree.flatten(pullback)
            trees.append(tree)
            return [*ys, *residuals]

        outs = self._lower(outputs_and_residuals, self._inputs, compared=True)(
            *(x.value for x in args)
        )
        ys, residuals = outs[: len(self._outputs)], outs[len(self._outputs) :]
        # JAX keeps the arrays of a pytree between the two passes, and what else it has.
        return tuple(ys), Partial(partial(self._cotangents, tuple(live), trees[-1]), *residuals)

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
            if type(ct) is not SymbolicZero and _varies(y)
        ]
        n = len(residuals)

        def of_live(*args: Array) -> Sequence[Array]:
            # zeros are made here, where it is seen that their sums need no message
            every = [
                jnp.zeros(y.shape, y.dtype) if _varies(y) else _no_tangent(y) for y in self._outputs
            ]
            for i, ct in zip(given, args[n:], strict=True):
                every[i] = ct
            cotangents: Sequence[Array] = jax.tree.unflatten(tree, args[:n])(every)
            return cotangents

        values = [*residuals, *(cts[i] for i in given)]
        lowered = self._lower(of_live, [jax.typeof(x) for x in values], compared=False)
        outs = iter(lowered(*values))
        return tuple(next(outs) if i in live else None for i in range(len(self._inputs)))


def _varies(x: AbstractValue | Array) -> bool:
    """Return whether an array has a derivative: one of floats or complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _no_tangent(x: ShapedArray) -> np.ndarray:
    """Return the tangent of an array without a derivative."""
    return np.zeros(x.shape, jax.dtypes.float0)
