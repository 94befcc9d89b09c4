"""A train step and its calls, and the same of other libraries, for the benchmarks that train."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peers
from mpi4py import MPI

optimizer = optax.sgd(1e-3, momentum=0.9)


class Trained:
    """Calls of a step, each on the state that the last one left."""

    def __init__(self, step, params, batch, put=lambda x: x):
        self.step, self.batch = step, jax.tree.map(put, batch)
        # the step donates its state, so it gets a copy
        self.state = jax.tree.map(lambda x: put(jnp.array(x)), (params, optimizer.init(params)))

    def __call__(self):
        self.state, loss = self.step(self.state, self.batch)
        return self.state, loss


def step_of(loss_of, average):
    def step(state, batch):
        params, momentum = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, momentum = optimizer.update(average(grads), momentum, params)
        return (optax.apply_updates(params, updates), momentum), loss

    return step


def mpi4jax_step(loss_of, params, batch):
    """Make a step that sends one mpi4jax message for each array."""
    import mpi4jax

    comm = MPI.COMM_WORLD.Clone()

    def mean(g):
        return mpi4jax.allreduce(g, op=MPI.SUM, comm=comm) / comm.size

    step = step_of(loss_of, partial(jax.tree.map, mean))
    return Trained(jax.jit(step, donate_argnums=0), params, batch)


def gloo_step(loss_of, params, batch):
    """Make a step that averages over JAX's own processes, which `peers.start_jax` has started."""
    mesh, sharding = peers.mesh()
    spec = jax.sharding.PartitionSpec()
    step = step_of(loss_of, lambda grads: jax.tree.map(lambda g: jax.lax.pmean(g, "ranks"), grads))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return Trained(
        jax.jit(sharded, donate_argnums=0), params, batch, partial(peers.global_array, sharding)
    )


def torch_steps(torch, model, batch, loss_of):
    """Make torch's step without communication, and DDP's."""
    inputs, targets = (torch.from_numpy(np.asarray(x)) for x in batch)

    def trained(model):
        sgd = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

        def call():
            sgd.zero_grad()
            loss_of(model(inputs), targets).backward()
            sgd.step()

        return call

    return {
        "torch local": trained(model()),
        "torch DDP": trained(torch.nn.parallel.DistributedDataParallel(model())),
    }
