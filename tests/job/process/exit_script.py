"""A rank that ends while jaxmpi has threads: exit_script.py KIND ENDING FOLDER.

See test_exits.py.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxmpi

kind, ending, folder = sys.argv[1:]
world = jaxmpi.init()
rows = np.arange(400_000.0).reshape(40, 10_000)


def blocked():
    """Yield two batches, and then wait for data that do not come."""
    yield from rows[:2]
    time.sleep(3600)


def busy():
    """Compute every batch in Python and with JAX, for ever."""
    while True:
        x = jnp.sin(rows[0]) + sum(range(20_000))
        yield np.asarray(x)


if kind == "prefetch":
    for _, batch in zip(
        range(3), jaxmpi.prefetch(jaxmpi.batches(rows, 2 * world.size)), strict=False
    ):
        jaxmpi.tree_allreduce(batch)
elif kind in ("blocked", "busy"):
    for _, batch in zip(
        range(2), jaxmpi.prefetch({"blocked": blocked, "busy": busy}[kind]()), strict=False
    ):
        jaxmpi.tree_allreduce(batch)
elif kind == "save":
    jaxmpi.save(
        folder, 1, {"x": jnp.ones((2_000_000,)), "y": jaxmpi.PerRankState(jnp.arange(500_000))}
    )
elif kind == "progress":
    bar = iter(jaxmpi.progress(range(100), mininterval=0.0))
    for i in zip(range(5), bar, strict=False):
        jaxmpi.print("line", i)
elif kind == "step":
    step = jaxmpi.jit(lambda x: jax.lax.pmean(x, jaxmpi.AXIS) + 1)
    x = jnp.zeros(100_000)
    for _ in range(3):
        x = step(x)  # is still running

print(f"ends {time.time()}", flush=True)
if ending == "raise":
    raise ValueError("on purpose")
if ending == "interrupt":
    raise KeyboardInterrupt
if ending.startswith("exit"):
    sys.exit(int(ending.split()[1]))
