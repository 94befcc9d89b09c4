"""Layers and statistics of models over all ranks.

batch_stats  combine the running means and variances of all ranks
stat_names   find the mean, spreads and count that belong together, by the names of their leaves
batch_norm   `flax.nnx` batch normalization over the valid rows of all ranks
linen        the same layer for `flax.linen`
"""
