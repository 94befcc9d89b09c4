"""Sizes and algorithms of the messages between nodes, and a probe of the network.

The probe decides how many chunks are on their way at once, and nothing else: the other fields decide in which order sums are
formed, and a job must give the same bits whenever it runs.
"""

import os
import statistics
import time
from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Network", "Tuning", "free_bytes", "probe", "tuned"]

LATENCIES = 8  # of a chunk, from when it is begun until it is there: the rendezvous of its messages, twice
CHUNKS = 16, 64  # at least and at most
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


def tuned(network: Network | None, room_bytes: int, asked: Mapping[str, int]) -> Tuning:
    """The sizes for a network, or the defaults.

    Args:
      network: what `probe` has found.
      room_bytes: of shared memory for each rank.
      asked: what JAXMPI_TUNE sets.
    """
    tuning = Tuning()._replace(**asked)
    if network is None or "chunks" in asked:
        return tuning
    wanted = ceil(LATENCIES * network.latency_seconds * network.bytes_per_second / tuning.chunk_bytes)
    most = min(CHUNKS[1], room_bytes // 2 // tuning.chunk_bytes)
    return tuning._replace(chunks=max(CHUNKS[0], min(wanted, most)))


def probe(world: Any, firsts: list[int]) -> Network:
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


def _median_seconds(world: Any, after: int, before: int, size: int) -> float:
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
