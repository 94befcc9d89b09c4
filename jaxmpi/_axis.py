"""The ranks are a named axis of a train step, as the axes of `jax.vmap` and `jax.shard_map` are."""

from typing import Any

from jax import lax
from jax.ad_checkpoint import checkpoint_name

__all__ = ["AXIS", "EQUAL", "bound", "equal_on_all_ranks"]

AXIS = "ranks"
EQUAL = "jaxmpi: equal on all ranks"


def bound() -> bool:
    """Whether the caller is traced with the axis bound: inside `jaxmpi.jit`, or a `shard_map` or `vmap` over it."""
    try:
        lax.axis_size(AXIS)
    except NameError:
        return False
    return True


def equal_on_all_ranks(x: Any) -> Any:
    """`x`, of which the caller knows that it is equal on all ranks, such as a counter that all have advanced together.

    A branch with a collective may depend on it. It is an identity with a name, which `variation` looks for.
    """
    return checkpoint_name(x, EQUAL)
