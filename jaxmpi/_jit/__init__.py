"""`jaxmpi.jit`: from a call to a program that runs.

    call -> step -> executor -> program (analyze, then `_lowering`) -> jitted -> XLA

api               `jit`, and compiled functions of jaxmpi itself
pmap              `pmap`: programs for `jax.pmap`, with a leading axis of one
nnx               `nn.jit`: steps that change Flax nnx objects in place
lost_nnx_changes  such changes under a plain `jit`, where they would be lost

step              the callable that `jit` returns, with its stages `trace`, `lower` and `compile`
function          a Python function, the facts about its arguments, and the arrays of a call
executor          finds the program of a call, compares it on several ranks, and runs it
first_call        the arguments of a first call are compared; a forgotten mean is named
compile_once      ranks with equal programs compile them once between them

program           a function for arguments of certain shapes and dtypes, on one backend
analyze           the messages of a program of several ranks, and the outputs that may differ
jitted            the function under `jax.jit`
"""
