"""The transports of the native extension: their shared memory within a node, and their connections to other nodes."""

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from jaxmpi._backends.base import Place
from jaxmpi._backends.communicator import Communicator
from jaxmpi._backends.mpi_library import libmpi
from jaxmpi._backends.shared_memory import SHARED_MEMORY, shared_memory
from jaxmpi._backends.tuning import Network, Tuning, free_bytes, probe, tuned
from jaxmpi._job.process import settings
from jaxmpi._job.process.processor import quota

__all__ = ["Transports"]

SLOTS, SLOT_BYTES = 4, 1 << 18  # within one node
THREADS = 4  # at most, of a rank


class Transports:
    """The transports of this rank, by their numbers: 0 is that of all ranks, the others are those of groups.

    Attributes:
      members: of each, the ranks of this rank's group; () for all.
      nodes: how many there are.
      tuning: of messages between nodes.
      network: between nodes, if it was measured.
      description: of how messages travel between nodes.
    """

    def __init__(self, mpi: ModuleType, native: Any, place: Place) -> None:
        self._mpi, self._native, self._place = mpi, native, place
        self._shared: list[tuple[int, mmap.mmap]] = []
        self.members: list[Sequence[int]] = []
        self.network: Network | None = None
        self.description = ""
        self.tuning, self.nodes = Tuning(), 1
        # of this rank, which share a large message; more ranks than cores
        self._threads, self._crowded = 1, False

    def open(self, comm: Communicator, members: Sequence[int]) -> int:
        """Map the memory that ranks of a node share, and say how those on other nodes are reached.

        Args:
          comm: the communicator of all ranks, at the first call, or of this rank's group; all ranks
            of the job call it, each with its own.
          members: the ranks of the group; () for all.

        Returns:
          The number of the transport.
        """
        place = self._place
        node = comm.Split(place.node, place.local_rank)
        places = sorted(comm.allgather((place.node, place.local_rank, comm.rank)))
        nodes = sorted({number for number, _, _ in places})
        ranks = [sum(number == each for number, _, _ in places) for each in nodes]
        if not self.members:
            self._measure(node, [places[sum(ranks[:each])][2] for each in range(len(ranks))])
        several = len(ranks) > 1
        slots, slot_bytes = (
            (self.tuning.chunks, self.tuning.chunk_bytes) if several else (SLOTS, SLOT_BYTES)
        )
        size = self._threads * self._native.layout_bytes(node.size, slot_bytes, slots)
        file, memory = shared_memory(self._mpi.COMM_WORLD, node, size)
        self._shared.append((file, memory))
        self.members.append(members)
        names = (
            [local_rank for number, local_rank, _ in places if number == place.node]
            if members
            else []
        )
        transport = self._native.open(
            rank=comm.rank, order=[rank for _, _, rank in places], ranks=ranks, node=nodes.index(place.node),
            local_rank=node.rank, local_names=names, slot_bytes=slot_bytes, slots=slots, threads=self._threads,
            crowded=self._crowded, memory=np.frombuffer(memory, np.uint8).ctypes.data, file=file,
        )  # fmt: skip
        if several:
            self._connect(transport, comm)
        node.Barrier()  # nobody looks whether a rank lives before it says that it does
        node.Free()
        return int(transport)

    def _measure(self, node: Communicator, firsts: list[int]) -> None:
        """Choose, for the ranks of the job, the threads and the sizes of messages; `firsts`: a rank of each node."""
        self.nodes, local_size = len(firsts), self._place.local_size
        cores = (
            min(len(set().union(*node.allgather(os.sched_getaffinity(0)))), quota() or math.inf)
            / local_size
        )
        self._crowded = cores < 1
        self.tuning = self._tune(firsts)
        self._threads = 1 if self.nodes > 1 else self.tuning.threads or self._threads_for(cores)

    def _connect(self, transport: int, comm: Communicator) -> None:
        """Have the extension reach other nodes by the functions of the MPI library."""
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
        """Return the number of threads that share a large message, equal on all ranks of a node."""
        # groups take theirs, too
        room = free_bytes(SHARED_MEMORY, self._place.local_size) // (8 * SLOTS * SLOT_BYTES)
        return int(
            self._mpi.COMM_WORLD.allreduce(
                max(1, min(THREADS, int(cores / 2), room)), self._mpi.MIN
            )
        )

    def _tune(self, firsts: list[int]) -> Tuning:
        """Sizes and algorithms between nodes, from JAXMPI_TUNE and what a probe finds; `firsts`: a rank of each node."""
        world, asked = self._mpi.COMM_WORLD, settings.get("JAXMPI_TUNE")
        if len(firsts) == 1:
            return tuned(None, 1, 1, 0, asked or {})
        self.network = probe(world, firsts) if asked is None else None
        room = world.allreduce(free_bytes(SHARED_MEMORY, self._place.local_size), self._mpi.MIN)
        local_size = world.allreduce(self._place.local_size, self._mpi.MAX)
        tuning = tuned(self.network, len(firsts), local_size, room, asked or {})
        found = (
            self.network
            and f"{1e6 * self.network.latency_seconds:.0f} µs, {self.network.bytes_per_second / 1e6:.0f} MB/s; "
        )
        self.description = f"between nodes: {found or ''}{tuning.chunks} chunks of {tuning.chunk_bytes >> 10} KB at once"
        return tuning

    def _handle(self, of: object) -> int:
        """A pointer, or an int that mpi4py takes for unsigned."""
        return ctypes.c_int64(self._mpi._handleof(of)).value

    def close(self) -> None:
        """Close the extension's transports, and free the shared memory."""
        self._native.close()
        for file, memory in self._shared:
            memory.close()
            os.close(file)
