"""Branches that send different messages, under plain `jax.jit` and eagerly.

A law: where a rank takes a branch that the others do not take, and the branches send different
messages, all ranks get an error in seconds that says which rank has skipped what. Where all ranks
take the same branches, or branches that send the same, the numbers are right and nothing is raised.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from other_transport import mpi4jax_pool

import jaxmpi
from jaxmpi._job.launch.pool import Task
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

STEPS, AT = 6, 3
INNER = {"distributed": jaxmpi.distributed, "sharded": jaxmpi.sharded}


def skip_at(step, *_, **__):
    """Return, for a transform that calls its inner one on a condition, whether it does."""
    return (step != AT) | (jaxmpi.rank() < jaxmpi.size() - 1)


# by name: transforms that skip an update of what is inside of them
AROUND = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, skip_at),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, skip_at),
}
WAYS = {"jit": jax.jit, "eager": lambda step: step}


def train(tx, way, bad_at=None):
    """Train with a NaN in the gradients of the last rank at one step; return the parameters."""
    params = {"w": jnp.ones(4)}
    state = tx.init(params)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] - 1) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = WAYS[way](step)
    for i in range(STEPS):
        x = jax.random.normal(jaxmpi.rank_key(jax.random.key(i)), (8, 4))
        if i == bad_at and jaxmpi.rank() == jaxmpi.size() - 1:
            x = x.at[0, 0].set(jnp.nan)
        params, state = jax.block_until_ready(step(params, state, x))
    return params


def refused(call, words):
    """Check that a call raises on all ranks in seconds, and that these can go on."""
    jaxmpi.barrier()
    start = time.monotonic()
    with pytest.raises(Exception, match="RankMismatchError: ") as caught:
        call()
        jaxmpi.allgather_object("a message that the last step of the others meets")
    assert time.monotonic() - start < 20
    text = str(caught.value)
    assert words in text, text
    jaxmpi.barrier()
    np.testing.assert_allclose(
        jax.jit(jaxmpi.tree_allreduce)(jnp.ones(3) * jaxmpi.rank()), (jaxmpi.size() - 1) / 2
    )
    return text


def check_skipped(around, inner, way):
    tx = AROUND[around](INNER[inner](optax.adam(1e-2)))
    last = jaxmpi.size() - 1
    text = refused(lambda: train(tx, way, bad_at=AT), f"{inner}: rank {last} has skipped an update")
    assert "test_skipped_updates.py:" in text and "inside of jaxmpi.distributed" in text
    assert "float32[" in text and "allow=" not in text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("around", AROUND)
@run_ranks(2, 3)
def test_a_skipped_update_is_an_error_on_all_ranks(around, inner, way):
    check_skipped(around, inner, way)


def right(name):
    inner = optax.adam(1e-2)
    return {
        "finite, inside": jaxmpi.distributed(optax.apply_if_finite(inner, 5)),
        "finite, behind the mean": optax.chain(
            jaxmpi.average_gradients(), optax.apply_if_finite(inner, 5)
        ),
        "MultiSteps, inside": jaxmpi.distributed(
            optax.MultiSteps(
                inner, 2, should_skip_update_fn=optax.skip_not_finite
            ).gradient_transformation()
        ),
        "skip_nonfinite": jaxmpi.skip_nonfinite(jaxmpi.distributed(inner)),
        # around it, and on all ranks alike
        "MultiSteps": optax.MultiSteps(jaxmpi.distributed(inner), 2),
        "every second": optax.conditionally_mask(
            jaxmpi.distributed(inner), lambda step: step % 2 == 0
        ),
    }[name]


def check_right(name, way):
    bad_at = AT if name not in ("MultiSteps", "every second") else None
    params = jaxmpi.allgather_object(np.asarray(train(right(name), way, bad_at)["w"]).tolist())
    assert params == [params[0]] * jaxmpi.size()
    assert np.isfinite(params).all() and params[0] != [1.0] * 4


RIGHT = (
    "finite, inside",
    "finite, behind the mean",
    "MultiSteps, inside",
    "skip_nonfinite",
    "MultiSteps",
    "every second",
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RIGHT)
@run_ranks(2, 3)
def test_right_orders_are_no_error(name, way):
    check_right(name, way)


def total(x):
    return jaxmpi.tree_allreduce(x, "sum")


def plain(name):
    """Return a function (flag, x) with a branch that sends another message than the other one."""
    quiet, in_jit = lambda x: x, jax.jit(total)
    return {
        "a branch": lambda flag, x: lax.cond(flag, total, quiet, x),
        "an inner jit": lambda flag, x: lax.cond(flag, lambda x: in_jit(x) + 1, quiet, x),
        "a switch": lambda flag, x: lax.switch(flag * 2, [quiet, quiet, total], x),
        "a scan in it": lambda flag, x: lax.cond(
            flag, lambda x: lax.scan(lambda c, _: (total(c), None), x, None, 2)[0], quiet, x
        ),
        "a loop around it": lambda flag, x: lax.fori_loop(
            0, 2, lambda _, x: lax.cond(flag, total, quiet, x), x
        ),
        "a branch in a branch": lambda flag, x: lax.cond(
            x[0] < 1e9, lambda x: lax.cond(flag, total, quiet, x), quiet, x
        ),
        "its derivative": lambda flag, x: jax.grad(lambda x: lax.cond(flag, total, quiet, x).sum())(
            x
        ),
    }[name]


PLAIN = (
    "a branch",
    "an inner jit",
    "a switch",
    "a scan in it",
    "a loop around it",
    "a branch in a branch",
    "its derivative",
)


def check_branch(name, way):
    f, x = WAYS[way](plain(name)), jnp.arange(3.0)
    for flags in ((1, 1), (0, 0), (1, 1)):
        f(flags[0], x + jaxmpi.rank())
    last = jaxmpi.size() - 1

    def apart():
        for quiet in (False, jaxmpi.rank() == last, False):
            jax.block_until_ready(f(int(not quiet), x))

    refused(apart, f"tree_allreduce: rank {last} has skipped an update")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PLAIN)
@run_ranks(2, 3)
def test_a_branch_that_one_rank_does_not_take(name, way):
    check_branch(name, way)


def check_quiet():
    """Check branches that ranks may take apart."""
    rank, n = jaxmpi.rank(), jaxmpi.size()
    x = jnp.arange(3.0)
    same = jax.jit(lambda flag, x: lax.cond(flag, lambda x: total(2 * x), lambda x: total(x), x))
    for _ in range(3):
        np.testing.assert_allclose(same(rank == 0, x), (n + 1) * x)
    local = jax.jit(lambda flag, x: lax.cond(flag, lambda x: x + 1, lambda x: x, x))
    np.testing.assert_allclose(total(local(rank == 0, x)), n * x + 1)
    always = jax.jit(lambda flag, x: lax.cond(flag, total, lambda x: x, x))
    np.testing.assert_allclose(always(True, x), n * x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMPI_CHECK", "0")
        # lowered without a comparison: the message of one rank meets a later one of the other
        unchecked = jax.jit(lambda flag, x: lax.cond(flag, lambda x: total(x + 1), lambda x: x, x))
        for i in range(3):
            jax.block_until_ready(unchecked(i != (0 if rank == 0 else 2), x))


@run_ranks(2, 3)
def test_branches_that_send_the_same_may_be_taken_apart():
    check_quiet()


@run_ranks(4, axes={"row": 2, "column": 2})
def test_a_branch_of_a_group_is_its_own():
    row, x = jaxmpi.rank() // 2, jnp.arange(3.0) + jaxmpi.rank()
    add = partial(jaxmpi.tree_allreduce, op="sum", axis="column")
    f = jax.jit(lambda flag, x: lax.cond(flag, add, lambda x: x, x))
    want = [x, 2 * jnp.arange(3.0) + 4 * row + 1][row]
    for _ in range(3):
        np.testing.assert_allclose(f(row, x), want)
    np.testing.assert_allclose(jax.jit(total)(x), 4 * jnp.arange(3.0) + 6)


@run_ranks(2)
def test_a_branch_sends_no_message_of_its_own():
    transport = session.current("test").transport
    if transport.name != "native":
        return
    x, f = jnp.arange(3.0), jax.jit(lambda flag, x: lax.cond(flag, total, lambda x: x, x))
    for flag in (1, 0):
        jax.block_until_ready(f(flag, x))
        started, _ = transport.native.messages()
        for _ in range(5):
            jax.block_until_ready(f(flag, x))
        assert transport.native.messages()[0] - started == 5 * flag


@run_ranks(2)
def test_jaxmpi_jit_records_no_branch():
    step = jaxmpi.jit(
        lambda flag, x: lax.cond(flag > 0, lambda x: lax.psum(x, jaxmpi.AXIS), lambda x: x, x),
        replicated_argnums=0,
    )
    x = jnp.arange(3.0)
    np.testing.assert_allclose(step(1, x), 2 * x)
    assert "jaxmpi_branch" not in step.lower(1, x).as_text()
    plainly = jax.jit(lambda flag, x: lax.cond(flag > 0, total, lambda x: x, x))
    assert ("jaxmpi_branch" in plainly.lower(1, x).as_text()) == (
        session.current("test").transport.name == "native"
    )


@run_ranks(2, backend="xla")
def test_on_xla_it_is_refused_where_it_is_compiled():
    tx = AROUND["apply_if_finite"](jaxmpi.distributed(optax.adam(1e-2)))
    for way in WAYS:
        with pytest.raises(RuntimeError, match=r"Use jaxmpi.jit instead of jax.jit"):
            train(tx, way, bad_at=AT)
    check_right("finite, inside", "eager")


@pytest.fixture(scope="module")
def mpi4jax_ranks():
    """Jobs of the other transport, by their numbers of ranks."""
    jobs = {n: mpi4jax_pool(n) for n in (2, 3)}
    yield jobs
    for job in jobs.values():
        job.end()


@pytest.mark.mpi4jax
@pytest.mark.parametrize("n", [2, 3])
def test_on_mpi4jax(n, mpi4jax_ranks):
    def on_ranks(check, **kwargs):
        mpi4jax_ranks[n].run(Task(__file__, check.__name__, kwargs, 120.0))

    for way in WAYS:
        for around in AROUND:
            on_ranks(check_skipped, around=around, inner="distributed", way=way)
        for name in RIGHT:
            on_ranks(check_right, name=name, way=way)
        on_ranks(check_branch, name="a branch in a branch", way=way)
    on_ranks(check_quiet)


@pytest.mark.parametrize("way", WAYS)
@run_ranks(2, 3)
def test_a_turn_more_on_one_rank(way):
    if session.current("test").transport.name != "native":
        return
    loop = WAYS[way](
        lambda turns, x: lax.while_loop(
            lambda c: c[0] < turns, lambda c: (c[0] + 1, total(c[1])), (0, x)
        )[1]
    )
    x = jnp.arange(3.0) + jaxmpi.rank()
    for turns in (2, 0, 1):
        want = x if not turns else jaxmpi.size() ** (turns - 1) * np.asarray(total(x))
        np.testing.assert_allclose(loop(turns, x), want)

    def apart():
        for turns in (1, 1 + (jaxmpi.rank() == 0), 1, 2):
            jax.block_until_ready(loop(turns, x))

    refused(apart, "a loop of allreduce sum of float32[3]")


@run_ranks(2, 3)
def test_equal_branches_and_loops_are_no_error_in_any_order():
    x, rng, n = jnp.ones((100, 100)), np.random.default_rng(5), jaxmpi.size()
    branch = jax.jit(lambda flag, x: lax.cond(flag, total, lambda x: x @ x * 0 + x, x))
    loop = jax.jit(
        lambda turns, x: lax.while_loop(
            lambda c: c[0] < turns, lambda c: (c[0] + 1, total(c[1]) / n), (0, x)
        )[1]
    )
    mean = jaxmpi.jit(lambda x: lax.pmean(x, jaxmpi.AXIS))
    calls = (
        lambda flag: (branch(flag, x), n if flag else 1),
        lambda flag: (loop(2 * flag, x), 1),
        lambda _: (mean(x), 1),
        lambda flag: (lax.cond(flag, total, lambda x: x, x), n if flag else 1),
        lambda _: (jaxmpi.tree_allreduce(x), 1),
    )
    for i in range(200):  # most of them without a wait for the one before
        out, want = calls[rng.integers(len(calls))](int(rng.integers(2)))
        if i % 20 == 0:
            assert float(out[0, 0]) == want
        if jaxmpi.rank() == 0 and i % 40 == 0:
            time.sleep(0.01)
    jaxmpi.barrier()
