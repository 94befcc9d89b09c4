"""Where samples come from, and how they reach the device.

sources     arrays and sequences of samples behind one face
sampler     a rank's part of them, and its rows of every global batch
feeds       what batches are read from, and where it is
state_text  a loader's own state as text, for a checkpoint
prefetch    batches that are ready when the step before is done
per_rank    batches of data that each rank has of its own, which end on all ranks together
"""
