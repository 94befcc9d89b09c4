"""Chunk sizes within a node and between nodes, algorithms between nodes, a probe of the network.

The probe chooses how many chunks are in transit at once and, up to `direct_nodes`, the size of
buckets. It chooses nothing else: the size of a chunk and the rest decide in which order sums are
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

from jaxmpi._backends.mpi_library import Communicator

__all__ = [
    *("NODE_CHUNKS", "NODE_CHUNK_BYTES", "Network", "Tuning"),
    *("free_bytes", "probe", "tuned"),
]

# Within a node: chunks of shared memory of each thread of a rank, in a job on one node
NODE_CHUNKS, NODE_CHUNK_BYTES = 4, 1 << 18
# Between nodes
MOST_CHUNK_BYTES = 1 << 19
LEAST_CHUNKS = 8
MOST_TRANSIT_BYTES = 1 << 25  # of all chunks in transit
LATENCY_FACTOR = 1.6  # times the bytes that cover the latency
EXTRA_CHUNKS = 4  # beside those in transit: they are being laid out, reduced or copied
# the cost of beginning a bucket is then a twentieth of its time
BUCKET_LATENCIES = 20
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 1 << 20, 1 << 24
LEAST_PROBE_BYTES, MOST_PROBE_BYTES = 1 << 20, 1 << 25
STILL_FASTER = 1.1  # the probe goes on while twice the bytes raise the rate by so much
TAG = 1


class Network(NamedTuple):
    """Latency and rate of messages between two nodes."""

    latency_seconds: float
    bytes_per_second: float


class Tuning(NamedTuple):
    """Sizes and thresholds of messages; `JAXMPI_TUNE` sets any of them."""

    chunk_bytes: int  # what each rank lays out of a message at once
    chunks: int = 16  # in transit at once
    # up to here, an allreduce, alltoall or permute is sent together with the fingerprint
    small_bytes: int = 1 << 15
    # up to so many nodes, each sends to each; above, there are ceil(log2 nodes) rounds
    direct_nodes: int = 8
    bucket_bytes: int = 1 << 22  # of one message that is sent while a step computes
    # of a rank, which share a large message within a node; 0: as many as its cores allow
    threads: int = 0


def tuned(
    network: Network | None,
    nodes: int,
    local_size: int,
    room_bytes: int,
    asked: Mapping[str, int],
    *,
    piece_bytes: int,
) -> Tuning:
    """Return the sizes for a network, or the defaults.

    Of a chunk, a rank sends one piece between two nodes, half a piece or less up to
    `direct_nodes`, and several pieces between more.

    Args:
      network: the result of `probe`, or None.
      nodes: the number of nodes.
      local_size: the largest number of ranks of a node.
      room_bytes: shared memory for each rank.
      asked: the fields that JAXMPI_TUNE sets.
      piece_bytes: the largest message that the extension sends.
    """
    chunk_bytes = min(MOST_CHUNK_BYTES, piece_bytes * local_size * max(1, nodes // 2))
    tuning = Tuning(chunk_bytes)._replace(**asked)
    if network is None:
        return tuning
    transit_bytes = network.latency_seconds * network.bytes_per_second
    found = {}
    if "chunks" not in asked:
        rounds = _rounds(nodes, tuning.direct_nodes)
        found["chunks"] = _chunks(rounds * transit_bytes, tuning.chunk_bytes, room_bytes)
    if "bucket_bytes" not in asked and nodes <= tuning.direct_nodes:
        found["bucket_bytes"] = _bucket_bytes(BUCKET_LATENCIES * transit_bytes)
    return tuning._replace(**found)


def _rounds(nodes: int, direct_nodes: int) -> int:
    """Return how many messages of a chunk of an allreduce wait for each other."""
    return 1 if nodes == 2 else 2 if nodes <= direct_nodes else 2 * ceil(log2(nodes))


def _chunks(transit_bytes: float, chunk_bytes: int, room_bytes: int) -> int:
    """Return how many chunks keep the network busy.

    Many more would wait in the queue of a cable, and delay the messages of other ranks.
    """
    most = min(MOST_TRANSIT_BYTES, room_bytes // 2) // chunk_bytes
    wanted = ceil(LATENCY_FACTOR * transit_bytes / chunk_bytes) + EXTRA_CHUNKS
    return max(LEAST_CHUNKS, min(wanted, most))


def _bucket_bytes(wanted: float) -> int:
    """Return `wanted`, rounded up to a power of 4 within the limits.

    The next job measures a bit more or less, and must find the compiled program of this one.
    """
    size = LEAST_BUCKET_BYTES
    while size < min(wanted, MOST_BUCKET_BYTES):
        size *= 4
    return size


def probe(world: Communicator, firsts: list[int], piece_bytes: int) -> Network:
    """Measure what a message from node to node costs, with the same result on all ranks.

    Pairs of nodes send 8 bytes there and back. Then all send pieces around a ring, twice as many
    each time, until that is no longer faster: TCP begins slowly.

    Args:
      world: the communicator of all ranks, which all call this.
      firsts: a rank of each node.
      piece_bytes: the largest message that the extension sends.
    """

    def median(measure: Callable[[], float]) -> float:
        mine = measure() if world.rank in firsts else 0.0
        return statistics.median(seconds for seconds in world.allgather(mine) if seconds)

    latency = median(partial(_latency, world, firsts))
    size, rate, before = LEAST_PROBE_BYTES, 0.0, 0.0
    while size <= MOST_PROBE_BYTES:
        taken = median(partial(_ring_seconds, world, firsts, size, piece_bytes))
        before, rate, size = rate, max(rate, size / max(1e-9, taken - latency)), 2 * size
        if before and rate < STILL_FASTER * before and taken > 2 * latency:
            break
    return Network(latency, rate)


def _latency(world: Communicator, firsts: list[int]) -> float:
    """Return the least seconds of a message from the first rank of a pair to the other.

    It is 0 on a rank that is not the first of a pair.
    """
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


def _ring_seconds(world: Communicator, firsts: list[int], size: int, piece_bytes: int) -> float:
    """Return the seconds in which a rank sends `size` bytes around a ring and gets as many."""
    at = firsts.index(world.rank)
    after, before = firsts[(at + 1) % len(firsts)], firsts[at - 1]
    sent, received = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    pieces = [slice(begin, begin + piece_bytes) for begin in range(0, size, piece_bytes)]
    start = time.perf_counter()
    requests = [world.Irecv(received[piece], before, TAG) for piece in pieces]
    requests += [world.Isend(sent[piece], after, TAG) for piece in pieces]
    for request in requests:
        request.Wait()
    return time.perf_counter() - start


def free_bytes(folder: str, ranks: int) -> int:
    """Return the bytes that each of `ranks` ranks may use in a folder."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize // ranks
