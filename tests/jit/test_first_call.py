"""The first call of a step names a forgotten mean, and outputs that differ across ranks."""

import re
import subprocess
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import jaxmpi
from jaxmpi._job.monitor.monitor import MAX_GATHERINGS
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

SAID = (
    r"step: output {}(, \S+ and \d+ more)? may differ between the ranks from this call on, "
    r"and was equal on all of them "
    r"before. If it is trained, average the gradients"
)


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def start():
    return {"w": jnp.ones(2), "b": jnp.zeros(())}


def batch():
    return jnp.ones((4, 2)) * (1 + jaxmpi.rank())


def plain(tx, params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jaxmpi.tree_allreduce(value)


def in_a_scan(tx, params, state, x):
    def one(carry, x):
        params, state, value = plain(tx, *carry, x)
        return (params, state), value

    (params, state), values = jax.lax.scan(one, (params, state), jnp.stack([x, x]))
    return params, state, values


def in_a_branch(tx, params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, new = tx.update(grads, state, params)
    finite = jnp.isfinite(jaxmpi.tree_allreduce(value))
    return jax.tree.map(
        lambda a, b: jnp.where(finite, a, b),
        (optax.apply_updates(params, updates), new),
        (params, state),
    )


def noted(call):
    """Run a call; return the notes that all ranks' messages give about it."""
    watch, said = session.monitor(), []
    watch.say = said.append
    try:
        call()
        jaxmpi.barrier()
        # some may wait for ranks that say nothing
        waiting, deadline = watch.gathering._messages, time.monotonic() + 2.0
        while (
            any(len(of_ranks) > 1 for of_ranks in [*waiting.values()])
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        time.sleep(0.2)
    finally:
        del watch.say
    return jaxmpi.broadcast_object(said)


def called(step, tx):
    """Return the notes of a step's first call, and of the calls that follow."""
    params = start()
    out = (params, tx.init(params))
    said = []
    for _ in range(3):
        said.append(noted(lambda out=out: step(*out[:2], batch())))
        out = step(*out[:2], batch())
    return said


FORGETFUL = {
    "sgd": (plain, optax.sgd(0.1)),
    "adam": (plain, optax.adamw(0.1)),
    "clipped": (plain, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))),
    "in a scan": (in_a_scan, optax.sgd(0.1)),
    "in a branch": (in_a_branch, optax.adam(0.1)),
}


def check_forgotten(name):
    fun, tx = FORGETFUL[name]

    def step(params, state, x):
        return fun(tx, params, state, x)

    first, *later = called(jaxmpi.jit(step), tx)
    assert len(first) == 1 and re.search(SAID.format(r"\[0\]\['b'\], \[0\]\['w'\]"), first[0]), (
        first
    )
    assert not any(later)


@pytest.mark.slow
@run_ranks(2, 3)
@pytest.mark.parametrize("name", FORGETFUL)
def test_a_forgotten_mean_is_named_once_on_mpi(name):
    check_forgotten(name)


@pytest.mark.slow
@run_ranks(2, backend="xla")
@pytest.mark.parametrize("name", FORGETFUL)
def test_a_forgotten_mean_is_named_once_on_xla(name):
    check_forgotten(name)


def check_allowed():
    tx = optax.sgd(0.1)

    def step(params, state, x):
        return plain(tx, params, state, x)

    args = start(), tx.init(start()), batch()
    assert len(noted(lambda: jaxmpi.jit(step)(*args))) == 1
    assert not noted(lambda: jaxmpi.jit(step, allow="forgotten_mean")(*args))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMPI_CHECK", "0")
        assert not noted(lambda: jaxmpi.jit(step)(*args))


@run_ranks(2)
def test_a_forgotten_mean_that_is_allowed_is_not_named_on_mpi():
    check_allowed()


@run_ranks(2, backend="xla")
def test_a_forgotten_mean_that_is_allowed_is_not_named_on_xla():
    check_allowed()


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(x)


@run_ranks(2)
def test_a_forgotten_mean_is_named_in_a_train_state():
    net = Net()
    state = TrainState.create(
        apply_fn=net.apply, params=net.init(jax.random.key(0), jnp.ones((1, 2))), tx=optax.adam(0.1)
    )

    @jaxmpi.jit
    def step(state, x):
        value, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(
            state.params
        )
        return jaxmpi.tree_allreduce(value), state.apply_gradients(grads=grads)

    (said,) = noted(lambda: step(state, batch()))
    assert re.search(SAID.format(r"\[1\]\.params\S+, \S+"), said), said


def check_nnx():
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    metrics = nnx.metrics.Average()
    for tx, forgetful in ((jaxmpi.distributed(optax.sgd(0.1)), False), (optax.sgd(0.1), True)):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @jaxmpi.nn.jit
        def step(model, optimizer, metrics, x):
            value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, grads)
            metrics.update(values=value)
            return jaxmpi.tree_allreduce(value)

        said = noted(partial(step, model, optimizer, metrics, batch()))
        assert len(said) == forgetful, said
        if said:
            assert (
                "output [0]['layers'][0]['bias'].value" in said[0]
                and "mean'" not in said[0]
                and "[2]" not in said[0]
            )


@pytest.mark.slow
@run_ranks(2)
def test_nnx_batch_statistics_and_metrics_are_each_ranks_own_on_mpi():
    check_nnx()


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_nnx_batch_statistics_and_metrics_are_each_ranks_own_on_xla():
    check_nnx()


def gradients(params, x):
    return jax.value_and_grad(loss)(params, x), jaxmpi.tree_allreduce(x)


def with_rate(params, state, x, rate):
    grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), state


def marked(params, key, x):
    key, noise = jax.random.split(key.per_rank)
    return (
        params,
        jaxmpi.PerRankState(key),
        jaxmpi.tree_allreduce(jnp.sum(jax.random.normal(noise, (2,)) @ params["w"]) + x.sum()),
    )


def transformed(tx):
    def step(params, state, x):
        return plain(tx, params, state, x)

    return step


RIGHT = {
    "distributed": (transformed, jaxmpi.distributed(optax.adam(0.1))),
    "sharded": (transformed, jaxmpi.sharded(optax.adam(0.1))),
    "local_sgd": (transformed, jaxmpi.local_sgd(optax.sgd(0.1), every=2)),
    "DiLoCo": (
        transformed,
        jaxmpi.local_sgd(
            optax.adam(0.1), every=2, outer=optax.sgd(0.7, momentum=0.9, nesterov=True)
        ),
    ),
    "accumulate": (transformed, jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(0.1)), every=2)),
    "codec": (transformed, jaxmpi.distributed(optax.sgd(0.1), codec=jaxmpi.codecs.int8())),
    "skip_nonfinite": (transformed, jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.sgd(0.1)))),
}


@run_ranks(2)
@pytest.mark.parametrize("name", RIGHT)
def test_a_step_that_is_right_is_not_warned_of(name):
    make, tx = RIGHT[name]
    assert called(jaxmpi.jit(make(tx)), tx) == [[], [], []]


def clipped_gradients(params, x):
    grads = jax.lax.map(lambda x: jax.grad(loss)(params, x[None]), x)
    return jax.tree.map(lambda g: jnp.clip(g.mean(0) / 2, -1, 1), grads)


@run_ranks(2)
@pytest.mark.parametrize("name", ["loss and gradients", "clipped gradients"])
def test_the_gradients_of_a_split_step_are_not_warned_of(name):
    """They have the paths of the parameters, but are not the next ones."""
    apply = jaxmpi.jit(
        lambda params, grads: jax.tree.map(
            lambda p, g: p - 0.1 * g, params, jaxmpi.tree_allreduce(grads)
        )
    )

    def step():
        if name == "clipped gradients":
            grads = jaxmpi.jit(clipped_gradients)(start(), batch())
        else:
            _, grads = jaxmpi.jit(jax.value_and_grad(loss))(start(), batch())
        apply(start(), grads)

    assert not noted(step)


@run_ranks(2)
def test_the_output_of_a_function_of_one_is_named_as_such():
    step = jaxmpi.jit(lambda p, x: p - 0.1 * x)
    (said,) = noted(lambda: step(jnp.ones(3), batch()[0, 0] * jnp.ones(3)))
    assert said.startswith("<lambda>: the output may differ between the ranks from this call on")


@pytest.mark.slow
@run_ranks(2)
def test_functions_that_carry_no_state_are_not_warned_of():
    params, rank = start(), jaxmpi.rank()
    assert not noted(lambda: jaxmpi.jit(gradients)(params, batch()))
    assert not noted(lambda: jaxmpi.jit(with_rate)(params, (), batch(), np.float32(0.1)))
    by_rank = lambda x: (x + jax.lax.axis_index("ranks"), jaxmpi.tree_allreduce(x))
    assert not noted(lambda: jaxmpi.jit(by_rank)(jnp.ones(3)))
    key = jaxmpi.PerRankState(jaxmpi.rank_key(jax.random.key(0)))
    assert not noted(lambda: jaxmpi.jit(marked)(params, key, batch()))
    environment = {"position": jnp.zeros(2) + rank}  # of each rank, from the start
    move = jaxmpi.jit(lambda env, x: ({"position": env["position"] + x}, jaxmpi.tree_allreduce(x)))
    assert not noted(lambda: move(environment, jnp.ones(2) * rank))
    assert not noted(lambda: jaxmpi.tree_reduce({"w": jnp.ones(2)}))


def mean_of(params, x):
    return jaxmpi.tree_allreduce(loss(params, x))


def check_values():
    rank, evaluate = jaxmpi.rank(), jaxmpi.jit(mean_of, replicated_argnums=0)
    wrong = {"w": jnp.ones(2) * (1 + (rank == 1)), "b": jnp.zeros(())}
    who = "rank 1 has other values than the other ranks"
    for _ in range(2):  # no call has run the program yet, so the next one is a first call, too
        with pytest.raises(
            jaxmpi.RankMismatchError,
            match=rf"mean_of: argument 0\['w'\]: float32\[2\] is named in .*, and {who}",
        ):
            evaluate(wrong, batch())
    evaluate({"w": jnp.ones(2), "b": jnp.zeros(())}, batch())
    evaluate(wrong, batch())  # once


@run_ranks(2, 3)
def test_arguments_that_are_named_as_replicated_are_compared_by_value_once_on_mpi():
    check_values()


@run_ranks(2, backend="xla")
def test_arguments_that_are_named_as_replicated_are_compared_by_value_once_on_xla():
    check_values()


@run_ranks(2)
@pytest.mark.parametrize("off", ["allow", "JAXMPI_CHECK"])
def test_replicated_arguments_are_compared_before_each_program_whatever_else_is_off(off):
    with pytest.MonkeyPatch.context() as patch:
        if off == "JAXMPI_CHECK":
            patch.setenv(off, "0")
        options = {"allow": "unequal_start"} if off == "allow" else {}
        step = jaxmpi.jit(
            lambda p, x: jaxmpi.tree_allreduce(p * x), replicated_argnums=0, **options
        )
        step(jnp.ones(2), jnp.ones(2))
        with pytest.raises(jaxmpi.RankMismatchError, match="is named in replicated_argnums"):
            step(jnp.ones(3) + jaxmpi.rank(), jnp.ones(3))


@run_ranks(2)
def test_ranks_that_come_to_a_program_in_other_ways_still_agree():
    """Ranks agree on a program that one has forgotten, compiled ahead, or called alone before.

    It is neither compared again nor missed.
    """
    rank, tx = jaxmpi.rank(), optax.sgd(0.1)

    def step(params, state, x, train):
        return plain(tx, params, state, x) if train else loss(params, x)

    step = jaxmpi.jit(step, static_argnums=3, replicated_argnums=0)
    params = start()
    args = params, tx.init(params)
    if rank == 0:
        step(*args, batch(), False)  # sends nothing
        step.lower(*args, batch(), True)
    assert len(noted(lambda: step(*args, batch(), True))) == 1
    if rank == 1:
        step.clear_cache()
    assert not noted(lambda: step(*args, batch(), True))
    again = step if rank else jaxmpi.jit(step.__wrapped__, static_argnums=3, replicated_argnums=0)
    again(*args, batch(), True)  # the first call of one rank's function, and not of the other's
    step(*args, batch()[:2], True)  # another program, not the first call of any
    if rank == 1:
        step.clear_cache()
    step(*args, batch()[:2], True)


@run_ranks(2)
def test_after_a_difference_another_batch_gets_its_own_program():
    rank, step = (
        jaxmpi.rank(),
        jaxmpi.jit(lambda w, x: jaxmpi.tree_allreduce((x * w).mean()), replicated_argnums=0),
    )
    with pytest.raises(
        jaxmpi.RankMismatchError, match=r"argument 0: float32\[\] is named in replicated_argnums"
    ) as raised:
        step(jnp.ones(()) + rank, jnp.ones(64))
    assert (raised.value.leaf, raised.value.ranks) == ("argument 0", (1,))
    assert step.program(jnp.ones(()), jnp.ones(32)).arguments[1].shape == (32,)
    assert float(step(jnp.ones(()), jnp.ones(32) * rank)) == 0.5


@run_ranks(2)
def test_a_program_of_one_rank_alone_is_not_compared_and_nothing_is_kept():
    evaluate = jaxmpi.jit(lambda w, x: (x @ w).sum(), replicated_argnums=0)
    for step in range(100 if jaxmpi.rank() == 0 else 1):
        evaluate(jnp.ones(3) * step, jnp.ones((4, 3)))
    assert len(session.monitor().gathering._messages) <= MAX_GATHERINGS
    jaxmpi.barrier()


@run_ranks(2)
def test_what_a_rank_has_from_outside_shifts_nothing():
    """A Python branch on the rank may use another array on mpi."""
    rank, table, params = jaxmpi.rank(), jnp.arange(3.0), {"w": jnp.ones(2), "b": jnp.zeros(())}

    def step(params, x):
        value = loss(params, x) + (table.sum() if rank == 0 else 0.0)
        return jaxmpi.tree_allreduce(value)

    jaxmpi.jit(step, replicated_argnums=0)(params, batch())


@run_ranks(2)
def test_a_table_in_a_jit_of_its_own_counts_as_equal():
    table = jnp.linspace(0.1, 0.01, 10)
    rate = jax.jit(lambda count: table[count])

    def step(params, count, x):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, g: p - rate(count) * g, params, grads), count + 1

    assert not noted(lambda: jaxmpi.jit(step)(start(), jnp.zeros((), jnp.int32), batch()))


SILENT = """
import jax, jax.numpy as jnp, jaxmpi, optax
rank = jaxmpi.init().rank
tx, params = optax.sgd(0.1), {"w": jnp.ones(2)}

@jaxmpi.jit
def step(params, state, x):
    grads = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

state = tx.init(params)
if rank == 0:
    jaxmpi.jit(lambda p, x: p["w"] + x)(params, 1.0)  # a program of one rank alone
for _ in range(3):
    params, state = step(params, state, jnp.ones((4, 2)) * (1 + rank))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mpi", "xla"])
def test_a_step_that_sends_nothing_is_warned_of_too(tmp_path, monkeypatch, backend):
    (tmp_path / "script.py").write_text(SILENT)
    monkeypatch.setenv("JAXMPI_BACKEND", backend)
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", tmp_path / "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = re.findall(rf"jaxmpi: \[rank 0/2 on \S+\] {SAID}".format(r"\[0\]\['w'\]"), done.stderr)
    assert len(said) == 1 and done.stderr.count("may differ") == 1, done.stderr
