"""Samples: where they come from, and how they reach the device.

sources      arrays and sequences of samples, with random access
fingerprint  a few samples, by which the ranks find that their data are in different orders
sampler      the loader of `batches`: a rank's rows of every global batch, drop or mask at the end
feeds        loaders with a position in the data, which goes into a checkpoint
prefetch     batches that are ready when the step before is done
per_rank     batches of data that differs between the ranks, which end on all ranks together
"""
