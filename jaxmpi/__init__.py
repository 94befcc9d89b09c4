"""jaxmpi: data-parallel training for JAX and Flax, as pure functions on pytrees and one optax transform."""

import importlib

from jaxmpi._axis import AXIS
from jaxmpi._backends.simulate import PerRank
from jaxmpi._collectives import (
    tree_allgather,
    tree_allreduce,
    tree_alltoall,
    tree_bcast,
    tree_reduce,
    tree_reduce_scatter,
)
from jaxmpi._errors import MPIError, NotInitializedError, RankMismatchError
from jaxmpi._jit import jit, local
from jaxmpi._objects import allgather_object, barrier, broadcast_object
from jaxmpi._optim import average_gradients, distributed
from jaxmpi._simulate import simulate
from jaxmpi._synchronize import synchronize
from jaxmpi._world import World, finalize, init, initialized, local_rank, local_size, rank, size
from jaxmpi.console import average_metrics, get_logger, print, progress
from jaxmpi.data import batches, rank_key, shard
from jaxmpi.diagnose import explain

__version__ = "0.1.0"

__all__ = [
    "AXIS",
    "MPIError",
    "NotInitializedError",
    "PerRank",
    "RankMismatchError",
    "World",
    "allgather_object",
    "average_gradients",
    "average_metrics",
    "barrier",
    "batches",
    "broadcast_object",
    "distributed",
    "explain",
    "finalize",
    "get_logger",
    "init",
    "initialized",
    "jit",
    "local",
    "local_rank",
    "local_size",
    "print",
    "progress",
    "rank",
    "rank_key",
    "shard",
    "simulate",
    "size",
    "synchronize",
    "tree_allgather",
    "tree_allreduce",
    "tree_alltoall",
    "tree_bcast",
    "tree_reduce",
    "tree_reduce_scatter",
]


def __getattr__(name: str) -> object:
    if name == "testing":  # starts no ranks, but takes longer to import
        return importlib.import_module("jaxmpi.testing")
    raise AttributeError(f"module 'jaxmpi' has no attribute {name!r}")
