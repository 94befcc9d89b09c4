"""Where samples come from, and how they reach the device.

sources   arrays and sequences of samples behind one face
prefetch  batches that are ready when the step before is done
"""
