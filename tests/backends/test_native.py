"""The native transport: sums across the borders of its chunks, equal bits on all ranks, timeouts.

Tests of behavior that all transports share are in the other folders.
"""

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import segments_left

import jaxmpi
from jaxmpi import MPIError
from jaxmpi._backends import extension, native_transports, start
from jaxmpi.testing import run_ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax", reason="these are of the other transport"
)
R = jaxmpi.AXIS
# together some chunks, whose borders are in the middle of arrays
COLUMNS = [1, 7, 300_000, 0, 64, 70_001]
DTYPES = ["float32", "float64", "bfloat16", "float16", "int8", "uint64", "complex128"]


def test_it_is_built_and_is_the_default():
    """The extension is built where there is a compiler; elsewhere mpi4jax is the default."""
    assert start.why_not_native() is None


@run_ranks(2)
def test_ranks_use_it():
    assert jaxmpi._world.session.current("test").transport.name == "native"


def of_rank(rank, dtype, rows=()):
    rng = np.random.default_rng(rank)
    values = [rng.normal(size=(*rows, n)) * 4 for n in COLUMNS]
    if dtype.startswith("complex"):
        values = [v + 1j * rng.normal(size=v.shape) for v in values]
    return [
        np.asarray(jnp.asarray(np.abs(v) if dtype.startswith("uint") else v, dtype)) for v in values
    ]


def check(got, inputs, dtype, *, divide=False):
    """Check that `got` is the sum over axis 0 of `inputs`, in the order of ranks, rounded once."""
    wide = np.float32 if dtype in ("bfloat16", "float16") else inputs.dtype
    want = inputs[0].astype(wide)
    for x in inputs[1:]:
        want = want + x.astype(wide)
    if divide:
        want = want / np.asarray(len(inputs), want.dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want.astype(inputs.dtype)))


def same_everywhere(arrays):
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in arrays)).hexdigest()
    assert len(set(jaxmpi.allgather_object(digest))) == 1
    return digest


@pytest.mark.parametrize("dtype", DTYPES)
@run_ranks(2, 3, 4)
def test_sums_across_chunks(dtype):
    with jax.enable_x64(True):
        n = jaxmpi.size()
        inputs = list(zip(*(of_rank(r, dtype) for r in range(n)), strict=True))
        mine = [x[jaxmpi.rank()] for x in inputs]
        sums = jaxmpi.tree_allreduce(mine, "sum")
        for got, x in zip(sums, inputs, strict=True):
            check(got, np.stack(x), dtype)
        assert same_everywhere(sums) == same_everywhere(jaxmpi.tree_allreduce(mine, "sum"))
        if dtype not in ("int8", "uint64", "complex128"):
            for got, x in zip(jaxmpi.tree_allreduce(mine), inputs, strict=True):
                check(got, np.stack(x), dtype, divide=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@run_ranks(2, 3, 4)
def test_reduce_scatter_and_allgather_across_chunks(dtype):
    n, me = jaxmpi.size(), jaxmpi.rank()
    inputs = list(zip(*(of_rank(r, dtype, (n,)) for r in range(n)), strict=True))
    scattered = jaxmpi.tree_reduce_scatter([x[me] for x in inputs], "sum")
    for got, x in zip(scattered, inputs, strict=True):
        check(got, np.stack(x)[:, me], dtype)
    whole = jaxmpi.tree_allgather([x[me][0] for x in inputs])
    for got, x in zip(whole, inputs, strict=True):
        np.testing.assert_array_equal(got, np.stack([y[0] for y in x]))
    same_everywhere(whole)


LONG = [3, 1_500_001, 64, 1_200_000]  # more than 16 chunks in each dtype here


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter", "allgather"])
@run_ranks(2, 3, 4)
def test_both_ways_to_write_to_shared_memory(kind, dtype):
    """The first 32 chunks of a job alternate between ordinary stores and stores past the caches.

    The inputs are small integers, so that sums are exact.
    """
    jaxmpi.finalize()
    jaxmpi.init()  # the first chunks come again
    n, me = jaxmpi.size(), jaxmpi.rank()
    with jax.enable_x64(True):
        mine = [np.asarray(jnp.asarray(np.arange(c) % 19 + me, dtype)) for c in LONG]
        exact = [np.asarray(x, np.float64) for x in mine]
        for _ in range(2):
            if kind == "allgather":
                got = jaxmpi.tree_allgather(mine)
                want = [np.stack([x + r - me for r in range(n)]) for x in exact]
            else:
                want = [x * n + n * (n - 1) / 2 - n * me for x in exact]
                if kind == "allreduce":
                    got = jaxmpi.tree_allreduce(mine, "sum")
                else:
                    got = jaxmpi.tree_reduce_scatter([np.stack([x] * n) for x in mine], "sum")
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(np.asarray(x, np.float64), y)


@run_ranks(2, 3)
def test_mixed_trees():
    """One message holds arrays of several dtypes, transposed, sliced and used afterwards."""
    rng, n = np.random.default_rng(0), jaxmpi.size()
    big = rng.normal(size=(300, 200)).astype(np.float32)

    @jaxmpi.jit
    def step(x):
        tree = {
            "t": x.T,
            "row": x[7],
            "half": x.astype(jnp.bfloat16),
            "int": jnp.arange(5),
            "same": x,
        }
        return lax.psum(tree, R), x

    sums, kept = step(big * (jaxmpi.rank() + 1))
    total = n * (n + 1) / 2
    np.testing.assert_allclose(sums["t"], big.T * total, rtol=1e-5)
    np.testing.assert_allclose(sums["row"], big[7] * total, rtol=1e-5)
    np.testing.assert_array_equal(sums["int"], np.arange(5) * n)
    np.testing.assert_allclose(np.float32(sums["half"]), big * total, rtol=0.02)
    np.testing.assert_array_equal(kept, big * (jaxmpi.rank() + 1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@run_ranks(2, 3)
def test_means_of_short_floats_are_rounded_once_on_the_way(dtype):
    n = jaxmpi.size()
    inputs = np.stack([of_rank(r, dtype)[2] for r in range(n)])
    step = jaxmpi.jit(jaxmpi.tree_allreduce)
    text = step.lower(inputs[0]).as_text()
    assert text.count("custom_call @") == 1 and "convert" not in text and "divide" not in text
    exact = inputs.astype(np.float64).mean(0)
    error = np.abs(np.float64(step(inputs[jaxmpi.rank()])) - exact)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(exact) + 1e-30)) - (7 if dtype == "bfloat16" else 10))
    assert np.all(error <= np.maximum(0.5001 * ulp, 2.0**-25))


@run_ranks(2, 3)
def test_what_is_folded_and_what_is_not():
    n = jaxmpi.size()

    def parts(x):
        total = lax.psum(x, R)
        other = lax.psum(2 * x, R)
        half = lax.psum((3 * x).astype(jnp.bfloat16).astype(jnp.float32), R)
        return (
            total / n,
            total,
            other / (n + 1),
            half.astype(jnp.float16),
            jax.grad(lambda x: lax.pmean(x, R).sum())(x),
        )

    x = jnp.arange(8.0)
    mean, total, other, half, gradient = jaxmpi.jit(parts)(x)
    np.testing.assert_array_equal(total, x * n)
    np.testing.assert_allclose(mean, x, rtol=1e-6)
    np.testing.assert_allclose(other, 2 * x * n / (n + 1), rtol=1e-6)
    np.testing.assert_array_equal(half, (3 * x * n).astype(jnp.float16))
    np.testing.assert_array_equal(gradient, np.ones(8))


@run_ranks(2, 3)
def test_means_of_literals():
    n = jaxmpi.size()
    step = jaxmpi.jit(
        lambda x: (
            x + lax.pmean(jnp.float32(3), R),
            lax.psum(jnp.asarray(2.5), R),
            jaxmpi.tree_allreduce(2.5),
        )
    )
    np.testing.assert_allclose(step(1.0), (4.0, 2.5 * n, 2.5), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@run_ranks(2, 3)
def test_derivatives_around_a_step_with_a_mean(dtype):
    """A step with a mean differentiates from outside as from inside.

    The derivative of the mean of all ranks' outputs is that of psum / n.
    """
    step = jaxmpi.jit(
        lambda x: (
            jaxmpi.tree_allreduce(x).sum()
            + jaxmpi.tree_reduce_scatter(jnp.tile(x, (jaxmpi.size(), 1))).sum()
        )
    )
    x = jnp.ones(3, dtype)
    np.testing.assert_allclose(np.float32(jax.grad(step)(x)), np.full(3, 2.0), rtol=1e-2)
    np.testing.assert_allclose(np.float32(jax.jit(jax.grad(step))(x)), np.full(3, 2.0), rtol=1e-2)


@run_ranks(2, 3)
def test_zeros_of_both_signs():
    mine = jnp.array([0.0, -0.0, -0.0]) if jaxmpi.rank() else jnp.array([-0.0, 0.0, -0.0])
    assert np.signbit(jaxmpi.tree_allreduce(mine, "max")).tolist() == [False, False, True]
    assert np.signbit(jaxmpi.tree_allreduce(mine, "min")).tolist() == [True, True, True]


def large(x):
    """Too much to be run while Python waits for it."""
    for _ in range(4):
        x = jnp.tanh(x @ x)
    return x


@run_ranks(2, 3)
def test_after_a_difference_in_a_program_that_runs_by_itself_all_can_go_on():
    n = jaxmpi.size()
    step = jaxmpi.jit(lambda x: lax.psum(large(x), R))
    plain = jax.jit(lambda x: jaxmpi.tree_allreduce(large(x)))
    for run in (step, plain):
        for shape in ((300, 300), (310, 310)):
            jax.block_until_ready(run(jnp.ones(shape)))
        with pytest.raises(
            (jaxmpi.RankMismatchError, jax.errors.JaxRuntimeError, ValueError),
            match=r"do not agree|called",
        ):
            jax.block_until_ready(run(jnp.ones((300, 300) if jaxmpi.rank() else (310, 310))))
        jaxmpi.barrier()
        with pytest.raises(TypeError, match="is a str"):
            step("no array")
        assert run(jnp.zeros((300, 300))).sum() == 0.0
        assert float(jaxmpi.tree_allreduce(1.0, "sum")) == n
        assert jaxmpi.allgather_object(3) == [3] * n


# 9: 45 numbers, of which the first 32 are summed sixteen at a time
@pytest.mark.parametrize("repeats", [1, 9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@run_ranks(2, 3)
def test_nan_and_infinity(dtype, repeats):
    x = jnp.tile(jnp.array([np.nan, np.inf, -np.inf, 1.0, -0.0], dtype), repeats)
    y = jnp.tile(jnp.array([1.0, 1.0, 1.0, np.nan, -0.0], dtype), repeats)
    mine = x if jaxmpi.rank() == 0 else y
    for op in ("max", "min", "sum", "prod", "mean"):
        got = np.asarray(jaxmpi.tree_allreduce(mine, op), np.float32)
        reduce = {"max": np.fmax, "min": np.fmin}.get(op, np.multiply if op == "prod" else np.add)
        others = np.asarray(y, np.float32)
        want = np.asarray(x, np.float32)
        for _ in range(jaxmpi.size() - 1):
            want = np.where(np.isnan(want) | np.isnan(others), np.nan, reduce(want, others))
        want = jnp.asarray(want / jaxmpi.size() if op == "mean" else want, dtype)
        np.testing.assert_array_equal(got, np.float32(want))


@run_ranks(2, 3)
def test_a_nan_stays_one_whatever_its_bits():
    """A sum keeps a NaN with any payload, and the largest numbers overflow to infinity.

    For bfloat16, 0x7f81 is the NaN next to infinity, and 0xffff the last one.
    """
    for bits in (0x7F81, 0xFF81, 0x7FFF, 0xFFFF):
        mine = np.full(37, bits if jaxmpi.rank() == 0 else 0x3F80, np.uint16).view(jnp.bfloat16)
        for op in ("mean", "sum"):
            assert np.isnan(np.float32(jaxmpi.tree_allreduce(mine, op))).all()
    largest = np.full(37, 0xFF7F, np.uint16).view(jnp.bfloat16)
    np.testing.assert_array_equal(
        np.float32(jaxmpi.tree_allreduce(largest, "sum")), np.full(37, -np.inf)
    )


# nodes

NODES = """
import jax, jax.numpy as jnp, numpy as np
import jaxmpi
w = jaxmpi.init()
n, me = w.size, w.rank
assert w.local_size < n
rng = np.random.default_rng(0)
for dtype in ("float32", "bfloat16", "int32"):
    data = np.asarray(jnp.asarray(rng.normal(size=(n, n, 700_001)) * 9, dtype))
    want, total = data.astype(np.float64).sum(0), np.abs(data.astype(np.float64)).sum(0)
    # between two nodes: see jaxmpi/_backends/native.py
    scale = 3 * 2.0**-8 if dtype == "bfloat16" else 1e-6

    def close(got, want, total):
        error = np.abs(np.float64(got) - want)
        np.testing.assert_array_less(error, scale * total + 1e-9)

    close(jaxmpi.tree_allreduce(data[me, 0], "sum"), want[0], total[0])
    np.testing.assert_array_equal(jaxmpi.tree_allreduce(data[me, 0], "max"), data[:, 0].max(0))
    close(jaxmpi.tree_allreduce([data[me, 1, :3]], "sum")[0], want[1, :3], total[1, :3])
    if dtype != "int32":
        close(jaxmpi.tree_allreduce(data[me, 0]), want[0] / n, total[0] / n)
    close(jaxmpi.tree_reduce_scatter(data[me], "sum"), want[me], total[me])
    np.testing.assert_array_equal(jaxmpi.tree_allgather(data[me, 0]), data[:, 0])
try:
    jaxmpi.tree_allreduce(np.ones(3 if me else 4, np.float32))
except jaxmpi.RankMismatchError as error:
    assert "float32[3]" in str(error) and "float32[4]" in str(error)
    jaxmpi.print("caught on", me)
assert jaxmpi.allgather_object(float(jaxmpi.tree_allreduce(1.0, "sum"))) == [n] * n
jaxmpi.print("fine on", me, w.node, w.local_rank)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "on_a_node"),
    [
        (3, 2),
        *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in [(2, 1), (4, 2), (4, 3)]),
    ],
)
def test_several_nodes(ranks, on_a_node, tmp_path):
    """Pretended nodes of equal and of different sizes give right numbers."""
    done = run(ranks, NODES, tmp_path, JAXMPI_NODE_RANKS=str(on_a_node))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine on") == ranks and done.stdout.count("caught on") == ranks


def run(ranks, code, folder, *, timeout=120, **environ):
    script = Path(folder, "script.py")
    script.write_text(code)
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), str(script)]
    environ = {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ)


@pytest.mark.exhaustive
def test_more_ranks_than_cores(tmp_path):
    """Eight ranks make progress, which on most machines of these tests share two cores."""
    code = """
        import jaxmpi, numpy as np
        w = jaxmpi.init()
        x = np.arange(2_000_000, dtype=np.float32)
        for i in range(5):
            total = jaxmpi.tree_allreduce(x * (w.rank + i), "sum")
            np.testing.assert_allclose(total, x * (28 + 8 * i), rtol=1e-6)
        jaxmpi.print("fine on", w.rank)
    """
    done = run(8, "\n".join(line[8:] for line in code.splitlines()), tmp_path)
    assert done.returncode == 0 and done.stdout.count("fine on") == 8, done.stdout + done.stderr


# several threads of a rank for one message

THREADS = """
import hashlib, os, sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import jaxmpi
w = jaxmpi.init()
n, me = w.size, w.rank
rng = np.random.default_rng(me)
trees = [[600_003], [300_001, 3, 0, 64, 299_999], [5_000] * 161]
digest = hashlib.sha256()
def note(tree):
    for x in jax.tree.leaves(tree):
        digest.update(np.asarray(x).tobytes())
for dtype in ("float32", "bfloat16", "float64", "int8", "complex64"):
    for sizes in trees:
        tree = [jnp.asarray(rng.normal(size=k) * 9, dtype) for k in sizes]
        note(jaxmpi.tree_allreduce(tree, "sum"))
        note(jaxmpi.tree_bcast(tree, root=n - 1))
        gathered = jaxmpi.tree_allgather(tree)
        assert all(np.array_equal(y[me], x) for x, y in zip(tree, gathered))
        note(gathered)
rows = jnp.asarray(rng.normal(size=(n, 300_001)), jnp.float32)
@jaxmpi.jit
def step(rows):
    ring = [(p, (p + 1) % n) for p in range(n)]
    return (
        lax.psum_scatter(rows, jaxmpi.AXIS),
        lax.all_to_all(rows, jaxmpi.AXIS, 0, 0),
        lax.ppermute(rows, jaxmpi.AXIS, ring),
        lax.pmean([rows, rows[0]], jaxmpi.AXIS),
    )
everyone = jaxmpi.tree_allgather(rows)
for _ in range(5):
    mine, swapped, before, mean = step(rows)
    np.testing.assert_allclose(mine, np.sum(everyone, 0)[me], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(swapped, everyone[:, me])
    np.testing.assert_array_equal(before, everyone[(me - 1) % n])
    np.testing.assert_allclose(mean[0], np.mean(everyone, 0), rtol=1e-4, atol=1e-4)
    note((mine, swapped, before, mean))
try:
    jaxmpi.tree_allreduce(np.ones(1_000_000 + (me == 0), np.float32))
except jaxmpi.RankMismatchError as error:
    assert "float32[1000000]" in str(error) and "float32[1000001]" in str(error)
    jaxmpi.print("caught on", me)
note(jaxmpi.tree_allreduce(np.ones(1_000_000, np.float32)))
jaxmpi.print("digest", me, digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_threads_of_a_rank_change_no_bit(ranks, tmp_path):
    """Threads share the columns of a message; a mismatch is found before they begin."""
    found = []
    for threads in (1, 3):
        done = run(ranks, THREADS, tmp_path, JAXMPI_TUNE=f"threads={threads}", JAX_ENABLE_X64="1")
        assert done.returncode == 0 and done.stdout.count("caught on") == ranks, (
            done.stdout + done.stderr
        )
        found.append(sorted(re.findall(r"digest (\d+) (\w+)", done.stdout)))
    assert len(found[0]) == ranks and found[0] == found[1]


# ends

KILLED = """
import os, signal, threading, time
import numpy as np
import jaxmpi
rank = jaxmpi.init().rank
x = np.ones(64_000_000, np.float32)
jaxmpi.barrier()
if rank == 1:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
jaxmpi.print("start", time.time())
while True:
    jaxmpi.tree_allreduce(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_a_kill_in_the_middle_of_a_large_message_leaves_nothing(threads, tmp_path):
    before = set(os.listdir("/dev/shm"))
    start = time.monotonic()
    done = run(3, KILLED, tmp_path, timeout=60, JAXMPI_TUNE=f"threads={threads}")
    assert done.returncode != 0 and "rank 1" in done.stderr, done.stderr
    assert time.monotonic() - start < 30
    assert not segments_left(before)


LOST = """
import mmap, os, sys, time
import numpy as np
import importlib
native = importlib.import_module("jaxmpi._native")
file = os.memfd_create("test")
size = native.layout_bytes(2, 4096, 4)
os.ftruncate(file, size)
path, child = f"/proc/{os.getpid()}/fd/{file}", os.fork()
file = os.open(path, os.O_RDWR)
memory = mmap.mmap(file, size)
native.open(
    rank=int(child == 0),
    order=[0, 1],
    ranks=[2],
    node=0,
    local_rank=int(child == 0),
    slot_bytes=4096,
    slots=4,
    crowded=True,
    memory=np.frombuffer(memory, np.uint8).ctypes.data,
    file=file,
)
print(native.compare(5 + (child == 0)), flush=True)
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
start = time.monotonic()
try:
    native.compare(7)
except RuntimeError as error:
    print(error, time.monotonic() - start < 5)
"""


def test_a_rank_that_is_gone_is_noticed_without_a_launcher():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("(5, 6, 0)") == 2, done.stdout + done.stderr
    assert "local rank 1 of this node has ended True" in done.stdout, done.stdout + done.stderr


# shared memory that cannot be had


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("too large", "File too large|No space left"),
        ("no folder", "No such file"),
        ("one cannot map it", "not on rank 1"),
    ],
)
@run_ranks(2, 3)
def test_without_shared_memory_all_ranks_say_what_to_do(why, said):
    """Whichever of them finds out; and no file stays."""

    def mmap_of(file, size):
        if jaxmpi.rank() == 1:
            raise ValueError("not on rank 1")
        return mmap.mmap(file, size)

    backend = jaxmpi._world.session.current("test")
    world, node = backend._mpi.COMM_WORLD, backend._node_communicator()
    folder = "/proc/nowhere" if why == "no folder" else "/dev/shm"
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(jaxmpi.MPIError, match=said) as caught,
    ):
        patch.setattr(native_transports, "SHARED_MEMORY", folder)
        patch.setattr(
            native_transports,
            "uuid",
            types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex=f"test-of-{world.size}")),
        )
        if why == "one cannot map it":
            patch.setattr(native_transports, "mmap", types.SimpleNamespace(mmap=mmap_of))
        native_transports.shared_memory(world, node, 1 << 55 if why == "too large" else 1 << 20)
    node.Free()
    assert f"Make room in {folder}, or set JAXMPI_TRANSPORT=mpi4jax." in str(caught.value)
    assert len(set(jaxmpi.allgather_object(str(caught.value)))) == 1
    assert not Path(f"/dev/shm/jaxmpi-test-of-{world.size}").exists()


# the extension


def stand_in(monkeypatch, **attributes):
    monkeypatch.setitem(
        sys.modules,
        "jaxmpi._native",
        types.SimpleNamespace(__file__="/old/_native.so", **attributes),
    )


def test_the_extension_was_built_from_the_sources_beside_it():
    native = extension.load()
    assert native.interface == extension.INTERFACE
    assert native.sources == extension.sources_digest(extension.ROOT / "native")


@pytest.mark.parametrize("change", ["another comment", "a new file"])
def test_an_extension_of_other_sources_is_refused(change, tmp_path, monkeypatch):
    digest = extension.sources_digest(extension.ROOT / "native")
    shutil.copytree(extension.ROOT / "native", tmp_path / "native")
    monkeypatch.setattr(extension, "ROOT", tmp_path)
    stand_in(monkeypatch, interface=extension.INTERFACE, sources=digest)
    extension.load()
    name = "transport.h" if change == "another comment" else "new.cc"
    with open(tmp_path / "native" / name, "a") as file:
        file.write("// changed\n")
    said = (
        "The extension /old/_native.so was built from other sources than those in "
        f"{tmp_path}/native. Rebuild it: pip install"
    )
    with pytest.raises(MPIError, match=re.escape(said)):
        extension.load()
    # where jaxmpi is installed, there are no sources
    monkeypatch.setattr(extension, "ROOT", tmp_path / "native")
    extension.load()


@pytest.mark.parametrize(
    "attributes", [{}, {"interface": 0}, {"interface": extension.INTERFACE + 1}]
)
def test_an_extension_with_another_interface_is_refused(attributes, monkeypatch):
    stand_in(monkeypatch, **attributes)
    with pytest.raises(
        MPIError,
        match=f"has interface [0-9]+, and this jaxmpi needs {extension.INTERFACE}. "
        "Install jaxmpi again",
    ):
        extension.load()


class _Base(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("next", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("version", _Version)]


class _Question(ctypes.Structure):
    _fields_ = [("base", _Base), ("metadata", ctypes.POINTER(_Metadata))]


class _Frame(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("question", ctypes.POINTER(_Question))]


HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
KEPT = []  # handlers, which jaxlib may call later


@pytest.mark.parametrize("ffi", ["0.0", "0.999", "9.0"])
def test_an_extension_of_another_ffi_is_refused(ffi):
    """jaxlib itself refuses it: it asks the handler for its version of the FFI."""
    jax.devices()

    @HANDLER
    def handler(frame):
        version = frame.contents.question.contents.metadata.contents.version
        version.major, version.minor = map(int, ffi.split("."))

    KEPT.append(handler)
    native = types.SimpleNamespace(ffi=ffi, handler=lambda name: jax.ffi.pycapsule(handler))
    said = (
        rf"built for XLA FFI {ffi}, which jaxlib [\d.]+ does not accept .*\({ffi}\).* "
        "pip install --upgrade jaxmpi jaxlib"
    )
    with pytest.raises(MPIError, match=said):
        extension.check_ffi(native)
    extension.check_ffi(extension.load())


# the choice

CHOICE = """
import jaxmpi, sys
{before}
try:
    jaxmpi.init()
    transport = jaxmpi._world.session.current("test").transport.name
    jaxmpi.print(transport, float(jaxmpi.tree_allreduce(1.0, "sum")))
except (ValueError, jaxmpi.MPIError) as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
"""


HALTED = "import of jaxmpi._native halted; None in sys.modules"
DOES_NOT_LOAD = """
sys.modules["mpi4jax"] = None
from jaxmpi._backends import extension
def load():
    raise ImportError("GLIBCXX_3.4.30 not found")
extension.load = load
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "built", "said"),
    [
        pytest.param("", False, "mpi4jax 2.0", marks=pytest.mark.mpi4jax),
        ("mpi4jax", True, "mpi4jax 2.0"),
        ("native", True, "native 2.0"),
        ("", "of other sources", "MPIError: The extension"),
        ("mpi4jax", "of other sources", "mpi4jax 2.0"),
        (
            "",
            "neither",
            f"neither is available. Native: rank 0: the extension is not built ({HALTED}). "
            "Build it with a C++ compiler, and have pip show why a build fails: pip install -v "
            f"--no-deps --no-build-isolation -e {extension.ROOT}. mpi4jax: ",
        ),
        (
            "",
            "does not load",
            "rank 0: the extension does not load (GLIBCXX_3.4.30 not found). Build it with a C++ "
            "compiler",
        ),
        (
            "native",
            False,
            "JAXMPI_TRANSPORT is native, and the native transport is not available. rank 0: the "
            "extension is not built",
        ),
    ],
)
def test_the_transport_is_chosen(transport, built, said, tmp_path):
    before = {
        False: "sys.modules['jaxmpi._native'] = None",
        "neither": "sys.modules['jaxmpi._native'] = sys.modules['mpi4jax'] = None",
        "does not load": DOES_NOT_LOAD,
        "of other sources": "from jaxmpi._backends import extension; "
        "extension.sources_digest = lambda folder: 'other'",
    }
    code = CHOICE.format(before=before.get(built, ""))
    done = run(2, code, tmp_path, JAXMPI_TRANSPORT=transport or "auto")
    assert done.stdout.count(said) >= 1, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("missing", [(0, 1, 2), (1,)])
def test_without_mpi4jax(missing, tmp_path):
    """The native transport carries all collectives where one rank lacks mpi4jax.

    Also in a plain `jax.jit` with control flow.
    """
    code = f"""
import os, sys
if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))) in {missing}:
    sys.modules["mpi4jax"] = None  # an import of it raises
import jax, jax.numpy as jnp, numpy as np, jaxmpi
from jax import lax
rank, size = jaxmpi.init().rank, jaxmpi.size()
columns, rows = np.arange(7.0, dtype=np.float32), np.arange(size, dtype=np.float32)
xs = columns + 10 * rows[:, None]  # a row for each rank

@jax.jit
def all_kinds(x):
    thrice, _ = lax.scan(lambda c, _: (jaxmpi.tree_allreduce(c, "sum"), None), x, None, length=3)
    sent, rows = jaxmpi.tree_bcast(x, 1), jnp.stack([x + q for q in range(size)])
    return sent, jaxmpi.tree_alltoall(rows), thrice

pairs = [(p, (p + 1) % size) for p in range(size)]
moved = jaxmpi.jit(lambda x: lax.ppermute(x, jaxmpi.AXIS, pairs))(xs[rank])
root, rows, thrice = all_kinds(xs[rank])
np.testing.assert_array_equal(moved, xs[rank - 1])
np.testing.assert_array_equal(root, xs[1])
np.testing.assert_array_equal(rows, xs + rank)
np.testing.assert_array_equal(thrice, 9 * xs.sum(0))
jaxmpi.print(jaxmpi._world.session.current("test").transport.name, sys.modules.get("mpi4jax"))
"""
    done = run(3, code, tmp_path)
    assert done.returncode == 0 and done.stdout.count("native None") == 3, done.stdout + done.stderr


@pytest.mark.slow
def test_a_chunk_without_room_for_an_item_names_its_setting(tmp_path):
    code = "import jaxmpi\njaxmpi.init()\njaxmpi.tree_allreduce(1.0)\n"
    done = run(2, code, tmp_path, JAXMPI_NODE_RANKS="1", JAXMPI_TUNE="chunk_bytes=2")
    text = "a chunk has 2 bytes, and this collective of 2 ranks needs 4 or more. Set chunk_bytes in"
    assert done.returncode and text in done.stderr, done.stdout + done.stderr
