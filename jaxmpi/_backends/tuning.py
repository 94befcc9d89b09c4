"""Sizes and algorithms of the messages between nodes, and a probe of the network.

The probe decides how many chunks are on their way at once and, up to `direct_nodes`, how large buckets are. Nothing else: the
rest decides in which order sums are formed, and a job must give the same bits whenever it runs.
"""

import os
import statistics
import time
from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

import numpy as np

from jaxmpi._backends.communicator import Communicator

__all__ = ["Network", "Tuning", "free_bytes", "probe", "tuned"]

LATENCIES = 8  # of a chunk, from when it is begun until it is there: the rendezvous of its messages, twice
CHUNKS = 16, 64  # at least and at most
BUCKET_LATENCIES = 20  # of a bucket: what it costs to begin one is then a twentieth of it
BUCKET_BYTES = 1 << 20, 1 << 24  # at least and at most
LARGE_BYTES = 1 << 20
TAG = 1


class Network(NamedTuple):
    """What a message between two nodes costs."""

    latency_seconds: float
    bytes_per_second: float


class Tuning(NamedTuple):
    """What `native/between.cc` takes from outside; `JAXMPI_TUNE` sets any of it."""

    chunk_bytes: int = 1 << 19  # of a message, that each rank lays out at once
    chunks: int = CHUNKS[0]  # on their way at once
    small_bytes: int = 1 << 15  # up to here, an allreduce is one message, which also compares the programs
    direct_nodes: int = 8  # up to so many nodes, each sends to each; above, there are ceil(log2 nodes) rounds
    bucket_bytes: int = 1 << 22  # of what is sent while a step computes, in one message
    threads: int = 0  # of a rank, which share a large message within a node; 0: as many as its cores allow


def tuned(network: Network | None, nodes: int, room_bytes: int, asked: Mapping[str, int]) -> Tuning:
    """The sizes for a network, or the defaults.

    Args:
      network: what `probe` has found.
      nodes: how many there are.
      room_bytes: of shared memory for each rank.
      asked: what JAXMPI_TUNE sets.
    """
    tuning = Tuning()._replace(**asked)
    if network is None:
        return tuning
    on_the_way = network.latency_seconds * network.bytes_per_second
    most = min(CHUNKS[1], room_bytes // 2 // tuning.chunk_bytes)
    chunks = max(CHUNKS[0], min(ceil(LATENCIES * on_the_way / tuning.chunk_bytes), most))
    found = {"chunks": chunks}
    if nodes <= tuning.direct_nodes:
        found["bucket_bytes"] = _bucket_bytes(BUCKET_LATENCIES * on_the_way)
    return tuning._replace(**{name: value for name, value in found.items() if name not in asked})


def _bucket_bytes(wanted: float) -> int:
    """A power of 4, so that a program that was compiled in one job is found again in the next, which measures a bit less."""
    size, most = BUCKET_BYTES
    while size < min(wanted, most):
        size *= 4
    return size


def probe(world: Communicator, firsts: list[int]) -> Network:
    """What a message from node to node costs, the same on all ranks: some messages of 8 bytes and of 1 MB around a ring.

    Args:
      world: the communicator of all ranks, which all call this.
      firsts: a rank of each node.
    """
    small = large = 0.0
    if world.rank in firsts:
        at = firsts.index(world.rank)
        after, before = firsts[(at + 1) % len(firsts)], firsts[at - 1]
        small, large = (_median_seconds(world, after, before, size) for size in (8, LARGE_BYTES))
    everyone = [both for both in world.allgather((small, large)) if both[1]]
    latency = statistics.median(small for small, _ in everyone)
    return Network(latency, LARGE_BYTES / max(1e-9, statistics.median(large for _, large in everyone) - latency))


def _median_seconds(world: Communicator, after: int, before: int, size: int) -> float:
    sent, received, taken = np.zeros(size, np.uint8), np.zeros(size, np.uint8), []
    for _ in range(4):
        start = time.perf_counter()
        world.Sendrecv(sent, after, TAG, received, before, TAG)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])  # the first opens the connection


def free_bytes(folder: str, ranks: int) -> int:
    """What each of so many ranks may take of the folder."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize // ranks
