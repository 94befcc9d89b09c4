"""Updates that lead to a given value: θ + u is that value, and not a rounding beside it.

Transforms that know where the parameters are to be after a step, such as the mean over the ranks, return u = q - θ, and the
caller computes θ + u. In floats that is rounded twice, and ranks that come from different θ arrive a rounding apart.

No choice of u avoids it. Let δ be the gap between floats just above 1, θ = -1 on one rank and -(1 + δ) on the other, and
1 < q < 2. Then u is between 2 and 4, where floats are 2δ apart, so the first rank reaches -1 plus multiples of 2δ, and the
second values that lie between those: no value near q is in both sets. Where θ is large and q tiny, θ + u is a multiple of half
the gap at θ, and q is not.

So a program is edited: where it adds the u of `update_to(θ, q)` to θ, the sum is replaced by q. That
holds for all floats. Where θ + u is computed elsewhere, such as outside of `jaxmpi.jit`, u is the float
that leads to q if there is one, and leads next to it if not.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._leaves import widest
from jaxmpi._lowering.classify import map_subjaxprs, subjaxprs

__all__ = ["apply_exactly", "update_to"]

IDENTITIES = ("name", "copy", "copy_p", "optimization_barrier")  # operand i is result i


@jax.jit
def _jaxmpi_update_to(x: jax.Array, to: jax.Array, guess: jax.Array) -> jax.Array:
    """Compute `update_to`; a call in the jaxpr, by whose name `apply_exactly` finds it."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_jaxmpi_update_to(x.real, to.real, guess.real), _jaxmpi_update_to(x.imag, to.imag, guess.imag))
    dtype, info = x.dtype, jnp.finfo(x.dtype)
    wide = widest(dtype)
    x, to, guess = x.astype(wide), to.astype(wide), guess.astype(wide)

    def rounded(y: jax.Array) -> jax.Array:
        # XLA may compute with short floats in float32 and leave out the roundings between; those to bits
        # and back it keeps. `reduce_precision`, which it keeps, too, makes 0 of the smallest numbers.
        if wide == dtype:
            return y
        bits = lax.bitcast_convert_type(y.astype(dtype), f"uint{8 * dtype.itemsize}")
        return lax.bitcast_convert_type(bits, dtype).astype(wide)

    both_finite = jnp.isfinite(x) & jnp.isfinite(to)

    def saturated(u: jax.Array) -> jax.Array:
        return jnp.where(both_finite, jnp.clip(u, -float(info.max), float(info.max)), u)

    step = saturated(rounded(to - x))
    nearest = saturated(rounded(step + (to - rounded(x + step))))
    beside = [jnp.nextafter(step.astype(dtype), jnp.asarray(end, dtype)).astype(wide) for end in (-jnp.inf, jnp.inf)]
    update = nearest
    for candidate in (*beside, step, guess):  # the last that arrives counts
        update = jnp.where(rounded(x + candidate) == to, candidate, update)
    return update.astype(dtype)


NAME = _jaxmpi_update_to.__name__


def update_to(x: ArrayLike, to: ArrayLike, guess: ArrayLike | None = None) -> jax.Array:
    """Return an update u for `optax.apply_updates` that leads from `x` to `to`.

    In a `jaxmpi.jit` that adds u to `x`, the sum is `to`, bit by bit. Elsewhere it is where a float u exists with x + u = to.

    Args:
      x: a real or complex array.
      to: an array of the same shape and dtype.
      guess: an update that leads there, if it is known to.
    """
    x, to = jnp.asarray(x), jnp.asarray(to)
    return _jaxmpi_update_to(x, to, to - x if guess is None else jnp.asarray(guess, x.dtype))


def apply_exactly(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return the program with x + u replaced by q wherever u is that of `update_to(x, q)`, in loops and calls, too."""
    if not _has_updates(jaxpr):
        return jaxpr
    inner, _ = _jaxcompat.parts(jaxpr)
    made_by = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    stands: dict[Var, Atom] = {}  # what is in the place of a sum
    eqns = []

    def replaced(atoms: Sequence[Atom]) -> list[Atom]:
        return [atom if isinstance(atom, Literal) else stands.get(atom, atom) for atom in atoms]

    for eqn in inner.eqns:
        if (target := _target(eqn, made_by)) is not None:
            stands[eqn.outvars[0]] = replaced([target])[0]
            continue
        if not _is_update(eqn) and any(map(_has_updates, subjaxprs(eqn))):
            eqn = eqn.replace(params={**eqn.params, **map_subjaxprs(eqn, apply_exactly)})
        eqns.append(eqn.replace(invars=replaced(eqn.invars)) if stands else eqn)
    return _jaxcompat.with_equations(jaxpr, eqns, replaced(inner.outvars))


@_jaxcompat.kept_with_jaxpr
def _has_updates(jaxpr: AnyJaxpr) -> bool:
    """Whether a program has an update to a given value, in its loops and calls, too."""
    eqns = _jaxcompat.parts(jaxpr)[0].eqns
    return any(_is_update(eqn) or any(map(_has_updates, subjaxprs(eqn))) for eqn in eqns)


def _is_update(eqn: JaxprEqn) -> bool:
    return eqn.params.get("name") == NAME and "jaxpr" in eqn.params


def _target(eqn: JaxprEqn, made_by: Mapping[Var, JaxprEqn]) -> Atom | None:
    """Return the value that a sum is to be, if it adds x and an update of `update_to(x, value)`; None for all else."""
    if eqn.primitive.name != "add":
        return None
    for x, u in (eqn.invars, eqn.invars[::-1]):
        update = None if isinstance(u, Literal) else made_by.get(_origin(u, made_by))
        if update is None or not _is_update(update) or u.aval.dtype != x.aval.dtype:
            continue
        start, to = update.invars[:2]
        if start.aval == x.aval and to.aval.shape == eqn.outvars[0].aval.shape and _same(x, start, made_by):
            return to
    return None


def _same(a: Atom, b: Atom, made_by: Mapping[Var, JaxprEqn]) -> bool:
    if isinstance(a, Literal) or isinstance(b, Literal):
        return False
    return _origin(a, made_by) is _origin(b, made_by)


def _origin(v: Var, made_by: Mapping[Var, JaxprEqn]) -> Var:
    """Return the variable that v is another name of, before identities and conversions that lose nothing."""
    while (eqn := made_by.get(v)) is not None:
        if eqn.primitive.name not in IDENTITIES and not (eqn.primitive.name == "convert_element_type" and _loses_nothing(eqn)):
            break
        before = eqn.invars[eqn.outvars.index(v)]
        if isinstance(before, Literal):
            break
        v = before
    return v


def _loses_nothing(eqn: JaxprEqn) -> bool:
    """Whether it converts floats to floats of as many bits or more."""
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    with jax.numpy_dtype_promotion("standard"):  # as in `widest`
        return bool(jnp.issubdtype(old, jnp.floating) and jnp.promote_types(old, new) == new)
