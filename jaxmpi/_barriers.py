"""Barriers: arithmetic that changes no numbers, and keeps XLA from rewriting a program.

Each function says which rewrite it prevents. An `optimization_barrier` prevents none of them on
CPUs: XLA drops it, and keeps no other order between equations than that of their operands. Instead,
most depend on a predicate whose value XLA does not know:

- No square is 2 modulo 4. `depending_on` selects by it between a value and zeros, so that XLA
  computes the value after a token. LLVM, which compiles the loops that XLA has fused, finds out and
  removes the select.
- n² + n is even for every integer n, also where it overflows: `not_fused` and `unknown_one`.
- x = x is false for NaN alone: `rounded`.

`computed_once` has a sort in the place of a predicate.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.typing import ArrayLike

from jaxmpi._leaves import PyTree

__all__ = [
    "computed_once",
    "depending_on",
    "inputs_depending_on",
    "not_fused",
    "rounded",
    "token_of",
    "unknown_one",
]


# the order of equations


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


# loops that XLA fuses, and numbers that it rounds


def not_fused(tree: PyTree) -> PyTree:
    """Return a tree of floats as it is; XLA fuses no operation before it with one after it.

    Fused, a product and a sum become one operation (FMA), which rounds differently.
    """
    leaves = [x for x in jax.tree.leaves(tree) if x.size]
    if not leaves:
        return tree
    is_even = _is_even(_first_as_int(leaves[0]))
    return lax.cond(is_even, lambda tree: tree, lambda tree: jax.tree.map(jnp.negative, tree), tree)


def unknown_one(x: jax.Array, k: int) -> jax.Array:
    """Return the number 1 in the dtype of x, computed from x such that XLA does not know it.

    A product with it is an operation that XLA keeps. With another k, it is another computation:
    XLA computes the products of one array with two of these numbers twice.
    """
    return jnp.where(_is_even(_first_as_int(x) + k), 1, -1).astype(x.dtype)


def _first_as_int(x: jax.Array) -> jax.Array:
    return x.reshape(-1)[0].real.astype(jnp.int32)


def _is_even(n: jax.Array) -> jax.Array:
    """Return whether n² + n is even: true, and unknown to XLA."""
    return (n * n + n) % 2 == 0


def computed_once(flag: jax.Array) -> jax.Array:
    """Return a boolean that depends on all leaves, for use on every leaf: XLA computes it once.

    Otherwise XLA fuses the whole computation of the flag into the loop of every leaf, and n leaves
    take n² instructions to compile. It does not fuse a sort.
    """
    return lax.sort(jnp.stack([flag, flag]).astype(jnp.uint8))[0] > 0


def rounded(x: jax.Array) -> jax.Array:
    """Return x, computed such that XLA rounds it before it is used.

    In some programs XLA makes one operation (FMA) of a product and the sum that it is added to, and
    rounds once. Here a `where` is between the two, which returns x in both cases. XLA does not know
    that, and keeps the product and the sum apart.
    """
    return jnp.where(x == x, x, jnp.nan)
