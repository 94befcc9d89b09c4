"""Laws of shard, batches and rank_key, with all ranks in one process, by explicit rank and size."""

import dataclasses
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi._backends.base import Place, Registry
from jaxmpi._errors import NotInitializedError
from jaxmpi._world import session
from jaxmpi.data import Batches, Shard, batches, check_data, rank_key, shard

SIZES = range(1, 9)
# (samples, global batch, seed): empty, shorter than a batch, exact, one over, one short, batch of
# one.
PLANS = [
    (0, 4, 1),
    (3, 8, 2),
    (24, 8, None),
    (24, 8, 3),
    (25, 8, 4),
    (23, 6, 5),
    (7, 1, 6),
    (13, 5, None),
    (40, 12, 7),
]


class Pair(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    x: Any
    y: Any


class OneByOne:
    """A source with __len__ and __getitem__ alone, which counts what it is asked for."""

    def __init__(self, samples):
        self.samples, self.asked = samples, []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        assert type(index) is int and 0 <= index < len(self.samples)
        self.asked.append(index)
        return self.samples[index]


class Bulk(OneByOne):
    def __getitems__(self, indices):
        assert type(indices) is list and all(type(index) is int for index in indices)
        self.asked.append(indices)
        return [self.samples[index] for index in indices]


class Tensor:
    """Converts to an array as a torch tensor does, and has nothing else."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)


def values(n):
    return 7 * np.arange(n) + 11


def columns(n):
    return {"x": values(n)[:, None] + np.array([0.25, 0.5]), "y": values(n)}


def rows_as(kind, n):
    return [kind(x, y) for x, y in zip(columns(n)["x"], columns(n)["y"], strict=True)]


def dicts(n):
    return [{"x": x, "y": y} for x, y in zip(columns(n)["x"], columns(n)["y"], strict=True)]


# name: (source of n samples, a sample or a batch as the dict of its columns)
SOURCES = {
    "dict": (columns, dict),
    "tuple": (lambda n: tuple(columns(n).values()), lambda t: {"x": t[0], "y": t[1]}),
    "named_tuple": (lambda n: Pair(**columns(n)), Pair._asdict),
    "dataclass": (lambda n: Record(**columns(n)), vars),
    "array": (lambda n: columns(n)["x"], lambda x: {"x": x}),
    "jax": (lambda n: jax.tree.map(jnp.asarray, columns(n)), dict),
    "jax_array": (lambda n: jnp.asarray(columns(n)["y"]), lambda y: {"y": y}),
    "list_of_dicts": (dicts, dict),
    "list_of_scalars": (lambda n: values(n).tolist(), lambda y: {"y": y}),
    "list_of_named_tuples": (lambda n: rows_as(Pair, n), Pair._asdict),
    "list_of_dataclasses": (lambda n: rows_as(Record, n), vars),
    "list_of_tensors": (lambda n: [Tensor(x) for x in columns(n)["x"]], lambda x: {"x": x}),
    "list_of_lists": (lambda n: columns(n)["x"].tolist(), lambda x: {"x": x}),
    "one_by_one": (lambda n: OneByOne(dicts(n)), dict),
    "bulk": (lambda n: Bulk(dicts(n)), dict),
}
source_table = pytest.mark.parametrize(("make", "as_dict"), SOURCES.values(), ids=SOURCES)


def play(n, batch_size, size, **options):
    """Return the global batches that `size` ranks see, and the position after each."""
    ranks = [
        Batches(values(n), batch_size, rank=rank, size=size, **options) for rank in range(size)
    ]
    global_batches, positions = [], []
    for step in zip(*ranks, strict=True):  # strict: every rank takes the same number of steps
        if options.get("remainder") == "mask":
            step = [batch[mask] for batch, mask in step]
        global_batches.append(np.concatenate(step).tolist())
        assert len({each.position for each in ranks}) == 1
        positions.append(ranks[0].position)
    assert {len(each) for each in ranks} == {len(global_batches)}
    return global_batches, positions


def play_as(monkeypatch, rank, size):
    # Only the backend is a stand-in: what the functions ask of _world is the real thing.
    alike = {"extremes": lambda word, *_: (word, word)}  # the ranks agree
    backend = SimpleNamespace(
        ranks_here=(rank,),
        eager=lambda *, alone, stacked, parallel: parallel,
        check_one_rank_here=lambda error: None,
        place=Place(rank=rank, size=size),
        axes={jaxmpi.AXIS: size},
        registry=Registry(),
        **alike,
    )
    monkeypatch.setattr(session, "_session", session.Session(backend, None))


# shard


def test_shard_parts_are_disjoint_complete_ordered_and_balanced():
    for n, size in itertools.product(range(65), SIZES):
        parts = [Shard(values(n), rank=rank, size=size) for rank in range(size)]
        assert [int(x) for part in parts for x in part] == values(n).tolist()
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("make", [list, np.asarray], ids=["list", "array"])
def test_shard_takes_9_items_on_4_ranks(make):
    # FluxMPI and Lux index out of bounds here.
    parts = [[int(x) for x in Shard(make(values(9)), rank=rank, size=4)] for rank in range(4)]
    assert parts == [[11, 18], [25, 32], [39, 46], [53, 60, 67]]


@pytest.mark.parametrize("make", [list, jnp.asarray, np.asarray], ids=["list", "jax", "array"])
@pytest.mark.parametrize(("n", "rank"), [(11, 0), (11, 1), (11, 2), (2, 0)])
def test_shard_indexes_and_slices_as_its_list_does(make, n, rank):
    part = Shard(make(values(n)), rank=rank, size=3)
    expected = values(n)[rank * n // 3 : (rank + 1) * n // 3].tolist()
    ends = [None, -5, -2, -1, 0, 1, 2, 5]
    for start, stop, step in itertools.product(ends, ends, [None, 2, -1, -2]):
        assert [int(x) for x in part[start:stop:step]] == expected[start:stop:step]
    for index in range(-len(expected), len(expected)):
        assert int(part[index]) == int(part[np.int64(index)]) == expected[index]
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(
            IndexError, match=rf"shard: index {index} is outside the {len(expected)} samples"
        ):
            part[index]


@source_table
def test_shard_takes_every_source(make, as_dict):
    part = Shard(make(10), rank=1, size=3)  # rows 3, 4, 5
    for row, sample in zip((3, 4, 5), part, strict=True):
        for name, column in as_dict(sample).items():
            np.testing.assert_array_equal(np.asarray(column), columns(10)[name][row])


def test_shard_slice_of_arrays_is_a_pytree_without_a_copy():
    data = Pair(**columns(10))
    part = Shard(data, rank=1, size=3)[1:]
    assert isinstance(part, Pair) and np.shares_memory(part.x, data.x)
    np.testing.assert_array_equal(part.y, data.y[4:6])


def test_shard_slice_of_samples_is_a_list_and_bulk_sources_are_asked_once():
    source = Bulk(dicts(10))
    part = Shard(source, rank=1, size=3)[:2]
    assert isinstance(part, list) and part == source.samples[3:5]
    assert source.asked == [[3, 4]]


def test_shard_iteration_does_not_hide_an_index_error_of_the_source():
    class ShorterThanItSays:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return [3, 1][index]

    with pytest.raises(IndexError):
        list(Shard(ShorterThanItSays(), rank=0, size=1))


# batches: the plan


@pytest.mark.filterwarnings("ignore:batches. an epoch of")
@pytest.mark.parametrize(("n", "batch_size", "seed"), PLANS)
def test_batches_drop_gives_every_number_of_ranks_the_same_global_batches(n, batch_size, seed):
    one_rank, positions = play(n, batch_size, 1, seed=seed, epoch=2)
    assert [len(batch) for batch in one_rank] == [batch_size] * (n // batch_size)
    assert positions == [batch_size * (step + 1) for step in range(n // batch_size)]
    assert len({sample for batch in one_rank for sample in batch}) == n // batch_size * batch_size
    for size in SIZES:
        if batch_size % size == 0:
            assert play(n, batch_size, size, seed=seed, epoch=2) == (one_rank, positions)


@pytest.mark.filterwarnings("ignore:batches. an epoch of")
@pytest.mark.parametrize(("n", "batch_size", "seed"), PLANS)
def test_batches_mask_gives_each_sample_once_on_every_number_of_ranks(n, batch_size, seed):
    one_rank, positions = play(n, batch_size, 1, seed=seed, epoch=2, remainder="mask")
    assert sorted(sample for batch in one_rank for sample in batch) == values(n).tolist()
    assert positions == [min(batch_size * (step + 1), n) for step in range(-(-n // batch_size))]
    for size in SIZES:
        assert play(n, batch_size, size, seed=seed, epoch=2, remainder="mask") == (
            one_rank,
            positions,
        )


def test_batches_mask_and_drop_agree_on_the_full_batches():
    dropped, _ = play(25, 8, 4, seed=4)
    masked, _ = play(25, 8, 4, seed=4, remainder="mask")
    assert masked[:3] == dropped and len(masked) == 4


@pytest.mark.filterwarnings("ignore:batches. an epoch of")
@pytest.mark.parametrize(("n", "batch_size", "seed"), PLANS)
def test_batches_mask_shapes_are_constant_and_padding_repeats_the_step(n, batch_size, seed):
    for size in SIZES:
        rows = -(-batch_size // size)
        one_rank, _ = play(n, batch_size, 1, seed=seed, remainder="mask")
        for rank in range(size):
            steps = Batches(
                values(n), batch_size, rank=rank, size=size, seed=seed, remainder="mask"
            )
            for step, (batch, mask) in enumerate(steps):
                assert type(mask) is np.ndarray and mask.dtype == bool
                assert batch.shape == mask.shape == (rows,)
                assert set(batch.tolist()) <= set(one_rank[step])


@pytest.mark.parametrize("size", SIZES)
def test_batches_split_a_global_batch_in_rank_order_within_one(size):
    masks = [
        next(iter(Batches(values(30), 10, rank=r, size=size, remainder="mask")))[1]
        for r in range(size)
    ]
    counts = [int(mask.sum()) for mask in masks]
    assert sum(counts) == 10 and max(counts) - min(counts) <= 1
    # padding comes last
    assert all(mask.tolist() == sorted(mask.tolist(), reverse=True) for mask in masks)


def test_batches_mask_compiles_once():
    traces = []

    @jax.jit
    def masked_sum(batch, mask):
        traces.append(batch.shape)
        return jnp.where(mask, batch, 0).sum()

    total = 0
    for r in range(3):
        for step in Batches(values(26), 10, rank=r, size=3, seed=1, remainder="mask"):
            total += int(masked_sum(*step))
    assert total == values(26).sum()
    assert traces == [(4,)]


def test_batches_without_a_seed_keep_the_order():
    assert play(9, 4, 2)[0] == [values(9)[:4].tolist(), values(9)[4:8].tolist()]


def test_batches_permutation_is_the_one_that_checkpoints_rely_on():
    # A saved position means nothing under another permutation: these numbers must not change.
    steps = Batches(np.arange(8), 4, rank=0, size=1, seed=3, epoch=2)
    assert [step.tolist() for step in steps] == [[6, 5, 0, 7], [2, 1, 3, 4]]


def test_batches_permutation_changes_with_seed_and_epoch_alone():
    orders = {
        (seed, epoch): tuple(play(40, 40, 4, seed=seed, epoch=epoch)[0][0])
        for seed, epoch in itertools.product(range(4), range(4))
    }
    assert len(set(orders.values())) == 16
    assert orders[2, 3] == tuple(np.concatenate(play(40, 5, 1, seed=2, epoch=3)[0]))
    # no seed, no shuffle
    assert all(play(40, 40, 1, epoch=epoch)[0] == [values(40).tolist()] for epoch in range(4))


@pytest.mark.parametrize(("n", "remainder"), [(3, "drop"), (0, "drop"), (0, "mask")])
def test_an_epoch_without_steps_is_warned_of_on_rank_0(n, remainder):
    with pytest.warns(
        UserWarning,
        match=f"batches: an epoch of {n} samples has no step with batch_size 4. Pass a smaller",
    ):
        assert list(Batches(values(n), 4, rank=0, size=2, remainder=remainder)) == []
    assert list(Batches(values(n), 4, rank=1, size=2, remainder=remainder)) == []
    # the end of an epoch, resumed
    assert list(Batches(values(8), 4, rank=0, size=2, start=8)) == []


@pytest.mark.parametrize("read", [lambda x: x, jaxmpi.prefetch])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_without_steps_is_warned_of_at_the_line_of_the_loop(read, ranks):
    with jaxmpi.simulate(ranks):
        loader = read(jaxmpi.batches(values(3), 4))
        with pytest.warns(UserWarning, match="no step") as warned:
            assert list(loader) == []
    assert [each.filename for each in warned] == [__file__]


COLUMNS = [np.ones((500, 2)), np.ones(500)]


@pytest.mark.parametrize("call", [lambda data: jaxmpi.batches(data, 100), jaxmpi.shard])
def test_a_list_of_columns_is_refused(call):
    jaxmpi.init()
    with pytest.raises(
        TypeError, match=r"data is a list of 2 arrays with 500 rows each, .*Pass a tuple"
    ):
        call(COLUMNS)
    call(tuple(COLUMNS))
    call([*np.ones((40, 3))])  # forty samples
    call([{"x": np.ones(3)}, {"x": np.ones(3)}])


# batches: where it is


@pytest.mark.filterwarnings("ignore:batches. an epoch of")
@pytest.mark.parametrize(("n", "batch_size", "seed"), PLANS)
@pytest.mark.parametrize("remainder", ["drop", "mask"])
def test_batches_resume_sees_exactly_the_rest(n, batch_size, seed, remainder):
    whole, positions = play(n, batch_size, 1, seed=seed, epoch=1, remainder=remainder)
    order = list(itertools.chain(*play(n, 1, 1, seed=seed, epoch=1)[0]))
    for step, position in enumerate([0, *positions]):
        same = play(n, batch_size, 1, seed=seed, epoch=1, start=position, remainder=remainder)
        assert same == (whole[step:], positions[step:])
        for size, other_batch_size in itertools.product((1, 2, 3, 5), (1, 7, batch_size)):
            rest, ends = play(
                n, other_batch_size, size, seed=seed, epoch=1, start=position, remainder="mask"
            )
            assert list(itertools.chain(*rest)) == order[position:]
            assert (ends or [position])[-1] == n
            multiple = size * other_batch_size
            rest, _ = play(n, multiple, size, seed=seed, epoch=1, start=position)
            until = position + (n - position) // multiple * multiple
            assert list(itertools.chain(*rest)) == order[position:until]


def test_batches_position_counts_the_batch_in_hand():
    steps = Batches(values(11), 4, rank=1, size=2, seed=1, remainder="mask", start=1)
    assert steps.position == 1
    assert [steps.position for _ in steps] == [5, 9, 11]
    assert steps.position == 11


def test_batches_position_stays_when_the_source_fails():
    source = OneByOne(dicts(6))
    steps = Batches(source, 2, rank=0, size=1)
    iterator = iter(steps)
    next(iterator)
    source.samples = source.samples[:3] + ["broken"] * 3
    with pytest.raises(ValueError):
        next(iterator)
    assert steps.position == 2


def test_batches_iterated_again_are_the_next_epoch():
    steps = Batches(values(12), 4, rank=0, size=2, seed=5, epoch=1, start=4)
    first = [(batch.tolist(), steps.epoch, steps.position) for batch in steps]
    fresh = Batches(values(12), 4, rank=0, size=2, seed=5, epoch=1, start=4)
    assert first == [(batch.tolist(), 1, fresh.position) for batch in fresh]
    assert len(first) == len(steps) == 2
    second = [(batch.tolist(), steps.epoch, steps.position) for batch in steps]
    fresh = Batches(values(12), 4, rank=0, size=2, seed=5, epoch=2)
    assert second == [(batch.tolist(), 2, fresh.position) for batch in fresh]
    assert len(second) == len(steps) == 3 and steps.position == 12


# batches: the sources


@source_table
@pytest.mark.parametrize("remainder", ["drop", "mask"])
def test_batches_take_every_source(make, as_dict, remainder):
    steps = list(Batches(make(10), 4, rank=1, size=2, seed=9, remainder=remainder))
    expected = list(Batches(np.arange(10), 4, rank=1, size=2, seed=9, remainder=remainder))
    for step, rows in zip(steps, expected, strict=True):
        if remainder == "mask":
            (step, mask), (rows, expected_mask) = step, rows
            np.testing.assert_array_equal(mask, expected_mask)
        for name, column in as_dict(step).items():
            assert isinstance(column, np.ndarray | jax.Array)
            np.testing.assert_array_equal(np.asarray(column), columns(10)[name][rows])
    if remainder == "drop" and not isinstance(make(10), list):
        structure = jax.tree.structure(dicts(1)[0] if isinstance(make(10), OneByOne) else make(10))
        assert jax.tree.structure(steps[0]) == structure


def test_batches_leave_jax_arrays_and_dtypes_alone():
    data = {
        "a": jnp.arange(8, dtype=jnp.bfloat16),
        "b": np.arange(8, dtype=np.uint8),
        "k": jax.random.split(jax.random.key(0), 8),
    }
    batch = next(iter(Batches(data, 4, rank=1, size=2)))
    assert batch.keys() == data.keys()
    for name, leaf in batch.items():
        assert leaf.dtype == data[name].dtype
        assert isinstance(leaf, jax.Array) == isinstance(data[name], jax.Array)
    assert (batch["k"] == data["k"][2:4]).all()


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2, 0.5, 3],
        [True, False, 2, 3],
        [np.float32(1), np.float32(2), 3.0, 4.0],
        [2**63, 2**63, 0.5, 2],  # beyond int64
        [{"x": np.ones(2), "y": 1}] * 2 + [{"x": np.ones(2), "y": 1j}, {"x": np.ones(2), "y": 2}],
        [[1, 2], [3, 4], [0.5, 6], [7, 8]],
        [np.zeros(2, np.int8)] * 3 + [np.full(2, 0.5, np.float32)],
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_of_a_list_have_the_dtype_of_all_its_samples_on_every_rank(samples, size):
    want = jax.tree.map(lambda *xs: np.stack(xs), *samples)
    if isinstance(samples[0], list):
        want = np.array(samples)
    ranks = [list(Batches(samples, 4, rank=rank, size=size)) for rank in range(size)]
    got = jax.tree.map(lambda *xs: np.concatenate(xs), *(batch for (batch,) in ranks))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for (batch,) in ranks:
        assert jax.tree.map(lambda x: x.dtype, batch) == jax.tree.map(lambda x: x.dtype, want)


def test_batches_ask_bulk_sources_once_a_step():
    source = Bulk(dicts(8))
    list(Batches(source, 4, rank=1, size=2))
    assert source.asked == [[2, 3], [6, 7]]


def test_batches_read_only_the_rows_of_the_rank():
    source = OneByOne(dicts(8))
    list(Batches(source, 4, rank=1, size=2))
    assert source.asked == [2, 3, 6, 7]


# bad input


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            {"x": values(9), "y": values(7)},
            ValueError,
            r"leaf \['y'\] has 7 samples, and leaf \['x'\] has 9\. Give all",
        ),
        (
            {"x": values(9), "n": 3},
            TypeError,
            r"leaf \['n'\] is of type int and shape \(\), not an array .* Pass a",
        ),
        (
            {"x": np.float32(2.5), "y": values(2)},
            TypeError,
            r"leaf \['x'\] is of type float32 and shape \(\)",
        ),
        (np.array(2.5), TypeError, r"leaf data is of type ndarray and shape \(\)"),
        ((4, 5), TypeError, r"leaf \[0\] is of type int .* a list of samples"),
        ({}, TypeError, r"data is \{\}, which holds no arrays\. Pass arrays"),
        (None, TypeError, "data is None, which holds no arrays"),
        (
            3,
            TypeError,
            "data is of type int. Pass arrays .* or anything with __len__ and __getitem__",
        ),
        ("train.npz", TypeError, "data is of type str. Pass arrays"),
        (iter([4, 5]), TypeError, "data is of type list_iterator. Pass arrays"),
        (
            type("DatasetDict", (dict,), {})(train=[4]),
            TypeError,
            "data is of type DatasetDict. Pass arrays",
        ),
        (Shard(values(4), rank=1, size=2), TypeError, "data is a Shard, .* Pass the whole data"),
    ],
)
@pytest.mark.parametrize(
    "function", [shard, lambda data: batches(data, 2)], ids=["shard", "batches"]
)
def test_data_of_the_wrong_kind_is_named(monkeypatch, request, function, data, error, message):
    play_as(monkeypatch, 0, 2)
    name = "shard" if function is shard else "batches"
    with pytest.raises(error, match=f"^{name}: {message}"):
        function(data)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"batch_size": 0},
            ValueError,
            "batch_size is 0, less than 1. Pass the samples per step over all ranks",
        ),
        ({"batch_size": 2.0}, TypeError, "batch_size is 2.0, not an int. Pass"),
        (
            {"batch_size": 6},
            ValueError,
            r'batch_size is 6, which 4 ranks .* multiple of 4, or remainder="mask"',
        ),
        ({"start": -1}, ValueError, "start is -1, less than 0. Pass the position"),
        ({"start": 10}, ValueError, "start is 10, and the data has 9 samples. Pass the position"),
        ({"start": "8"}, TypeError, "start is '8', not an int. Pass the position"),
        ({"seed": -2}, ValueError, "seed is -2, less than 0. Pass None"),
        ({"seed": 0.5}, TypeError, "seed is 0.5, not an int. Pass None"),
        ({"epoch": -3}, ValueError, "epoch is -3, less than 0. Pass the number"),
        ({"epoch": None, "seed": 1}, TypeError, "epoch is None, not an int. Pass the number"),
        ({"remainder": "pad"}, ValueError, 'remainder is \'pad\'. Pass "drop" or "mask"'),
    ],
)
def test_batches_bad_arguments_are_named(monkeypatch, arguments, error, message):
    play_as(monkeypatch, 1, 4)
    with pytest.raises(error, match=f"^batches: {message}"):
        batches(values(9), **{"batch_size": 4, **arguments})


def test_batches_accept_integers_of_numpy_and_jax():
    steps = Batches(
        values(9),
        np.int64(4),
        rank=0,
        size=1,
        seed=np.uint8(3),
        epoch=np.array(2),
        start=jnp.array(4),
    )
    assert [step.tolist() for step in steps] == play(9, 4, 1, seed=3, epoch=2)[0][1:]
    assert type(steps.position) is int


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [{"x": [1, 2]}, {"x": [3]}],
            r"sample 1 has the shapes \{'x': \(1,\)\}, and sample 0 has \{'x': \(2,\)\}\. Pad",
        ),
        (
            [{"x": 1}, {"y": 1}],
            r"sample 1 has the shapes \{'y': \(\)\}, and sample 0 has \{'x': \(\)\}\. Pad",
        ),
    ],
)
def test_batches_name_the_samples_that_do_not_stack(samples, message):
    with pytest.raises(ValueError, match=f"^batches: {message}"):
        next(iter(Batches(samples, 2, rank=0, size=1)))


def test_batches_name_a_bulk_source_that_returns_columns():
    class Columns(OneByOne):
        def __getitems__(self, indices):
            return {"x": [self.samples[index] for index in indices]}

    with pytest.raises(
        ValueError,
        match=r"^batches: Columns\.__getitems__ returned 1 samples for 3 indices\. Return",
    ):
        next(iter(Batches(Columns(values(3)), 3, rank=0, size=1)))


# the public functions


def test_shard_and_batches_are_those_of_the_rank(monkeypatch):
    for rank in range(3):
        play_as(monkeypatch, rank, 3)
        assert shard(values(10))[:].tolist() == Shard(values(10), rank=rank, size=3)[:].tolist()
        options = {"seed": 4, "epoch": 2, "start": 1, "remainder": "mask"}
        for got, expected in zip(
            batches(values(10), 4, **options),
            Batches(values(10), 4, rank=rank, size=3, **options),
            strict=True,
        ):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("shard", lambda: shard(values(4))),
        ("batches", lambda: batches(values(4), 2)),
        ("check_data", lambda: check_data(values(4))),
        ("rank_key", lambda: rank_key(jax.random.key(0))),
    ],
)
def test_functions_name_themselves_before_init(monkeypatch, name, call):
    monkeypatch.setattr(session, "_session", None)
    with pytest.raises(NotInitializedError, match=f"^{name} was called before"):
        call()


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_rank_key_differs_between_ranks_and_from_the_key(monkeypatch, make_key):
    key = make_key(5)
    draws = [float(jax.random.uniform(key))]
    for rank in range(4):
        play_as(monkeypatch, rank, 4)
        assert rank_key(key).dtype == key.dtype
        assert (rank_key(key) == jax.random.fold_in(key, rank)).all()
        assert (jax.jit(lambda key: rank_key(key))(key) == rank_key(key)).all()
        draws.append(float(jax.random.uniform(rank_key(key))))
    assert len(set(draws)) == 5


def test_rank_key_takes_a_traced_rank(monkeypatch):
    play_as(monkeypatch, 0, 3)
    monkeypatch.setattr(session, "rank", lambda: jax.lax.axis_index("ranks"))
    key = jax.random.key(5)
    keys = jax.jit(jax.vmap(lambda _: rank_key(key), axis_name="ranks"))(jnp.arange(3))
    assert (keys == jax.vmap(lambda rank: jax.random.fold_in(key, rank))(jnp.arange(3))).all()


def test_prefetch_gives_the_same_batches_on_the_device():
    jaxmpi.init()
    data = {"x": np.arange(40.0).reshape(20, 2), "name": np.arange(20)}
    plain = list(jaxmpi.batches(data, 4, seed=1))
    loader = jaxmpi.prefetch(jaxmpi.batches(data, 4, seed=1))
    assert len(loader) == 5 and loader.position == 0
    for i, (batch, want) in enumerate(zip(loader, plain, strict=True)):
        assert isinstance(batch["x"], jax.Array) and loader.position == 4 * (i + 1)
        # a step would be compiled again for what it makes of one that is
        assert not batch["x"].committed
        np.testing.assert_array_equal(batch["x"], want["x"])


def test_prefetch_copies_what_a_loader_uses_again():
    jaxmpi.init()
    memory = np.zeros(4096 + 16)
    # aligned, so that JAX could take it as it is
    buffer = memory[(-memory.ctypes.data % 64) // 8 :][:4096]

    def source():
        for i in range(5):
            buffer[:] = i
            yield buffer

    batches = jaxmpi.prefetch(source())
    assert [float(batch[0]) for batch in list(batches)] == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="come from an iterator, which has begun"):
        iter(batches)


def test_prefetch_reads_ahead_and_no_further():
    read = []

    def source():
        for i in range(10):
            read.append(i)
            yield np.full(2, i), "text"

    jaxmpi.init()
    iterator = iter(jaxmpi.prefetch(source(), ahead=2))
    first, text = next(iterator)
    assert float(first[0]) == 0 and text == "text"
    time.sleep(0.3)
    assert read == [0, 1, 2]  # one is in use, and two wait
    iterator.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxmpi-prefetch"]


def test_prefetch_raises_what_reading_raises():
    def source():
        yield np.ones(1)
        raise OSError("the disk is gone")

    jaxmpi.init()
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in jaxmpi.prefetch(source()):
            seen.append(batch)
    assert len(seen) == 1
    with pytest.raises(ValueError, match="ahead is 0"):
        jaxmpi.prefetch(source(), ahead=0)
    for ahead in (2.5, "2", True):
        with pytest.raises(
            TypeError, match=f"ahead is {ahead!r}. It is a number of batches: an int"
        ):
            jaxmpi.prefetch(source(), ahead=ahead)
    with pytest.raises(TypeError, match=r"batches is a int. Pass a loader"):
        jaxmpi.prefetch(3)
    with pytest.raises(
        OverflowError, match=r"prefetch: leaf \['id'\] is 1099511627783, which int32 cannot hold"
    ):
        list(jaxmpi.prefetch([{"id": np.array([1, 2**40 + 7])}]))
    for labels in (np.array(["cat"]), np.array([None])):
        with pytest.raises(
            TypeError,
            match=rf"prefetch: leaf \['label'\] of a batch has dtype {labels.dtype}, which no",
        ):
            list(jaxmpi.prefetch([{"label": labels}]))
