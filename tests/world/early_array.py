"""An array that is made before `init`, on the xla backend."""

import jax.numpy as jnp

import jaxmpi

jnp.zeros(3)
jaxmpi.init("xla")
