"""Positions in the data: what follows depends on the state alone, for every kind of source.

It does not matter how often a loop was left.
"""

import gc
import itertools
import tempfile
import threading
import time

import grain.python as grain
import jax
import numpy as np
import pytest

import jaxmpi
from jaxmpi._data.feeds import from_text, to_text
from jaxmpi.data import Batches
from jaxmpi.testing import run_ranks

N = 14


@pytest.fixture(autouse=True)
def _one_rank():
    jaxmpi.init()


class Counted:
    """A loader without a state: each iteration is the same epoch."""

    def __iter__(self):
        return (np.arange(i, i + 2) for i in range(0, N, 2))


class Stateful:
    """An iterator with Grain's words for its state."""

    def __init__(self):
        self.i = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i >= N:
            raise StopIteration
        self.i += 2
        return np.arange(self.i - 2, self.i)

    def get_state(self):
        return {"i": self.i, "rng": (b"\x00\xff", np.float32(0.5), None)}

    def set_state(self, state):
        assert state["rng"] == (b"\x00\xff", np.float32(0.5), None)
        self.i = state["i"]


class StatefulLoader:
    """Loader with PyTorch's state methods, which shuffles each epoch anew.

    It takes a state before it is iterated.
    """

    def __init__(self):
        self.epochs, self.next, self.fresh = 0, 0, True

    def __iter__(self):
        if self.fresh:
            self.next = 0
        self.fresh = True
        order = np.random.default_rng(self.epochs).permutation(N).reshape(-1, 2)
        while self.next < len(order):
            self.next += 1
            yield order[self.next - 1]
        self.epochs, self.next = self.epochs + 1, 0

    def state_dict(self):
        return {"epochs": self.epochs, "next": self.next}

    def load_state_dict(self, state):
        self.epochs, self.next, self.fresh = state["epochs"], state["next"], False


def grain_dataset():
    return grain.MapDataset.source(np.arange(N)).shuffle(seed=3).batch(2).to_iter_dataset()


def grain_loader():
    options = {"shard_options": grain.NoSharding(), "shuffle": True, "seed": 1, "num_epochs": 1}
    return grain.DataLoader(
        data_source=np.arange(N),
        sampler=grain.IndexSampler(N, **options),
        operations=[grain.Batch(2)],
    )


def hugging_face():
    import datasets

    rows = datasets.Dataset.from_dict({"x": np.arange(N)}).to_iterable_dataset()
    return rows.with_format("numpy").batch(2)


class Silent(Counted):
    """A loader whose state cannot be asked for yet."""

    def state_dict(self):
        raise NotImplementedError("no state yet")

    def load_state_dict(self, state):
        raise NotImplementedError("no state yet")


def augmented(plan):
    return (batch + 100 for batch in plan)


def ahead(plan):
    """A loader that takes all rows of the epoch before it gives out the first batch."""
    rows = list(plan)
    yield from rows


LOADERS = {
    "batches": lambda: jaxmpi.batches(np.arange(N), 4, seed=2),
    "mask": lambda: jaxmpi.batches(np.arange(N), 4, seed=2, remainder="mask"),
    "in order": lambda: jaxmpi.batches(np.arange(N), 4),
    "started": lambda: jaxmpi.batches(np.arange(N), 4, seed=2, epoch=3, start=5),
    "prefetch": lambda: jaxmpi.prefetch(jaxmpi.batches(np.arange(N), 4, seed=2)),
    "prefetch 5": lambda: jaxmpi.prefetch(jaxmpi.batches(np.arange(N), 4, seed=2), ahead=5),
    "read generator": lambda: jaxmpi.prefetch(
        jaxmpi.batches(np.arange(N), 4, seed=2), read=augmented
    ),
    "read ahead": lambda: jaxmpi.prefetch(jaxmpi.batches(np.arange(N), 4, seed=2), read=ahead),
    "counted": lambda: jaxmpi.prefetch(Counted()),
    "list": lambda: jaxmpi.prefetch(list(Counted())),
    "stateful loader": lambda: jaxmpi.prefetch(StatefulLoader()),
    "Hugging Face": lambda: jaxmpi.prefetch(hugging_face()),
    "grain dataset": lambda: jaxmpi.prefetch(grain_dataset()),
    "grain loader": lambda: jaxmpi.prefetch(grain_loader()),
    "per rank": lambda: jaxmpi.per_rank_batches(list(Counted())),
    "per rank mask": lambda: jaxmpi.per_rank_batches(StatefulLoader(), remainder="mask"),
}
STREAMS = {
    "generator": lambda: iter(Counted()),
    "list iterator": lambda: iter(list(Counted())),
    "map": lambda: map(np.asarray, Counted()),
    "stateful": Stateful,
    "grain": lambda: iter(grain_dataset()),
}


def numbers(batch):
    return [np.asarray(x).tolist() for x in jax.tree.leaves(batch)]


def some(loader, steps):
    """Up to so many batches in loops that are left early, or to the end of an epoch."""
    got = []
    for batch in loader:
        got.append(numbers(batch))
        if len(got) == steps:
            break
    return got


def epochs(loader, count):
    return [numbers(batch) for _ in range(count) for batch in loader]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_what_follows_depends_on_the_state_alone(make):
    whole = epochs(make(), 3)
    first_epoch = len(epochs(make(), 1))
    assert len(whole) > 2 * first_epoch - 1
    structure = jax.tree.structure(make().state)
    for cut in range(first_epoch + 2):
        loader, got = make(), []
        while len(got) < cut:  # two steps at a time
            got += some(loader, min(2, cut - len(got)))
        assert got == whole[:cut]
        state = loader.state
        assert jax.tree.structure(state) == structure  # so that a checkpoint of any moment fits
        again = make()
        again.state = state
        for one in (again, loader):  # the job that is started again, and the one that went on
            rest = []
            while len(rest) < len(whole) - cut:
                rest += some(one, 3)
            assert rest[: len(whole) - cut] == whole[cut:], cut


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_state_goes_back(make):
    loader = make()
    start, whole = loader.state, epochs(make(), 1)
    assert some(loader, 2) == whole[:2]
    loader.state = start
    assert some(loader, 3) == whole[:3]


@pytest.mark.parametrize(
    "make", [*LOADERS.values(), *(lambda m=m: jaxmpi.prefetch(m()) for m in STREAMS.values())]
)
def test_a_checkpoint_holds_the_state_as_it_is(make, tmp_path):
    whole, loader = epochs(make(), 1), make()
    some(loader, 1)
    jaxmpi.save(tmp_path, 1, {"data": loader.state})
    again = make()
    again.state = jaxmpi.restore(tmp_path, {"data": again.state})["data"]
    assert some(again, 100) == whole[1:]


@pytest.mark.parametrize(
    "make", [make for name, make in LOADERS.items() if name.startswith(("batches", "pre", "mask"))]
)
def test_at_the_end_of_an_epoch_the_state_is_the_next_ones_start(make):
    loader, states = make(), []
    for _ in loader:
        states.append(loader.state)
    end = {"epoch": 1, "position": 0, "order": "14 samples shuffled by seed 2"}
    assert loader.state == states[-1] == end
    again = make()
    again.state = states[-1]
    assert epochs(again, 1) == epochs(loader, 1) != []


def test_a_state_holds_for_other_ranks_and_batch_sizes():
    one = Batches(np.arange(48), 8, rank=0, size=1, seed=1)
    seen = list(itertools.chain(*(batch.tolist() for _, batch in zip(range(3), one, strict=False))))
    order = list(
        itertools.chain(*(b.tolist() for b in Batches(np.arange(48), 48, rank=0, size=1, seed=1)))
    )
    for size, batch_size in [(1, 8), (2, 8), (3, 12), (4, 24)]:
        options = {"size": size, "seed": 1, "start": one.state}
        ranks = [Batches(np.arange(48), batch_size, rank=r, **options) for r in range(size)]
        rest = []
        for step in zip(*ranks, strict=True):
            rest += np.concatenate(step).tolist()
        assert seen + rest == order
        next_epoch = Batches(np.arange(48), 48, rank=0, size=1, seed=1, epoch=1).state
        assert all(rank.state == next_epoch for rank in ranks)


@pytest.mark.parametrize("kind", ["prefetch", "plain"])
def test_simulated_ranks_have_the_state_of_real_ones(kind):
    with jaxmpi.simulate(2):
        wrap = jaxmpi.prefetch if kind == "prefetch" else (lambda x: x)
        loader = wrap(jaxmpi.batches(np.arange(N), 4, seed=2))
        got = [
            batch.stack.ravel().tolist()
            for _, batch in zip(range(4), itertools.chain(loader, loader), strict=False)
        ]
        state = loader.state
        again = wrap(jaxmpi.batches(np.arange(N), 4, seed=2, start=state))
        got += [batch.stack.ravel().tolist() for batch in again]
    want = Batches(np.arange(N), 4, rank=0, size=1, seed=2)
    assert got == [b.tolist() for _ in range(2) for b in want]


# streams


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_a_second_prefetch_of_a_stream_goes_on(make):
    whole = [numbers(b) for b in make()]
    stream, got = make(), []
    for steps in (1, 2, 1):  # each is dropped with what it has read ahead
        got += some(jaxmpi.prefetch(stream), steps)
        gc.collect()
    kept = jaxmpi.prefetch(stream)
    got.append(numbers(next(kept)))
    both = jaxmpi.prefetch(stream)
    got += [numbers(next(both)), numbers(next(kept))]
    assert got == whole
    with pytest.raises(StopIteration):
        next(both)
    with pytest.raises(RuntimeError, match="come from an iterator, which has begun and ended"):
        iter(both)


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_a_stream_goes_on_at_a_state(make):
    whole = [numbers(b) for b in make()]
    for cut in range(len(whole)):
        loader = jaxmpi.prefetch(make())
        some(loader, cut) if cut else None
        again = jaxmpi.prefetch(make())
        again.state = loader.state
        assert [numbers(b) for b in again] == whole[cut:]
        assert [numbers(b) for b in loader] == whole[cut:]


def test_a_stream_without_a_state_cannot_go_back():
    loader = jaxmpi.prefetch(iter(Counted()))
    start = loader.state
    some(loader, 3)
    with pytest.raises(
        ValueError, match="behind 0 batches, and 3 were used of an iterator, which cannot go back"
    ):
        loader.state = start
    with pytest.raises(ValueError, match="behind 99 batches, more than the iterator has"):
        loader.state = {"epoch": 0, "batches": 99}


def test_next_takes_a_batch_and_stops_at_the_end_of_an_epoch():
    loader = jaxmpi.prefetch([np.ones(2), np.zeros(2)])
    assert next(loader).tolist() == [1, 1] and next(loader).tolist() == [0, 0]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)
    assert next(iter(loader)).tolist() == [1, 1] and loader.epoch == 1


@pytest.mark.parametrize("leave", ["close", "drop", "drop the stream"])
def test_no_thread_stays_behind(leave):
    stream = iter(Counted())
    loader = jaxmpi.prefetch(Counted() if leave != "drop the stream" else stream)
    next(loader)
    if leave == "close":
        loader.close()
        assert numbers(next(loader)) == [[2, 3]]
    del loader, stream
    gc.collect()
    deadline = time.monotonic() + 10
    while [t for t in threading.enumerate() if t.name == "jaxmpi-prefetch"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_of_reading_leaves_the_place():
    class Broken:
        fail = True

        def __len__(self):
            return 8

        def __getitem__(self, row):
            if row == 5 and self.fail:
                raise OSError("the disk is gone")
            return row

    data = Broken()
    loader = jaxmpi.prefetch(jaxmpi.batches(data, 2))
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader)
    assert loader.position == 4 and loader.state["position"] == 4
    data.fail = False
    assert epochs(loader, 1) == [[[4, 5]], [[6, 7]]]


# bad input


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (
            LOADERS["batches"],
            {"epoch": 0, "batches": 3},
            r"batches: the state is .* has the keys \['epoch', 'order'",
        ),
        (
            LOADERS["counted"],
            {"epoch": 0, "position": 3, "order": ""},
            r"prefetch: the state is .*keys \['batches', 'epoch'\]",
        ),
        (
            LOADERS["grain dataset"],
            {"epoch": 0, "batches": 3},
            r"keys \['batches', 'epoch', 'source'\]",
        ),
        (
            LOADERS["counted"],
            {"epoch": 0, "batches": -1},
            "'batches' of the state is -1. It counts from 0",
        ),
        (
            LOADERS["grain dataset"],
            {"epoch": 0, "batches": 1, "source": 7},
            "'source' of the state is a int, and not the text",
        ),
        (
            LOADERS["prefetch"],
            {"epoch": 0, "position": 99, "order": "14 samples shuffled by seed 2"},
            "start is 99",
        ),
        (
            LOADERS["prefetch"],
            {"epoch": -1, "position": 0, "order": "14 samples shuffled by seed 2"},
            "epoch is -1",
        ),
        (
            LOADERS["batches"],
            {"epoch": 0, "position": 4, "order": "14 samples shuffled by seed 3"},
            "belongs to 14 samples shuffled by seed 3, and this is 14 samples shuffled by seed 2",
        ),
    ],
)
def test_a_state_of_something_else_is_refused(make, state, message):
    with pytest.raises(ValueError, match=message):
        make().state = state


def test_an_epoch_beside_a_state_must_be_its_own():
    state = {"epoch": 2, "position": 4, "order": "14 samples in order"}
    assert jaxmpi.batches(np.arange(N), 2, epoch=2, start=state).position == 4
    with pytest.raises(ValueError, match="epoch is 1, and start is a state of epoch 2"):
        jaxmpi.batches(np.arange(N), 2, epoch=1, start=state)


def test_more_batches_than_a_loader_has_are_refused():
    loader = jaxmpi.prefetch(Counted())
    loader.state = {"epoch": 0, "batches": 9}
    with pytest.raises(ValueError, match="behind 9 batches, 2 more than the loader has"):
        list(loader)


@pytest.mark.parametrize(
    ("read", "count"), [(lambda p: list(p)[:1], "1 batches"), (lambda p: [*p, 1], "more than 3")]
)
def test_read_must_give_one_batch_for_each(read, count):
    with pytest.raises(ValueError, match=f"read gave {count}.* for 3 batches of rows"):
        list(jaxmpi.prefetch(jaxmpi.batches(np.arange(N), 4), read=read))


def test_read_needs_batches():
    with pytest.raises(TypeError, match=r"read needs jaxmpi\.batches, and batches is a list"):
        jaxmpi.prefetch([1], read=iter)


def test_a_state_that_no_checkpoint_holds_is_named_when_it_is_asked_for():
    class Odd(Stateful):
        def get_state(self):
            return {"rng": [0, {1, 2}]}

    loader = jaxmpi.prefetch(Odd())
    next(loader)
    with pytest.raises(
        TypeError,
        match=r"the state\['rng'\]\[1\] is a set, and a state that goes into a checkpoint",
    ):
        _ = loader.state


def test_a_loader_whose_state_fails_can_be_iterated():
    loader = jaxmpi.prefetch(Silent())
    assert epochs(loader, 1) == epochs(Counted(), 1)
    with pytest.raises(NotImplementedError, match="no state yet"):
        _ = loader.state


def test_a_state_as_text_comes_back_with_its_types():
    state = {
        "a": [1, -2.5, float("inf"), True, None, "ü"],
        "b": {1: (b"\x00\x80", ()), "$dict": 3},
        "c": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "d": np.int64(2**62),
    }
    back = from_text(to_text(state))
    np.testing.assert_array_equal(back["c"], state["c"])
    assert back["c"].dtype == np.uint8 and type(back["d"]) is np.int64
    assert back | {"c": None} == state | {"c": None}


# ranks


@run_ranks(2, 3)
def test_the_state_is_equal_on_all_ranks_and_compared():
    r, n = jaxmpi.rank(), jaxmpi.size()
    loader = jaxmpi.prefetch(jaxmpi.batches(np.arange(24 * n), 2 * n, seed=1))
    some(loader, 5)
    states = jaxmpi.allgather_object(loader.state)
    order = f"{24 * n} samples shuffled by seed 1"
    assert states == [{"epoch": 0, "position": 10 * n, "order": order}] * n
    behind = jaxmpi.batches(np.arange(24 * n), 2 * n, seed=1)
    behind.state = {**states[0], "position": 10 * n - 2 * n * (r == 1)}
    with pytest.raises(jaxmpi.RankMismatchError, match=rf"batches start={8 * n}"):
        list(behind)
    # a loader of each rank's own, whose state differs
    mine = jaxmpi.prefetch(Stateful())
    some(mine, 1 + r)
    folder = jaxmpi.broadcast_object(tempfile.mkdtemp())
    jaxmpi.save(folder, 1, {"data": {**mine.state, "batches": 0}})
    back = jaxmpi.prefetch(Stateful())
    back.state = jaxmpi.restore(folder, {"data": back.state})["data"]
    assert numbers(next(back)) == [[2 + 2 * r, 3 + 2 * r]]
