"""What `jaxmpi.jit` makes of a traced function, step by step.

trace          trace the function once, with the axis bound, and open the calls that contain a
collective exact_updates  updates that lead to a given value, bit by bit
named_axes     equations over named axes, as equations over all ranks in groups
batched_while  loops under vmap whose lanes end on their own
classify       what an equation has to do with the ranks
refuse         which equations are refused, and in which words
translate      which collective an equation is
rank_classes   on which ranks a value is the same
replication    which values differ between the ranks
forgotten_mean train state that parts between the ranks because a mean was forgotten
across_elements shards whose next value depends on more than their own elements
combine        which collectives travel together
piggyback      which numbers share the message of another collective
ahead          which messages are taken in a later call of the program
buckets        which messages overlap with computation, and in which pieces
dependency     values that XLA computes after others
fuse_mean      a sum, its division and its bf16 conversions as one mean
summary        what will be sent, for `explain`
costs          how many bytes and seconds that takes
control_slice  which computations control what is sent, and must be the same on all ranks
text           equations as text
signature      of all these, what the ranks compare
order_loops    loops that communicate, in one order with what is sent beside them
rewrite        put a backend's collectives in the place of JAX's, in scan, while and cond, too
lower          what `jax.jit` compiles
"""
