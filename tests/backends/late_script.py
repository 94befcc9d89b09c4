"""Rank 1 comes 33 s late to the first collective of its group, then to the first of all ranks."""

import sys
import time

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback

import jaxmpi

SECONDS = 33  # more than gloo waits for the ranks of a group as they connect

jaxmpi.init(axes={"island": 2, "member": -1})
axis = sys.argv[1]


def wait(rank, x):
    if rank == 1:
        time.sleep(SECONDS)
    return x


@jaxmpi.jit
def step(x):
    late = io_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), jaxmpi.rank(), x)
    return lax.psum(late, axis)


got = float(np.asarray(step(np.float32(jaxmpi.rank() + 1)))[()])
island = 2 * (jaxmpi.rank() // 2)
assert got == {"ranks": 10.0, "member": 2 * island + 3}[axis], got
jaxmpi.print("right")
