"""`jaxmpi.jit`: from a call to a program that runs.

api               `jit`, and compiled functions of jaxmpi itself
pmap              `pmap`: programs for `jax.pmap`, with a leading axis of one
nnx               `nn.jit`: steps that change Flax nnx objects in place
lost_nnx_changes  such changes under a plain `jit`, where they would be lost

step              the callable that `jit` returns
function          a Python function, and the facts about its arguments
arguments         the arrays of a call by shape and dtype, and their names in errors
jitted            the function under `jax.jit`
stages            `lower`, `trace` and `compile`

build             from a call to its program
analyze           the messages of a program of several ranks, and the outputs that may differ
program           a function for arguments of certain shapes and dtypes, on one backend

executor          compares a program on several ranks, compiles it once between them, and runs it
compares_inline   an executor whose programs are compared in their own messages
compares_before   an executor that compares programs before each call
cache             the programs of one function, by the shapes and dtypes of their arguments
first_call        the arguments of a first call are compared; a forgotten mean is named
compile_once      ranks with equal programs compile them once between them
"""
