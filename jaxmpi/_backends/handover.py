"""Messages that ranks wait for asleep while one of them is busy for seconds: MPI's own calls would take the core it needs."""

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxmpi._backends.communicator import Communicator

__all__ = ["barrier", "broadcast"]

HEADER, BODY = 1, 2  # tags
PIECE_BYTES = 1 << 28  # of one message: MPI's counts are 32 bits wide
SHORTEST, LONGEST = 1e-4, 2e-2  # seconds between two looks


def barrier(comm: Communicator) -> None:
    """Return once every rank has called it."""
    _until(comm.Ibarrier().Test)


def broadcast(comm: Communicator, obj: object, ranks: Sequence[int]) -> Any:
    """The picklable object of the first of these ranks, on all of them; each passes it on to those after it, as in a tree.

    Args:
      comm: the communicator, which carries nothing else from rank to rank.
      obj: the object, on the first of `ranks`.
      ranks: who calls this, in the same order on each.
    """
    here, size = ranks.index(comm.rank), len(ranks)
    data = (
        np.frombuffer(pickle.dumps(obj), np.uint8)
        if here == 0
        else _received(comm, ranks[here & (here - 1)])
    )
    step = 1
    while step < size and not here & step:
        step *= 2
    while step := step // 2:
        if here + step < size:
            _send(comm, data, ranks[here + step])
    return obj if here == 0 else pickle.loads(data.data)  # what a rank of this job has written


def _send(comm: Communicator, data: np.ndarray, rank: int) -> None:
    comm.send(data.size, rank, HEADER)
    for start in range(0, data.size, PIECE_BYTES):
        comm.Send(data[start : start + PIECE_BYTES], rank, BODY)


def _received(comm: Communicator, rank: int) -> np.ndarray:
    _until(lambda: comm.iprobe(rank, HEADER))
    data = np.empty(comm.recv(source=rank, tag=HEADER), np.uint8)
    for start in range(0, data.size, PIECE_BYTES):
        comm.Recv(data[start : start + PIECE_BYTES], rank, BODY)
    return data


def _until(done: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not done():
        time.sleep(min(max((time.monotonic() - began) / 16, SHORTEST), LONGEST))
