"""Layers and statistics of models over all ranks.

running_stats  `average_batch_stats`: the running means and variances of all ranks as one
stat_names   find the mean, spreads and count that belong together, by the names of their leaves
batch_norm   the layer for `flax.nnx`, which sums each batch over the valid rows of all ranks
linen        the same layer for `flax.linen`
"""
