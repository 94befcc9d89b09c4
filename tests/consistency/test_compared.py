"""Ranks that call different public functions at the same time all get a RankMismatchError."""

import functools
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


@functools.cache
def sharded_state():
    return jaxmpi.sharded(optax.sgd(0.1, momentum=0.9)).init({"w": X})


@functools.cache
def whole_state():
    return jaxmpi.unshard(sharded_state())


def averaged_loss(x):
    return jax.grad(jaxmpi.average_loss(lambda w: (w * w).sum()))(x)


mapped = jaxmpi.pmap(lambda x: lax.pmean(x, "batch"), axis_name="batch")
step, averaged, nn_step = (
    jaxmpi.jit(program),
    jaxmpi.jit(averaged_loss),
    jaxmpi.nn.jit(lambda x: lax.pmax(x, jaxmpi.AXIS)),
)

CALLS = {
    "tree_allreduce": lambda: jaxmpi.tree_allreduce(X),
    "tree_bcast": lambda: jaxmpi.tree_bcast(X),
    "tree_reduce": lambda: jaxmpi.tree_reduce(X),
    "tree_allgather": lambda: jaxmpi.tree_allgather(X),
    "tree_alltoall": lambda: jaxmpi.tree_alltoall(rows()),
    "tree_reduce_scatter": lambda: jaxmpi.tree_reduce_scatter(rows()),
    "jit": lambda: step(X),
    "nn.jit": lambda: nn_step(X),
    "pmap": lambda: mapped(X[None]),
    "average_loss": lambda: averaged(X),
    "average_metrics": lambda: jaxmpi.average_metrics({"loss": 1.0}),
    "any_rank": lambda: jaxmpi.any_rank(True),
    "unshard": lambda: jaxmpi.unshard(sharded_state()),
    "fully_shard": lambda: jaxmpi.fully_shard({"w": X}),
    "reshard": lambda: jaxmpi.reshard(whole_state()),
    "nn.average_batch_stats": lambda: jaxmpi.nn.average_batch_stats(
        nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    ),
    "nn.BatchNorm": lambda: jaxmpi.nn.BatchNorm(2, rngs=nnx.Rngs(0))(rows()),
    "merge_metrics": lambda: jaxmpi.merge_metrics(nnx.MultiMetric(loss=nnx.metrics.Average())),
    "allgather_object": lambda: jaxmpi.allgather_object(1),
    "broadcast_object": lambda: jaxmpi.broadcast_object(1),
    "barrier": lambda: jaxmpi.barrier(),
    "check_data": lambda: jaxmpi.check_data(rows()),
    "synchronize": lambda: jaxmpi.synchronize(X),
    "Throughput.read": lambda: jaxmpi.Throughput().read(),
    "save": lambda: jaxmpi.save(DIRECTORY, 1, {"w": X}),
    "restore": lambda: jaxmpi.restore(DIRECTORY, {"w": X}),
    "latest": lambda: jaxmpi.latest(DIRECTORY),
    "finalize": lambda: jaxmpi.finalize(),
}
# Collective, and nothing is sent when they are called: `init` is before, the agreement of
# `preempted` is between threads. `shard` sends at the first call from a line only: see
# tests/data/test_order.py.
SILENT = {"init", "explain", "preempted", "shard"}


def public():
    for name in jaxmpi.__all__:
        value = getattr(jaxmpi, name)
        yield name, value
        if inspect.isclass(value):
            for method, f in vars(value).items():
                if not method.startswith("_"):
                    yield f"{name}.{method}", f
    for module in (jaxmpi.nn, jaxmpi.codecs):
        for name in module.__all__:
            yield f"{module.__name__.rpartition('.')[2]}.{name}", getattr(module, name)


def test_every_public_collective_is_in_the_table():
    calls = (
        "**Collective:** every rank calls it",
        "**Collective:** every rank calls the",
        "**Collective:** as `jaxmpi.jit`",
    )
    found = set()
    for name, value in public():
        text = inspect.getdoc(value) or ""
        if any(words in text for words in calls):
            found.add(name)
    assert found == set(CALLS) | SILENT


def pairs():
    """Pair each call with a program, an object function and two others of the table.

    Each pair is tested in both orders.
    """
    names = [*CALLS]
    some = []
    for i, name in enumerate(names):
        for other in ("jit", "barrier", names[i - 1], names[i - 2]):
            some.append({name, other})
    return [pair for pair in itertools.permutations(names, 2) if {*pair} in some]


def check_pairs():
    whole_state()  # which communicates once
    for call in ("tree_allreduce", "tree_allgather"):
        CALLS[call]()  # the ranks have run programs before
    rank = jaxmpi.rank()
    for names in pairs():
        with pytest.raises(jaxmpi.RankMismatchError) as caught:
            CALLS[names[min(rank, 1)]]()
        assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value), (
            names,
            str(caught.value),
        )
    assert jaxmpi.initialized() and jaxmpi.allgather_object(rank) == [0, 1]


@pytest.mark.slow
@run_ranks(2)
def test_pairs_of_public_functions_are_compared_on_mpi():
    check_pairs()


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_pairs_of_public_functions_are_compared_on_xla():
    check_pairs()


# functions whose messages have the same bytes

NUMBER = np.float32(3.0)
SGD = optax.sgd(0.1)


def updated(tx, **extra_args):
    """A call of `update` outside of a step, of one number."""
    state = tx.init(NUMBER)
    return tx.update(jax.numpy.float32(NUMBER), state, jax.numpy.float32(NUMBER), **extra_args)


def named(function):
    """A program that means one number, which is called outside of any other."""
    return jaxmpi.jit(function)


def one(x):
    return jaxmpi.tree_allreduce(x)


def other(x):
    return jaxmpi.tree_allreduce(x)


PROGRAMS = {name: named(function) for name, function in (("one", one), ("other", other))}
PROGRAMS |= {
    "any_rank in step": named(lambda x: jaxmpi.any_rank(x > 0)),
    "tree_allreduce in step": named(lambda x: jaxmpi.tree_allreduce(x) > 0),
    "average_loss in step": named(lambda x: jaxmpi.average_loss(lambda w: w * 2)(x)),
    "average_gradients in step": named(lambda x: updated(jaxmpi.average_gradients())[0] + x),
    "watch in step": named(lambda x: jaxmpi.tree_allreduce({"watch": x})),
}
SAME_BYTES = {
    "any_rank": lambda: jaxmpi.any_rank(True),
    "tree_allreduce mean": lambda: jaxmpi.tree_allreduce(NUMBER),
    "tree_allreduce sum": lambda: jaxmpi.tree_allreduce(NUMBER, "sum"),
    "tree_allreduce max": lambda: jaxmpi.tree_allreduce(NUMBER, "max"),
    "tree_allreduce min": lambda: jaxmpi.tree_allreduce(NUMBER, "min"),
    "tree_allreduce of ['a']": lambda: jaxmpi.tree_allreduce({"a": NUMBER}),
    "tree_allreduce of ['b']": lambda: jaxmpi.tree_allreduce({"b": NUMBER}),
    "tree_reduce": lambda: jaxmpi.tree_reduce(NUMBER),
    "tree_bcast": lambda: jaxmpi.tree_bcast(NUMBER),
    "tree_bcast from 1": lambda: jaxmpi.tree_bcast(NUMBER, root=1),
    "tree_allgather": lambda: jaxmpi.tree_allgather(NUMBER),
    "tree_allgather of a row": lambda: jaxmpi.tree_allgather(np.full(1, NUMBER)),
    "tree_allgather tiled": lambda: jaxmpi.tree_allgather(np.full(1, NUMBER), tiled=True),
    "tree_reduce_scatter": lambda: jaxmpi.tree_reduce_scatter(np.ones(jaxmpi.size(), np.float32)),
    "tree_alltoall": lambda: jaxmpi.tree_alltoall(np.ones(jaxmpi.size(), np.float32)),
    "average_metrics": lambda: jaxmpi.average_metrics(NUMBER),
    "average_gradients": lambda: updated(jaxmpi.average_gradients()),
    "average_gradients weighted": lambda: updated(jaxmpi.average_gradients(), weight=2),
    "distributed": lambda: updated(jaxmpi.distributed(SGD)),
    "distributed sum": lambda: updated(jaxmpi.distributed(SGD, op="sum")),
    "distributed bf16": lambda: updated(jaxmpi.distributed(SGD, codec=jaxmpi.codecs.bf16())),
    "distributed f16": lambda: updated(jaxmpi.distributed(SGD, codec=jaxmpi.codecs.f16())),
    "local_sgd": lambda: updated(jaxmpi.local_sgd(SGD, 1)),
    "average_loss": lambda: jaxmpi.average_loss(lambda w: w * 2)(NUMBER),
    "nn.average_batch_stats": lambda: jaxmpi.nn.average_batch_stats({"a": NUMBER}),
    "watch_replicas": lambda: updated(jaxmpi.watch_replicas(SGD, 1)),
    **{name: functools.partial(program, NUMBER) for name, program in PROGRAMS.items()},
}


def check_same_bytes(some):
    for call in SAME_BYTES.values():
        call()
    for names in itertools.permutations(SAME_BYTES, 2):
        if not some(*names):
            continue
        try:
            got = SAME_BYTES[names[min(jaxmpi.rank(), 1)]]()
        except jaxmpi.RankMismatchError:
            continue
        raise AssertionError(f"{names}: no error, and {got}")
    assert float(jaxmpi.tree_allreduce(jaxmpi.rank() + 1.0, "sum")) == 3.0


@run_ranks(2)
def test_a_vote_and_a_mean_of_one_number_are_told_apart():
    mean = functools.partial(jaxmpi.tree_allreduce, NUMBER)
    with pytest.raises(
        jaxmpi.RankMismatchError, match="rank 0 called any_rank, and rank 1 called tree_allreduce"
    ):
        jaxmpi.any_rank(True) if jaxmpi.rank() == 0 else mean()
    with pytest.raises(
        jaxmpi.RankMismatchError, match=r"(?s)tree_allreduce of \['a'\].*tree_allreduce of \['b'\]"
    ):
        jaxmpi.tree_allreduce({"ab"[jaxmpi.rank()]: NUMBER})
    assert float(jaxmpi.tree_allreduce(jaxmpi.rank() + 1.0)) == 1.5


@pytest.mark.slow
@run_ranks(2)
def test_functions_that_send_the_same_bytes_are_told_apart():
    numbers = {name: i for i, name in enumerate(SAME_BYTES)}
    check_same_bytes(
        lambda a, b: (numbers[a] - numbers[b]) % len(numbers) in (1, 2) or "any_rank" in (a, b)
    )


@pytest.mark.exhaustive
@run_ranks(2, timeout_seconds=600)
def test_all_functions_that_send_the_same_bytes_are_told_apart_on_mpi():
    check_same_bytes(lambda a, b: True)


@pytest.mark.exhaustive
@run_ranks(2, backend="xla", timeout_seconds=600)
def test_all_functions_that_send_the_same_bytes_are_told_apart_on_xla():
    check_same_bytes(lambda a, b: True)
