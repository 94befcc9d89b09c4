"""Waits of plain JAX and of jaxmpi in one job, backend xla: program_beside_jaxmpi.py HOW.

HOW is "plain": rank 1 does not come to a collective of plain JAX; or "ours": rank 1 works for long
in a callback of a program of jaxmpi, and says so.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import jaxmpi

how = sys.argv[1]
jax.distributed.initialize()
rank = jaxmpi.init("xla").rank


def work(x):
    if rank == 1:
        with jaxmpi.busy("a long evaluation"):
            time.sleep(10.0)
    return x


@jaxmpi.jit
def step(x):
    x = jax.pure_callback(work, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return jaxmpi.tree_allreduce(x)


if how == "ours":
    print(f"mean {np.asarray(step(jnp.ones(3)))}", flush=True)
else:
    jax.block_until_ready(jaxmpi.tree_allreduce(jnp.ones(3)))
    if rank == 1:
        time.sleep(60.0)
    multihost_utils.sync_global_devices("all")
