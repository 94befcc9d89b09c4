"""`jaxmpi.jit`: from a call to a program that runs.

    one process     call -> step -> jitted (traces, builds the program) -> XLA
    several         call -> step -> executor -> jitted or program -> XLA
    program         `_lowering.trace` -> analyze -> `_lowering.signature`, `_lowering.lower`

api               `jit`, and compiled functions of jaxmpi itself
pmap              `pmap`: programs for `jax.pmap`, with a leading axis of one
nnx               `nn.jit`: steps that change Flax nnx objects in place
lost_nnx_changes  such changes under a plain `jit`, where they would be lost

step              the callable that `jit` returns, with its stages `trace`, `lower` and `compile`
function          a Python function, properties of its arguments, and the arrays of a call
executor          find the program of a call, compare it on several ranks, and run it
first_call        compare the arguments of a first call; warn of a forgotten mean
numbers           compare learning rates, counts and the like while the ranks train
compile_once      compile a program on one rank for all ranks that have it

program           a function for arguments of certain shapes and dtypes, on one backend
analyze           the messages of a program of several ranks, and the outputs that may differ
jitted            the function under `jax.jit`, which builds its program while JAX traces
"""
