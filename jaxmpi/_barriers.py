"""Data dependencies that change no numbers, by which XLA computes values after others.

On CPUs, XLA keeps no other order. It sees that the values depend on the others. LLVM, which
compiles what XLA has fused with them, sees that nothing changes, and leaves the dependency out.
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
    """Return an int32 of any value that is ready once these arrays and an older token are."""
    return sum((_one_number(x) for x in before if x.size), jnp.int32(token))


def depending_on(token: jax.Array, xs: Sequence[ArrayLike]) -> list[jax.Array]:
    """Return the numbers unchanged, but available only once a token is."""
    never = (token * token & 3) == 2  # no square is 2 modulo 4, which XLA does not know
    return [lax.select(never, jnp.zeros_like(x), x) for x in xs]


@contextmanager
def inputs_depending_on(
    token: jax.Array, eqns: Sequence[JaxprEqn], values: dict[Var, ArrayLike]
) -> Iterator[None]:
    """Make the values that equations take from others available only once a token is.

    Args:
      token: the token.
      eqns: the equations.
      values: of the program's variables; changed within the block.
    """
    made = {v for eqn in eqns for v in eqn.outvars}
    own = {v: values[v] for eqn in eqns for v in eqn.invars if isinstance(v, Var) and v not in made}
    values.update(zip(own, depending_on(token, [*own.values()]), strict=True))
    yield
    values.update(own)


def _one_number(y: jax.Array) -> jax.Array:
    first = lax.squeeze(lax.slice(y, (0,) * y.ndim, (1,) * y.ndim), range(y.ndim))
    return (first.real if jnp.iscomplexobj(first) else first).astype(jnp.int32)
