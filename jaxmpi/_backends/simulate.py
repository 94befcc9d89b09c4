"""Several ranks in one process: the values that differ between them are stacked, and a step runs on all at once."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxmpi._axis import AXIS
from jaxmpi._backends.base import Collective, Place
from jaxmpi._backends.single import OneProcess

__all__ = ["PerRank", "Simulated"]


@jax.tree_util.register_pytree_node_class
class PerRank:
    """An array that each simulated rank has its own of: `stack[r]` is rank r's.

    A pytree node, so that it goes into and comes out of `jaxmpi.jit`, and `jax.device_get` and `np.asarray` take it.
    """

    def __init__(self, stack: jax.Array | np.ndarray) -> None:
        self.stack = stack

    def __getitem__(self, rank: int) -> Any:
        return self.stack[rank]

    def __len__(self) -> int:
        return len(self.stack)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.stack, dtype) if copy else np.asarray(self.stack, dtype)

    def __repr__(self) -> str:
        return f"PerRank({self.stack!r})"

    def tree_flatten(self) -> tuple[tuple[jax.Array | np.ndarray], None]:
        return (self.stack,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[jax.Array | np.ndarray]) -> "PerRank":
        return cls(*children)


class Simulated(OneProcess):
    """`size` ranks, of which Python sees rank 0; values that are no `PerRank` are equal on all of them."""

    name = "simulate"
    simulates, takes_references = True, False

    def __init__(self, size: int, axes: tuple[tuple[str, int], ...] = ()) -> None:
        self.place = Place(rank=0, size=size, local_rank=0, local_size=size, node=0)
        self.axes = {AXIS: size, **dict(axes)}

    def index(self) -> jax.Array:
        """Each rank's number, inside of `jaxmpi.jit`."""
        return jax.lax.axis_index(AXIS)

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Not outside of `jaxmpi.jit`, where an array does not say whether it is one rank's or all ranks'."""
        raise RuntimeError("Simulated ranks communicate inside of jaxmpi.jit. Put it in the place of jax.jit.")
