"""XLA's own collectives between processes: NCCL on CUDA, gloo or MPI on CPUs; MPI carries objects.

Each rank's arrays go in and come out as global arrays with the sharding `P()` of a mesh of one
device a rank. XLA takes these for replicated, but each process holds its own values, and nothing
inside (`shard_map` without `check_vma`) relies on more. Wrapping and unwrapping share the memory.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import ModuleType
from typing import TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxmpi._axis import AXIS
from jaxmpi._backends import lax_collectives
from jaxmpi._backends.base import Branch, Collective, Place, Target
from jaxmpi._backends.comparison import Comparison, MpiTransport, SeparateComparison
from jaxmpi._backends.groups import named_groups
from jaxmpi._backends.interface import Arrays, Limits, Lowering, Processes, nesting_error
from jaxmpi._backends.jax_processes import join_jax_processes
from jaxmpi._backends.mpi_library import Communicator
from jaxmpi._job.process import jax_collectives

__all__ = ["Xla"]

R = TypeVar("R")
T = TypeVar("T")
Tree = TypeVar("Tree")  # a pytree of arrays


class Xla(MpiTransport):
    """Programs on a mesh of one device a rank, which talk through XLA."""

    name, description = "xla", ""

    def __init__(self, place: Place, mpi: ModuleType) -> None:
        """Have JAX's processes join each other; every rank calls it.

        Args:
          place: of this rank.
          mpi: the module `mpi4py.MPI`.
        """
        self._size = place.size
        self._is_left_to_monitor = False  # to end the job for a long wait
        if place.size > 1:
            one_host = place.local_size == place.size
            join_jax_processes(place.rank, place.size, one_host, mpi.COMM_WORLD.allgather)
        # of each rank, as `local_devices` has it
        first = {device.process_index: device for device in reversed(jax.devices())}
        self._mesh = Mesh(np.array([first[rank] for rank in range(place.size)]), (AXIS,))
        self.arrays = GlobalArrays(NamedSharding(self._mesh, PartitionSpec()))
        # NCCL waits on the GPU, and its threads on the host look again and again.
        self.waits_asleep = jax.default_backend() == "cpu"

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    @property
    def effects(self) -> frozenset[Hashable]:
        """Return none: XLA orders collectives by the whole program."""
        return frozenset()

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Raise an error: plain `jax.jit` does not know the other ranks."""
        raise RuntimeError(
            "A collective was called under jax.jit, and on the xla backend the ranks are known "
            "only inside of jaxmpi.jit. Use jaxmpi.jit instead of jax.jit."
        )

    def rank(self) -> jax.Array:
        """Return this rank, an int32, inside of `jaxmpi.jit`."""
        return jax.lax.axis_index(AXIS)

    def compare(
        self, fingerprint: int, first: Collective | None, calls: Sequence[Collective]
    ) -> Callable[[], None] | None:
        """Return None: the ranks compare a program before each call."""
        return None

    def compare_branch(
        self, jaxpr: ClosedJaxpr, taken: Branch, branches: Sequence[Branch]
    ) -> ClosedJaxpr:
        """Return the branch as it is: under plain `jax.jit`, `run` refuses its messages."""
        return jaxpr

    def compare_loop(self, messages: Sequence[str]) -> Callable[[], None] | None:
        """Return None, for the same reason."""
        return None

    def comparison(self, ranks: Processes, objects: Communicator, maximum: object) -> Comparison:
        """Return a comparison before each program."""
        return SeparateComparison(ranks, objects, maximum)

    def target(self) -> Target:
        """Return XLA's collectives on a few arrays at a time.

        On GPUs XLA knows best what to combine, and starts collectives, and loops that contain some,
        in one order on all ranks. On CPUs it does neither.
        """
        on_cpu = jax.default_backend() == "cpu"
        return Target(
            self._size,
            lax_collectives.run_packed,
            self.rank,
            combine=on_cpu,
            keeps_order=not on_cpu,
        )

    def lower(self, lowering: Lowering[R]) -> R:
        """Make a program a `shard_map` over the mesh."""
        return lowering.on_mesh(self.target(), self._mesh)

    def check(self, limits: Limits) -> None:
        """Refuse references from outside, and effects that JAX has for one device only."""
        limits.no_references_from_outside()
        limits.no_ordered_effects()

    def nested(self, program: T, api: str, title: str) -> T:
        """Raise a RuntimeError: a traced caller has this rank's arrays, and no global ones."""
        raise nesting_error(self.name, api, title)

    def shared_module(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr | None:
        """Return the program.

        XLA orders collectives by the whole program that it compiles, and gloo tells them apart by
        their order.
        """
        return jaxpr

    def loops(self, *, xla: T, native: T) -> T:
        """Return the form of XLA's operations."""
        return xla

    def connects(self, call: Collective) -> bool:
        """Return that XLA has groups for each of its collectives."""
        return True

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """Return the bytes of each of XLA's collectives for arrays like these."""
        return lax_collectives.packed_messages(call, arrays, self._size)

    def connect(self, axes: Mapping[str, int]) -> None:
        """Connect the ranks of each group along named axes; every rank calls it.

        On CPUs, the first collective of a group connects its ranks, and gloo gives the last of them
        30 seconds to come. In `init` all ranks are there at the same time; in a train step one of
        them may still be reading its data.
        """
        if self._size == 1 or jax.default_backend() != "cpu":
            return

        def communicate(x: jax.Array) -> jax.Array:
            x = jax.lax.psum(x, AXIS)
            # one after the other, in the same order on all ranks
            for groups in named_groups(axes):
                x = jax.lax.psum(x, AXIS, axis_index_groups=groups)
            return x

        everywhere = PartitionSpec()
        program = jax.shard_map(
            communicate,
            mesh=self._mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        jax.block_until_ready(jax.jit(program)(*self.arrays.wrap([np.zeros(1, np.float32)])))

    def monitored(self, is_in_program: Callable[[], bool]) -> None:
        """Have the library of JAX's collectives end no job for a wait in a program."""
        is_left = is_in_program()
        if is_left != self._is_left_to_monitor:
            jax_collectives.leave_end_to_monitor(is_left)
            self._is_left_to_monitor = is_left

    def wait_for_all(self) -> None:
        """Do nothing: a program waits for each message."""

    def close(self) -> None:
        """Leave JAX's other processes."""
        self.monitored(lambda: False)
        if self._size > 1:
            jax.distributed.shutdown()


class GlobalArrays(Arrays):
    """Arrays that JAX knows as those of all processes: each has its own values."""

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding, self._size = sharding, sharding.mesh.size

    def wrap(self, leaves: list[ArrayLike]) -> list[ArrayLike]:
        """Return arrays of this rank as global ones.

        It returns the list itself if all are global already, as the state of a train step is.
        """
        try:
            if [x.sharding for x in leaves].count(self._sharding) == len(leaves):
                return leaves
        except AttributeError:  # NumPy arrays and numbers
            pass
        return [self._wrap(x) for x in leaves]

    def wrap_tree(self, tree: Tree) -> Tree:
        """Return a tree with global arrays; the tree itself in a job of one rank."""
        if self._size == 1:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(self.wrap(leaves))

    def local(self, tree: Tree) -> Tree:
        """Return this rank's arrays of global ones."""
        return jax.tree.map(self._local, tree)

    def _wrap(self, x: ArrayLike) -> ArrayLike:
        if (
            isinstance(x, bool | int | float | complex)
            or getattr(x, "sharding", None) == self._sharding
        ):
            return x
        if getattr(x, "dtype", None) == jax.dtypes.float0:  # JAX makes no array on a device of it
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, weak_type=x.weak_type, sharding=self._sharding
            )
        if isinstance(x, jax.Array) and not x.is_fully_addressable and x.is_fully_replicated:
            # a library's array over all devices, of which each has the whole
            x = x.addressable_data(0)
        mine = jax.device_put(x, jax.local_devices()[0])
        return jax.make_array_from_single_device_arrays(mine.shape, self._sharding, [mine])

    def _local(self, x: ArrayLike) -> ArrayLike:
        if isinstance(x, jax.Array) and x.sharding == self._sharding:
            return x.addressable_data(0)
        return x
