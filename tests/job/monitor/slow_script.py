"""One rank of a job whose programs sometimes take 20 times as long: slow_script.py LONG_CALLS."""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxmpi

LONG_CALLS = int(sys.argv[1])
CALLS, TIMES, USUAL_SECONDS, TRIAL = 100, 20, 0.25, 2000

# On a loaded machine one rank may take longer to start than the limit of a wait in `init`.
folder = Path(os.environ["JAXMPI_TEST_MARKER"])
(folder / f"{os.getpid()}.started").touch()
while len([*folder.glob("*.started")]) < 2:
    time.sleep(0.01)
rank = jaxmpi.init().rank


@jaxmpi.jit
def step(x, times):
    """Compute, then average: the ranks that have less to do wait in the program."""
    x = jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ x), x)
    return jaxmpi.tree_allreduce(x)


def seconds_of(times):
    start = time.perf_counter()
    jax.block_until_ready(step(x, jnp.int32(times)))
    return time.perf_counter() - start


x = jnp.ones((128, 128)) / 128
seconds_of(TRIAL)
took = min(jaxmpi.allgather_object(min(seconds_of(TRIAL) for _ in range(5))))
usual = max(1, round(TRIAL * USUAL_SECONDS / took))
longest = 0.0
for call in range(CALLS):
    times = usual // 2 if rank == 0 else usual
    if call % (CALLS // LONG_CALLS) == 10 % (CALLS // LONG_CALLS):
        times *= TIMES  # a larger loop count
    if call == CALLS // 2:
        jax.clear_caches()  # compiled anew
    longest = max(longest, seconds_of(times))
print(f"rank {rank} is through, its longest program took {longest:.1f} s", flush=True)
