"""Ranks of a job: how they are found, and the state that lives as long as the job.

init           find the other ranks, choose a backend, begin a session
session        the Session: backend, World, monitor and the states of other layers
world          the World that `init` returns, and the named axes of its ranks
simulate       several ranks in one process
leftover_pmap  a warning about `jax.pmap`, whose collectives reach no other rank
"""
