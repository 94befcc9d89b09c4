"""One rank of a job in which rank 1 is alive and stuck: stuck_script.py SITUATION; test_stuck.py.

"plain" as a second argument takes plain JAX: process and port are in PROCESS and PORT, and the
number of processes is in PROCESSES.
"""

import os
import signal
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

situation, plain = sys.argv[1], "plain" in sys.argv[2:]
CALLS, CALL = 12, 8
calls = 0


def load_batch():
    time.sleep(1000)  # the slow line


def evaluate():
    total = 0
    while True:
        total += 1  # the line that loops


def stop():
    time.sleep(1.0)  # so that the others are in the program
    os.kill(os.getpid(), signal.SIGSTOP)  # the line that stops


EVENTS = {
    "sleeps before": load_batch,
    "loops before": evaluate,
    "callback sleeps": load_batch,
    "callback loops": evaluate,
    "stopped inside": stop,
}
in_callback = situation in ("callback sleeps", "callback loops", "stopped inside")


def hold(x):
    """Called by the program of each step."""
    global calls
    calls += 1
    if in_callback and rank == 1 and calls == CALL:
        EVENTS[situation]()
    return x


def held(x):
    return jax.pure_callback(hold, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


if plain:
    rank, size = int(os.environ["PROCESS"]), int(os.environ["PROCESSES"])
    jax.distributed.initialize(f"127.0.0.1:{os.environ['PORT']}", size, rank)
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    everywhere = PartitionSpec()
    step = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.pmean(held(x), "ranks"),
            mesh=mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
    )
    tell = partial(print, flush=True)
else:
    import jaxmpi

    rank = jaxmpi.init().rank
    step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(held(x)))
    tell = partial(print, flush=True)

x = jnp.ones(100)
for i in range(CALLS):
    if i + 1 == CALL:
        tell(f"now {time.time()}")
        if rank == 1 and situation in EVENTS and not in_callback:
            EVENTS[situation]()
    x = step(x)
    x.block_until_ready()
tell(f"rank {rank} is through")
