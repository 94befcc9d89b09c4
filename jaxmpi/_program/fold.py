"""The mean of short floats as one collective, for transports that divide and round on the way.

In a traced program, a mean is a sum and a division, and that of bfloat16 stands between two conversions, so that it is rounded
once. Each of these reads and writes all of the memory again; a transport that sums bfloat16 in float32, and divides what it has
just summed, does the same while it is in the cache.
"""

from collections import Counter
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxmpi import _jaxcompat
from jaxmpi._program.reading import kind, map_subjaxprs
from jaxmpi._program.schedule import folded

__all__ = ["fold"]

SUMS = ("psum", "reduce_scatter")
SHORT = (jnp.bfloat16, jnp.float16)


def fold(jaxpr: Any, size: int) -> Any:
    """A program with the same results, in which a sum's parameter "op" says that the division by `size` is part of it."""
    open_jaxpr = _jaxcompat.parts(jaxpr)[0]
    uses = Counter(v for eqn in open_jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal))
    uses.update(v for v in open_jaxpr.outvars if not isinstance(v, Literal))
    user = {v: eqn for eqn in open_jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}  # the one, of those with one
    source = {v: eqn for eqn in open_jaxpr.eqns for v in eqn.outvars}
    known = folded(jaxpr)
    eqns, merged = [], set()
    for eqn in open_jaxpr.eqns:
        if id(eqn) in merged:
            continue
        if kind(eqn) == "loop":
            eqn = eqn.replace(params={**eqn.params, **map_subjaxprs(eqn, lambda inner: fold(inner, size))})
        elif kind(eqn) == "collective" and eqn.primitive.name in SUMS and id(eqn) not in known:
            x, y, op = eqn.invars[0], eqn.outvars[0], "sum"
            then = user.get(y) if uses[y] == 1 else None
            if then is not None and _divides(then, y, size):
                merged.add(id(then))
                y, op = then.outvars[0], "mean"
                then = user.get(y) if uses[y] == 1 else None
            before = None if isinstance(x, Literal) else source.get(x)
            if then is not None and before is not None and _widens(before) and _converts(then, before.invars[0].aval.dtype):
                merged.add(id(then))
                x, y = before.invars[0], then.outvars[0]
            eqn = eqn.replace(invars=[x], outvars=[y], params={**eqn.params, "op": op})
        eqns.append(eqn)
    return _jaxcompat.with_equations(jaxpr, eqns)


def _divides(eqn: Any, y: Any, size: int) -> bool:
    """Whether it divides a float y by the number of ranks."""
    if eqn.primitive.name != "div" or eqn.invars[0] is not y or not jnp.issubdtype(y.aval.dtype, jnp.floating):
        return False
    by = eqn.invars[1]
    return isinstance(by, Literal) and by.aval.shape == () and by.val == size


def _widens(eqn: Any) -> bool:
    """Whether it makes float32 of a short float."""
    return eqn.primitive.name == "convert_element_type" and (
        eqn.invars[0].aval.dtype in SHORT and eqn.outvars[0].aval.dtype == jnp.float32
    )


def _converts(eqn: Any, dtype: Any) -> bool:
    return eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == dtype
