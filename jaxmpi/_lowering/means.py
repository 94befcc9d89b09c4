"""Means as one collective: of short floats everywhere, of all floats where the transport divides.

In a traced program, a mean is a sum and a division. The sum of float16 may be infinite where the
mean is not: taken together, they are computed in float32 and rounded once. And each of them reads
and writes all of the memory again, as do the conversions that stand around a mean of bfloat16: a
transport that sums bfloat16 in float32, and divides what it has just summed, does the same while it
is in the cache.
"""

from collections import Counter
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import kinds
from jaxmpi._analysis.constant_sums import constant_sums
from jaxmpi._analysis.inner_jaxprs import map_subjaxprs
from jaxmpi._analysis.primitives import Op, op_of, reduction_of
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = ["fuse_means"]

SHORT = (jnp.bfloat16, jnp.float16)
J = TypeVar("J", bound=AnyJaxpr)


def fuse_means(jaxpr: J, size: int, *, fuses_mean: bool) -> J:
    """Return a program with the same results, in which a sum's "op" may be "mean".

    The division by `size`, and conversions around it, are then part of the collective.

    Args:
      jaxpr: of `trace.trace`.
      size: the number of ranks.
      fuses_mean: whether the transport divides, and takes any float; otherwise only short ones are
        taken in.
    """
    open_jaxpr = _jaxcompat.parts(jaxpr)[0]
    around = _Around(open_jaxpr, size, fuses_mean)
    what, known = kinds(jaxpr), constant_sums(jaxpr)
    eqns: list[JaxprEqn] = []
    for eqn in open_jaxpr.eqns:
        if what.get(id(eqn)) == "loop":
            inside = map_subjaxprs(
                eqn, lambda inner: fuse_means(inner, size, fuses_mean=fuses_mean)
            )
            eqns.append(eqn.replace(params={**eqn.params, **inside}))
        elif (
            what.get(id(eqn)) == "collective"
            and reduction_of(eqn) == "sum"
            and id(eqn) not in known
        ):
            eqns.append(around.take_in(eqn))
        elif id(eqn) not in around.taken:
            eqns.append(eqn)
    return _jaxcompat.with_equations(jaxpr, eqns)


class _Around:
    """Conversions before and after each sum of a program, and its division."""

    def __init__(self, jaxpr: Jaxpr, size: int, fuses_mean: bool) -> None:
        used = [(v, eqn) for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)]
        self._uses = Counter(
            [v for v, _ in used] + [v for v in jaxpr.outvars if not isinstance(v, Literal)]
        )
        self._user = dict(used)
        self._source = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._size, self._divides = size, fuses_mean
        self.taken: set[int] = set()  # the equations, by id, that are part of a sum now

    def take_in(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return a sum that includes the division and the conversions around it, if any."""
        x, y, op = eqn.invars[0], eqn.outvars[0], "sum"
        groups = eqn.params.get("axis_index_groups")
        size = len(groups[0]) if groups else self._size
        then = self._only_user(y)
        if then is not None and (self._divides or _is_short(y)) and _divides(then, y, size):
            self.taken.add(id(then))
            y, op = then.outvars[0], "mean"
            then = self._only_user(y)
        if not self._divides:
            return eqn.replace(outvars=[y], params={**eqn.params, "op": op})
        before = None if isinstance(x, Literal) else self._source.get(x)
        if (
            then is not None
            and before is not None
            and _widens(before)
            and _converts(then, before.invars[0].aval.dtype)
        ):
            self.taken.add(id(then))
            x, y = before.invars[0], then.outvars[0]
        return eqn.replace(invars=[x], outvars=[y], params={**eqn.params, "op": op})

    def _only_user(self, y: Var) -> JaxprEqn | None:
        return self._user.get(y) if self._uses[y] == 1 else None


def _is_short(y: Var) -> bool:
    return jnp.issubdtype(y.aval.dtype, jnp.floating) and jnp.finfo(y.aval.dtype).bits < 32


def _divides(eqn: JaxprEqn, y: Var, size: int) -> bool:
    """Return whether an equation divides a float y by the number of ranks."""
    if (
        op_of(eqn) is not Op.DIVIDE
        or eqn.invars[0] is not y
        or not jnp.issubdtype(y.aval.dtype, jnp.floating)
    ):
        return False
    by = eqn.invars[1]
    return isinstance(by, Literal) and by.aval.shape == () and by.val == size


def _widens(eqn: JaxprEqn) -> bool:
    """Return whether an equation converts a short float to float32."""
    return op_of(eqn) is Op.CONVERT and (
        eqn.invars[0].aval.dtype in SHORT and eqn.outvars[0].aval.dtype == jnp.float32
    )


def _converts(eqn: JaxprEqn, dtype: np.dtype) -> bool:
    return op_of(eqn) is Op.CONVERT and eqn.outvars[0].aval.dtype == dtype
