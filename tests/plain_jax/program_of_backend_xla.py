"""A program of backend xla, which prints what carries its collectives."""

import jax
import jax.numpy as jnp
from jax import lax

import jaxmpi

jaxmpi.init(backend="xla")
mean = jaxmpi.jit(lambda x: lax.pmean(x, jaxmpi.AXIS))(jnp.full(2, jaxmpi.rank(), jnp.float32))
carrier = jax.config.jax_cpu_collectives_implementation
print(f"{carrier} {jaxmpi.local(mean)}", flush=True)  # one text, that no other rank writes into
