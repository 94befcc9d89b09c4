"""The ranks are a named axis of a train step, as the axes of `jax.vmap` and `jax.shard_map` are."""

from jax import lax

__all__ = ["AXIS", "bound"]

AXIS = "ranks"


def bound() -> bool:
    """Whether the caller is traced with the axis bound: inside `jaxmpi.jit`, or a `shard_map` or `vmap` over it."""
    try:
        lax.axis_size(AXIS)
    except NameError:
        return False
    return True
