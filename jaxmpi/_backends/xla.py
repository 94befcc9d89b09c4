"""XLA's own collectives between processes, NCCL on CUDA and gloo on CPU; MPI starts them, and carries objects.

Each rank's arrays go in and come out as global arrays with the sharding `P()` of a mesh of one
device a rank. XLA takes these for replicated, but each process holds its own values, and nothing
inside (`shard_map` without `check_vma`) relies on more. Wrapping and unwrapping share the memory.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxmpi._axis import AXIS
from jaxmpi._backends import packing
from jaxmpi._backends.base import Collective
from jaxmpi._backends.groups import named_groups
from jaxmpi._backends.jax_processes import join_jax_processes
from jaxmpi._backends.mpi_library import import_mpi4py
from jaxmpi._backends.process_group import MpiProcessGroup
from jaxmpi._backends.start_checks import check_start, take_device

__all__ = ["Xla"]


class Xla(MpiProcessGroup):
    """Ranks whose programs talk through XLA."""

    name = "xla"
    effects: frozenset[Hashable] = frozenset()
    global_arrays, takes_references = True, False
    # XLA orders collectives by the whole program that it compiles, and gloo tells them apart by
    # their order
    same_module = True

    def __init__(self, launched: int, devices: Sequence[int] | None) -> None:
        """Join the other ranks, and have JAX join them; `launched` and `devices` as in `jaxmpi.init`."""
        mpi = import_mpi4py(launched)
        check_start(mpi, launched)
        take_device(launched, devices)
        super().__init__(mpi)
        if self.place.size > 1:
            one_host = self.place.local_size == self.place.size
            join_jax_processes(
                self.place.rank, self.place.size, one_host, partial(self.broadcast_object, root=0)
            )
        # of each rank, as `local_devices` has it
        first = {device.process_index: device for device in reversed(jax.devices())}
        self.mesh = Mesh(np.array([first[rank] for rank in range(self.place.size)]), (AXIS,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec())

    def name_axes(self, axes: Mapping[str, int]) -> None:
        """Name axes beside AXIS, and connect the ranks of each group; every rank calls it.

        On CPUs, the first collective of a group connects its ranks, and gloo gives the last of them
        30 seconds to come. In `init` all ranks are there at the same time; in a train step one of
        them may still be reading its data.
        """
        super().name_axes(axes)
        if self.place.size == 1 or jax.default_backend() != "cpu":
            return

        def connect(x: jax.Array) -> jax.Array:
            x = jax.lax.psum(x, AXIS)
            # one after the other, in the same order on all ranks
            for groups in named_groups(self.axes):
                x = jax.lax.psum(x, AXIS, axis_index_groups=groups)
            return x

        everywhere = PartitionSpec()
        program = jax.shard_map(
            connect, mesh=self.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
        jax.block_until_ready(jax.jit(program)(*self.wrap([np.zeros(1, np.float32)])))

    @property
    def combines(self) -> bool:
        """Not on GPUs, where XLA knows best what to combine."""
        return jax.default_backend() == "cpu"

    @property
    def keeps_order(self) -> bool:
        """Return whether XLA starts collectives, and loops that contain some, in one order on all ranks: not on CPUs."""
        return jax.default_backend() != "cpu"

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """The bytes of each of XLA's collectives for arrays like these."""
        return packing.messages(call, arrays, self.place.size)

    def wrap(self, leaves: list[ArrayLike]) -> list[ArrayLike]:
        """Arrays of this rank as global ones; the list itself if all are global already, as the state of a train step is."""
        try:
            if [x.sharding for x in leaves].count(self.sharding) == len(leaves):
                return leaves
        except AttributeError:  # NumPy arrays and numbers
            pass
        return [self._wrap(x) for x in leaves]

    def _wrap(self, x: ArrayLike) -> ArrayLike:
        if (
            isinstance(x, bool | int | float | complex)
            or getattr(x, "sharding", None) == self.sharding
        ):
            return x
        if getattr(x, "dtype", None) == jax.dtypes.float0:  # JAX makes no array on a device of it
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, weak_type=x.weak_type, sharding=self.sharding
            )
        if isinstance(x, jax.Array) and not x.is_fully_addressable and x.is_fully_replicated:
            # a library's array over all devices, of which each has the whole
            x = x.addressable_data(0)
        mine = jax.device_put(x, jax.local_devices()[0])
        return jax.make_array_from_single_device_arrays(mine.shape, self.sharding, [mine])

    def unwrap(self, x: jax.Array) -> jax.Array:
        """This rank's array of a global one."""
        return (
            x.addressable_data(0) if isinstance(x, jax.Array) and x.sharding == self.sharding else x
        )

    def index(self) -> jax.Array:
        """This rank's number, inside of `jaxmpi.jit`."""
        return jax.lax.axis_index(AXIS)

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Raise an error: plain `jax.jit` does not know the other ranks."""
        raise RuntimeError(
            "A collective was called under jax.jit, and on the xla backend the ranks are known "
            "only inside of jaxmpi.jit. Use jaxmpi.jit instead of jax.jit."
        )

    def close(self) -> None:
        """Leave the other ranks."""
        super().close()
        if self.place.size > 1:
            jax.distributed.shutdown()
