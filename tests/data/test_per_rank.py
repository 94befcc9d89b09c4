"""Per-rank data: all ranks take as many steps for any lengths, and masks keep every sample."""

import itertools
import os
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi._backends.asleep import _ByMpi, open_votes
from jaxmpi._votes import Outcome, Vote
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

# batches of each rank; the first as many as there are ranks
LENGTHS = [
    (3, 5, 4, 9),
    (5, 3, 4, 1),
    (0, 2, 3, 1),
    (2, 0, 0, 4),
    (0, 0, 0, 0),
    (4, 5, 4, 4),
    (5, 4, 5, 5),
    (6, 6, 6, 6),
]


def rows(r, lengths, short=0):
    """Make this rank's batches of 4 rows; the last one has fewer."""
    mine = [np.arange(4.0) + 100 * r + 10 * k for k in range(lengths[r])]
    if short and mine:
        mine[-1] = mine[-1][: 4 - short]
    return mine


def total(lengths, short=0):
    sums = 0.0
    for r in range(len(lengths)):
        sums += sum(float(x.sum()) for x in rows(r, lengths, short))
    return sums


@jaxmpi.jit
def add(carry, batch, mask):
    return carry + jaxmpi.tree_allreduce(jnp.where(mask, batch, 0).sum(), op="sum")


@run_ranks(1, 2, 3, 4)
def test_all_ranks_end_together():
    for lengths, stream in itertools.product(LENGTHS, (False, True)):
        check_ends(lengths[: jaxmpi.size()], stream)


def check_ends(lengths, stream):
    r, n = jaxmpi.rank(), jaxmpi.size()
    make = (lambda: iter(rows(r, lengths))) if stream else (lambda: rows(r, lengths))
    loader = jaxmpi.per_rank_batches(make())
    for epoch in range(1 if stream else 2):
        carry, seen = jnp.zeros(()), []
        for batch in loader:
            carry = add(carry, batch, True)
            seen.append(np.asarray(batch).tolist())
        assert seen == [x.tolist() for x in rows(r, lengths)[: min(lengths)]]
        assert loader.epoch == epoch + 1
        want = 0.0
        for q in range(n):
            want += sum(float(x.sum()) for x in rows(q, lengths)[: min(lengths)])
        np.testing.assert_allclose(carry, want)
    if stream:
        with pytest.raises(RuntimeError, match="come from an iterator, and have ended"):
            iter(loader)


@run_ranks(1, 2, 3, 4)
def test_masks_take_every_sample_once():
    for lengths, short in itertools.product(LENGTHS, (0, 3)):
        check_masks(lengths[: jaxmpi.size()], short)


def check_masks(lengths, short):
    r, n = jaxmpi.rank(), jaxmpi.size()
    loader = jaxmpi.per_rank_batches(rows(r, lengths, short), remainder="mask")
    rows_there = {len(rows(q, lengths, short)[0]) for q in range(n) if lengths[q]}
    for _ in range(2):
        carry, seen, steps = jnp.zeros(()), [], 0
        for batch, mask in loader:
            assert isinstance(batch, jax.Array) and batch.shape == mask.shape == (max(rows_there),)
            carry, steps = add(carry, batch, mask), steps + 1
            seen += np.asarray(batch)[mask].tolist()
        assert steps == max(lengths)
        assert seen == [x for batch in rows(r, lengths, short) for x in batch.tolist()]
        np.testing.assert_allclose(carry, total(lengths, short))


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("remainder", ["drop", "mask"])
def test_a_state_goes_on_with_the_rest(remainder):
    r, n = jaxmpi.rank(), jaxmpi.size()
    lengths = (5, 3, 4)[:n]
    steps = max(lengths) if remainder == "mask" else min(lengths)
    make = lambda: jaxmpi.per_rank_batches(rows(r, lengths), remainder=remainder)
    numbers = lambda batch: [np.asarray(x).tolist() for x in jax.tree.leaves(batch)]
    loader = make()
    whole = [numbers(b) for b in itertools.chain(loader, loader)]  # two epochs
    assert len(whole) == 2 * steps
    for cut in range(2 * steps):
        loader = make()
        chained = itertools.chain.from_iterable(loader for _ in range(3))
        got = [numbers(next(chained)) for _ in range(cut)]
        states = jaxmpi.allgather_object(loader.state)
        rows_there = {"rows": 4 * (cut % steps > 0)} if remainder == "mask" else {}
        state = {"epoch": cut // steps, "batches": cut % steps, **rows_there}
        assert states == [state] * n or cut == steps
        again = make()
        again.state = loader.state
        rest = [numbers(b) for b in itertools.chain(again, again)]
        assert got + rest[: len(whole) - cut] == whole
        assert whole[: len(got)] == got
        assert [numbers(next(chained)) for _ in range(2 * steps - cut)] == whole[cut:]


@run_ranks(2, 3)
def test_each_ranks_own_state_is_saved():
    from test_positions import Stateful  # of 7 batches

    r = jaxmpi.rank()

    def make():
        source = Stateful()
        source.i = 4 * r  # this rank's begins later
        return jaxmpi.per_rank_batches(source, remainder="mask")

    whole = [np.asarray(x)[m].tolist() for x, m in make()]
    loader = make()
    for _ in range(4):
        next(loader)
    folder = jaxmpi.broadcast_object(tempfile.mkdtemp())
    jaxmpi.save(folder, 4, {"data": loader.state})
    again = make()
    again.state = jaxmpi.restore(folder, {"data": again.state})["data"]
    assert [np.asarray(x)[m].tolist() for x, m in again] == whole[4:]


@run_ranks(2)
def test_ranks_at_other_places_or_of_other_shapes_are_named():
    r = jaxmpi.rank()
    loader = jaxmpi.per_rank_batches([np.ones(2)] * 5)
    loader.state = {"epoch": 0, "batches": r}
    with pytest.raises(jaxmpi.RankMismatchError, match=r"per_rank_batches batches=1"):
        iter(loader)
    with pytest.raises(jaxmpi.RankMismatchError, match=r"per_rank_batches remainder="):
        iter(jaxmpi.per_rank_batches([np.ones(2)], remainder=("drop", "mask")[r]))
    other = [{"x": np.ones((2, 3 + r), np.float32)}]
    want = r"leaf \['x'\] of the first batch is float32\[3\] on rank 0 and float32\[4\] on rank 1"
    with pytest.raises(jaxmpi.RankMismatchError, match=want):
        iter(jaxmpi.per_rank_batches(other, remainder="mask"))
    loader = jaxmpi.per_rank_batches([{"xy"[r]: np.ones(2)}], remainder="mask")
    for _ in range(2):  # whoever catches it gets no batch
        with pytest.raises(jaxmpi.RankMismatchError, match=r"leaf \['[xy]'\] .* not there on rank"):
            next(loader)


@run_ranks(1, 2, 3, 4)
def test_votes_within_a_node_and_between_nodes():
    r, n = jaxmpi.rank(), jaxmpi.size()
    if n == 1:
        return
    backend = session.current("test")
    kinds = [open_votes(backend._mpi, backend.place, True)]
    kinds += [
        _ByMpi(backend._mpi.COMM_WORLD.Dup(), backend._mpi.MAX, concurrent)
        for concurrent in (True, False)
    ]
    for votes in kinds:
        hear, want = None, None
        for k in range(40):
            if (k + r) % 7 == 0:
                time.sleep(0.002)  # ranks that come late
            all_votes = [Vote((k // (q + 1)) % 3) for q in range(n)]
            last, hear = hear, votes.start(all_votes[r], lambda: backend.waiting("a vote"))
            if last and k % 5:  # some are never asked about
                assert last() == want
            yes = [vote is Vote.YES for vote in all_votes]
            want = Outcome(any(yes), all(yes), Vote.FAILED in all_votes)
        assert hear() == hear() == want
        jaxmpi.barrier()
        assert not votes.pending()
        votes.close()


@run_ranks(2, 3)
def test_votes_wait_for_no_program():
    r = jaxmpi.rank()
    vote = session.current("test").start_vote
    assert vote(Vote.YES, "a vote")() == (True, True, False)  # the first one opens them
    jaxmpi.barrier()
    if r:
        time.sleep(0.5)
    begin = time.monotonic()
    hear = vote(Vote.YES if r == 1 else Vote.NO, "a vote")
    assert time.monotonic() - begin < 0.4 or r  # rank 0 goes on
    assert hear() == (True, False, False)


@run_ranks(2, 3)
def test_a_wait_for_votes_is_no_collective():
    r = jaxmpi.rank()
    backend = session.current("test")
    jaxmpi.barrier()
    before = backend.progress().entered
    for _ in jaxmpi.per_rank_batches([np.ones(2)] * 8):
        time.sleep(0.01 * (r == 0))  # all others wait for rank 0
    entered = jaxmpi.allgather_object(backend.progress().entered - before)
    assert len(set(entered)) == 1, entered


class Breaks:
    """A loader of batches of 4 rows, the last one of 2, of which one cannot be read at first."""

    def __init__(self, batches, at):
        self.batches, self.at = batches, at

    def __iter__(self):
        for k in range(self.batches):
            if k == self.at:
                self.at = None
                raise OSError("the disk is gone")
            yield np.full(2 if k == self.batches - 1 else 4, float(k))


def numbers_of(loader):
    """List what is left of an epoch: each batch, with its mask where there is one."""
    return [[np.asarray(x).tolist() for x in jax.tree.leaves(batch)] for batch in loader]


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("at", [0, 1, 3, 4])
@pytest.mark.parametrize("remainder", ["drop", "mask"])
def test_after_an_error_of_reading_all_ranks_go_on_and_nothing_is_lost(remainder, at):
    r, n = jaxmpi.rank(), jaxmpi.size()
    # with masks, the other ranks have ended before the last batch that cannot be read
    length = [*((1, 3) if remainder == "mask" else (4, 7)), 5][r - n]
    fails = r == n - 1

    def make(at=None):
        return jaxmpi.per_rank_batches(Breaks(length, at if fails else None), remainder=remainder)

    whole, loader, got = numbers_of(make()), make(at), []
    with pytest.raises(OSError if fails else jaxmpi.RankMismatchError, match="the disk is gone"):
        for batch in loader:
            got += numbers_of([batch])
    assert got == whole[:at]
    again = make()
    again.state = loader.state
    assert got + numbers_of(loader) == got + numbers_of(again) == whole
    assert numbers_of(loader) == whole  # the next epoch


@run_ranks(2, 3)
def test_a_batch_that_no_mask_fits_is_named_on_all_ranks():
    r = jaxmpi.rank()
    other = [{"x": np.ones(2), **({"n": 3} if r == 1 else {})}]
    with pytest.raises((TypeError, jaxmpi.RankMismatchError), match=r"leaf \['n'\] is a int"):
        iter(jaxmpi.per_rank_batches(other, remainder="mask"))
    assert jaxmpi.allgather_object(r) == list(range(jaxmpi.size()))  # in step


class Counts:
    """A loader with PyTorch's state methods, which goes on within an epoch and not beyond it."""

    def __init__(self, length):
        self.length, self.next, self.fresh = length, 0, True

    def __iter__(self):
        if self.fresh:
            self.next = 0
        self.fresh = True
        while self.next < self.length:
            self.next += 1
            yield np.full(2, float(self.next - 1))
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next, self.fresh = state["next"], False


@run_ranks(1, 2, 3)
def test_an_epoch_that_is_cut_short_is_over_for_the_state_too():
    make = lambda: jaxmpi.per_rank_batches(Counts(7 if jaxmpi.rank() else 2))
    numbers = lambda batches: [float(x[0]) for x in batches]
    loader = make()
    for _ in range(3):
        assert numbers(loader) == [0, 1]
        again, then = make(), make()
        again.state = loader.state
        iter(again)  # begun, and nothing taken
        then.state = again.state
        assert numbers(again) == numbers(then) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [{"JAXMPI_NODE_RANKS": "1"}, {"JAXMPI_TRANSPORT": "mpi4jax"}, {"JAXMPI_BACKEND": "xla"}],
)
def test_other_transports(environment, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import jaxmpi, numpy as np\n"
        "jaxmpi.init()\n"
        "r = jaxmpi.rank()\n"
        "loader = jaxmpi.per_rank_batches([np.full(2, k + 10.0 * r) for k in range(3 + 2 * r)], "
        "remainder='mask')\n"
        "total = 0.0\n"
        "for _ in range(2):\n"
        "    for batch, mask in loader:\n"
        "        total += float(jaxmpi.tree_allreduce((batch * mask).sum(), op='sum'))\n"
        "    print('total', total)\n"
    )
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", str(script)]
    environment = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    want = 2 * sum(k + 10.0 * r for r in range(2) for k in range(3 + 2 * r))
    totals = sorted(line for line in done.stdout.splitlines() if line.startswith("total"))
    assert totals == sorted([f"total {want}", f"total {2 * want}"] * 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: jaxmpi.per_rank_batches([1], remainder="pad"),
            ValueError,
            'remainder is \'pad\'. Pass "drop" or "mask"',
        ),
        (
            lambda: jaxmpi.per_rank_batches(jaxmpi.batches(np.ones(4), 2)),
            TypeError,
            "the loader is jaxmpi.batches",
        ),
        (
            lambda: jaxmpi.per_rank_batches(jaxmpi.per_rank_batches([1])),
            TypeError,
            "is a per_rank_batches already",
        ),
        (
            lambda: list(jaxmpi.per_rank_batches([{"a": 3}], remainder="mask")),
            TypeError,
            r"leaf \['a'\] is a int without rows",
        ),
        (
            lambda: list(jaxmpi.per_rank_batches([(np.ones(2), np.ones(3))], remainder="mask")),
            ValueError,
            r"have \{'\[0\]': 2, '\[1\]': 3\} rows",
        ),
        (
            lambda: list(jaxmpi.per_rank_batches([np.ones(2), np.ones(3)], remainder="mask")),
            ValueError,
            "a batch has 3 rows, and the first batches of all ranks had at most 2",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    jaxmpi.init()
    with pytest.raises(error, match=f"^per_rank_batches: .*{message}"):
        call()


def test_simulated_ranks_have_no_data_of_their_own():
    with jaxmpi.simulate(2), pytest.raises(RuntimeError, match="simulated ranks are one process"):
        jaxmpi.per_rank_batches([np.ones(2)])


def test_prefetch_leaves_it_as_it_is():
    jaxmpi.init()
    loader = jaxmpi.per_rank_batches([np.ones(2)])
    assert jaxmpi.prefetch(loader) is loader
