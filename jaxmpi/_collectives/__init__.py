"""What users call: collectives on pytrees and on Python objects.

trees        tree_allreduce and its relatives, eager and in traced code
exact_counts sums of integers of Python and NumPy, which are right or an error
arrays       the same on lists of arrays, in traced code
objects      broadcast_object, allgather_object, barrier
synchronize  the same parameters and state on all ranks
preempted    a signal to one rank stops all at the same step
merge_metrics  the metrics of all ranks as one, whatever they compute
metrics_log  metrics by step in files
mean_speed   what a mean takes on these ranks
throughput   samples a second, and the share of the time in collectives
"""
