"""Which ranks there are.

session   `init`, `finalize` and the state of the job between them
simulate  several ranks in one process
"""
