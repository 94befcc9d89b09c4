"""What stands between gradients and parameters, as optax transforms that compose.

distributed   an optimizer that gets the gradients of all ranks, and what it takes beside them
average       means over ranks: of gradients, of losses, by weight
accumulate    one communication for several steps
objective     what `update` gets beside gradients, such as the loss, of all ranks
zero1         the optimizer's state shared out over the ranks (ZeRO-1)
sharded_state which arrays of that state are shards
fsdp          the parameters shared out over the ranks, too (ZeRO-3)
local_sgd     steps of each rank's own, averaged now and then (local SGD, DiLoCo)
streaming     the same, a part of the parameters at a time, while the ranks go on
adasum        sums that know when gradients point the same way
deterministic the same bits for any number of ranks
nonfinite     skipping what is not finite, loss scales, votes
shards        arrays as equal shards of the ranks
sharded_array such arrays as leaves of trees that users hold
partition     functions of whole arrays, evaluated on shards
clip          clipping by the global norm
noise         the gradient noise scale
drift         replicas that drift apart are found
compression   fewer bytes for a mean: what a codec is, and those that cast
int8_codec    8 bits for a number
topk_codec    the largest numbers only
low_rank_codec  matrices as products of thin ones (PowerSGD)
weights       exact means of batches of different sizes
ordered_sums  sums in one order, whatever the number of threads
float_leaves  the floats of a tree
"""
