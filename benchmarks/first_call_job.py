"""Seconds of a step's first call in a job whose ranks share the cores, beside one rank alone.

    jaxmpi run -n 1 benchmarks/first_call_job.py
    jaxmpi run -n 4 benchmarks/first_call_job.py
    jaxmpi run -n 4 benchmarks/first_call_job.py --plain
    jaxmpi run -n 4 benchmarks/first_call_job.py --plain-share

Prints seconds of wall time and of all cores, and how many programs were compiled. With --plain each
rank calls a step of its own in plain JAX; with --plain-share only rank 0 compiles it, which leaves
the cost of tracing. JAXMPI_CACHE_BYTES=0 keeps the cache empty: with a cache, the second run would
compile nothing.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import optax

import jaxmpi

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument(
    "--plain", action="store_true", help="jax.jit and optax, each rank for itself"
)
arguments.add_argument(
    "--plain-share", action="store_true", help="the same, but only rank 0 compiles"
)
args = arguments.parse_args()
LAYERS, WIDTH = 24, 64
EVENTS: list[str] = []

jax.monitoring.register_event_listener(lambda name, **_: EVENTS.append(name.rpartition("/")[2]))
jaxmpi.init()
plain = args.plain or args.plain_share
tx = optax.adam(1e-3) if plain else jaxmpi.distributed(optax.adam(1e-3))


def loss(params, x):
    for w, b in params:
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ w + b) @ w.T
    return jnp.mean(x**2)


def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


step = jax.jit(step) if plain else jaxmpi.jit(step)
params = [(jnp.full((WIDTH, WIDTH), 0.01), jnp.zeros(WIDTH)) for _ in range(LAYERS)]
state, x = jax.jit(tx.init)(params), jnp.ones((8, WIDTH))
jaxmpi.barrier()
EVENTS.clear()
began, cpu = time.perf_counter(), time.process_time()
if args.plain_share:
    lowered = step.lower(params, state, x)
    if jaxmpi.rank() == 0:
        lowered.compile()
else:
    jax.block_until_ready(step(params, state, x))
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
compiled = EVENTS.count("compile_requests_use_cache") - EVENTS.count("cache_hits")
everyone = jaxmpi.allgather_object((seconds, cpu, compiled))
if jaxmpi.rank() == 0:
    walls, cpus, programs = zip(*everyone, strict=True)
    print(
        f"{jaxmpi.size()} ranks: {max(walls):.2f} s, {sum(cpus):.2f} s of CPU time, "
        f"{sum(programs)} programs compiled"
    )
