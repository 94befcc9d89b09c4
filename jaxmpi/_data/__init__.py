"""Where samples come from, and how they reach the device.

sources   arrays and sequences of samples behind one face
sampler   a rank's part of them, and its rows of every global batch
prefetch  batches that are ready when the step before is done
"""
