"""Ranks about to differ all get the same error, at once, with both sides; order is kept."""

import os
import re
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmpi
from jaxmpi import RankMismatchError, codecs
from jaxmpi._backends.base import fingerprint_of
from jaxmpi._backends.comparison import EVENTS
from jaxmpi._consistency import compare
from jaxmpi._consistency.mismatch import Call
from jaxmpi._world import session
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
    "shape": (
        lambda: jaxmpi.jit(sum_of)(X),
        lambda: jaxmpi.jit(sum_of)(X[:3]),
        "float32[4]",
        "float32[3]",
    ),
    "dtype": (
        lambda: jaxmpi.jit(sum_of)(X),
        lambda: jaxmpi.jit(sum_of)(X.astype(np.int32)),
        "float32[4]",
        "int32[4]",
    ),
    "op": (
        lambda: jaxmpi.jit(sum_of)(X),
        lambda: jaxmpi.jit(lambda x: lax.pmax(x, R))(X),
        "allreduce sum",
        "allreduce max",
    ),
    "order": (
        lambda: jaxmpi.jit(first_sum)(X),
        lambda: jaxmpi.jit(first_max)(X),
        "first_sum",
        "first_max",
    ),
    "one more": (
        lambda: jaxmpi.jit(sum_of)(X),
        lambda: jaxmpi.jit(one_more)(X),
        "nothing more",
        "allreduce max",
    ),
    "length of a loop": (
        lambda: jaxmpi.jit(looped(3))(X),
        lambda: jaxmpi.jit(looped(4))(X),
        "scan[3]",
        "scan[4]",
    ),
    "another step": (
        lambda: jaxmpi.jit(sum_of)(X),
        lambda: jaxmpi.jit(one_more)(X),
        "called sum_of",
        "called one_more",
    ),
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
    "eager ops": (
        lambda: jaxmpi.tree_allreduce(X, "min"),
        lambda: jaxmpi.tree_allreduce(X, "max"),
        "e min",
        "allreduce max",
    ),
    "an object": (
        lambda: jaxmpi.jit(sum_of)(X),
        lambda: jaxmpi.allgather_object(1),
        "called sum_of",
        "called allgather_object",
    ),
    "objects": (
        lambda: jaxmpi.barrier(),
        lambda: jaxmpi.broadcast_object(1),
        "called barrier",
        "called broadcast_object",
    ),
    "roots": (
        lambda: jaxmpi.broadcast_object(1),
        lambda: jaxmpi.broadcast_object(1, root=1),
        "root=0",
        "root=1",
    ),
    "synchronize": (
        lambda: jaxmpi.synchronize(X),
        lambda: jaxmpi.tree_bcast(X),
        "called synchronize",
        "called tree_bcast",
    ),
    "a meter": (
        lambda: jaxmpi.Throughput().read(),
        lambda: jaxmpi.barrier(),
        "called Throughput.read",
        "called barrier",
    ),
}


def in_step(work, **options):
    """A call of a step with this work, of the argument."""
    return jaxmpi.jit(lambda x: work(x), **options)(X)


def updated(tx, **extra):
    """A call of a step with an optax transform."""
    params, grads = jnp.ones((2, 8)), jnp.ones((2, 8))
    step = jaxmpi.jit(lambda grads, state: tx.update(grads, state, params, **extra))
    return step(grads, tx.init(params))


def stacked(micro_batches):
    """Make a step with several micro-batches whose messages do not depend on their number."""
    tx = distributed(sgd, micro_batches=micro_batches)
    grads = jnp.ones((micro_batches // jaxmpi.size(), 4))
    return jaxmpi.jit(lambda grads: tx.update(grads, tx.init(jnp.ones(4)), jnp.ones(4)))(grads)


def batches(**options):
    return next(iter(jaxmpi.batches(np.arange(24), **{"batch_size": 12, "seed": 0, **options})))


def saved(**options):
    return jaxmpi.save("a folder that is not there", **{"step": 1, "tree": {}, **options})


distributed, sgd = jaxmpi.distributed, optax.sgd(0.1)
clip = jaxmpi.clip_by_global_norm


def bcast_in_loop(x, root):
    return lax.scan(lambda c, _: (jaxmpi.tree_bcast(c, root), None), x, None, length=2)[0]


def squares_of_bcast(x, root):
    return jnp.sum(jax.checkpoint(jaxmpi.tree_bcast, static_argnums=1)(x, root) ** 2)


def square():
    return np.ones([jaxmpi.size()] * 2, np.float32)


PARAMETERS = {  # a call, and two values of a parameter that all ranks must give alike
    "root of tree_bcast": (lambda root: jaxmpi.tree_bcast(X, root), 0, 1),
    "root of tree_bcast in a step": (
        lambda root: in_step(lambda x: jaxmpi.tree_bcast(x, root)),
        0,
        1,
    ),
    "root of tree_bcast in a loop": (
        lambda root: in_step(lambda x: bcast_in_loop(x, root)),
        0,
        1,
    ),
    "root of tree_bcast that is differentiated": (
        lambda root: in_step(jax.grad(lambda x: squares_of_bcast(x, root))),
        0,
        1,
    ),
    "root of tree_reduce": (lambda root: jaxmpi.tree_reduce(X, "sum", root), 0, 1),
    "root of broadcast_object": (lambda root: jaxmpi.broadcast_object(1, root), 0, 1),
    "root of synchronize": (lambda root: jaxmpi.synchronize(X, root), 0, 1),
    "strict of synchronize": (
        lambda strict: jaxmpi.synchronize({"x": X, "f": "name"}, strict=strict),
        True,
        False,
    ),
    "op, mean or sum": (lambda op: jaxmpi.tree_allreduce(X, op), "mean", "sum"),
    "op of integers": (lambda op: jaxmpi.tree_allreduce(X.astype(np.int32), op), "mean", "sum"),
    "op of tree_reduce_scatter": (
        lambda op: jaxmpi.tree_reduce_scatter(np.ones((jaxmpi.size(), 2)), op),
        "mean",
        "sum",
    ),
    "op of distributed": (lambda op: updated(distributed(sgd, op=op)), "mean", "sum"),
    "pairs": (lambda pairs: in_step(lambda x: lax.ppermute(x, R, pairs)), [(0, 1)], [(1, 0)]),
    "axis of all_to_all": (
        lambda axis: jaxmpi.jit(lambda x: lax.all_to_all(x, R, axis, 0))(square()),
        0,
        1,
    ),
    "axis of psum_scatter": (
        lambda axis: jaxmpi.jit(lambda x: lax.psum_scatter(x, R, scatter_dimension=axis))(square()),
        0,
        1,
    ),
    "weight, given or not": (
        lambda w: updated(distributed(sgd), **({"weight": w} if w else {})),
        None,
        3.0,
    ),
    "codec": (lambda codec: updated(distributed(sgd, codec=codec())), codecs.bf16, codecs.f16),
    "block of int8": (lambda block: updated(distributed(sgd, codec=codecs.int8(block))), 64, 128),
    "fraction of topk": (
        lambda fraction: updated(distributed(sgd, codec=codecs.topk(fraction))),
        0.5,
        0.49,
    ),
    "rank of powersgd": (lambda rank: updated(distributed(sgd, codec=codecs.powersgd(rank))), 1, 2),
    "micro_batches": (lambda m: stacked(m * jaxmpi.size()), 2, 4),
    "every of accumulate": (
        lambda every: updated(jaxmpi.accumulate(distributed(sgd), every)),
        2,
        3,
    ),
    "every of local_sgd": (lambda every: updated(jaxmpi.local_sgd(sgd, every)), 2, 3),
    "outer of local_sgd": (lambda outer: updated(jaxmpi.local_sgd(sgd, 2, outer)), None, sgd),
    "every of watch_replicas": (
        lambda every: updated(jaxmpi.watch_replicas(distributed(sgd), every)),
        2,
        3,
    ),
    "max_norm": (lambda norm: updated(distributed(optax.chain(clip(norm), sgd))), 1.0, 2.0),
    "max_norm in sharded": (
        lambda norm: updated(jaxmpi.sharded(optax.chain(clip(norm), sgd))),
        1.0,
        2.0,
    ),
    "master_dtype": (
        lambda dtype: updated(jaxmpi.sharded(sgd, master_dtype=dtype)),
        None,
        jnp.float32,
    ),
    "growth_every": (
        lambda n: updated(jaxmpi.dynamic_loss_scale(distributed(sgd), growth_every=n)),
        10,
        20,
    ),
    "seed of batches": (lambda seed: batches(seed=seed), 0, 1),
    "epoch of batches": (lambda epoch: batches(epoch=epoch), 0, 1),
    "batch size": (lambda size: batches(batch_size=size), 6, 12),
    "seed of prefetched batches": (
        lambda seed: next(iter(jaxmpi.prefetch(jaxmpi.batches(np.arange(24), 12, seed=seed)))),
        0,
        1,
    ),
    "step of save": (lambda step: saved(step=step), 1, 2),
    "keep of save": (lambda keep: saved(keep=keep), 1, 2),
    "background of save": (lambda background: saved(background=background), True, False),
    "numbers in what is saved": (lambda x: saved(tree={"x": x}), 1, 2),
    "step of restore": (lambda step: jaxmpi.restore("a folder that is not there", {}, step), 1, 2),
    "folder of save": (lambda folder: jaxmpi.save(folder, 1, {}), "one folder", "another folder"),
    "folder of restore": (
        lambda folder: jaxmpi.restore(folder, {}),
        "one folder",
        "another folder",
    ),
    "folder of latest": (jaxmpi.latest, "one folder", "another folder"),
}


def differ(mine, others):
    """Return the text of the error that all ranks raise where the last one calls `others`.

    The ranks go on after it.
    """
    jaxmpi.jit(sum_of)(X)
    with pytest.raises(RankMismatchError) as caught:
        others() if jaxmpi.rank() == jaxmpi.size() - 1 else mine()
    np.testing.assert_array_equal(jaxmpi.jit(sum_of)(X), X * jaxmpi.size())
    texts = jaxmpi.allgather_object(str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


@pytest.mark.slow
@run_ranks(2, 3)
def test_every_parameter_is_compared():
    for name, (call, one, other) in PARAMETERS.items():
        text = differ(partial(call, one), partial(call, other))
        compared = "do not agree. " in text and " by rank" in text
        assert compared or "is not equal on all ranks" in text or re.search("called .*=", text), (
            name,
            text,
        )


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_every_parameter_is_compared_on_xla():
    test_every_parameter_is_compared.__wrapped__()


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
    # nothing was sent: the job could go on
    np.testing.assert_array_equal(jaxmpi.jit(sum_of)(X), X * jaxmpi.size())
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
    """A rank that cannot trace does not wait for ranks that may never come.

    If it goes on, the next call shows the mismatch.
    """
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


# Python branches on the rank


def me():
    """A Python int; `jaxmpi.rank()` is traced in a step."""
    return session.current("test").place.rank


def unused(x):
    total = lax.psum(x, R)
    return total if me() == 0 else x


def unused_in_a_loop(x):
    return lax.scan(lambda c, _: (unused(c), None), x, None, length=2)[0]


def unused_loop(x):
    y = lax.scan(lambda c, _: (lax.psum(c, R), None), x, None, length=2)[0]
    return y if me() == 0 else x


def halo(u):
    """Neighbours send their edges; the ends of the line have no neighbour."""
    n = jaxmpi.size()
    right = lax.ppermute(u[-2:-1], R, [(i, i + 1) for i in range(n - 1)])
    if me() > 0:
        u = u.at[0].set(right[0])
    left = lax.ppermute(u[1:2], R, [(i + 1, i) for i in range(n - 1)])
    if me() < n - 1:
        u = u.at[-1].set(left[0])
    return u


def constant(x):
    return lax.psum(x * (1.0 + me()), R)


def cells(rank):
    return np.arange(4, dtype=np.float32) + 10 * rank


def halo_in_numpy(ranks):
    out = np.stack(ranks)
    out[1:, 0], out[:-1, -1] = out[:-1, -2].copy(), out[1:, 1].copy()
    return out


BRANCHES = {
    "unused": (unused, lambda xs: [sum(xs), *xs[1:]]),
    "unused in a loop": (unused_in_a_loop, lambda xs: [sum(xs) + sum(xs[1:]), *xs[1:]]),
    "an unused loop": (unused_loop, lambda xs: [sum(xs) * len(xs), *xs[1:]]),
    "halo": (halo, halo_in_numpy),
    "constant": (constant, lambda xs: [sum(x * (1.0 + r) for r, x in enumerate(xs))] * len(xs)),
}


@pytest.mark.parametrize("name", BRANCHES)
@run_ranks(2, 3)
def test_branches_with_the_same_collectives_are_right(name):
    """Branches with the same collectives run them in the order of the calls.

    It does not matter how a rank uses their results.
    """
    fun, whole = BRANCHES[name]
    want = whole([cells(rank) for rank in range(jaxmpi.size())])
    np.testing.assert_array_equal(jaxmpi.jit(fun)(cells(jaxmpi.rank())), want[jaxmpi.rank()])


def one_message_or_two(x, branch):
    """Make two sums that may travel together, or depend on each other on a rank with `branch`."""
    a = lax.psum(x, R)
    return lax.psum(a if branch else x, R) + a


def which_depends(x, branch):
    """Send three messages of equal arrays; `branch` decides which of them needs the first sum.

    It is the third or the second.
    """
    a = lax.psum(x, R)
    b = lax.psum(a if branch else x * 2, R)
    c = lax.psum(x * 3 if branch else a, R)
    return b, c


def which_loop_depends(x, branch):
    def loop(x):
        return lax.scan(lambda c, _: (lax.psum(c, R), None), x, None, length=2)[0]

    a = lax.pmax(x, R)
    return loop(a if branch else x), loop(x if branch else a)


def another_collective(x, branch):
    return lax.pmax(x, R) if branch else lax.psum(x, R)


def another_place(x, branch):
    return lax.pmax(lax.psum(x, R) * 2, R) if branch else lax.psum(lax.pmax(x, R) * 2, R)


@pytest.mark.parametrize(
    "fun",
    [one_message_or_two, which_depends, which_loop_depends, another_collective, another_place],
)
@run_ranks(2, 3)
def test_branches_with_other_messages_are_refused_by_their_name(fun):
    step = jaxmpi.jit(fun, static_argnums=1)
    text = differ(
        partial(step, cells(jaxmpi.rank()), False), partial(step, cells(jaxmpi.rank()), True)
    )
    assert (
        "An `if` on the rank makes different programs: use jnp.where." in text
        and " by rank" in text
    ), text


def masked(x, branch):
    """Send the same messages in both branches, with different local work."""
    y = lax.ppermute(x, R, [(0, 1), (1, 0)])
    return lax.psum(y.at[0].set(0.0) if branch else y, R)


def held(value):
    array = np.full(3, value, np.float32)
    large = np.full(100_000, value, np.float32)
    return jaxmpi.jit(lambda x: lax.psum(x, R) + array), jaxmpi.jit(
        lambda x: lax.psum(x, R) + jnp.sum(x[0] * large)
    )


@pytest.mark.skipif(
    os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax",
    reason="it compares programs, and not each message",
)
@run_ranks(2, 3)
def test_a_rank_that_has_caught_an_error_in_the_middle_of_a_step_is_found():
    """The next step of such a rank begins with a message like the one the others are at."""
    last = jaxmpi.rank() == jaxmpi.size() - 1
    fails = [last]

    def look(x):
        if fails and fails.pop():
            raise ValueError("once")
        return x

    @jaxmpi.jit
    def two_sums(x):
        x = lax.psum(x, R)
        return lax.psum(jax.pure_callback(look, x, x), R)

    if last:
        with pytest.raises(jax.errors.JaxRuntimeError, match="once"):
            jax.block_until_ready(two_sums(X))
    sides = r"two_sums.* caught an error.*message \d of the program.*message \d of the program"
    with pytest.raises(RankMismatchError, match=f"(?s){sides}"):
        jax.block_until_ready(two_sums(X))
    np.testing.assert_allclose(two_sums(X), jaxmpi.size() ** 2 * X, rtol=1e-6)


@run_ranks(2, backend="xla")
def test_xla_runs_one_program_on_all_ranks():
    x = cells(jaxmpi.rank())[:3]
    step = jaxmpi.jit(masked, static_argnums=1)
    branch = "An `if` on the rank makes different programs: use jnp.where."
    text = differ(partial(step, x, False), partial(step, x, True))
    assert branch in text and re.search(r"computed by rank 1: .* at test_agreement.py:\d+", text)
    np.testing.assert_array_equal(step(x, False), cells(0)[:3] + cells(1)[:3])
    text = differ(
        partial(step.lower(x, False).compile(), x), partial(step.lower(x, True).compile(), x)
    )
    assert branch in text
    for name in ("unused", "halo", "constant"):
        fun, _ = BRANCHES[name]
        with pytest.raises(RankMismatchError, match=branch):
            jaxmpi.jit(fun)(cells(jaxmpi.rank()))
    for mine, others in zip(held(1.0), held(2.0), strict=True):
        text = differ(partial(mine, x), partial(others, x))
        assert "decided by rank 1: an array from outside" in text
    mean = jaxmpi.jit(lambda x: lax.psum(jnp.mean(x), R))
    text = differ(partial(mean, x), partial(mean, x[:2]))
    assert (
        "On the xla backend all ranks run one compiled program" in text
        and "argument 0: float32[2]" in text
    )


@run_ranks(2, backend="xla")
def test_numbers_that_are_declared_equal_are_compared_at_every_call():
    """Ranks compare numbers declared equal before a program, on mpi4jax, too.

    On the native transport the messages carry them.
    """
    step = jaxmpi.jit(
        lambda x, i: lax.cond(i % 2 == 0, lambda: lax.psum(x, R), lambda: x), replicated_argnums=1
    )
    for number in (int, np.int32):
        for i in range(3):
            np.testing.assert_array_equal(step(X, number(i)), X * (1 if i % 2 else 2))
        text = differ(partial(step, X, number(3)), partial(step, X, number(4)))
        assert (
            "given by rank 0: argument 1: int32[] is 3\n  given by rank 1: argument 1: int32[] is 4"
            in text
        )
    np.testing.assert_array_equal(step(X, jnp.int32(4)), X * 2)


def with_rate(rate):
    """A step whose parameters are declared to be equal on all ranks."""

    def train(params, x):
        return params - rate * jnp.sqrt(2.0) * lax.pmean(jnp.mean(x) * params, R), jnp.mean(
            x
        ) * rate

    return jaxmpi.jit(train, replicated_argnums=0, replicated_outnums=0)


def in_loops(rate):
    def train(params, x):
        def turn(c, _):
            p, seen = c
            return (p - rate * lax.psum(jnp.sum(x) / len(x), R), seen + jnp.sum(x) / len(x)), None

        (p, seen), _ = lax.scan(turn, (params, 0.0), None, length=2)
        p = lax.fori_loop(0, 2, lambda _, p: lax.cond(p > 0, lambda p: p * rate, lambda p: p, p), p)
        return jax.jit(lambda p: p * rate)(p), seen

    return jaxmpi.jit(train, replicated_argnums=0, replicated_outnums=0)


@pytest.mark.parametrize("make", [with_rate, in_loops])
@run_ranks(2, 3)
def test_what_computes_an_output_that_is_declared_equal_is_compared(make):
    """The comparison goes from the last reduction on: what is before it may differ.

    So may the shapes of batches.
    """
    params, x = np.float32(1.0), np.ones(4 + jaxmpi.rank(), np.float32)
    text = differ(partial(make(0.1), params, x), partial(make(0.2), params, x))
    assert "decided by rank" in text and "0.2" in text and " at test_agreement.py" in text, text
    make(0.1)(params, x)
    everyone = jaxmpi.allgather_object(float(make(0.1)(params, x)[0]))
    assert len(set(everyone)) == 1


@run_ranks(2)
def test_what_decides_is_compared_from_the_last_reduction_on():
    step = jaxmpi.jit(
        lambda x: lax.while_loop(
            lambda c: lax.psum(jnp.mean(x), R) > c, lambda c: c + lax.psum(1.0, R), 0.0
        )
    )
    # the mean divides by another number on each rank
    assert float(step(np.ones(4 + jaxmpi.rank(), np.float32))) == 2.0


@run_ranks(2)
def test_what_a_gradient_leaves_behind_costs_no_round():
    """The loss of a gradient is not used: its mean travels with that of the gradient."""
    step = jaxmpi.jit(
        lambda w, x: lax.pmean(jax.grad(lambda w: lax.pmean(jnp.sum(w * x), R))(w), R)
    )
    entries = step.program(X, X).entries
    assert [len(entry.arrays) for entry in entries] in ([2], [1, 1])
    assert len({entry.path for entry in entries}) == 1
    np.testing.assert_allclose(step(X, X * jaxmpi.rank()), X / 2)


@run_ranks(2)
def test_notes_of_parameters_are_no_part_of_the_program():
    step = jaxmpi.jit(
        lambda x: (jaxmpi.tree_allreduce(x, "sum"), jaxmpi.tree_reduce(x, "sum", root=1))
    )
    assert " name[" not in str(step.trace(X).jaxpr)
    (entry,) = step.program(X).entries
    assert len(entry.arrays) == 1  # an array that two calls reduce is sent once


@run_ranks(2)
def test_plain_jit_compares_what_mpi4jax_carries_on_the_native_transport():
    if session.current("test").transport.name != "native":
        return
    rank = jaxmpi.rank()
    for call in (
        lambda: jaxmpi.tree_bcast(X, rank),
        lambda: jaxmpi.tree_alltoall(jnp.ones((2, 1 + rank))),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="RankMismatchError"):
            jax.block_until_ready(jax.jit(call)())
        jaxmpi.barrier()
    np.testing.assert_array_equal(jax.jit(lambda x: jaxmpi.tree_bcast(x, 1))(X * rank), X)


def iterates_alone():
    """Iterate in a thread, where no collectives may be, and by `len`; nothing is compared."""
    alone = jaxmpi.batches(np.arange(24), 12, seed=jaxmpi.rank())
    assert len(alone) == 2
    thread = threading.Thread(target=lambda: list(alone))
    thread.start()
    thread.join()


@run_ranks(2)
def test_batches_are_compared_where_collectives_may_be():
    if jaxmpi.rank() == 0:
        iterates_alone()
    text = differ(
        lambda: list(jaxmpi.batches(np.arange(24), 12)),
        lambda: list(jaxmpi.batches(np.arange(26), 12)),
    )
    assert "given by rank 0: batches samples=24\n  given by rank 1: batches samples=26" in text


# order


def long_operation(x, n):
    return lax.fori_loop(0, n, lambda _, y: jnp.sin(y) + 1e-3, x)


def twenty(x, n):
    """Run independent collectives, which ranks would reach at different times and in any order."""
    parts = [long_operation(x + k, (n * (k + 3)) % 17) * 0 + x + k for k in range(20)]
    return [(lax.psum, lax.pmax)[k % 2](part * (k + 1), R) for k, part in enumerate(parts)]


def check_order(runs):
    size, rank = jaxmpi.size(), jaxmpi.rank()
    step = jaxmpi.jit(twenty)
    alone = jaxmpi.jit(lambda x, n: lax.psum(long_operation(x, n) * 0 + x, R))
    also = jaxmpi.jit(lambda x, n: lax.psum(long_operation(x, 40 - n) * 0 + x * 2, R))
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
    """Programs of jaxmpi.jit and of jax.jit stay in order when they alternate.

    Only the latter have an effect outside.
    """
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
        # a compiler may fuse mean and step
        np.testing.assert_allclose(params["w"], X - (jaxmpi.size() - 1) / 2, atol=1e-6)
        other = {"w": jnp.nextafter(params["w"], jnp.inf) if last else params["w"]}
        words = r"one_step: argument 0\['w'\]: float32\[4\] is not equal"
        if jaxmpi.size() > 2:  # so that one rank is in the minority
            words = r"one_step: argument 0\['w'\].* is not equal .*: "
            words += f"rank {jaxmpi.size() - 1} has other"
        with pytest.raises(RankMismatchError, match=words):
            step(other, X)
    finally:
        del os.environ["JAXMPI_CHECK"]
    jaxmpi.jit(one_step, allow="unequal_start")({"w": jnp.asarray(X) * jaxmpi.rank()}, X)


@run_ranks(2)
def test_what_was_compared_is_forgotten_once_there_was_enough_after_it():
    """Records of the comparison are dropped once enough messages have followed.

    Each saved step has its own fingerprint, and a long run must not grow by them.
    """
    backend = session.current("test")
    for step in range(EVENTS + 100):
        compare.check_consistent(backend, Call.of("save", f"step {step}"))
        compare.check_consistent(backend, Call.of("always"))
    assert len(backend._titles) == EVENTS
    words = [fingerprint_of(text) for text in ("step 0", f"step {EVENTS + 99}", "always")]
    assert [backend.described(word)[1] for word in words] == ["", "save", "always"]


# what is wrong, in words


def gathers():
    rank = jaxmpi.rank()
    mixed = {"same": np.ones(3), "rows": np.ones((2 + rank, 2))}
    inside = jaxmpi.jit(lambda x: jax.lax.all_gather(x, jaxmpi.AXIS, tiled=True))
    return {
        "tree_allgather": lambda: jaxmpi.tree_allgather(np.ones(3 + rank)),
        "of one leaf": lambda: jaxmpi.tree_allgather(mixed),
        "all_gather in a step": lambda: inside(np.ones(3 + rank)),
        "average of predictions": lambda: jaxmpi.jit(
            lambda x: (jaxmpi.tree_allgather(x), jaxmpi.tree_allreduce(x.sum()))
        )(np.ones((rank + 2, 5), np.int32)),
    }


def check_gathers():
    for name, call in gathers().items():
        with pytest.raises(
            RankMismatchError, match=r"A gather takes arrays of one shape"
        ) as caught:
            call()
        text = str(caught.value)
        assert "jaxmpi.allgather_object" in text and "pad the arrays" in text, name
    others = {
        "dtype": lambda: jaxmpi.tree_allgather(
            np.ones(3, np.int32 if jaxmpi.rank() else np.float32)
        ),
        "axes": lambda: jaxmpi.tree_allgather(np.ones((3,) * (1 + jaxmpi.rank()))),
        "sum": lambda: jaxmpi.tree_allreduce(np.ones(3 + jaxmpi.rank())),
    }
    for name, call in others.items():
        with pytest.raises(
            RankMismatchError, match="Every rank must send the same arrays"
        ) as caught:
            call()
        assert "allgather_object" not in str(caught.value), name


@run_ranks(2)
def test_gathers_of_other_lengths_are_told_what_to_do():
    check_gathers()


@run_ranks(2, backend="xla")
def test_gathers_of_other_lengths_are_told_what_to_do_on_xla():
    check_gathers()


def check_weak(step):
    """A number of Python on rank 1, and an array of the same dtype on rank 0."""
    with pytest.raises(RankMismatchError, match="Their arguments differ in weak type") as caught:
        step(2.0 if jaxmpi.rank() else jnp.float32(2.0))
    text = str(caught.value)
    assert "jnp.asarray(x, jnp.float32)" in text, text
    assert "taken by rank 0: argument 0: float32[]\n" in text, text
    assert "taken by rank 1: argument 0: float32[], of weak type" in text, text


@run_ranks(2)
def test_arrays_that_differ_in_weak_type_are_said_to():
    check_weak(jaxmpi.jit(lambda x: jax.lax.psum(x * jnp.bfloat16(2), jaxmpi.AXIS)))


@run_ranks(2, backend="xla")
def test_arrays_that_differ_in_weak_type_are_said_to_on_xla():
    for step in (jaxmpi.tree_allreduce, jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))):
        check_weak(step)
