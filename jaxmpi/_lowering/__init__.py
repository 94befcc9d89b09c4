"""Lowering: from a traced function to the program that XLA compiles.

    function -> trace -> means -> plan -> explain    (a table for people)
                                       -> signature  (what the ranks compare)
                                       -> rewrite -> lower (what `jax.jit` compiles)

trace           trace the function once, with the axis bound, and open calls with collectives
collectives     collectives over named axes, as collectives over all ranks; calls of a transport
loops           loops that communicate: under `vmap`, and in one order with other messages
exact_updates   updates that lead to a given value, bit by bit
refuse          errors for collectives that are not supported
means           a sum, its division and its bf16 conversions as one mean
plan            rounds of a program: local equations, messages, loops; its collectives as entries
messages        collectives that travel in one message, and when it is sent
explain         messages, bytes and seconds of collectives, and the table of `explain`
signature       the facts that the ranks compare, for `_consistency/mismatch`
rewrite         a transport's collectives for JAX's, round by round
lower           the function that `jax.jit` compiles
"""
