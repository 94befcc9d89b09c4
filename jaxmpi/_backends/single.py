"""One process: every collective is the identity, and MPI is neither needed nor started."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxmpi._axis import AXIS
from jaxmpi._backends import packing
from jaxmpi._backends.base import Collective, Place

__all__ = ["OneProcess", "Single"]

T = TypeVar("T")


class OneProcess:
    """Objects and votes with one process: all ranks have the same objects."""

    effects: frozenset[Hashable] = frozenset()
    place: Place
    axes: Mapping[str, int]
    forked = False  # a forked child is one process, too
    long_operation = ""  # with what takes long, for those who watch
    simulates = global_arrays = nests = fuses_mean = compares_inline = same_module = False
    encodes_int8 = False
    takes_references = combines = True
    overlap = None

    def carries(self, call: Collective) -> bool:
        """Return whether the ranks compare what they send when they carry it out."""
        return False

    def connects(self, call: Collective) -> bool:
        """Return whether groups have messages: as on backend "xla"."""
        return True

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """Return the bytes of each message, as on backend "xla"."""
        return packing.messages(call, arrays, self.place.size)

    def wrap(self, leaves: list[ArrayLike]) -> list[ArrayLike]:
        """The arrays as they are."""
        return leaves

    def unwrap(self, x: jax.Array) -> jax.Array:
        """The array as it is."""
        return x

    def allgather_object(self, obj: T) -> list[T]:
        """The object, once for each rank."""
        return [obj] * self.place.size

    def broadcast_object(self, obj: object, root: int) -> Any:
        """The object itself."""
        return obj

    def broadcast_buffer(self, buffer: np.ndarray, root: int) -> None:
        """Leave it as it is."""

    def barrier(self) -> None:
        """Return at once."""

    def extremes(self, fingerprint: int, title: str = "", program: int = 0) -> tuple[int, int]:
        """The number itself."""
        return fingerprint, fingerprint

    def start_vote(self, yes: bool, title: str) -> Callable[[], tuple[bool, bool]]:
        """Return a function that returns this vote."""
        return lambda: (yes, yes)

    def name_axes(self, axes: Mapping[str, int]) -> None:
        """Name axes beside AXIS."""
        self.axes = {AXIS: self.place.size, **axes}

    def close(self) -> None:
        """Nothing was taken."""


class Single(OneProcess):
    """The backend of a job of one rank."""

    name = "single"
    place = Place()
    axes: Mapping[str, int] = {AXIS: 1}

    def index(self) -> np.int32:
        """The number of the only rank."""
        return np.int32(0)

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Give back the only rank's arrays, in the shapes that `call` promises."""
        if call.kind == "permute" and not call.pairs:
            return [jnp.zeros_like(x) for x in xs]
        return [jnp.reshape(x, call.out_shape(np.shape(x), 1)) for x in xs]
