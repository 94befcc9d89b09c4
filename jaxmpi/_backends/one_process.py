"""One process that is all ranks of its job: one rank, or simulated ones; MPI is not started.

Values that differ between simulated ranks are stacked, in a `PerRank`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.extend.core import ClosedJaxpr

from jaxmpi._axis import AXIS
from jaxmpi._backends import lax_collectives
from jaxmpi._backends.base import (
    Branch,
    Collective,
    Explain,
    Place,
    Registry,
    Target,
)
from jaxmpi._backends.interface import (
    Limits,
    LocalArrays,
    Lowering,
    Processes,
    Ranks,
    Transport,
    nesting_error,
)
from jaxmpi._backends.wire import through_all
from jaxmpi._votes import Outcome, Vote

__all__ = ["Identity", "PerRank", "Simulated", "Single", "Stack"]

R = TypeVar("R")
T = TypeVar("T")

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

    def __getitem__(self, rank: int) -> jax.Array | np.ndarray:
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


class OneProcess(Ranks):
    """All ranks of a job in this process: they have the same objects and votes."""

    def __init__(self, name: str, place: Place, transport: Transport) -> None:
        self.name, self.place, self.transport = name, place, transport
        self.ranks_here = range(place.size)
        self.axes: Mapping[str, int] = {AXIS: place.size}
        self.registry, self.long_operation = Registry(), ""
        self.cores_per_rank = math.inf  # one process has all of them

    def executor(
        self, *, inline: Callable[[Processes], R], before: Callable[[Processes], R]
    ) -> R | None:
        """Return None: JAX runs its programs by itself."""
        return None

    def lower(self, lowering: Lowering[R]) -> R:
        """Make a program one of the transport."""
        return self.transport.lower(lowering)

    def allgather_object(self, obj: T) -> list[T]:
        """Return the object, once for each rank."""
        return [obj] * self.place.size

    def broadcast_object(self, obj: T, root: int) -> T:
        """Return the object itself."""
        return obj

    def broadcast_buffer(self, buffer: np.ndarray, root: int) -> None:
        """Leave it as it is."""

    def gather_details(self, side: T, ranks: Sequence[int] = ()) -> list[T]:
        """Return the object, once for each rank."""
        return [side] * (len(ranks) or self.place.size)

    def barrier(self) -> None:
        """Return at once."""

    def extremes(self, fingerprint: int, title: str = "", program: int = 0) -> tuple[int, int]:
        """Return the fingerprint itself, twice."""
        return fingerprint, fingerprint

    def start_vote(self, vote: Vote, title: str) -> Callable[[], Outcome]:
        """Return a function that returns this vote."""
        yes = vote is Vote.YES
        return lambda: Outcome(yes, yes, vote is Vote.FAILED)

    def explain_mismatches(self, explain: Explain) -> None:
        """Do nothing: there is nobody to differ from."""

    def name_axes(self, axes: Mapping[str, int]) -> None:
        """Name axes beside AXIS."""
        self.axes = {AXIS: self.place.size, **axes}

    def check_process(self) -> None:
        """Return: a forked child is one process, too."""

    def in_forked_child(self) -> Ranks:
        """Return these ranks."""
        return self

    def close(self) -> None:
        """Return: nothing was taken."""


class Single(OneProcess):
    """The only rank of a job."""

    def __init__(self) -> None:
        super().__init__("single", Place(), Identity())

    def eager(self, *, alone: T, stacked: T, parallel: T) -> T:
        """Return `alone`."""
        return alone

    def check_one_rank_here(self, error: str) -> None:
        """Return: this process is one rank."""


class Simulated(OneProcess):
    """Simulated ranks; Python is rank 0, and only a `PerRank` may differ between them."""

    def __init__(self, size: int, axes: tuple[tuple[str, int], ...] = ()) -> None:
        super().__init__("simulate", Place(0, size, 0, size, 0), Stack(size))
        self.name_axes(dict(axes))

    def eager(self, *, alone: T, stacked: T, parallel: T) -> T:
        """Return `stacked`."""
        return stacked

    def check_one_rank_here(self, error: str) -> None:
        """Raise a RuntimeError with this text."""
        raise RuntimeError(error)


class InProcess(Transport):
    """Programs of one process, which sends nothing."""

    description = ""

    def __init__(self, size: int) -> None:
        self._size, self.arrays = size, LocalArrays()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    @property
    def effects(self) -> frozenset[Hashable]:
        """Return none."""
        return frozenset()

    @abstractmethod
    def rank(self) -> jax.Array | np.int32:
        """Return this rank, an int32, in traced code."""

    def compare(
        self, fingerprint: int, first: Collective | None, calls: Sequence[Collective]
    ) -> Callable[[], None] | None:
        """Return None: there is nobody to compare with."""
        return None

    def compare_branch(
        self, jaxpr: ClosedJaxpr, taken: Branch, branches: Sequence[Branch]
    ) -> ClosedJaxpr:
        """Return the branch as it is."""
        return jaxpr

    def compare_loop(self, messages: Sequence[str]) -> Callable[[], None] | None:
        """Return None."""
        return None

    def shared_module(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr | None:
        """Return None: there is one module."""
        return None

    def loops(self, *, xla: T, native: T) -> T:
        """Return the form of XLA's operations."""
        return xla

    def connects(self, call: Collective) -> bool:
        """Return that `call` is within its groups, as on backend "xla"."""
        return True

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """Return the bytes of each message, as on backend "xla"."""
        return lax_collectives.packed_messages(call, arrays, self._size)

    def connect(self, axes: Mapping[str, int]) -> None:
        """Return: there is nobody to connect to."""

    def close(self) -> None:
        """Return: nothing was taken."""


class Identity(InProcess):
    """Programs of one rank: a collective gives back its arrays."""

    name = "single"

    def __init__(self) -> None:
        super().__init__(1)

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Give back the only rank's arrays, in the shapes that `call` promises."""
        if call.kind == "permute" and not call.pairs:
            return [jnp.zeros_like(x) for x in xs]
        return [jnp.reshape(x, call.out_shape(np.shape(x), 1)) for x in xs]

    def rank(self) -> np.int32:
        """Return the only rank, 0."""
        return np.int32(0)

    def target(self) -> Target:
        """Return operations that give back their arrays."""
        return Target(1, self.run, self.rank)

    def lower(self, lowering: Lowering[R]) -> R:
        """Make a program one without messages."""
        return lowering.as_it_is(self.target())

    def check(self, limits: Limits) -> None:
        """Refuse nothing."""

    def nested(self, program: T, api: str, title: str) -> T:
        """Return the program."""
        return program


class Stack(InProcess):
    """Programs of simulated ranks: a `vmap` over their stacked arrays."""

    name = "simulate"

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Raise an error: outside of `jaxmpi.jit` it is unknown whose array this is."""
        raise RuntimeError(
            "A collective was called outside of a step, and simulated ranks communicate only "
            "inside of jaxmpi.jit. Use jaxmpi.jit instead of jax.jit."
        )

    def rank(self) -> jax.Array:
        """Return each rank, an int32, inside of `jaxmpi.jit`."""
        return jax.lax.axis_index(AXIS)

    def target(self) -> Target:
        """Return JAX's collectives over the bound axis."""

        def run(call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
            # `vmap` knows no groups
            if call.groups:
                return through_all(lax_collectives.run_widened, call, xs, self.rank())
            return lax_collectives.run_widened(call, xs)

        return Target(self._size, run, self.rank)

    def lower(self, lowering: Lowering[R]) -> R:
        """Make a program one of stacked arrays."""
        return lowering.stacked(self.target())

    def check(self, limits: Limits) -> None:
        """Refuse references that `vmap` cannot batch."""
        limits.no_references_from_outside()
        limits.no_references_in_branches()

    def nested(self, program: T, api: str, title: str) -> T:
        """Raise a RuntimeError: the arrays of a traced caller are not stacked."""
        raise nesting_error(self.name, api, title)
