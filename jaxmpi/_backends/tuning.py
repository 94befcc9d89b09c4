"""Sizes and algorithms of the messages between nodes, and a probe of the network.

The probe decides how many chunks are on their way at once and, up to `direct_nodes`, how large
buckets are. Nothing else: the size of a chunk, and the rest, decides in which order sums are
formed, and a job must give the same bits whenever it runs.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil, log2
from typing import NamedTuple

import numpy as np

from jaxmpi._backends.communicator import Communicator

__all__ = ["Network", "Tuning", "free_bytes", "probe", "tuned"]

# of a message between nodes, as `native/internode.cc` cuts it: MPI sends it without asking first
PIECE_BYTES = 60 << 10
CHUNK_BYTES = 1 << 19  # at most
CHUNKS = 8  # at least
ON_THE_WAY_BYTES = 1 << 25  # of all chunks, at most
# times what covers the latency, and so many chunks more, which are being laid out, reduced or
# copied
MARGIN = 1.6, 4
BUCKET_LATENCIES = 20  # of a bucket: what it costs to begin one is then a twentieth of it
BUCKET_BYTES = 1 << 20, 1 << 24  # at least and at most
PROBE_BYTES = 1 << 20, 1 << 25  # at least and at most
STILL_FASTER = 1.1
TAG = 1


class Network(NamedTuple):
    """Cost of a message between two nodes."""

    latency_seconds: float
    bytes_per_second: float


class Tuning(NamedTuple):
    """Parameters of `native/between.cc`; `JAXMPI_TUNE` sets them."""

    chunk_bytes: int = PIECE_BYTES  # of a message, that each rank lays out at once
    chunks: int = 16  # on their way at once
    # up to here, an allreduce, alltoall or permute is sent with the comparison of the programs
    small_bytes: int = 1 << 15
    # up to so many nodes, each sends to each; above, there are ceil(log2 nodes) rounds
    direct_nodes: int = 8
    bucket_bytes: int = 1 << 22  # of what is sent while a step computes, in one message
    # of a rank, which share a large message within a node; 0: as many as its cores allow
    threads: int = 0


def tuned(
    network: Network | None, nodes: int, local_size: int, room_bytes: int, asked: Mapping[str, int]
) -> Tuning:
    """The sizes for a network, or the defaults.

    What a rank sends of a chunk is one piece between two nodes, half a piece or less up to
    `direct_nodes`, and several pieces between more.

    Args:
      network: what `probe` has found.
      nodes: how many there are.
      local_size: ranks of a node, at most.
      room_bytes: of shared memory for each rank.
      asked: what JAXMPI_TUNE sets.
    """
    tuning = Tuning(
        chunk_bytes=min(CHUNK_BYTES, PIECE_BYTES * local_size * max(1, nodes // 2))
    )._replace(**asked)
    if network is None:
        return tuning
    on_the_way = network.latency_seconds * network.bytes_per_second
    found = {
        "chunks": _chunks(
            _rounds(nodes, tuning.direct_nodes) * on_the_way, tuning.chunk_bytes, room_bytes
        )
    }
    if nodes <= tuning.direct_nodes:
        found["bucket_bytes"] = _bucket_bytes(BUCKET_LATENCIES * on_the_way)
    return tuning._replace(**{name: value for name, value in found.items() if name not in asked})


def _rounds(nodes: int, direct_nodes: int) -> int:
    """Messages of a chunk of an allreduce that wait for each other."""
    return 1 if nodes == 2 else 2 if nodes <= direct_nodes else 2 * ceil(log2(nodes))


def _chunks(on_the_way: float, chunk_bytes: int, room_bytes: int) -> int:
    """Return the number of chunks that keep the network busy, and few more."""
    times, more = MARGIN
    most = min(ON_THE_WAY_BYTES, room_bytes // 2) // chunk_bytes
    return max(CHUNKS, min(ceil(times * on_the_way / chunk_bytes) + more, most))


def _bucket_bytes(wanted: float) -> int:
    """A power of 4, so that a program that was compiled in one job is found again in the next, which measures a bit less."""
    size, most = BUCKET_BYTES
    while size < min(wanted, most):
        size *= 4
    return size


def probe(world: Communicator, firsts: list[int]) -> Network:
    """Measure the cost of a message between nodes; the result is equal on all ranks.

    Pairs of nodes send 8 bytes there and back. Then all send pieces around a ring, twice as many
    each time, until that is not faster any more: TCP begins slowly.

    Args:
      world: the communicator of all ranks, which all call this.
      firsts: a rank of each node.
    """

    def median(measure: Callable[[], float]) -> float:
        mine = measure() if world.rank in firsts else 0.0
        return statistics.median(seconds for seconds in world.allgather(mine) if seconds)

    latency = median(partial(_latency, world, firsts))
    size, rate, before = PROBE_BYTES[0], 0.0, 0.0
    while size <= PROBE_BYTES[1]:
        taken = median(partial(_ring_seconds, world, firsts, size))
        before, rate, size = rate, max(rate, size / max(1e-9, taken - latency)), 2 * size
        if before and rate < STILL_FASTER * before and taken > 2 * latency:
            break
    return Network(latency, rate)


def _latency(world: Communicator, firsts: list[int]) -> float:
    """The least of the seconds that a message takes between this rank, the first of a pair, and the other; 0 on the others."""
    at, message, taken = firsts.index(world.rank), np.zeros(8, np.uint8), []
    if (at ^ 1) >= len(firsts):
        return 0.0
    other = firsts[at ^ 1]
    for _ in range(8):
        start = time.perf_counter()
        if at % 2 == 0:
            world.Send(message, other, TAG)
        world.Recv(message, other, TAG)
        if at % 2:
            world.Send(message, other, TAG)
        taken.append(time.perf_counter() - start)
    return 0.0 if at % 2 else min(taken) / 2


def _ring_seconds(world: Communicator, firsts: list[int], size: int) -> float:
    """The seconds until this rank has sent so many bytes to the next one of a ring, and received as many."""
    at = firsts.index(world.rank)
    after, before = firsts[(at + 1) % len(firsts)], firsts[at - 1]
    sent, received = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    pieces = [slice(begin, begin + PIECE_BYTES) for begin in range(0, size, PIECE_BYTES)]
    start = time.perf_counter()
    requests = [world.Irecv(received[piece], before, TAG) for piece in pieces]
    requests += [world.Isend(sent[piece], after, TAG) for piece in pieces]
    for request in requests:
        request.Wait()
    return time.perf_counter() - start


def free_bytes(folder: str, ranks: int) -> int:
    """Return the bytes of the folder that each of the ranks may use."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize // ranks
