"""Barriers: data dependencies that change no numbers, by which XLA computes values after others.

On CPUs, XLA keeps no other order between equations: it drops an `optimization_barrier`. So a value
becomes a select between itself and zeros, whose predicate is computed from a token and is always
false. XLA does not know that it is, and computes the value after the token. LLVM, which compiles
the loops that XLA has fused, finds out and removes the select.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.typing import ArrayLike

__all__ = ["depending_on", "inputs_depending_on", "token_of"]


def token_of(before: Iterable[jax.Array], token: ArrayLike = 0) -> jax.Array:
    """Return a token that is ready once these arrays and an older token are.

    A token is an int32 scalar of any value: only its dependencies matter.
    """
    return sum((_one_number(x) for x in before if x.size), jnp.int32(token))


def depending_on(token: jax.Array, xs: Sequence[ArrayLike]) -> list[jax.Array]:
    """Return these arrays unchanged, but available only once a token is ready."""
    never = (token * token & 3) == 2  # no square is 2 modulo 4, which XLA does not know
    return [lax.select(never, jnp.zeros_like(x), x) for x in xs]


@contextmanager
def inputs_depending_on(
    token: jax.Array, eqns: Sequence[JaxprEqn], values: dict[Var, ArrayLike]
) -> Iterator[None]:
    """Make the inputs of some equations available only once a token is ready.

    Their inputs are the variables that they read and that none of them makes.

    Args:
      token: the token.
      eqns: the equations, which the caller evaluates within the block.
      values: the values of the program's variables. Those of the inputs depend on the token within
        the block, and are as before after it.
    """
    made = {v for eqn in eqns for v in eqn.outvars}
    inputs: dict[Var, ArrayLike] = {}
    for eqn in eqns:
        for v in eqn.invars:
            if isinstance(v, Var) and v not in made:
                inputs[v] = values[v]
    values.update(zip(inputs, depending_on(token, [*inputs.values()]), strict=True))
    yield
    values.update(inputs)


def _one_number(y: jax.Array) -> jax.Array:
    """Return an int32 that depends on an array: its first element, cast."""
    first = lax.squeeze(lax.slice(y, (0,) * y.ndim, (1,) * y.ndim), range(y.ndim))
    return (first.real if jnp.iscomplexobj(first) else first).astype(jnp.int32)
