"""Loops to which `vmap` has given a predicate with a value for each lane.

When JAX lowers such a `while_loop`, it freezes the state of the lanes that are done; but not where
the condition has ordered effects, as messages are (jax 0.10 to 0.12): those lanes compute on, and
their results are wrong. So such a loop is rewritten with a scalar predicate: in an inlined program
by `trace`, and in any other one by `ordered`, as it is lowered.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmpi._jaxcompat.jaxprs import parts
from jaxmpi._jaxcompat.retrace import as_function

Carry: TypeAlias = tuple[list[jax.Array], list[jax.Array]]  # [predicate], and the state


def has_lanes(params: Mapping[str, Any]) -> bool:
    """Return whether the predicate of a `while` equation has a value for each lane."""
    return bool(parts(params["cond_jaxpr"])[0].outvars[0].aval.shape)


def with_scalar_predicate(params: Mapping[str, Any], xs: Sequence[ArrayLike]) -> list[jax.Array]:
    """Carry out a while_loop with a predicate for each lane until all lanes are done.

    A lane that is done keeps its state.

    Args:
      params: the parameters of the `while` equation.
      xs: its operands: constants of the condition, constants of the body, and the state.
    """
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, state = (
        xs[:n_cond],
        xs[n_cond : n_cond + n_body],
        xs[n_cond + n_body :],
    )
    cond, body = as_function(params["cond_jaxpr"]), as_function(params["body_jaxpr"])

    def body_of_active_lanes(carry: Carry) -> Carry:
        (is_active,), before = carry
        after = [
            _where(is_active, new, old)
            for old, new in zip(before, body(*body_consts, *before), strict=True)
        ]
        return cond(*cond_consts, *after), after

    _, outs = lax.while_loop(
        lambda carry: jnp.any(carry[0][0]),
        body_of_active_lanes,
        (cond(*cond_consts, *state), list(state)),
    )
    return outs


def _where(is_active: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return `new` in the active lanes, and `old` in the others; the lanes are the first axes."""
    lanes = tuple(range(is_active.ndim))
    return lax.select(lax.broadcast_in_dim(is_active, new.shape, lanes), new, old)
