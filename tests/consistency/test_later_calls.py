"""Programs with messages only in branches: later calls are compared with the next message.

A law: ranks that make the same calls get the right numbers; where one of them makes others, all get
a RankMismatchError, with the next message at the latest, and can go on.
"""

import itertools
import time
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmpi
from jaxmpi import RankMismatchError
from jaxmpi._job.launch.pool import Pool, Task
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

R = jaxmpi.AXIS
EVERY, DELAY = 4, 2


@partial(jaxmpi.jit, replicated_argnums=1)
def branch(x, loud):
    return lax.cond(loud > 0, lambda: lax.psum(x, R), lambda: x)


@partial(jaxmpi.jit, replicated_argnums=1)
def other_branch(x, loud):
    return lax.cond(loud > 0, lambda: lax.pmax(x, R), lambda: x)


@partial(jaxmpi.jit, replicated_argnums=1)
def turns(x, number):
    return lax.fori_loop(0, number, lambda _, x: lax.pmean(x, R), x)


@jaxmpi.jit
def always(x):
    return lax.psum(x, R)


@jax.jit
def alone(x):
    return x + 1


@cache
def streaming():
    tx = jaxmpi.local_sgd(optax.sgd(0.5), EVERY, fragments=2, delay=DELAY)

    def train(params, state, x):
        updates, state = tx.update(
            jax.tree.map(lambda p: x[0] * jnp.ones_like(p), params), state, params
        )
        return optax.apply_updates(params, updates), state

    params = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    return jaxmpi.jit(train), (params, tx.init(params))


class Rank:
    """The calls of one rank: each method makes one, and returns its result and the expected one."""

    def __init__(self, length):
        self.x = np.arange(1.0, length + 1, dtype=np.float32) * (jaxmpi.rank() + 1)
        self.everyone = np.stack(
            [self.x / (jaxmpi.rank() + 1) * (r + 1) for r in range(jaxmpi.size())]
        )
        self.step, self.state = streaming()

    def quiet(self):
        return branch(self.x, 0), self.x

    def loud(self):
        return branch(self.x, 1), self.everyone.sum(0)

    def other_quiet(self):
        return other_branch(self.x, 0), self.x

    def other_loud(self):
        return other_branch(self.x, 1), self.everyone.max(0)

    def no_turns(self):
        return turns(self.x, 0), self.x

    def two_turns(self):
        return turns(self.x, 2), self.everyone.mean(0)

    def always(self):
        return always(self.x), self.everyone.sum(0)

    def barrier(self):
        jaxmpi.barrier()
        return 0, 0

    def objects(self):
        return jaxmpi.allgather_object(jaxmpi.rank()), [*range(jaxmpi.size())]

    def streamed(self):
        self.state = self.step(*self.state, self.x)
        return 0, 0

    def alone(self):
        return alone(self.x), self.x + 1


NAMES = [name for name in vars(Rank) if not name.startswith("_")]


def deviating(rng, names):
    """The calls of a rank that makes others, perhaps."""
    names, i = [*names], int(rng.integers(len(names) - 1))
    match rng.integers(5):
        case 0:
            names[i] = str(rng.choice(NAMES))
        case 1:
            names.insert(i, str(rng.choice(NAMES)))
        case 2:
            del names[i]
        case 3:
            names[i : i + 2] = names[i + 1], names[i]
    return names


def outcome(names, length):
    rank, start = Rank(length), time.monotonic()
    try:
        done = [getattr(rank, name)() for name in names]
        jaxmpi.tree_allreduce(0)  # no other call is like it
        jax.block_until_ready(rank.state)
        for got, want in done:
            np.testing.assert_allclose(jaxmpi.local(got), want, rtol=1e-6)
    except (RankMismatchError, jax.errors.JaxRuntimeError) as error:
        text = str(error).removeprefix("FAILED_PRECONDITION: ").removeprefix("RankMismatchError: ")
        assert isinstance(error, RankMismatchError) or "RankMismatchError" in str(error), error
        assert "rank 0" in text or "ranks 0" in text, text
        return "refused"
    finally:
        assert time.monotonic() - start < 60
    return "right"


def check_sequences(seeds):
    counts = {"right": 0, "refused": 0}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        length = int(rng.integers(1, 4))
        names = [str(name) for name in rng.choice(NAMES, size=rng.integers(3, 12))]
        others, who = deviating(rng, names), int(rng.integers(jaxmpi.size()))
        same = [name for name in names if name != "alone"] == [
            name for name in others if name != "alone"
        ]
        found = outcome(others if jaxmpi.rank() == who else names, length)
        assert set(jaxmpi.allgather_object(found)) == {"right" if same else "refused"}, (
            seed,
            names,
            others,
            who,
        )
        assert float(jaxmpi.tree_allreduce(1.0, "sum")) == jaxmpi.size()
        counts[found] += 1
    assert min(counts.values()) > len(seeds) // 10, counts


@pytest.mark.slow
@run_ranks(2, 3)
def test_sequences_of_calls():
    check_sequences(range(60))


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_sequences_of_calls_on_xla():
    check_sequences(range(20))


def on_nodes(ranks, name, monkeypatch, **environ):
    for key, value in {"JAXMPI_NODE_RANKS": "1", **environ}.items():
        monkeypatch.setenv(key, value)
    job = Pool(ranks, "mpi")
    try:
        job.run(Task(__file__, name, {}, 300.0))
    finally:
        job.end()


def check_some_sequences():
    check_sequences(range(100, 160))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_sequences_of_calls_between_nodes_with_messages_ahead(ranks, monkeypatch):
    on_nodes(ranks, "check_some_sequences", monkeypatch)


# of the native transport


def native():
    return session.current("test").transport.name == "native"


def sent():
    return session.current("test").progress()[0]


@run_ranks(2, 3)
def test_a_call_that_sends_nothing_has_no_message():
    if not native():
        return
    rank = Rank(5)
    for call in (rank.quiet, rank.other_quiet, rank.no_turns, rank.always):
        jax.block_until_ready(call()[0])
    before = sent()
    for call in (rank.quiet, rank.other_quiet, rank.no_turns, rank.quiet):
        jax.block_until_ready(call()[0])
    assert sent() == before
    for call in (rank.loud, rank.other_loud, rank.always):
        jax.block_until_ready(call()[0])
    assert sent() == before + 3
    jaxmpi.barrier()


@run_ranks(2, 3)
def test_the_first_call_is_compared_at_once():
    """A first call is compared at once, even if other ranks make a later call of a known program.

    Those send something only then.
    """
    if not native():
        return
    last = jaxmpi.rank() == jaxmpi.size() - 1
    for length, messages in itertools.product((6, 7), range(2)):
        new = partial(branch, np.ones(length + 2 * messages + 10, np.float32), 0)
        known = Rank(4)
        for call in (known.quiet, known.loud):
            jax.block_until_ready(call()[0])
        with pytest.raises(
            (RankMismatchError, jax.errors.JaxRuntimeError), match=r"(?s)do not agree.*float32\[4\]"
        ):
            if last:
                jax.block_until_ready(new())
            for _ in range(messages):
                known.quiet()
            jax.block_until_ready(known.loud()[0])
        assert jaxmpi.allgather_object(1) == [1] * jaxmpi.size()


@run_ranks(2, 3)
def test_both_calls_are_named():
    if not native():
        return
    rank, last = Rank(4), jaxmpi.rank() == jaxmpi.size() - 1
    others = "rank 0" if jaxmpi.size() == 2 else "ranks 0, 1"

    def text(*calls):
        for call in (rank.quiet, rank.other_quiet, rank.always):
            jax.block_until_ready(call()[0])
        with pytest.raises((RankMismatchError, jax.errors.JaxRuntimeError)) as caught:
            for call in calls:
                jax.block_until_ready(call()[0])
        (all_ranks,) = set(
            jaxmpi.allgather_object(
                str(caught.value).partition("RankMismatchError: ")[-1] or str(caught.value)
            )
        )
        return all_ranks

    def called(first, second):
        return (
            f"{others} called {first}, and rank {jaxmpi.size() - 1} called {second}. "
            "Every rank must make the same calls"
        )

    found = text(rank.quiet, rank.other_quiet if last else rank.quiet, rank.quiet, rank.always)
    assert called("branch", "other_branch") in found, found
    found = text(rank.quiet, *([rank.quiet] if last else []), rank.always, rank.always)
    assert called("always", "branch") in found, found
    found = text(rank.quiet, *([rank.quiet] if last else []), rank.loud, rank.loud)
    assert "caught an error" in found and "message 1 of the program" in found
    assert "no message yet, in another call of this program" in found
    found = text(
        rank.quiet,
        rank.other_quiet if last else rank.quiet,
        *([rank.always] if last else [rank.barrier]),
    )
    assert called("branch", "other_branch") in found, found


@run_ranks(2)
def test_calls_that_never_send_are_compared_in_the_end():
    """A rank waits for one that goes on with another program, or both go on with their own."""
    if not native():
        return
    rank = Rank(4)
    for calls in ((rank.quiet, rank.always), (rank.quiet, rank.other_quiet)):
        for call in (rank.quiet, rank.other_quiet, rank.always):
            jax.block_until_ready(call()[0])
        with pytest.raises(
            (RankMismatchError, jax.errors.JaxRuntimeError), match="branch, and rank 1 called"
        ):
            for _ in range(5000):
                jax.block_until_ready(calls[jaxmpi.rank()]()[0])
        assert float(jaxmpi.tree_allreduce(1.0, "sum")) == 2
    for _ in range(5000):
        jax.block_until_ready(rank.quiet()[0])
    jaxmpi.barrier()


@run_ranks(2, 3)
def test_calls_are_forgotten_with_the_job():
    if not native():
        return
    rank = Rank(4)
    jax.block_until_ready([rank.quiet()[0] for _ in range(3 + jaxmpi.rank())][-1])
    with pytest.raises((RankMismatchError, jax.errors.JaxRuntimeError)):
        jaxmpi.barrier()
    for _ in range(3):
        jax.block_until_ready(rank.quiet()[0])
    np.testing.assert_allclose(rank.loud()[0], rank.everyone.sum(0))


def check_fragment_beside_other_calls():
    """A fragment is under way where another rank does something else: nobody waits for ever."""
    last = jaxmpi.rank() == jaxmpi.size() - 1
    step, state = streaming()
    assert (
        not native() or "jaxmpi_send_ahead" in step.lower(*state, np.ones(4, np.float32)).as_text()
    )
    for skipped, after in itertools.product(
        range(EVERY + 2), ("quiet", "always", "barrier", "streamed")
    ):
        rank = Rank(4)
        for _ in range(2 * EVERY):
            rank.streamed()
        rank.quiet(), rank.always()
        jax.block_until_ready(rank.state)
        start = time.monotonic()
        with pytest.raises(
            (RankMismatchError, jax.errors.JaxRuntimeError), match=r"do not agree|called"
        ):
            for i in range(2 * EVERY):
                if not (last and i == skipped):
                    rank.streamed()
                getattr(rank, after)()
                jax.block_until_ready(rank.state)
            jaxmpi.barrier()
        assert time.monotonic() - start < 20, (skipped, after)
        assert float(jaxmpi.tree_allreduce(1.0, "sum")) == jaxmpi.size()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_fragment_beside_other_calls(ranks, monkeypatch):
    on_nodes(ranks, "check_fragment_beside_other_calls", monkeypatch)
