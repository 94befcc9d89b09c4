"""Make θ + u equal a given value q exactly, where u is an update from θ to q.

Transforms that know the parameters after a step, such as the mean over the ranks, return u = q - θ,
and the caller computes θ + u. In floats that is rounded twice, so ranks with different θ end a
rounding apart.

No choice of u avoids it. Let δ be the gap between floats just above 1, θ = -1 on one rank and -(1 +
δ) on the other, and 1 < q < 2. Then u is between 2 and 4, where floats are 2δ apart, so the first
rank reaches -1 plus multiples of 2δ, and the second values that lie between those: no value near q
is in both sets. Where θ is large and q tiny, θ + u is a multiple of half the gap at θ, and q is
not.

So a program is edited: where it adds the u of `update_to(θ, q)` to θ, the sum is replaced by q, for
all floats. `trace` inlines the calls of inner functions first, so that the sum and the update are
in the same jaxpr. Between them u may pass through

- `select_n(p, 0, u)`, as in `jaxmpi.skip_nonfinite`: θ + u becomes `select_n(p, θ, q)`;
- `cond`, as in `jaxmpi.accumulate`: θ + u is computed in the branches, in one of which it is q.

Where θ + u is computed elsewhere, such as outside of `jaxmpi.jit`, u is a float with θ + u = q if
there is one; if not, θ + u is a float next to q.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Atom
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import map_subjaxprs, subjaxprs, substituted
from jaxmpi._analysis.primitives import Op, Trait, has, op_of
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._leaves import widest

__all__ = ["apply_exactly", "has_updates", "is_update", "update_to"]


@jax.jit
def _jaxmpi_update_to(x: jax.Array, to: jax.Array, known: jax.Array) -> jax.Array:
    """Compute `update_to`. `apply_exactly` finds the call in a jaxpr by this function's name."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(
            _jaxmpi_update_to(x.real, to.real, known.real),
            _jaxmpi_update_to(x.imag, to.imag, known.imag),
        )
    dtype, info = x.dtype, jnp.finfo(x.dtype)
    wide = widest(dtype)
    x, to, known = x.astype(wide), to.astype(wide), known.astype(wide)

    def rounded(y: jax.Array) -> jax.Array:
        # XLA may compute short floats in float32, and leave out the roundings between operations.
        # It keeps a conversion to bits and back. It would keep `reduce_precision`, too, but that
        # flushes the smallest numbers to 0.
        if wide == dtype:
            return y
        bits = lax.bitcast_convert_type(y.astype(dtype), f"uint{8 * dtype.itemsize}")
        return lax.bitcast_convert_type(bits, dtype).astype(wide)

    both_finite = jnp.isfinite(x) & jnp.isfinite(to)

    def saturated(u: jax.Array) -> jax.Array:
        return jnp.where(both_finite, jnp.clip(u, -float(info.max), float(info.max)), u)

    step = saturated(rounded(to - x))
    nearest = saturated(rounded(step + (to - rounded(x + step))))
    neighbors = [
        jnp.nextafter(step.astype(dtype), jnp.asarray(end, dtype)).astype(wide)
        for end in (-jnp.inf, jnp.inf)
    ]
    # Choose the first of these with x + u = to:
    #   1. the given candidate, 2. to - x, 3. the floats next to it, above and below,
    #   4. if there is none, to - x corrected by what the sum misses.
    # A later `where` wins, so the order is reversed.
    update = nearest
    for candidate in (*neighbors, step, known):
        update = jnp.where(rounded(x + candidate) == to, candidate, update)
    return update.astype(dtype)


NAME = _jaxmpi_update_to.__name__


def update_to(x: ArrayLike, to: ArrayLike, known: ArrayLike | None = None) -> jax.Array:
    """Return an update u for `optax.apply_updates` with x + u = to.

    In a `jaxmpi.jit` that adds u to `x`, the sum is `to`, bit by bit. Elsewhere it is that only
    where a float u exists with x + u = to.

    Args:
      x: a real or complex array.
      to: an array of the same shape and dtype.
      known: a candidate, which is preferred if x + known = to; `to - x` by default.
    """
    x, to = jnp.asarray(x), jnp.asarray(to)
    return _jaxmpi_update_to(x, to, to - x if known is None else jnp.asarray(known, x.dtype))


def apply_exactly(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return the program with x + u replaced by q wherever u is that of `update_to(x, q)`.

    Loops and branches are edited, too.

    Args:
      jaxpr: a program in which each such sum and its update are in the same jaxpr, apart from
        `cond` and `where` between them: `trace` has inlined the calls of inner functions.
    """
    if not has_updates(jaxpr):
        return jaxpr
    inner, _ = _jaxcompat.parts(jaxpr)
    edited = _EditedEquations(inner)
    for eqn in inner.eqns:
        total = edited.exact_sum(eqn) if op_of(eqn) is Op.ADD else None
        if total is not None:
            edited.replacements[eqn.outvars[0]] = total
            continue
        if not is_update(eqn) and any(map(has_updates, subjaxprs(eqn))):
            eqn = eqn.replace(params={**eqn.params, **map_subjaxprs(eqn, apply_exactly)})
        edited.append(eqn)
    outvars = substituted(inner.outvars, edited.replacements)
    return _jaxcompat.with_equations(jaxpr, edited.eqns, outvars)


@_jaxcompat.kept_with_jaxpr
def has_updates(jaxpr: AnyJaxpr) -> bool:
    """Return whether a program, or a loop or call in it, calls `update_to`."""
    eqns = _jaxcompat.parts(jaxpr)[0].eqns
    return any(is_update(eqn) or any(map(has_updates, subjaxprs(eqn))) for eqn in eqns)


def is_update(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call of `update_to`."""
    return eqn.params.get("name") == NAME and "jaxpr" in eqn.params


class _EditedEquations:
    """The equations of a program with exact sums, up to the one that is being edited.

    Attributes:
      eqns: the equations.
      replacements: for the result of each sum that was left out, the value to use instead.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.eqns: list[JaxprEqn] = []
        self.replacements: dict[Var, Atom] = {}
        self._made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        # for a variable, the index in `eqns` of the equation that computes it
        self._index: dict[Var, int] = {}

    def append(self, eqn: JaxprEqn) -> None:
        """Add an equation, with its operands replaced."""
        for v in eqn.outvars:
            self._index[v] = len(self.eqns)
        if self.replacements:
            eqn = eqn.replace(invars=substituted(eqn.invars, self.replacements))
        self.eqns.append(eqn)

    def exact_sum(self, add: JaxprEqn) -> Atom | None:
        """Return q if an equation adds x and an update of `update_to(x, q)`; else None."""
        for x, u in (add.invars, add.invars[::-1]):
            # q has the shape and dtype of x: a sum that is broadcast or promoted is another value
            if u.aval.dtype == x.aval.dtype and u.aval.shape == add.outvars[0].aval.shape:
                total = self._total(add, x, u)
                if total is not None:
                    return total
        return None

    def _total(self, add: JaxprEqn, x: Atom, u: Atom) -> Atom | None:
        """Return the exact x + u if u is from `update_to`, directly or by a `select_n` or `cond`.

        None if it is not.
        """
        if isinstance(x, Literal) or isinstance(u, Literal):
            return None
        u = _origin(u, self._made_by)
        eqn = self._made_by.get(u)
        if eqn is None:
            return None
        if is_update(eqn):
            start, to = eqn.invars[:2]
            if start.aval != x.aval or not self._same(x, start):
                return None
            return substituted([to], self.replacements)[0]
        if op_of(eqn) is Op.SELECT:
            return self._selected(add, x, eqn)
        if op_of(eqn) is Op.COND and any(map(has_updates, subjaxprs(eqn))):
            return self._from_branches(add, x, u, eqn)
        return None

    def _selected(self, add: JaxprEqn, x: Var, select: JaxprEqn) -> Atom | None:
        """Return x + select_n(p, 0, u) as select_n(p, x, q), for u = `update_to(x, q)`; or None."""
        predicate, *cases = select.invars
        # x + 0 is x, up to the sign of a zero (-0.0 + 0.0 is 0.0)
        totals = [x if self._is_zero(case) else self._total(add, x, case) for case in cases]
        if any(total is None or total.aval.shape != add.outvars[0].aval.shape for total in totals):
            return None
        total = _jaxcompat.new_variable(add.outvars[0])
        self.append(select.replace(invars=[predicate, *totals], outvars=[total]))
        return total

    def _from_branches(self, add: JaxprEqn, x: Var, u: Var, cond: JaxprEqn) -> Atom | None:
        """Return x + u as another output of the `cond` that makes u.

        It is None if no branch makes u an update of x.
        """
        position = self._index[u]
        # The branches can use x if it is an operand of the cond. Operand 0 is the predicate.
        operand: int | None = None
        for i, v in enumerate(cond.invars):
            if i > 0 and v.aval == x.aval and self._same(x, v):
                operand = i
                break
        if operand is None:
            return None
        # Add x + u as another output of each branch, and make it exact there.
        branches, are_exact = [], []
        for branch in self.eqns[position].params["branches"]:
            inner, _ = _jaxcompat.parts(branch)
            total = _jaxcompat.new_variable(add.outvars[0])
            summed = add.replace(
                invars=[inner.invars[operand - 1], inner.outvars[cond.outvars.index(u)]],
                outvars=[total],
            )
            longer = _jaxcompat.with_equations(
                branch, [*inner.eqns, summed], [*inner.outvars, total]
            )
            branches.append(apply_exactly(longer))
            are_exact.append(_jaxcompat.parts(branches[-1])[0].outvars[-1] is not total)
        if not any(are_exact):
            return None
        total = _jaxcompat.new_variable(add.outvars[0])
        edited = self.eqns[position]
        self.eqns[position] = edited.replace(
            params={**edited.params, "branches": tuple(branches)}, outvars=[*edited.outvars, total]
        )
        return total

    def _is_zero(self, v: Atom) -> bool:
        """Return whether a value is a constant 0."""
        if isinstance(v, Literal):
            return bool(np.all(np.asarray(v.val) == 0))
        maker = self._made_by.get(_origin(v, self._made_by))
        return (
            maker is not None
            and op_of(maker) is Op.BROADCAST_SHAPE
            and self._is_zero(maker.invars[0])
        )

    def _same(self, x: Var, y: Atom) -> bool:
        """Return whether two variables have the same value by `_origin`."""
        return not isinstance(y, Literal) and _origin(x, self._made_by) is _origin(y, self._made_by)


def _origin(v: Var, made_by: Mapping[Var, JaxprEqn]) -> Var:
    """Return the variable from which v comes by steps that keep its value.

    These are identities, and conversions to floats of as many bits or more.
    """
    while (eqn := made_by.get(v)) is not None:
        if not has(eqn, Trait.IDENTITY) and not (op_of(eqn) is Op.CONVERT and _loses_nothing(eqn)):
            break
        before = eqn.invars[eqn.outvars.index(v)]
        if isinstance(before, Literal):
            break
        v = before
    return v


def _loses_nothing(eqn: JaxprEqn) -> bool:
    """Return whether an equation converts floats to floats of as many bits or more."""
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    with jax.numpy_dtype_promotion("standard"):  # as in `widest`
        return bool(jnp.issubdtype(old, jnp.floating) and jnp.promote_types(old, new) == new)
