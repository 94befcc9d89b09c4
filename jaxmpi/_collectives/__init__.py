"""Collectives that users call, on pytrees and on Python objects, and metrics over all ranks.

trees          `tree_allreduce` and its relatives: the public functions
tree_calls     the reduce operations, and one call: eager, under `simulate`, or in traced code
arrays         the same collectives on lists of arrays, in traced code
exact_counts   sums of Python and NumPy integers that are exact or an error
objects        broadcast_object, allgather_object, barrier, preempted
synchronize    the same parameters and state on all ranks
merge_metrics  the metrics of all ranks as one, whatever they compute
throughput     samples per second, the share of communication, the time of a mean
metrics_log    metrics by step in files
"""
