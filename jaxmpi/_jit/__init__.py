"""`jaxmpi.jit`: from a call to a program that runs.

api               `jit`, and functions of ours that are compiled in the same way
pmap              `pmap`: programs for `jax.pmap`, with a leading axis of one
step              what `jit` returns
executor          how several ranks compare a program, compile it once between them, and run it
compares_inline   the same, where the program's own messages compare it
compares_before   the same, where the ranks compare it before each call
jitted            the function under `jax.jit`
cache             the programs of one function, by the kinds of their arguments
arguments         the arrays of a call by shape and dtype, and the words for them
analyze           what a program of several ranks sends, and what must be equal for that
build             from a call to its program
program           a function for one kind of arguments and one backend
function          a Python function, and what is known of its arguments
first_call        arguments are compared by value at the first call, and a forgotten mean is named
compile_once      the ranks that have agreed on a program compile it once between them
stages            `lower`, `trace` and `compile`
nnx               `nn.jit`: steps that change Flax nnx objects in place
lost_nnx_changes  such changes under a plain `jit`, where they would be lost
"""
