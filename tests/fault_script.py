"""One rank of a job in which a rank fails on purpose: fault_script.py MODE KIND DIRECTORY; see test_faults.py."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxmpi
from jaxmpi.testing import faults

CALLS, CALL = 10, 5


def main():
    mode, kind, directory = sys.argv[1:]
    world = jaxmpi.init()
    tx = jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.sgd(0.1)))

    def loss(params, batch):
        mean = lax.stop_gradient(jaxmpi.tree_allreduce(batch))  # so what is sent has the shape and the dtype of the batch, too
        return jnp.mean(((batch - mean) @ params["w"]) ** 2)

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
        return {"w": params["w"] - 0.1 * jnp.nan_to_num(grads["w"])}, state

    @jaxmpi.jit
    def total_loss(params, batch):
        return jaxmpi.tree_allreduce(loss(params, batch), op="sum")

    def evaluation(params, state, batch):
        return {"w": params["w"] + jnp.nan_to_num(total_loss(params, batch))}, state

    def save(params, state, batch):
        jaxmpi.save(directory, len(saved), {"params": params, "batch": batch})
        saved.append(0)
        return params, state

    saved = []
    function = {"jit": step, "scan": scan, "eager": eager, "evaluation": evaluation, "save": save}[mode]
    function = faults.inject(function, kind, rank=world.size - 1, call=CALL, seconds=0.5)
    params = {"w": jnp.ones(4)}
    state = tx.init(params)
    for i in range(CALLS):
        jax.block_until_ready(params)
        if i == CALL:
            print(f"now {time.time()}", flush=True)
        params, state = function(params, state, jnp.asarray(np.random.default_rng(i).normal(size=(3, 4)), jnp.float32))
    if mode == "save":
        assert jaxmpi.latest(directory) == CALLS - 1
    skipped = int(state.skipped)
    same = len(set(jaxmpi.allgather_object((np.asarray(params["w"]).tobytes(), skipped)))) == 1
    print(f"rank {world.rank} is through: the same on all ranks: {same}, skipped {skipped}", flush=True)


if __name__ == "__main__":
    main()
