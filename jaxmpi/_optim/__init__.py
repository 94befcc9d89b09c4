"""What stands between gradients and parameters, as optax transforms that compose.

average     means over ranks: `distributed`, `average_gradients`; exact ones, by weight
accumulate  one communication for several steps
sharded     the optimizer's state shared out over the ranks (ZeRO-1)
local       steps of each rank's own, averaged now and then (local SGD, DiLoCo)
adasum      sums that know when gradients point the same way
invariant   the same bits for any number of ranks
control     skipping what is not finite, loss scales, votes
clip        clipping by the global norm, of shards, too
noise       the gradient noise scale
replicas    replicas that drift apart are found
"""
