from . import checkpoint as checkpoint
from . import codecs, nn
from . import console as console
from . import data as data
from . import diagnose as diagnose
from . import testing as testing
from ._axis import AXIS
from ._backends.one_process import PerRank
from ._collectives.merge_metrics import merge_metrics
from ._collectives.metrics_log import MetricsLog
from ._collectives.objects import allgather_object, barrier, broadcast_object, preempted
from ._collectives.synchronize import synchronize
from ._collectives.throughput import Rate, Throughput
from ._collectives.trees import (
    tree_allgather,
    tree_allreduce,
    tree_alltoall,
    tree_bcast,
    tree_reduce,
    tree_reduce_scatter,
)
from ._data.prefetch import prefetch
from ._errors import (
    CheckpointError,
    MPIError,
    NotInitializedError,
    RankCountError,
    RankMismatchError,
)
from ._jit.api import jit, local
from ._jit.pmap import pmap
from ._job.launch.pool import launch
from ._job.process.busy import busy
from ._optim.accumulate import accumulate
from ._optim.clip import clip_by_global_norm
from ._optim.deterministic import micro_batch_grads
from ._optim.distributed import average_gradients, distributed
from ._optim.fsdp import fully_shard, unshard
from ._optim.local_sgd import local_sgd
from ._optim.loss import average_loss
from ._optim.noise_scale import measure_noise_scale
from ._optim.nonfinite import any_rank, dynamic_loss_scale, skip_nonfinite
from ._optim.replicas import check_replicas, watch_replicas
from ._optim.sharded_array import ShardedArray
from ._optim.sharded_state import reshard
from ._optim.zero1 import sharded
from ._per_rank_state import PerRankState
from ._world.init import init
from ._world.session import finalize, initialized, local_rank, local_size, rank, size
from ._world.simulate import simulate
from ._world.world import World
from .checkpoint import latest, restore, save
from .console import average_metrics, get_logger, print, progress
from .data import batches, check_data, per_rank_batches, rank_key, shard
from .diagnose import explain

__version__: str

__all__ = [
    "AXIS",
    "CheckpointError",
    "MPIError",
    "MetricsLog",
    "NotInitializedError",
    "PerRank",
    "PerRankState",
    "RankCountError",
    "RankMismatchError",
    "Rate",
    "ShardedArray",
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
    "busy",
    "check_data",
    "check_replicas",
    "clip_by_global_norm",
    "codecs",
    "distributed",
    "dynamic_loss_scale",
    "explain",
    "finalize",
    "fully_shard",
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
    "merge_metrics",
    "micro_batch_grads",
    "nn",
    "per_rank_batches",
    "pmap",
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
