"""Lowering: from a traced function to the program that XLA compiles, step by step.

Trace:
trace           trace the function once, with the axis bound, and open calls with collectives
exact_updates   updates that lead to a given value, bit by bit
named_axes      equations over named axes, as equations over all ranks in groups
batched_while   loops under vmap, in which each lane ends by itself
primitives      the table of primitives that are known by name, with their properties
inner_jaxprs    jaxprs of calls, loops and branches
classify        equations that communicate, or contain one that does
refuse          errors for collectives that are not supported
translate       the collective of an equation

Analyze:
dataflow        facts propagated through a program, and slices of it, for any analysis
replication     values that may differ between the ranks
forgotten_mean  train state that starts to differ because a mean was forgotten
across_elements optimizers that combine several elements of a shard

Plan messages:
fuse_mean       a sum, its division and its bf16 conversions as one mean
constant_sums   sums of numbers that all ranks know, which are not sent
plan            rounds of a program: local equations, messages, loops; its collectives as entries
messages        collectives that travel in one message, and those of an earlier call
overlap         messages that overlap with computation
dependency      values that XLA computes after others

Explain and compare:
costs           their bytes and seconds, and the table of `explain`
control_slice   the computations that control messages, and must be equal on all ranks
text            equations as text
signature       the facts that the ranks compare, for `_consistency/mismatch`

Compile:
order_loops     loops with collectives, in one order with other messages
rewrite         a backend's collectives for JAX's, in scan, while and cond, too
lower           the function that `jax.jit` compiles
"""
