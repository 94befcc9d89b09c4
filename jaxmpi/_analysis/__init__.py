"""Analysis: facts about a traced program that follow from its equations.

primitives      the table of primitives that are known by name, with their properties
inner_jaxprs    jaxprs of calls, loops and branches
classify        equations that communicate, or contain one that does
dataflow        facts propagated through a program, and slices of it, for any analysis

Each of these is a lattice of facts and a table of rules:
replication     values that may differ between the ranks
forgotten_mean  train state that starts to differ because a mean was forgotten
shards          optimizers that combine several elements of a shard
constant_sums   sums of numbers that all ranks know, which are not sent
control_slice   the computations that control messages, and must be equal on all ranks

text            equations as text
"""
