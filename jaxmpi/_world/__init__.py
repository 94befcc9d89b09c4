"""Which ranks there are.

init      finds the other ranks and begins a session
axes      the named axes that they are asked for
session   what lives from `init` to `finalize`: the backend, the World, the monitor
world     what `init` returns
simulate  several ranks in one process
leftover_pmap  a warning of `jax.pmap`, whose collectives reach no other rank
"""
