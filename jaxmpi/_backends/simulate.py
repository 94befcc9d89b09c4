"""Simulated ranks in one process: values that differ between them are stacked."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
import numpy.typing as npt

from jaxmpi._axis import AXIS
from jaxmpi._backends.base import Collective, Place
from jaxmpi._backends.single import OneProcess

__all__ = ["PerRank", "Simulated"]

REFUSED = (
    "is not defined: each simulated rank has a different value. Use the value of rank 0, x[0], the "
    "values of all ranks, np.asarray(x), or their mean, jaxmpi.average_metrics(x)."
)
BINARY = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "divmod": "divmod",
    "pow": "**",
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
}
UNARY = {  # and comparisons, which have no reflected method of their own
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "ge": ">=",
    "neg": "-",
    "pos": "+",
    "abs": "abs",
    "invert": "~",
    "round": "round",
    "bool": "bool",
    "int": "int",
    "float": "float",
    "complex": "complex",
    "index": "index",
}


@jax.tree_util.register_pytree_node_class
class PerRank:
    """An array with a value for each simulated rank: `stack[r]` is the array of rank r.

    It is a pytree node: `jaxmpi.jit` takes and returns it, and so do `jax.device_get` and
    `np.asarray`. It is no number: arithmetic, comparisons, `bool`, `float` and formats such as
    ".3f" raise a TypeError, because each process of a real job would have a different value.
    `x[0]` is the value of rank 0, as which Python runs; `np.asarray(x)` has all values;
    `jaxmpi.average_metrics(x)` is their mean, which a log should show: the same line is right on
    real ranks.
    """

    __array_ufunc__ = None  # so that NumPy's numbers leave arithmetic to the methods below
    __hash__ = object.__hash__

    def __init__(self, stack: jax.Array | np.ndarray) -> None:
        self.stack = stack

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(f"PerRank: format {spec!r} {REFUSED}")
        return str(self)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"PerRank: .{name} {REFUSED}")

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


def _refused(operator: str) -> Callable[..., NoReturn]:
    def method(self: PerRank, *_: object) -> NoReturn:
        raise TypeError(f"PerRank: {operator} {REFUSED}")

    return method


# Python looks for operators in the class, and not in __getattr__
for _name, _operator in (BINARY | UNARY).items():
    setattr(PerRank, f"__{_name}__", _refused(_operator))
for _name, _operator in BINARY.items():
    setattr(PerRank, f"__r{_name}__", _refused(_operator))


class Simulated(OneProcess):
    """Backend of `size` simulated ranks; Python is rank 0, and only a `PerRank` may differ."""

    name = "simulate"
    simulates, takes_references = True, False

    def __init__(self, size: int, axes: tuple[tuple[str, int], ...] = ()) -> None:
        self.place = Place(rank=0, size=size, local_rank=0, local_size=size, node=0)
        self.axes = {AXIS: size, **dict(axes)}

    def index(self) -> jax.Array:
        """Each rank's number, inside of `jaxmpi.jit`."""
        return jax.lax.axis_index(AXIS)

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Raise an error: outside of `jaxmpi.jit` it is unknown whose array this is."""
        raise RuntimeError(
            "A collective was called outside of a step, and simulated ranks communicate only "
            "inside of jaxmpi.jit. Use jaxmpi.jit instead of jax.jit."
        )
