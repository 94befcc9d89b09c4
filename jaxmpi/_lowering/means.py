"""Fuse a sum, its division by the number of ranks and its conversions into one collective "mean".

In a traced program, the mean of bfloat16 is four equations:

    before: x32 = convert(x)    sum: s = psum(x32)    division: m = s / n    after: y = convert(m)

Fusing them has two reasons:

- Range. The sum of float16 may be infinite where the mean is not. Fused, both are computed in
  float32 and rounded once. So the division of short floats (16 bits) is fused on all transports.
- Speed. Each equation reads and writes all of the memory again. A transport that sums bfloat16 in
  float32, and divides what it has just summed, does all four while the data is in the cache. So
  all four are fused, for all floats, where the transport divides.

Fused conversions must not lose what the float32 in the program is for. They stay around a sum where
the transport would round partial sums to 16 bits: these may overflow though the whole does not; and
a sum of short floats without conversions is sent in float32 there. A mean keeps its range, as it is
divided before it is rounded.

A sum over the ranks and an axis of `vmap` (`axes=(0, "ranks")`) begins with a sum on each rank, in
float32 (`collectives.translate`). So its conversions stay, too; and the mean over both, of short
floats, is one that divides by the size of that axis and the number of ranks.
"""

from collections import Counter
from math import prod
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import Role, roles
from jaxmpi._analysis.constant_sums import constant_sums
from jaxmpi._analysis.primitives import Op, op_of, reduction_of
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.collectives import is_short, vmap_axes

__all__ = ["fuse_means"]

J = TypeVar("J", bound=AnyJaxpr)


def fuse_means(jaxpr: J, size: int, *, transport_divides: bool, transport_rounds_once: bool) -> J:
    """Return a jaxpr with the same results, in which psum and reduce_scatter have an "op".

    It is "mean" where the division by the number of ranks is part of the collective, else "sum".
    Loops and branches stay as they are: `plan_of` fuses the means inside of them when it plans
    them. JAX cannot differentiate the result.

    Args:
      jaxpr: an inlined program, or the jaxpr of a loop or branch.
      size: the number of ranks.
      transport_divides: whether the transport computes means of all floats; otherwise only means of
        short floats are fused.
      transport_rounds_once: whether the transport rounds sums of 16-bit floats once, at the end.
    """
    inner, _ = _jaxcompat.parts(jaxpr)
    fusion = _MeanFusion(inner, size, transport_divides, transport_rounds_once)
    role_by_id, not_sent = roles(jaxpr), constant_sums(jaxpr)
    eqns: list[JaxprEqn] = []
    for eqn in inner.eqns:
        is_collective = role_by_id.get(id(eqn)) is Role.COLLECTIVE
        if is_collective and reduction_of(eqn) == "sum" and id(eqn) not in not_sent:
            eqns.append(fusion.fused_sum(eqn))
        elif id(eqn) not in fusion.removed:
            eqns.append(eqn)
    return _jaxcompat.with_equations(jaxpr, eqns)


class _MeanFusion:
    """Fuses sums of one jaxpr with the division and the conversions around them.

    Attributes:
      removed: the ids of equations that are now part of a sum.
    """

    def __init__(
        self, jaxpr: Jaxpr, size: int, transport_divides: bool, transport_rounds_once: bool
    ) -> None:
        self._uses: Counter[Var] = Counter()  # how often a value is an operand or a result
        self._user: dict[Var, JaxprEqn] = {}  # the last equation that uses a value
        self._source: dict[Var, JaxprEqn] = {}  # the equation that computes a value
        for eqn in jaxpr.eqns:
            self._source.update(dict.fromkeys(eqn.outvars, eqn))
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    self._uses[v] += 1
                    self._user[v] = eqn
        self._uses.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
        self._size, self._transport_divides = size, transport_divides
        self._transport_rounds_once = transport_rounds_once
        self.removed: set[int] = set()

    def fused_sum(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return a sum that includes the division and the conversions around it, if any."""
        x, y, op = eqn.invars[0], eqn.outvars[0], "sum"
        groups = eqn.params.get("axis_index_groups")
        size = len(groups[0]) if groups else self._size
        dims = vmap_axes(eqn)
        size *= prod(x.aval.shape[dim] for dim in dims)
        # the division
        after = self._only_user(y)
        may_fuse = is_short(y.aval.dtype) or (self._transport_divides and not dims)
        if after is not None and may_fuse and _divides(after, y, size):
            self.removed.add(id(after))
            y, op = after.outvars[0], "mean"
            after = self._only_user(y)
        may_fuse = self._transport_divides and not dims
        rounds_once = op == "mean" or self._transport_rounds_once
        if not may_fuse or not rounds_once:
            # a sum that the transport would round on the way is sent in float32
            is_wide = is_short(x.aval.dtype) and not rounds_once
            return eqn.replace(outvars=[y], params={**eqn.params, "op": op, "is_wide": is_wide})
        # The conversions, if they are a pair. The first one stays where other equations use its
        # result; if none does, it is not needed any more.
        before = None if isinstance(x, Literal) else self._source.get(x)
        if (
            after is not None
            and before is not None
            and _widens(before)
            and _converts(after, before.invars[0].aval.dtype)
        ):
            self.removed.add(id(after))
            x, y = before.invars[0], after.outvars[0]
        return eqn.replace(invars=[x], outvars=[y], params={**eqn.params, "op": op})

    def _only_user(self, y: Var) -> JaxprEqn | None:
        """Return the equation that uses a value, if that is the value's only use."""
        return self._user.get(y) if self._uses[y] == 1 else None


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
        is_short(eqn.invars[0].aval.dtype) and eqn.outvars[0].aval.dtype == jnp.float32
    )


def _converts(eqn: JaxprEqn, dtype: np.dtype) -> bool:
    """Return whether an equation converts to a dtype."""
    return op_of(eqn) is Op.CONVERT and eqn.outvars[0].aval.dtype == dtype
