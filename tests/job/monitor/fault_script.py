"""One rank of a job with a fault: fault_script.py MODE KIND DIRECTORY; see test_faults.py."""

import multiprocessing
import os
import resource
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxmpi
from jaxmpi._job.process import joining
from jaxmpi._world.init import launched_ranks
from jaxmpi.testing import faults

CALLS, CALL = 10, 5
mode, kind, directory = sys.argv[1:]

if kind == "before init" and joining.rank_here() == launched_ranks() - 1:
    print(f"now {time.time()}", flush=True)
    sys.exit(0)
if kind == "many files":
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
world = jaxmpi.init()  # in a spawned worker, too, which imports this file


def square(x):
    return x * x, jaxmpi.size()


def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, of threads
        child = os.fork()
    if not child:
        sys.exit(3)
    assert os.waitpid(child, 0)[1] == 3 << 8


def spawn():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(square, [3]) == [(9, 1)]


def close_streams():
    sys.stdout = sys.stderr = open("/dev/full", "w", buffering=1)


EVENTS = {"forked child": fork, "spawned worker": spawn, "broken stdout": close_streams}


def inject(function):
    """The function with the fault, and what comes before it."""
    then = {"broken stdout": "exit", "many files": "exit"}.get(kind, kind)
    calls = 0

    def prepared(*args):
        nonlocal calls
        # the streams of all ranks
        if calls == CALL and (kind == "broken stdout" or world.rank == world.size - 1):
            EVENTS[kind]()
        calls += 1
        return function(*args)

    if then in faults.KINDS:
        function = faults.inject(function, then, rank=world.size - 1, call=CALL, seconds=0.5)
    return prepared if kind in EVENTS else function


def main():
    tx = jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.sgd(0.1)))

    def loss(params, batch):
        # so what is sent has the shape and the dtype of the batch, too
        mean = lax.stop_gradient(jaxmpi.tree_allreduce(batch))
        return jnp.mean((jnp.tanh((batch - mean) @ params["v"]) @ params["w"]) ** 2)

    @jaxmpi.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    @jaxmpi.jit
    def scan(params, state, batch):
        def body(carry, _):
            updates, after = tx.update(jax.grad(loss)(carry[0], batch), carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), after), None

        return lax.scan(body, (params, state), length=3)[0]

    def eager(params, state, batch):
        mean = jaxmpi.tree_allreduce(batch)
        grads = jaxmpi.tree_allreduce({"w": params["w"] * jnp.mean(batch - mean)})
        return {**params, "w": params["w"] - 0.1 * jnp.nan_to_num(grads["w"])}, state

    @jaxmpi.jit
    def total_loss(params, batch):
        return jaxmpi.tree_allreduce(loss(params, batch), op="sum")

    def evaluation(params, state, batch):
        return {**params, "w": params["w"] + jnp.nan_to_num(total_loss(params, batch))}, state

    def save(params, state, batch):
        jaxmpi.save(directory, len(saved), {"params": params, "batch": batch})
        saved.append(0)
        return params, state

    saved = []
    modes = {"jit": step, "scan": scan, "eager": eager, "evaluation": evaluation, "save": save}
    function = inject(modes[mode])
    params = {"w": jnp.ones(4), "v": jnp.eye(4)}
    state = tx.init(params)
    if os.environ.get("JAXMPI_OVERLAP") == "1" and mode in ("jit", "scan"):
        program = (step if mode == "jit" else scan).lower(params, state, jnp.ones((3, 4)))
        assert "jaxmpi_start" in program.as_text()
    for i in range(CALLS):
        jax.block_until_ready(params)
        if i == CALL:
            print(f"now {time.time()}", flush=True)
        params, state = function(
            params, state, jnp.asarray(np.random.default_rng(i).normal(size=(3, 4)), jnp.float32)
        )
    if mode == "save":
        assert jaxmpi.latest(directory) == CALLS - 1
    skipped = int(state.skipped)
    same = len(set(jaxmpi.allgather_object((np.asarray(params["w"]).tobytes(), skipped)))) == 1
    print(
        f"rank {world.rank} is through: the same on all ranks: {same}, skipped {skipped}",
        flush=True,
    )


if __name__ == "__main__":
    main()
