"""The transports of the native extension: shared memory and connections to other nodes."""

import ctypes
import math
import mmap
import os
import uuid
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from types import ModuleType

import numpy as np

from jaxmpi._backends.base import Place
from jaxmpi._backends.extension import Extension
from jaxmpi._backends.mpi_library import Communicator, libmpi
from jaxmpi._backends.tuning import (
    NODE_CHUNK_BYTES,
    NODE_CHUNKS,
    Network,
    Tuning,
    free_bytes,
    probe,
    tuned,
)
from jaxmpi._errors import MPIError
from jaxmpi._job.process import settings
from jaxmpi._job.process.processor import quota
from jaxmpi._job.process.run_dir import SEGMENT_PREFIX

__all__ = ["SHARED_MEMORY", "Transports", "shared_memory"]

SHARED_MEMORY = "/dev/shm"

MOST_THREADS = 4  # of a rank


class Transports:
    """The transports of this rank, by number: 0 is that of all ranks, the others are of groups.

    Attributes:
      members: for each transport, the ranks of this rank's group; () for all.
      nodes: the number of nodes of the job.
      tuning: sizes and thresholds of messages.
      network: latency and rate between nodes, if they were measured.
      description: how messages travel between nodes, for the line that `init` prints.
    """

    def __init__(self, mpi: ModuleType, native: Extension, place: Place) -> None:
        self._mpi, self._native, self._place = mpi, native, place
        self._shared: list[tuple[int, mmap.mmap]] = []
        self.members: list[Sequence[int]] = []
        self.network: Network | None = None
        self.description = ""
        self.tuning, self.nodes = Tuning(native.piece_bytes), 1
        self._threads = 1  # of this rank, which share a large message
        self._crowded = False  # whether there are more ranks than cores

    def open(self, comm: Communicator, members: Sequence[int]) -> int:
        """Open a transport: map the shared memory of the node, and connect the other nodes.

        **Collective:** all ranks of the job call it, each with the communicator of its group.

        Args:
          comm: the communicator of all ranks, at the first call, or of this rank's group.
          members: the ranks of the group; () for all.

        Returns:
          The number of the transport.
        """
        place = self._place
        node = comm.Split(place.node, place.local_rank)
        places = sorted(comm.allgather((place.node, place.local_rank, comm.rank)))
        nodes = sorted({number for number, _, _ in places})
        on_node = Counter(number for number, _, _ in places)
        ranks = [on_node[each] for each in nodes]
        if not self.members:
            first_of_node = accumulate(ranks[:-1], initial=0)
            self._measure(node, [places[first][2] for first in first_of_node])
        several = len(ranks) > 1
        slots, slot_bytes = NODE_CHUNKS, NODE_CHUNK_BYTES
        if several:
            slots, slot_bytes = self.tuning.chunks, self.tuning.chunk_bytes
        size = self._threads * self._native.layout_bytes(node.size, slot_bytes, slots)
        file, memory = shared_memory(self._mpi.COMM_WORLD, node, size)
        self._shared.append((file, memory))
        self.members.append(members)
        # errors name a rank by its local rank on the node, not by its number in the group
        names = []
        if members:
            names = [local_rank for number, local_rank, _ in places if number == place.node]
        transport = self._native.open(
            rank=comm.rank,
            order=[rank for _, _, rank in places],
            ranks=ranks,
            node=nodes.index(place.node),
            local_rank=node.rank,
            local_names=names,
            slot_bytes=slot_bytes,
            slots=slots,
            threads=self._threads,
            crowded=self._crowded,
            memory=np.frombuffer(memory, np.uint8).ctypes.data,
            file=file,
        )
        if several:
            self._connect(transport, comm)
        # `open` has locked this rank's byte of the file, which shows that it lives; nobody may
        # look for that lock before
        node.Barrier()
        node.Free()
        return int(transport)

    def _measure(self, node: Communicator, firsts: list[int]) -> None:
        """Choose threads and sizes of messages for the job; `firsts` has a rank of each node."""
        self.nodes, local_size = len(firsts), self._place.local_size
        node_cores = len(set().union(*node.allgather(os.sched_getaffinity(0))))
        cores = min(node_cores, quota() or math.inf) / local_size
        self._crowded = cores < 1
        self.tuning = self._tune(firsts)
        self._threads = 1 if self.nodes > 1 else self.tuning.threads or self._threads_for(cores)

    def _connect(self, transport: int, comm: Communicator) -> None:
        """Connect a transport to other nodes by the functions of the MPI library."""
        mpi, tuning = self._mpi, self.tuning
        self._native.connect(
            group=transport,
            library=libmpi(mpi),
            comm=self._handle(comm),
            byte=self._handle(mpi.BYTE),
            request_bytes=mpi._sizeof(mpi.Request),
            small_bytes=tuning.small_bytes,
            direct_nodes=tuning.direct_nodes,
        )

    def _threads_for(self, cores: float) -> int:
        """Return how many threads of a rank share a large message, the same on all ranks."""
        # each thread has slots of its own; at most an eighth of the room, as groups need some, too
        room = free_bytes(SHARED_MEMORY, self._place.local_size) // (
            8 * NODE_CHUNKS * NODE_CHUNK_BYTES
        )
        threads = max(1, min(MOST_THREADS, int(cores / 2), room))
        return int(self._mpi.COMM_WORLD.allreduce(threads, self._mpi.MIN))

    def _tune(self, firsts: list[int]) -> Tuning:
        """Return sizes and thresholds, from JAXMPI_TUNE and from a probe between nodes."""
        world, asked = self._mpi.COMM_WORLD, settings.get("JAXMPI_TUNE")
        piece_bytes = self._native.piece_bytes
        if len(firsts) == 1:
            return tuned(None, 1, 1, 0, asked or {}, piece_bytes=piece_bytes)
        self.network = probe(world, firsts, piece_bytes) if asked is None else None
        room = world.allreduce(free_bytes(SHARED_MEMORY, self._place.local_size), self._mpi.MIN)
        local_size = world.allreduce(self._place.local_size, self._mpi.MAX)
        tuning = tuned(
            self.network, len(firsts), local_size, room, asked or {}, piece_bytes=piece_bytes
        )
        found = ""
        if self.network:
            microseconds = 1e6 * self.network.latency_seconds
            rate = self.network.bytes_per_second / 1e6
            found = f"{microseconds:.0f} µs, {rate:.0f} MB/s; "
        chunks = f"{tuning.chunks} chunks of {tuning.chunk_bytes >> 10} KB at once"
        self.description = f"between nodes: {found}{chunks}"
        return tuning

    def _handle(self, of: object) -> int:
        """Return an MPI handle, a pointer or an int, as a signed 64-bit number."""
        return ctypes.c_int64(self._mpi._handleof(of)).value

    def close(self) -> None:
        """Close the extension's transports, and free the shared memory."""
        self._native.close()
        for file, memory in self._shared:
            memory.close()
            os.close(file)


def shared_memory(world: Communicator, node: Communicator, size: int) -> tuple[int, mmap.mmap]:
    """Return a file of zeros that all ranks of a node have mapped, and its memory.

    The file has no name any more once they have; `_job/process/run_dir` removes it after a kill.

    **Collective:** every rank of the job calls it.

    Raises:
      MPIError: on all ranks, if it cannot be made or mapped on one.
    """
    path, mapped, failure = "", None, ""
    if node.rank == 0:  # it makes the file, then the others open it
        path = f"{SHARED_MEMORY}/{SEGMENT_PREFIX}{uuid.uuid4().hex}"
        mapped, failure = _mapped(path, os.O_CREAT | os.O_EXCL, size)
    path, failure = node.bcast((path, failure))
    if node.rank and not failure:
        mapped, failure = _mapped(path, 0, size)
    failures = [other for other in world.allgather(failure) if other]
    if node.rank == 0 and mapped:
        os.unlink(path)
    if mapped and not failures:
        return mapped
    if mapped:
        os.close(mapped[0])
        mapped[1].close()
    raise MPIError(
        f"init: a host cannot share {size >> 20} MiB of memory among its {node.size} ranks: "
        f"{failures[0]}. "
        f"Make room in {SHARED_MEMORY}, or set JAXMPI_TRANSPORT=mpi4jax."
    )


def _mapped(path: str, flags: int, size: int) -> tuple[tuple[int, mmap.mmap] | None, str]:
    """Return a file and its memory, or why there is none.

    A file that was made and cannot be mapped is removed.
    """
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        if flags:
            os.posix_fallocate(file, 0, size)  # an error now, rather than a bus error later
        return (file, mmap.mmap(file, size)), ""
    except (OSError, ValueError) as error:
        if file >= 0:
            os.close(file)
            if flags:
                os.unlink(path)
        return None, f"{error} on {os.uname().nodename}"
