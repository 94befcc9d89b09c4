from . import checkpoint as checkpoint
from . import codecs, nn
from . import console as console
from . import data as data
from . import diagnose as diagnose
from . import testing as testing
from ._axis import AXIS
from ._backends.simulate import PerRank
from ._collectives import (
    tree_allgather,
    tree_allreduce,
    tree_alltoall,
    tree_bcast,
    tree_reduce,
    tree_reduce_scatter,
)
from ._data.prefetch import prefetch
from ._errors import CheckpointError, MPIError, NotInitializedError, RankMismatchError
from ._jit import jit, local
from ._leaves import PerRankState
from ._meter import Rate, Throughput
from ._objects import allgather_object, barrier, broadcast_object
from ._optim.accumulate import accumulate
from ._optim.average import average_gradients, average_loss, distributed
from ._optim.clip import clip_by_global_norm
from ._optim.control import any_rank, dynamic_loss_scale, skip_nonfinite
from ._optim.invariant import micro_batch_grads
from ._optim.local import local_sgd
from ._optim.noise import measure_noise_scale
from ._optim.replicas import check_replicas, watch_replicas
from ._optim.sharded import reshard, sharded, unshard
from ._preempt import preempted
from ._run.notebook import launch
from ._simulate import simulate
from ._synchronize import synchronize
from ._world import World, finalize, init, initialized, local_rank, local_size, rank, size
from .checkpoint import latest, restore, save
from .console import average_metrics, get_logger, print, progress
from .data import batches, rank_key, shard
from .diagnose import explain

__version__: str

__all__ = [
    "AXIS",
    "CheckpointError",
    "MPIError",
    "NotInitializedError",
    "PerRank",
    "PerRankState",
    "RankMismatchError",
    "Rate",
    "Throughput",
    "World",
    "accumulate",
    "allgather_object",
    "any_rank",
    "average_gradients",
    "average_loss",
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
