"""Ranks that call different public functions at the same time all get a RankMismatchError, whatever these are."""

import inspect
import itertools
import os
import tempfile

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmpi
from jaxmpi.testing import run_ranks

X = np.ones(4, np.float32)
DIRECTORY = os.path.join(tempfile.gettempdir(), "jaxmpi-no-such-folder")


def program(x):
    return lax.psum(x, jaxmpi.AXIS)


def rows():
    return np.ones((jaxmpi.size(), 2), np.float32)


def sharded_state():
    return jaxmpi.sharded(optax.sgd(0.1, momentum=0.9)).init({"w": X})


def averaged_loss(x):
    return jax.grad(jaxmpi.average_loss(lambda w: (w * w).sum()))(x)


step, averaged, nn_step = jaxmpi.jit(program), jaxmpi.jit(averaged_loss), jaxmpi.nn.jit(lambda x: lax.pmax(x, jaxmpi.AXIS))

CALLS = {
    "tree_allreduce": lambda: jaxmpi.tree_allreduce(X),
    "tree_bcast": lambda: jaxmpi.tree_bcast(X),
    "tree_reduce": lambda: jaxmpi.tree_reduce(X),
    "tree_allgather": lambda: jaxmpi.tree_allgather(X),
    "tree_alltoall": lambda: jaxmpi.tree_alltoall(rows()),
    "tree_reduce_scatter": lambda: jaxmpi.tree_reduce_scatter(rows()),
    "jit": lambda: step(X),
    "nn.jit": lambda: nn_step(X),
    "average_loss": lambda: averaged(X),
    "average_metrics": lambda: jaxmpi.average_metrics({"loss": 1.0}),
    "any_rank": lambda: jaxmpi.any_rank(True),
    "unshard": lambda: jaxmpi.unshard(sharded_state()),
    "nn.average_batch_stats": lambda: jaxmpi.nn.average_batch_stats(nnx.BatchNorm(2, rngs=nnx.Rngs(0))),
    "allgather_object": lambda: jaxmpi.allgather_object(1),
    "broadcast_object": lambda: jaxmpi.broadcast_object(1),
    "barrier": lambda: jaxmpi.barrier(),
    "synchronize": lambda: jaxmpi.synchronize(X),
    "Throughput.read": lambda: jaxmpi.Throughput().read(),
    "save": lambda: jaxmpi.save(DIRECTORY, 1, {"w": X}),
    "restore": lambda: jaxmpi.restore(DIRECTORY, {"w": X}),
    "latest": lambda: jaxmpi.latest(DIRECTORY),
    "finalize": lambda: jaxmpi.finalize(),
}
# Collective, and nothing is sent when they are called: `init` is before, the agreement of `preempted` is between threads.
SILENT = {"init", "explain", "reshard", "preempted", "fully_shard"}


def public():
    for name in jaxmpi.__all__:
        value = getattr(jaxmpi, name)
        yield name, value
        if inspect.isclass(value):
            yield from ((f"{name}.{method}", f) for method, f in vars(value).items() if not method.startswith("_"))
    for module in (jaxmpi.nn, jaxmpi.codecs):
        yield from ((f"{module.__name__.rpartition('.')[2]}.{name}", getattr(module, name)) for name in module.__all__)


def test_every_public_collective_is_in_the_table():
    calls = ("**Collective:** every rank calls it", "**Collective:** every rank calls the", "**Collective:** as `jaxmpi.jit`")
    found = {name for name, value in public() if any(words in (inspect.getdoc(value) or "") for words in calls)}
    assert found == set(CALLS) | SILENT


def pairs():
    """Each with a program, with an object function, and with two others of the table; in both orders."""
    names = [*CALLS]
    some = [{*(name, other)} for i, name in enumerate(names) for other in ("jit", "barrier", names[i - 1], names[i - 2])]
    return [pair for pair in itertools.permutations(names, 2) if {*pair} in some]


def check_pairs():
    for call in ("tree_allreduce", "tree_allgather"):
        CALLS[call]()  # the ranks have run programs before
    rank = jaxmpi.rank()
    for names in pairs():
        with pytest.raises(jaxmpi.RankMismatchError) as caught:
            CALLS[names[min(rank, 1)]]()
        assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value), (names, str(caught.value))
    assert jaxmpi.initialized() and jaxmpi.allgather_object(rank) == [0, 1]


@pytest.mark.slow
@run_ranks(2)
def test_pairs_of_public_functions_are_compared_on_mpi():
    check_pairs()


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_pairs_of_public_functions_are_compared_on_xla():
    check_pairs()
