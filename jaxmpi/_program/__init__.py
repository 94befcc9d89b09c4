"""What `jaxmpi.jit` makes of a function, step by step.

`trace` traces it once, with the axis bound: from here on, differentiation, batching and rematerialization are over, and the
derivatives of the collectives are JAX's own. It also opens the calls that contain a collective (jit, checkpoint, custom_vjp,
...), and writes out the loops whose lanes end on their own (`lanes`). `reading` says what an equation has to do with the
ranks, `refuse` which are refused, `translate` which collective it is, `schedule` which of them travel together, `riders` which
share a message, `fold` which divisions are done on the way, `variation` which values differ between the ranks, `steering` which
equations must be the same on all ranks, `listing` and `costs` what will be sent; `signature` makes of these what the ranks
compare, with `text` for the words; `rewrite` puts a backend's collectives in the place of JAX's, and `build` makes of that what
`jax.jit` compiles.
`function` and `program` are the two ends: the user's function, and what it does for one kind of arguments.
"""
