"""Analysis: facts about a traced program that follow from its equations.

Nothing here communicates or changes a program. `jaxmpi._jit.analyze` calls these in order, on the
jaxpr that `jaxmpi._lowering.trace` has inlined (no calls around collectives are left in it):
`replication` and `shards` check it, `forgotten_mean` finds what to compare while it runs, and
`control_slice` returns the text that the ranks compare before it runs.

What all analyses are built on:
primitives      the table of primitives that are known by name, with their properties
inner_jaxprs    jaxprs of calls, loops and branches
classify        whether an equation communicates, or contains one that does
dataflow        facts propagated forward through a program
slices          equations that some values depend on, found backward
text            equations as text
traced_program  a program with the paths of its inputs and outputs

Analyses, each a lattice of facts with rules by primitive, or a slice:
replication     values that may differ between the ranks, and branches that would deadlock
forgotten_mean  train state that starts to differ because a mean was forgotten
carried         state and numbers that must be equal, by how a mean updates the state
shards          optimizers that combine several elements of a shard
constant_sums   sums of constants that all ranks know, which are not sent
control_slice   the computations that control messages, and must be equal on all ranks
"""
