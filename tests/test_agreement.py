"""Ranks that are about to do different things all get the same error, at once, with both sides; and order is kept."""

import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmpi
from jaxmpi import RankMismatchError, _agreement, _world
from jaxmpi._backends import word_of
from jaxmpi._backends.job import EVENTS
from jaxmpi.testing import run_ranks

R = jaxmpi.AXIS
X = np.ones(4, np.float32)


def sum_of(x):
    return lax.psum(x, R)


def one_more(x):
    return lax.psum(x, R), lax.pmax(x * 2, R)


def first_sum(x):
    return lax.pmax(lax.psum(x, R) * x, R)


def first_max(x):
    return lax.psum(lax.pmax(x, R) * x, R)


def looped(n):
    def fun(x):
        return lax.scan(lambda c, _: (lax.psum(c, R), None), x, None, length=n)[0]

    return fun


def fails(x):
    raise ValueError("boom")


DIFFERENCES = {
    "shape": (lambda: jaxmpi.jit(sum_of)(X), lambda: jaxmpi.jit(sum_of)(X[:3]), "float32[4]", "float32[3]"),
    "dtype": (lambda: jaxmpi.jit(sum_of)(X), lambda: jaxmpi.jit(sum_of)(X.astype(np.int32)), "float32[4]", "int32[4]"),
    "op": (lambda: jaxmpi.jit(sum_of)(X), lambda: jaxmpi.jit(lambda x: lax.pmax(x, R))(X), "allreduce sum", "allreduce max"),
    "order": (lambda: jaxmpi.jit(first_sum)(X), lambda: jaxmpi.jit(first_max)(X), "first_sum", "first_max"),
    "one more": (lambda: jaxmpi.jit(sum_of)(X), lambda: jaxmpi.jit(one_more)(X), "nothing more", "allreduce max"),
    "length of a loop": (lambda: jaxmpi.jit(looped(3))(X), lambda: jaxmpi.jit(looped(4))(X), "scan[3]", "scan[4]"),
    "another step": (lambda: jaxmpi.jit(sum_of)(X), lambda: jaxmpi.jit(one_more)(X), "called sum_of", "called one_more"),
    "an eager call": (
        lambda: jaxmpi.jit(sum_of)(X),
        lambda: jaxmpi.tree_allreduce(X[:2]),
        "called sum_of",
        "called tree_allreduce",
    ),
    "eager shapes": (
        lambda: jaxmpi.tree_allreduce({"a": X, "b": X}),
        lambda: jaxmpi.tree_allreduce({"a": X, "b": X[:1]}),
        "argument 0['b']: float32[4]",
        "argument 0['b']: float32[1]",
    ),
    "eager trees": (
        lambda: jaxmpi.tree_allgather({"a": X}),
        lambda: jaxmpi.tree_allgather({"a": X, "b": X}),
        "nothing more",
        "argument 0['b']: float32[4]",
    ),
    "eager ops": (lambda: jaxmpi.tree_allreduce(X, "min"), lambda: jaxmpi.tree_allreduce(X, "max"), "e min", "allreduce max"),
    "an object": (
        lambda: jaxmpi.jit(sum_of)(X),
        lambda: jaxmpi.allgather_object(1),
        "called sum_of",
        "called allgather_object",
    ),
    "objects": (lambda: jaxmpi.barrier(), lambda: jaxmpi.broadcast_object(1), "called barrier", "called broadcast_object"),
    "roots": (lambda: jaxmpi.broadcast_object(1), lambda: jaxmpi.broadcast_object(1, root=1), "root=0", "root=1"),
    "synchronize": (lambda: jaxmpi.synchronize(X), lambda: jaxmpi.tree_bcast(X), "called synchronize", "called tree_bcast"),
}


def check_difference(name):
    mine, others, *words = DIFFERENCES[name]
    jaxmpi.jit(sum_of)(X)  # the ranks have run programs before
    start = time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        others() if jaxmpi.rank() == jaxmpi.size() - 1 else mine()
    assert time.monotonic() - start < 5.0
    for word in words:
        assert word in str(caught.value)
    assert "rank 0" in str(caught.value) or "ranks 0" in str(caught.value)
    np.testing.assert_array_equal(jaxmpi.jit(sum_of)(X), X * jaxmpi.size())  # nothing was sent: the job could go on
    texts = jaxmpi.allgather_object(str(caught.value))
    assert len(set(texts)) == 1


@pytest.mark.parametrize("name", DIFFERENCES)
@run_ranks(2, 3)
def test_ranks_that_differ_all_raise_on_mpi(name):
    check_difference(name)


@pytest.mark.parametrize("name", DIFFERENCES)
@run_ranks(2, backend="xla")
def test_ranks_that_differ_all_raise_on_xla(name):
    check_difference(name)


@run_ranks(3)
def test_one_rank_that_recompiles_while_the_others_go_on():
    step = jaxmpi.jit(sum_of)
    for _ in range(5):
        step(X)
    with pytest.raises(RankMismatchError, match=r"float32\[4\] at test_agreement.py:\d+"):
        step(X[:2] if jaxmpi.rank() == 1 else X)
    np.testing.assert_array_equal(step(X), X * 3)


@run_ranks(3)
def test_arguments_may_differ_where_the_messages_do_not():
    """The last batch of a rank may be shorter: it compiles anew, and the others wait for it."""
    step = jaxmpi.jit(lambda x: lax.psum(jnp.sum(x), R))
    step(np.ones(8, np.float32))
    assert float(step(np.ones(8 - jaxmpi.rank(), np.float32))) == 8 + 7 + 6


@run_ranks(2, 3)
def test_a_rank_that_cannot_trace_raises_at_once():
    """It does not wait for ranks that may never come; should it go on, the next call shows that they disagree."""
    with pytest.raises(ValueError, match="boom"):
        jaxmpi.jit(fails)(X)
    if jaxmpi.rank() == 1:
        with pytest.raises(ValueError, match="boom"):
            jaxmpi.jit(fails)(X)
    with pytest.raises(RankMismatchError, match="rank 1 called barrier"):
        jaxmpi.barrier() if jaxmpi.rank() == 1 else jaxmpi.jit(sum_of)(X)


@run_ranks(2)
def test_a_step_without_messages_may_run_on_one_rank():
    if jaxmpi.rank() == 0:
        assert float(jaxmpi.jit(lambda x: x + 1)(1.0)) == 2.0
    jaxmpi.barrier()


@run_ranks(2)
def test_nothing_is_sent_while_tracing_or_compiling():
    """Rank 1 does none of it, and nobody waits."""
    if jaxmpi.rank() == 0:
        step = jaxmpi.jit(sum_of)
        compiled = step.lower(X).compile()
        assert "psum" in str(step.trace(X).jaxpr) or "program" in str(step.trace(X).jaxpr)
        assert step.eval_shape(X).shape == (4,)
    jaxmpi.barrier()
    if jaxmpi.rank() == 1:
        compiled = jaxmpi.jit(sum_of).lower(X).compile()
    np.testing.assert_array_equal(compiled(X), X * 2)


@run_ranks(2)
def test_ahead_of_time_programs_are_compared_too():
    compiled = jaxmpi.jit(sum_of if jaxmpi.rank() else one_more).lower(X).compile()
    with pytest.raises(RankMismatchError, match="one_more"):
        compiled(X)


# order


def busy(x, n):
    return lax.fori_loop(0, n, lambda _, y: jnp.sin(y) + 1e-3, x)


def twenty(x, n):
    """Independent collectives, which the ranks reach at different moments and, if nothing held them, in different orders."""
    parts = [busy(x + k, (n * (k + 3)) % 17) * 0 + x + k for k in range(20)]
    return [(lax.psum, lax.pmax)[k % 2](part * (k + 1), R) for k, part in enumerate(parts)]


def check_order(runs):
    size, rank = jaxmpi.size(), jaxmpi.rank()
    step = jaxmpi.jit(twenty)
    alone = jaxmpi.jit(lambda x, n: lax.psum(busy(x, n) * 0 + x, R))
    also = jaxmpi.jit(lambda x, n: lax.psum(busy(x, 40 - n) * 0 + x * 2, R))
    rng = np.random.default_rng(rank)
    wrong = 0
    for i in range(runs):
        x = np.full(3, rank + i, np.float32)
        n = int(rng.integers(0, 40))
        got = step(x, n)
        first, second = alone(x, n), also(x, n)  # dispatched back to back, no data between them
        ranks = [r + i for r in range(size)]
        for k, y in enumerate(got):
            want = (sum, max)[k % 2]((r + k) * (k + 1) for r in ranks)
            wrong += not np.array_equal(y, np.full(3, want, np.float32))
        wrong += not np.array_equal(first, np.full(3, sum(ranks), np.float32))
        wrong += not np.array_equal(second, np.full(3, 2 * sum(ranks), np.float32))
    assert wrong == 0


@run_ranks(2, 3, timeout_seconds=120)
def test_collectives_keep_their_order():
    check_order(1000 if jaxmpi.size() == 2 else 200)


@run_ranks(2)
def test_programs_and_plain_jit_keep_their_order():
    """A program of jaxmpi.jit has no effect outside, one of jax.jit has; called in turn, both stay in order."""
    size, rank = jaxmpi.size(), jaxmpi.rank()
    hidden = jaxmpi.jit(lambda x: lax.psum(x, R))
    plain = jax.jit(lambda x: jaxmpi.tree_allreduce(x, "sum"))
    for i in range(200):
        x = np.float32(rank + i)
        outs = [hidden(x), plain(x * 2), hidden(x * 3), plain(x * 4)]
        total = sum(r + i for r in range(size))
        assert [float(y) for y in outs] == [total * k for k in (1, 2, 3, 4)]


@run_ranks(2)
def test_no_effect_is_left_outside():
    step = jaxmpi.jit(sum_of)
    assert not step.trace(X).jaxpr.effects
    text = step.lower(X).as_text()
    assert len(re.findall("custom_call @", text)) == 1


def one_step(params, x):
    return {"w": params["w"] - lax.pmean(x, R)}, x


@run_ranks(2, 3)
def test_a_full_check_finds_what_is_not_equal():
    """JAXMPI_CHECK=1 compares the values of what is to be equal, too."""
    last = jaxmpi.rank() == jaxmpi.size() - 1
    os.environ["JAXMPI_CHECK"] = "1"
    try:
        step = jaxmpi.jit(one_step, replicated_argnums=0, donate_argnums=0)
        params, _ = step({"w": jnp.asarray(X)}, X * jaxmpi.rank())
        np.testing.assert_allclose(params["w"], X - (jaxmpi.size() - 1) / 2, atol=1e-6)  # a compiler may fuse mean and step
        other = {"w": jnp.nextafter(params["w"], jnp.inf) if last else params["w"]}
        with (
            pytest.raises(
                RankMismatchError, match=rf"one_step: argument 0\['w'\].* is not equal .*: rank {jaxmpi.size() - 1} has other"
            )
            if jaxmpi.size() > 2
            else pytest.raises(RankMismatchError, match=r"one_step: argument 0\['w'\]: float32\[4\] is not equal")
        ):
            step(other, X)
    finally:
        del os.environ["JAXMPI_CHECK"]
    jaxmpi.jit(one_step)({"w": jnp.asarray(X) * jaxmpi.rank()}, X)


@run_ranks(2)
def test_what_was_compared_is_forgotten_once_there_was_enough_after_it():
    """There is another word for each step that is saved: the memory of a long run must not grow by them."""
    backend = _world.current("test")
    for step in range(EVENTS + 100):
        _agreement.meet(backend, _agreement.Statement.of("save", f"step {step}"))
        _agreement.meet(backend, _agreement.Statement.of("always"))
    assert len(backend._titles) == EVENTS
    words = [word_of(text) for text in ("step 0", f"step {EVENTS + 99}", "always")]
    assert [backend.described(word)[1] for word in words] == ["", "save", "always"]
