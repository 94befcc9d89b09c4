"""What stands between gradients and parameters, as optax transforms that compose.

average     means over ranks: `distributed`, `average_gradients`; exact ones, by weight
accumulate  one communication for several steps
objective   what `update` gets beside gradients, such as the loss, of all ranks
sharded     the optimizer's state shared out over the ranks (ZeRO-1)
local       steps of each rank's own, averaged now and then (local SGD, DiLoCo)
adasum      sums that know when gradients point the same way
invariant   the same bits for any number of ranks
control     skipping what is not finite, loss scales, votes
shards      arrays as equal shards of the ranks
partition   functions of whole arrays, evaluated on shards
clip        clipping by the global norm
noise       the gradient noise scale
replicas    replicas that drift apart are found
"""
