"""What models need of the other ranks.

batch_stats  running means and variances of all ranks as one
batch_norm   batch normalization with the statistics of the valid rows of all ranks; that of nnx
linen        the same for linen
"""
