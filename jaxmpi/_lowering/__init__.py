"""Lowering: from a traced function to the program that XLA compiles.

    function -> trace -> plan -> entries -> signature  (what the ranks compare)
                                         -> explain    (a table for people)
                              -> lower, by rewrite     (what `jax.jit` compiles)
                                 -> derivatives        (inside of another traced function)

From `trace` on, a program is a jaxpr over the axis AXIS alone, in which every collective is at the
top or in a loop: an inlined program. `_jit/analyze` calls `plan`; `_jit/program` calls `trace`,
`signature` and `lower`; `_jit/jitted` calls `explain`.

trace           trace the function once, with the axes bound, and inline calls with collectives
collectives     collectives over named axes as collectives over all ranks; calls of a transport
loops           loops that communicate: under `vmap`, and in one order with other messages
exact_updates   updates that lead to a given value, bit by bit
refuse          errors for collectives that are not supported
plan            rounds of a program: local equations, messages, loops; its collectives as entries
means           a sum, its division and its bf16 conversions fused into one mean
messages        which collectives share a message, and when it is sent
explain         messages, bytes and seconds of collectives, and the table of `explain`
signature       the call that the ranks compare, and its details for `_consistency/mismatch`
rewrite         the planned program with a transport's collectives instead of JAX's
derivatives     derivative rules for a program inside of another traced function
lower           the function that `jax.jit` compiles
"""
