"""Samples: where they come from, and how they reach the device.

sources   arrays and sequences of samples, with random access
sampler   a rank's part of them, and its rows of every global batch
feeds     sources of batches with a place in the data, which goes into a checkpoint
prefetch  batches that are ready when the step before is done
per_rank  batches of data that differs between the ranks, which end on all ranks together
"""
