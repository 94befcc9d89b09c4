"""Rank 1 ends by SystemExit(3) while rank 0 waits for it in plain JAX: program_that_leaves.py HOW.

HOW is "plain": the program does not call jaxmpi.init; or "init": it does. With "later" after it,
the ranks have communicated in plain JAX before. With "asynchronous" nothing is wrong: rank 1 has
left its last collective to a thread, and rank 0 comes to it late.
"""

import sys
import threading
import time

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

import jaxmpi

how = sys.argv[1]
jax.distributed.initialize()
rank = jax.process_index()
if how.endswith("later"):
    multihost_utils.sync_global_devices("before")
if not how.startswith("plain"):
    jaxmpi.init()
    jaxmpi.tree_allreduce(jnp.ones(3))
if how == "asynchronous":
    if rank == 0:
        time.sleep(15.0)
    last = threading.Thread(target=multihost_utils.sync_global_devices, args=("last",))
    last.daemon = True
    last.start()
    if rank == 1:
        time.sleep(1.0)
    else:
        last.join()
        print("done", flush=True)
else:
    if rank == 1:
        raise SystemExit(3)
    multihost_utils.sync_global_devices("last")
