"""jaxmpi: data-parallel training for JAX and Flax, as pure functions on pytrees and one optax transform."""

import importlib

from jaxmpi import codecs, nn
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
from jaxmpi._data.prefetch import prefetch
from jaxmpi._errors import CheckpointError, MPIError, NotInitializedError, RankMismatchError
from jaxmpi._jit import jit, local
from jaxmpi._meter import Rate, Throughput
from jaxmpi._objects import allgather_object, barrier, broadcast_object
from jaxmpi._optim.accumulate import accumulate
from jaxmpi._optim.average import average_gradients, distributed
from jaxmpi._optim.clip import clip_by_global_norm
from jaxmpi._optim.control import any_rank, dynamic_loss_scale, skip_nonfinite
from jaxmpi._optim.invariant import micro_batch_grads
from jaxmpi._optim.local import local_sgd
from jaxmpi._optim.noise import measure_noise_scale
from jaxmpi._optim.replicas import check_replicas, watch_replicas
from jaxmpi._optim.sharded import reshard, sharded, unshard
from jaxmpi._preempt import preempted
from jaxmpi._run.notebook import launch
from jaxmpi._simulate import simulate
from jaxmpi._synchronize import synchronize
from jaxmpi._world import World, finalize, init, initialized, local_rank, local_size, rank, size
from jaxmpi.checkpoint import latest, restore, save
from jaxmpi.console import average_metrics, get_logger, print, progress
from jaxmpi.data import batches, rank_key, shard
from jaxmpi.diagnose import explain

__version__ = "0.1.0"

__all__ = [
    "AXIS",
    "CheckpointError",
    "MPIError",
    "NotInitializedError",
    "PerRank",
    "RankMismatchError",
    "Rate",
    "Throughput",
    "World",
    "accumulate",
    "allgather_object",
    "any_rank",
    "average_gradients",
    "average_metrics",
    "barrier",
    "batches",
    "broadcast_object",
    "check_replicas",
    "clip_by_global_norm",
    "codecs",
    "distributed",
    "dynamic_loss_scale",
    "explain",
    "finalize",
    "get_logger",
    "init",
    "initialized",
    "jit",
    "latest",
    "launch",
    "local",
    "local_rank",
    "local_sgd",
    "local_size",
    "measure_noise_scale",
    "micro_batch_grads",
    "nn",
    "preempted",
    "prefetch",
    "print",
    "progress",
    "rank",
    "rank_key",
    "reshard",
    "restore",
    "save",
    "shard",
    "sharded",
    "simulate",
    "size",
    "skip_nonfinite",
    "synchronize",
    "tree_allgather",
    "tree_allreduce",
    "tree_alltoall",
    "tree_bcast",
    "tree_reduce",
    "tree_reduce_scatter",
    "unshard",
    "watch_replicas",
]


def __getattr__(name: str) -> object:
    if name == "testing":  # starts no ranks, but takes longer to import
        return importlib.import_module("jaxmpi.testing")
    raise AttributeError(f"module 'jaxmpi' has no attribute {name!r}")
