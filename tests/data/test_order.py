"""Data in one order on all ranks: `batches`, `shard` and `check_data` compare a few samples.

A law: ranks with another order of the data all get an error that names a sample and the ranks, and
can go on; ranks with the same data get none, whatever it is made of.
"""

import dataclasses
import datetime
import enum
import pathlib
import re
import tempfile
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi import RankMismatchError
from jaxmpi._data.fingerprint import fingerprint_of_samples
from jaxmpi._data.sampler import open_whole
from jaxmpi.testing import run_ranks

N = 24
NOISE = np.random.default_rng(0).normal(size=(N, 700)).astype(np.float32)
NOISE_LIST = [*NOISE]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Record:
    path: str
    label: int


@jax.tree_util.register_pytree_node_class
class Columns:
    """A tree of arrays that is no container of Python."""

    def __init__(self, *columns):
        self.columns = columns

    def tree_flatten(self):
        return self.columns, None

    @classmethod
    def tree_unflatten(cls, _, columns):
        return cls(*columns)


class Opaque:
    """An object of which only the type is known."""


class Source:
    """A data set that counts what is read."""

    def __init__(self, samples):
        self.samples, self.reads = samples, 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        self.reads += 1
        return self.samples[i]


class Cropped(Source):
    """A data set with random samples of one type."""

    def __getitem__(self, i):
        return {"x": np.random.default_rng().normal(size=3), "id": super().__getitem__(i)}


def mapped(order):
    """Return a memory map of rows in an order."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, np.asarray(order, np.float32)[:, None] * np.ones(3, np.float32))
        return np.load(file.name, mmap_mode="r")


# by name: data whose sample i is that of order[i]
DATA = {
    "array": lambda order: np.asarray(order),
    "rows": lambda order: np.asarray(order)[:, None, None] * np.ones((2, 3), np.float16),
    "long rows": lambda order: np.asarray(order)[:, None] * np.ones(5000, np.float32),
    "dict of arrays": lambda order: {"x": np.zeros((N, 2)), "y": np.asarray(order)},
    "array of jax": lambda order: jnp.asarray(order),
    "bfloat16": lambda order: (jnp.asarray(order, jnp.bfloat16), jnp.zeros(N)),
    "noise": lambda order: NOISE[np.asarray(order)],
    "short noise": lambda order: jnp.asarray(NOISE[np.asarray(order)], jnp.bfloat16),
    "shortest noise": lambda order: jnp.asarray(NOISE[np.asarray(order)], jnp.float8_e4m3fn),
    "complex noise": lambda order: [*(NOISE[np.asarray(order)] * 1j)],
    "fortran": lambda order: np.asfortranarray(np.asarray(order)[:, None] * np.ones((N, 3))),
    "memory map": mapped,
    "array of texts": lambda order: np.array([f"sample {i}" for i in order]),
    "array of objects": lambda order: np.array([{"id": i} for i in order], object),
    "record of arrays": lambda order: Columns(np.zeros((N, 2)), np.asarray(order, np.float32)),
    "many arrays": lambda order: (
        *[np.zeros(N)] * 20,
        *[np.asarray(order, np.float16)] * 20,
    ),
    "mostly zeros": lambda order: np.eye(N, 784, dtype=np.float32)[np.asarray(order)],
    "array with NaN": lambda order: np.where(np.asarray(order) % 2, np.nan, np.asarray(order)),
    "numbers": lambda order: [*order],
    "a range": lambda order: range(order[0], order[-1] + order[1] - order[0], order[1] - order[0]),
    "floats": lambda order: [i / 7 for i in order],
    "scalars of numpy": lambda order: [np.int64(i) for i in order],
    "dicts": lambda order: [{"id": i} for i in order],
    "dicts of lists": lambda order: [{"tokens": [i] * 900, "n": 900} for i in order],
    "tuples of arrays": lambda order: [(np.full((2, 2), i), i % 2) for i in order],
    "arrays of jax": lambda order: [jnp.full(2, i) for i in order],
    "huge texts": lambda order: ["x" * 100_000 + str(i) for i in order],
    "huge numbers": lambda order: [2**100_000 + i for i in order],
    "bytes": lambda order: [bytes([i]) * 9000 for i in order],
    "paths": lambda order: [pathlib.Path(f"/scratch/{i % 3}/{i}.png") for i in order],
    "texts of paths": lambda order: [f"/data/{i % 3}/shard-{i:02d}.npy" for i in order],
    "folders": lambda order: [f"train/{i}/01.png" for i in order],
    "dataclasses": lambda order: [Record(f"{i}.png", i) for i in order],
    "enums": lambda order: [(Color.RED if i % 2 else Color.BLUE, i // 2) for i in order],
    "dates": lambda order: [datetime.date(2026, 1, 1 + i) for i in order],
    "sets": lambda order: [{f"a{i}", f"b{i}", f"c{i}"} for i in order],
}
table = pytest.mark.parametrize("name", DATA)


def mine(how):
    """Return this rank's order of N numbers."""
    last = jaxmpi.rank() == jaxmpi.size() - 1
    match how:
        case "reversed" if last:
            return [*range(N)][::-1]
        case "rotated" if last:  # as where one file is missing, and another one is there
            return [*range(1, N), 0]
        case "random":
            return np.random.default_rng(jaxmpi.rank()).permutation(N).tolist()
    return [*range(N)]


def refused(call, function, ranks):
    """Check that a call raises on all ranks, and that these can go on."""
    start = time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        call()
    error = caught.value
    assert time.monotonic() - start < 20
    assert error.function == function and error.ranks == tuple(ranks)
    assert f"{function}: the data differ between the ranks: rank" in str(error)
    assert "another sample " in str(error) and " than rank " in str(error)
    assert jaxmpi.allgather_object(str(error)) == [str(error)] * jaxmpi.size()
    return str(error)


@table
@run_ranks(2, 3)
def test_another_order_is_an_error_on_all_ranks(name):
    last = [jaxmpi.size() - 1]
    for how in ("reversed", "rotated") if name != "a range" else ("reversed",):
        data = DATA[name](mine(how))
        seed = 3 if how == "reversed" else None
        loader = jaxmpi.batches(data, 6, seed=seed)
        refused(partial(list, loader), "batches", last)
        refused(partial(jaxmpi.shard, data), "shard", last)
        refused(partial(jaxmpi.check_data, data), "check_data", last)


@table
@run_ranks(2, 3)
def test_the_same_data_are_no_error(name):
    data = DATA[name]([*range(N)])
    jaxmpi.check_data(data)
    assert len(jaxmpi.shard(data)) == N // jaxmpi.size()
    for _ in jaxmpi.batches(np.arange(N), 6, seed=1):
        pass
    jaxmpi.batches(data, 6, seed=1).agree()


@run_ranks(2, 3)
def test_random_orders_name_all_other_ranks():
    data = [{"id": i} for i in mine("random")]
    refused(lambda: list(jaxmpi.batches(data, 6)), "batches", range(1, jaxmpi.size()))


@run_ranks(2, backend="xla")
def test_on_xla():
    for data in (np.asarray(mine("reversed")), [{"id": i} for i in mine("reversed")]):
        refused(lambda data=data: list(jaxmpi.batches(data, 6)), "batches", [1])
        refused(lambda data=data: jaxmpi.shard(data), "shard", [1])
    refused(lambda: jaxmpi.check_data(Source(mine("reversed"))), "check_data", [1])
    made = jaxmpi.jit(lambda x: x + 0)(np.arange(N))  # a global array
    assert len(list(jaxmpi.batches({"x": np.arange(N)}, 6))) == 4
    jaxmpi.batches(jaxmpi.local(made), 6).agree()
    jaxmpi.batches(made, 6).agree()


@run_ranks(2)
def test_the_error_names_the_sample_and_what_it_is():
    data = [{"id": i} for i in range(N)]
    if jaxmpi.rank():
        data[5], data[7] = data[7], data[5]
    text = refused(lambda: list(jaxmpi.batches(data, 6)), "batches", [1])
    assert "rank 1 has another sample 5 than rank 0, {'id': 7} and not {'id': 5}; 2 of 24" in text
    assert 'allow="data_order" turns this check off' in text and "sorted(os.listdir" in text
    text = refused(lambda: jaxmpi.check_data(data), "check_data", [1])
    assert "allow" not in text


@run_ranks(2)
def test_other_arguments_and_lengths_are_told_as_ever():
    rank = jaxmpi.rank()
    for call, word in (
        (lambda: list(jaxmpi.batches(mine("reversed"), 6, seed=rank)), "batches seed=1"),
        (lambda: list(jaxmpi.batches(np.arange(N + 2 * rank), 2)), "batches samples=26"),
        (lambda: jaxmpi.shard(np.arange(N + rank)), "shard samples=25"),
        (lambda: jaxmpi.check_data(np.arange(N + rank)), "check_data samples=25"),
        (lambda: list(jaxmpi.batches([1, 2], 2, allow=["data_order"] * rank)), "batches allow="),
    ):
        with pytest.raises(RankMismatchError, match=word) as raised:
            call()
        for side in raised.value.sides:
            assert re.fullmatch(r"test_order\.py:\d+", side.called_at[0])
            assert f"called by rank {side.ranks[0]} at {side.called_at[0]}" in str(raised.value)
    with pytest.raises(RankMismatchError, match=r"called shard at test_order.py:\d+, and rank 1"):
        jaxmpi.barrier() if rank else jaxmpi.shard(np.arange(N))


@run_ranks(2)
def test_allow_and_the_variable_turn_it_off():
    data = mine("reversed")
    assert len(list(jaxmpi.batches(data, 6, allow="data_order"))) == 4
    if jaxmpi.rank():  # local, then
        assert len(jaxmpi.shard(data, allow="data_order")) == N // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMPI_CHECK", "0")
        assert len(list(jaxmpi.batches(data, 6))) == 4
        if jaxmpi.rank():
            assert len(jaxmpi.shard(data)) == N // 2
    for function in (jaxmpi.shard, partial(jaxmpi.batches, batch_size=2)):
        with pytest.raises(ValueError, match="allow has 'order', which is none of"):
            function(data, allow="order")


@run_ranks(2)
def test_shard_is_compared_at_the_first_call_from_a_line():
    for i in range(3):
        if i == 0 or jaxmpi.rank():
            assert len(jaxmpi.shard(np.arange(N))) == N // 2
    thread = threading.Thread(target=lambda: jaxmpi.shard(mine("reversed")))
    thread.start()
    thread.join()
    jaxmpi.barrier()


@run_ranks(2)
def test_nothing_is_compared_in_traced_code():
    def parts(x):
        jaxmpi.check_data(x)
        return jaxmpi.shard(x)[:]

    x = np.arange(N)
    if jaxmpi.rank():
        jax.make_jaxpr(parts)(x)
    np.testing.assert_array_equal(jax.jit(parts)(x), np.split(x, 2)[jaxmpi.rank()])
    jaxmpi.barrier()


@run_ranks(2)
def test_sources_with_code_of_their_own_are_read_by_check_data_alone():
    source = Source([{"id": i} for i in mine("reversed")])
    batches = jaxmpi.batches(source, 6)
    batches.agree()
    jaxmpi.shard(source)
    assert source.reads == 0
    refused(lambda: jaxmpi.check_data(source), "check_data", [1])
    assert source.reads > 0
    jaxmpi.check_data(Source([{"id": i} for i in range(N)]))
    jaxmpi.check_data(Cropped([*range(N)]))  # by its types
    jaxmpi.check_data([Opaque() for _ in range(N)])
    jaxmpi.check_data([Opaque() if i % 2 else [Opaque()] for i in range(N)])


@run_ranks(2)
def test_a_source_that_fails_on_one_rank_is_an_error_on_all():
    source = Source([1, 2, 3] if jaxmpi.rank() else None)
    if not jaxmpi.rank():
        source = Source([1, 2, 3])
        source.samples = type("Short", (), {"__len__": lambda self: 3})()
    error = RankMismatchError if jaxmpi.rank() else TypeError
    with pytest.raises(error):
        jaxmpi.check_data(source)
    wrong = [np.zeros(9), np.zeros(9)] if jaxmpi.rank() else np.zeros((9, 2))
    with pytest.raises(TypeError if jaxmpi.rank() else RankMismatchError, match=r"np\.stack"):
        jaxmpi.shard(wrong)
    jaxmpi.barrier()


class Unreadable:
    """Samples of which none can be read on rank 0."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        if jaxmpi.rank() == 0:
            raise RuntimeError("the decoder has failed")
        return i


@run_ranks(2)
def test_a_source_that_raises_a_runtime_error_on_one_rank_is_an_error_on_all():
    error = RankMismatchError if jaxmpi.rank() else RuntimeError
    with pytest.raises(error, match="the decoder has failed"):
        jaxmpi.check_data(Unreadable())
    jaxmpi.barrier()


class Flipped:
    """Images of which half are flipped at random each time that they are read."""

    def __init__(self):
        self.random = np.random.default_rng(jaxmpi.rank())

    def __len__(self):
        return N

    def __getitem__(self, i):
        return NOISE[i][:: -1 if self.random.random() < 0.5 else 1]


class ReadOnce:
    """Samples that can be read so many times each."""

    def __init__(self, numbers, times):
        self.numbers, self.left = numbers, dict.fromkeys(range(N), times)

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.left[i] -= 1
        if self.left[i] < 0:
            raise OSError("the stream is over")
        return self.numbers[i]


@run_ranks(2, 3)
def test_samples_that_are_random_on_each_rank_are_no_error():
    jaxmpi.check_data(Flipped())


@run_ranks(2)
def test_samples_that_are_random_on_one_rank_are_no_error():
    jaxmpi.check_data(Flipped() if jaxmpi.rank() else NOISE_LIST)


@run_ranks(2, 3)
def test_samples_that_cannot_be_read_once_more_are_an_error_on_all():
    numbers = [*range(N)][:: -1 if jaxmpi.rank() == 1 else 1]
    # twice for the digests; rank 1 has no more than these reads
    source = ReadOnce(numbers, 2 if jaxmpi.rank() == 1 else 9)
    with pytest.raises(RankMismatchError, match=r"another sample 0 than rank .*unreadable now"):
        jaxmpi.check_data(source)
    jaxmpi.barrier()


@run_ranks(3)
def test_a_rank_that_differs_by_rounding_is_not_named():
    numbers = np.arange(1.0, N + 1, dtype=np.float32)
    if jaxmpi.rank() == 1:
        numbers = np.nextafter(numbers, np.float32(np.inf))
    if jaxmpi.rank() == 2:
        numbers = numbers[::-1].copy()
    with pytest.raises(RankMismatchError, match="rank 2 has another sample 0 than rank 0") as found:
        jaxmpi.check_data(numbers)
    assert found.value.ranks == (2,)


@run_ranks(2)
def test_arrays_on_another_device_are_compared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxmpi._data.fingerprint._is_on_cpu", lambda x: False)
        order = slice(None, None, -1 if jaxmpi.rank() else 1)
        with pytest.raises(RankMismatchError, match="another sample 0"):
            jaxmpi.check_data(jnp.asarray(NOISE)[order])
        jaxmpi.check_data(jnp.asarray(NOISE))


@run_ranks(2)
def test_the_order_of_keys_is_no_difference():
    words = [f"word {i}" for i in range(40)]
    samples = [dict.fromkeys(words[:: -1 if jaxmpi.rank() else 1], i) for i in range(N)]
    jaxmpi.check_data(samples)


@run_ranks(2)
def test_what_ranks_may_have_is_no_error():
    rank = jaxmpi.rank()
    paths = [f"/scratch/node{rank}/job{rank}/cat/{i}.png" for i in range(N)]
    jaxmpi.check_data(paths)
    jaxmpi.check_data(
        [{"set": {f"x{i}", f"y{i}"}, "z": dict.fromkeys(range(3), i)} for i in (1, 2)]
    )
    for data in ([], np.zeros((0, 3)), [None] * 5, np.zeros((4, 0)), [float("nan")] * 4):
        jaxmpi.check_data(data)
        jaxmpi.shard(data)
    # what each host computes may differ in the last bits
    x = np.linspace(0.1, 1, 4 * N, dtype=np.float32).reshape(N, 4)
    x = np.nextafter(x, np.float32(9)) if rank else x
    for data in (x, {"x": x, "y": np.arange(N)}, [{"x": row, "y": 1.5} for row in x], x * 1j):
        loader = jaxmpi.batches(data, 6)
        loader.agree()
        loader.agree()
        jaxmpi.check_data(data)
    loops = [[]]
    loops[0].append(loops)
    jaxmpi.check_data([{"a": loops}, {"a": loops}])
    keys = jax.random.split(jax.random.key(0), 4)
    jaxmpi.batches(keys, 2).agree()
    jaxmpi.batches(jnp.ones(4), 2).agree() if rank else jaxmpi.batches(Source([1] * 4), 2).agree()
    # data of each rank's own
    assert len(list(jaxmpi.per_rank_batches([np.full(2, rank)] * 3))) == 3


@run_ranks(4, axes={"island": 2, "data": 2})
def test_groups_may_have_data_of_their_own():
    island, place = divmod(jaxmpi.rank(), 2)
    data = np.arange(N) + 100 * island
    batches = jaxmpi.batches(data, 6, axis="data")
    for _ in range(2):
        assert len(list(batches)) == 4
    jaxmpi.shard(data, axis="data")
    jaxmpi.check_data(data, axis="data")
    refused(lambda: list(jaxmpi.batches(data, 8)), "batches", [2, 3])
    if island:
        data = data[::-1] if place else data
    refused(lambda: list(jaxmpi.batches(data, 6, axis="data")), "batches", [3])


def test_one_rank_and_simulated_ranks_compare_nothing():
    jaxmpi.init()
    source = Source([1, 2, 3])
    jaxmpi.check_data(source)
    assert source.reads == 0
    with pytest.raises(TypeError, match=r"check_data: data is of type int"):
        jaxmpi.check_data(3)
    with jaxmpi.simulate(2):
        jaxmpi.check_data(source)
        assert len(list(jaxmpi.batches(np.arange(8), 4))) == 2


def fingerprint(data, seed=0):
    return fingerprint_of_samples(open_whole("test", data), seed)


def test_the_places_are_the_ends_the_middle_and_some_of_the_seed():
    data = np.arange(1_000_000)
    rows = [place.row for place in fingerprint(data, 0).places]
    assert {0, 500_000, 999_999} <= {*rows} and 30 <= len(rows) <= 32
    assert rows != [place.row for place in fingerprint(data, 1).places]
    assert rows == [place.row for place in fingerprint(data, None).places]
    assert [place.row for place in fingerprint(data[:9], 5).places] == [*range(9)]


@pytest.mark.parametrize(
    "data",
    [
        np.arange(1_000_000),
        {"x": np.zeros((1_000_000, 8), np.float32), "y": np.zeros(1_000_000, np.int32)},
        [{"id": i} for i in range(1_000_000)],
    ],
    ids=["array", "dict", "list"],
)
def test_the_fingerprint_of_a_million_samples_takes_a_millisecond(data):
    source, times = open_whole("test", data), []
    for _ in range(20):
        start = time.perf_counter()
        fingerprint_of_samples(source, 0)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3
