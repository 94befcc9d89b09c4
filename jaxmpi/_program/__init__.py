"""What `jaxmpi.jit` makes of a function, step by step.

`trace` traces it once, with the axis bound: from here on, differentiation, batching and rematerialization are over, and the
derivatives of the collectives are JAX's own. `opened` then opens the calls that contain a collective (jit, checkpoint,
custom_vjp, ...), `schedule` says which collectives travel together, `variation` which values differ between the ranks,
`listing` what will be sent; `rewrite` puts a backend's collectives in the place of JAX's.
"""
