"""Messages between nodes: schedules for any number of nodes, and all collectives against NumPy.

The nodes are pretended (JAXMPI_NODE_RANKS); test_hosts.py and benchmarks/hosts.py have a network
between them.
"""

import os
import subprocess
import sys
from collections import defaultdict, deque
from pathlib import Path

import pytest

from jaxmpi._backends import extension

pytestmark = pytest.mark.skipif(
    os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax", reason="these are of the other transport"
)
MANY = 10_000
SIZES = [*range(1, 18), 31, 32, 33, 100]
schedule = extension.load().schedule


def played(name, nodes, state, merge, **options):
    """Play a schedule; return the blocks of all nodes.

    `state[node][i]` is block i, counted from the node's own.
    """
    queues = defaultdict(deque)  # what is on its way from one node to another, in order

    def play(node):
        for transfers in schedule(name, nodes, node, **options):
            for to, _, begin, end, *_ in transfers:
                if to >= 0:
                    queues[node, to].append(state[node][begin:end])
            for _, source, _, _, begin, end, reduces in transfers:
                if source < 0:
                    continue
                while not queues[source, node]:
                    yield
                parts = queues[source, node].popleft()
                assert len(parts) == end - begin
                for i, part in enumerate(parts, begin):
                    state[node][i] = merge(state[node][i], part) if reduces else part

    playing = [play(node) for node in range(nodes)]
    for _ in range(2 * nodes + 2):
        playing = [each for each in playing if next(each, "over") != "over"]
    assert not playing, "nodes wait for what nobody sends"
    assert not any(queues.values()), "what was sent is not received"
    return state


def disjoint(mine, theirs):
    assert not mine & theirs, "a part is reduced twice"
    return mine | theirs


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nodes", SIZES)
def test_reduce_scatter_schedules_reduce_each_part_once(nodes, direct):
    state = [[{node} for _ in range(nodes)] for node in range(nodes)]
    done = played("reduce_scatter", nodes, state, disjoint, direct=direct)
    assert all(blocks[0] == set(range(nodes)) for blocks in done)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nodes", SIZES)
def test_allgather_schedules_bring_every_block_to_every_node(nodes, direct):
    state = [[{node}, *[set()] * (nodes - 1)] for node in range(nodes)]
    done = played("allgather", nodes, state, None, direct=direct)
    for node, blocks in enumerate(done):
        assert all(blocks[i] == {(node + i) % nodes} for i in range(nodes))


@pytest.mark.parametrize("nodes", SIZES)
def test_recursive_doubling_reduces_everything_everywhere(nodes):
    done = played("recursive_doubling", nodes, [[{node}] for node in range(nodes)], disjoint)
    assert all(blocks[0] == set(range(nodes)) for blocks in done)
    rounds = max(len(schedule("recursive_doubling", nodes, node)) for node in range(nodes))
    power = nodes.bit_length() - 1
    assert rounds == power + 2 * (nodes > 1 << power)


@pytest.mark.parametrize("nodes", SIZES)
def test_a_broadcast_reaches_every_node(nodes):
    for root in {0, nodes // 2, nodes - 1}:
        state = [[{"root"} if node == root else set()] for node in range(nodes)]
        assert all(
            blocks[0] == {"root"} for blocks in played("bcast", nodes, state, None, root=root)
        )


def test_ten_thousand_nodes():
    """A node sends p - 1 blocks in ceil(log2 p) messages each way; every block arrives once.

    All nodes have the same schedule, relative to their own number: so one is enough to follow. Sets
    are bits of an int.
    """
    everyone, rounds = (1 << MANY) - 1, 14  # ceil(log2 10 000)
    for node in range(0, MANY, 37):
        for name, way in (("reduce_scatter", 1), ("allgather", -1)):
            plan, first = schedule(name, MANY, node), schedule(name, MANY, 0)
            assert len(plan) == rounds and all(len(transfers) == 1 for transfers in plan)
            assert sum(end - begin for ((_, _, begin, end, *_),) in plan) == MANY - 1
            for ((to, source, *blocks),), ((to_0, _, *blocks_0),) in zip(plan, first, strict=True):
                assert (
                    blocks == blocks_0
                    and (to - node) % MANY == to_0
                    and (node - source) % MANY == to_0
                )
                assert to_0 == (blocks[0] if way == 1 else MANY - blocks[2])
    sources = [1] * MANY  # of each block: whose parts it has, relative to the node that holds it
    for ((skip, _, begin, end, into, until, _),) in schedule("reduce_scatter", MANY, 0):
        # the sender is `skip` nodes before
        arrived = [parts << skip for parts in sources[begin:end]]
        arrived = [(parts & everyone) | parts >> MANY for parts in arrived]
        assert until - into == end - begin
        assert not any(map(int.__and__, sources[into:until], arrived))
        sources[into:until] = map(int.__or__, sources[into:until], arrived)
    assert sources[0] == everyone
    held = [True] + [False] * (MANY - 1)
    for ((_, _, begin, end, into, until, _),) in schedule("allgather", MANY, 0):
        assert all(held[begin:end]) and not any(held[into:until])
        held[into:until] = [True] * (until - into)
    assert all(held)
    assert max(len(schedule("recursive_doubling", MANY, node)) for node in range(MANY)) == 13 + 2
    longest = 0
    for node in range(MANY):
        longest = max(longest, *map(len, schedule("bcast", MANY, node)))
    assert longest == rounds


COLLECTIVES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import jaxmpi

w = jaxmpi.init()
n, me = w.size, w.rank
rng = np.random.default_rng(0)
UNIT = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 2.0**-24,
    "complex64": 2.0**-22,
    "float64": 2.0**-53,
}
ROUNDS = 2 + int(n - 1).bit_length()
rings = [[(p, (p + 1) % n) for p in range(n)], [(0, n - 1)], [(p, n - 1 - p) for p in range(n)]]


def everywhere(x):
    assert len(set(jaxmpi.allgather_object(np.asarray(x).tobytes()))) == 1


def check(got, xs, dtype, reduce=np.add, divide=1):
    exact = xs.astype(np.complex128 if dtype.startswith("complex") else np.float64)
    want = reduce.reduce(exact) / divide
    bound = 0
    if reduce is np.add and not np.issubdtype(xs.dtype, np.integer):
        bound = n * np.abs(exact).sum(0) * UNIT[dtype] / divide
    if dtype in ("bfloat16", "float16"):
        # the bound of jaxmpi/_backends/native.py, and float16's subnormal numbers
        bound = ROUNDS * UNIT[dtype] * np.abs(exact).sum(0) / divide * 1.01 + n * 2.0**-24
        bound = bound if reduce is np.add else 0
    assert got.dtype == xs.dtype
    assert np.all(np.abs(np.asarray(got).astype(exact.dtype) - want) <= bound), (dtype, xs.shape)


with jax.enable_x64(True):
    for dtype in sys.argv[1].split(","):
        for columns in map(int, sys.argv[2].split(",")):
            data = rng.normal(size=(n, n, columns)) * 9
            data = np.abs(data) if dtype.startswith("uint") else data
            data = np.asarray(jnp.asarray(data, dtype))
            rows = data[:, 0]

            @jaxmpi.jit
            def step(x, all_rows):
                sums = [lax.psum(x, jaxmpi.AXIS)]
                if not dtype.startswith("complex"):
                    sums.append(lax.pmax(x, jaxmpi.AXIS))
                moved = [lax.ppermute(x, jaxmpi.AXIS, pairs) for pairs in rings]
                gathered = lax.all_gather(x, jaxmpi.AXIS)
                return sums, gathered, lax.all_to_all(all_rows, jaxmpi.AXIS, 0, 0), moved

            sums, gathered, exchanged, moved = step(rows[me], data[me])
            check(sums[0], rows, dtype)
            everywhere(sums[0])
            if len(sums) > 1:
                check(sums[1], rows, dtype, np.maximum)
            np.testing.assert_array_equal(gathered, rows)
            np.testing.assert_array_equal(exchanged, data[:, me])
            for got, pairs in zip(moved, rings):
                source = [p for p, q in pairs if q == me]
                want = rows[source[0]] if source else np.zeros_like(rows[0])
                np.testing.assert_array_equal(got, want)
            scattered = jaxmpi.tree_reduce_scatter(data[me], "sum")
            check(scattered, data[:, me], dtype)
            if "int" not in dtype:
                mean = jaxmpi.tree_allreduce(rows[me])
                check(mean, rows, dtype, divide=n)
                everywhere(mean)
            for root in {0, n - 1}:
                np.testing.assert_array_equal(jaxmpi.tree_bcast(rows[me], root=root), rows[root])
            again = jaxmpi.tree_allreduce(rows[me], "sum")
            np.testing.assert_array_equal(again, sums[0])

# arrays of several dtypes in one message, and ranks that differ
tree = {
    "a": jnp.full(300_001, me + 1.0),
    "b": jnp.arange(5) * (me + 1),
    "c": jnp.full((3, 7), 0.5, jnp.bfloat16),
}
got, total = jaxmpi.tree_allreduce(tree, "sum"), n * (n + 1) // 2
np.testing.assert_array_equal(got["a"], np.full(300_001, total, np.float32))
np.testing.assert_array_equal(got["b"], np.arange(5) * total)
np.testing.assert_array_equal(np.float32(got["c"]), np.full((3, 7), n / 2))
for size in (3, 700_001):
    try:
        jaxmpi.tree_allreduce(np.ones(size + (me == n - 1), np.float32))
    except jaxmpi.RankMismatchError as error:
        assert f"float32[{size}]" in str(error) and f"float32[{size + 1}]" in str(error)
    else:
        raise AssertionError("ranks that differ")

# messages sent ahead in a permute or an alltoall on which the ranks differ are never received later
around = jaxmpi.jit(lambda x: lax.ppermute(x, jaxmpi.AXIS, [(i, (i + 1) % n) for i in range(n)]))
across = jaxmpi.jit(lambda x: lax.all_to_all(x, jaxmpi.AXIS, 0, 0))
for turn in range(3):
    row, square = np.full(5, -1, np.float32), np.full((n, 5), -1, np.float32)
    for moved, x in ((around, row), (across, square)):
        try:
            (jaxmpi.tree_allreduce if me == n - 1 else moved)(x)
        except jaxmpi.RankMismatchError:
            pass
        else:
            raise AssertionError("ranks that differ")
        got = around(np.full(5, me + turn, np.float32))
        np.testing.assert_array_equal(got, np.full(5, (me - 1) % n + turn))
        got = across(np.full((n, 5), me + turn, np.float32))
        np.testing.assert_array_equal(got, np.arange(n)[:, None] + np.full((n, 5), turn))

largest = np.full(9000, 60_000, np.float16)  # a node's sum is beyond float16, and the mean is not
np.testing.assert_array_equal(jaxmpi.tree_allreduce(largest), largest)
assert jaxmpi.allgather_object(float(jaxmpi.tree_allreduce(1.0, "sum"))) == [n] * n
jaxmpi.print("fine on", me)
"""
ALL = "float32,bfloat16,float16,int8,uint64,complex64"
ROUNDS, SMALL_CHUNKS = "direct_nodes=0", "direct_nodes=0,small_bytes=0,chunk_bytes=4096,chunks=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "on_a_node", "tune", "dtypes", "columns"),
    [
        (2, 1, "", ALL, "1,4001,300001"),
        (3, 1, "chunk_bytes=524288", "float32", "1,300001"),  # messages of several pieces
        (3, 2, "", "float32,bfloat16", "1,30001"),
        (4, 2, ROUNDS, "float32,bfloat16", "5,30001"),
        (4, 2, SMALL_CHUNKS, "float32", "1,30001"),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in [
                (3, 1, "", "float32,bfloat16", "1,3001,300001"),
                (4, 1, ROUNDS, "float32,float16", "7,300001"),
                (5, 1, ROUNDS, "float32,bfloat16", "1,70001"),
                (5, 1, "small_bytes=0", "float32", "3,70001"),
                (2, 1, SMALL_CHUNKS, "float32,bfloat16", "1,64,30001"),
                (3, 2, "", ALL, "1,4001,300001"),
                (4, 2, ROUNDS, "float32,bfloat16", "5,300001"),
                (6, 2, ROUNDS, "float32,bfloat16", "5,30001"),
                (4, 2, SMALL_CHUNKS, "float32,float64", "1,30001"),
                (5, 2, "", "float32,bfloat16", "1,30001"),
            ]
        ),
    ],
)
def test_collectives(ranks, on_a_node, tune, dtypes, columns, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(COLLECTIVES)
    done = subprocess.run(
        [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), str(script), dtypes, columns],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "JAXMPI_NODE_RANKS": str(on_a_node),
            "JAXMPI_TUNE": tune,
            "PYTHONPATH": str(Path.cwd()),
        },
    )
    assert done.returncode == 0 and done.stdout.count("fine on") == ranks, done.stdout + done.stderr
