"""A `while_loop` under `vmap` whose lanes end on their own, and which communicates.

`vmap` gives such a loop a predicate with a value for each lane. JAX keeps the state of the lanes
that are done when it lowers the loop, but not where the condition has ordered effects, as messages
are (jax 0.10 to 0.12). So the loop is written out with a scalar predicate before it gets there,
which `order_loops` needs, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._lowering.classify import has_collective
from jaxmpi._lowering.primitives import Op, op_of

__all__ = ["batched_predicate", "with_scalar_predicate"]

Carry: TypeAlias = tuple[list[jax.Array], list[jax.Array]]  # the predicate alone, and the state


def batched_predicate(eqn: JaxprEqn) -> bool:
    """Return whether it is a while_loop that communicates, with a predicate for each lane of a vmap."""
    if op_of(eqn) is not Op.WHILE:
        return False
    inner, _ = _jaxcompat.parts(eqn.params["cond_jaxpr"])
    return bool(inner.outvars[0].aval.shape) and any(
        map(has_collective, (inner, eqn.params["body_jaxpr"]))
    )


def with_scalar_predicate(params: Mapping[str, Any], xs: Sequence[ArrayLike]) -> list[jax.Array]:
    """Carry out a while_loop of these parameters until all lanes are done; a lane that is done keeps its state."""
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, state = (
        xs[:of_cond],
        xs[of_cond : of_cond + of_body],
        xs[of_cond + of_body :],
    )
    cond, body = (
        _jaxcompat.as_function(params["cond_jaxpr"]),
        _jaxcompat.as_function(params["body_jaxpr"]),
    )

    def turn(carry: Carry) -> Carry:
        (on,), before = carry
        after = [_where(on, y, x) for x, y in zip(before, body(*body_consts, *before), strict=True)]
        return cond(*cond_consts, *after), after

    _, outs = lax.while_loop(
        lambda carry: jnp.any(carry[0][0]), turn, (cond(*cond_consts, *state), list(state))
    )
    return outs


def _where(on: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` in the lanes that are on; the lanes are the first axes of all of them."""
    return lax.select(lax.broadcast_in_dim(on, x.shape, tuple(range(on.ndim))), x, y)
