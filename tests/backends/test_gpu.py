"""GPU arrays on the native transport, tested without a GPU.

A library that stands in for CUDA's driver serves arrays of the host as if they were a GPU's. Checks
that need a real GPU are in benchmarks/gpu.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_native import run

ROOT = Path(__file__).parents[2]
HERE, NATIVE = ROOT / "tests/backends", ROOT / "native"
COMPILE = ("c++", "-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror")
SEEDS, SANITIZED = 10_000, 1_000


@pytest.fixture(scope="module")
def stand_in_for_cuda(tmp_path_factory):
    """A library with the functions of CUDA's driver that are called, for arrays of the host."""
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so"
    subprocess.run(
        [*COMPILE, "-shared", "-fPIC", "-o", library, HERE / "stand_in_for_cuda.cc"], check=True
    )
    return str(library)


# what happens when


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "flags"),
    [
        (SEEDS, ()),
        (SANITIZED, ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")),
        (SANITIZED, ("-fsanitize=thread",)),
    ],
)
def test_messages_of_a_gpu_in_many_orders(stand_in_for_cuda, seeds, flags, tmp_path):
    """Messages on several streams and contexts, in random order, give right numbers or an error.

    Calls of the driver fail at random.
    """
    program = tmp_path / "schedules"
    sources = [HERE / "staging_schedules.cc", NATIVE / "gpu_staging.cc", NATIVE / "cuda.cc"]
    subprocess.run([*COMPILE, *flags, f"-I{NATIVE}", "-o", program, *sources, "-ldl"], check=True)
    # pinned memory is kept as long as the process lives
    environ = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [program, stand_in_for_cuda, "0", str(seeds)], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{seeds} schedules" in done.stdout and ", 0 wrong" in done.stdout


# the kernel

nvcc = pytest.mark.skipif(
    not shutil.which("nvcc"), reason="nvcc compiles the kernel, where it is installed"
)


@nvcc
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_the_kernel_compiles_without_warnings(chip, tmp_path):
    flags = [
        "-cubin",
        f"-arch={chip}",
        "-std=c++17",
        "-Werror",
        "all-warnings",
        "-Xptxas",
        "-warn-spills",
    ]
    subprocess.run(
        ["nvcc", *flags, "-o", tmp_path / "gather.cubin", NATIVE / "gather.cu"], check=True
    )


@nvcc
def test_the_extension_has_what_the_compiler_makes_of_the_kernel():
    subprocess.run([sys.executable, ROOT / "packaging/ptx.py", "--check"], check=True)


# whole programs

STAGED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import jaxmpi
import jaxmpi._native as extension
from jaxmpi._backends import native, start

handler = extension.handler
extension.handler = lambda name: handler("rehearsal" if name == "host" else name)
native.on_host = lambda: False
start.why_not_native = lambda: extension.use_cuda({library!r}) or None
w = jaxmpi.init()
n, me = w.size, w.rank
columns = [1, 7, 2_500_000, 0, 64, 70_001]  # several batches, which end in the middle of arrays
rng = np.random.default_rng(0)
for dtype in ("float32", "bfloat16", "int8", "complex128"):
    data = [np.asarray(jnp.asarray(rng.normal(size=(n, k)) * 9, dtype)) for k in columns]
    mine = [x[me] for x in data]
    exact = [x.astype(np.complex128 if dtype == "complex128" else np.float64).sum(0) for x in data]
    for got, want in zip(jaxmpi.tree_allreduce(mine, "sum"), exact):
        want = want.astype(np.int64).astype(np.int8) if dtype == "int8" else want
        scale = 2e-2 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(got.astype(want.dtype), want, rtol=scale, atol=10 * scale)
    for got, want in zip(jaxmpi.tree_allgather(mine), data):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(jaxmpi.tree_bcast(mine, root=n - 1), data):
        np.testing.assert_array_equal(got, want[n - 1])
blocks = np.arange(n * n * 700_001, dtype=np.float32).reshape(n, n, 700_001) % 1009
np.testing.assert_array_equal(jaxmpi.tree_reduce_scatter(blocks[me], "sum"), blocks.sum(0)[me])

@jaxmpi.jit
def step(x, rows):
    ring = [(p, (p + 1) % n) for p in range(n)]
    x = x * 2
    mean, moved = lax.pmean(x, jaxmpi.AXIS), lax.ppermute(x, jaxmpi.AXIS, ring)
    return mean, moved, lax.all_to_all(rows, jaxmpi.AXIS, 0, 0)

for _ in range(3):
    mean, before, rows = step(jnp.full(1000, me + 1.0), jnp.asarray(blocks[me]))
    np.testing.assert_array_equal(mean, np.full(1000, n + 1.0))
    np.testing.assert_array_equal(before, np.full(1000, 2.0 * ((me - 1) % n + 1)))
    np.testing.assert_array_equal(rows, blocks[:, me])
try:
    jaxmpi.tree_allreduce(np.ones(3 if me else 4, np.float32))
except jaxmpi.RankMismatchError as error:
    assert "float32[3]" in str(error) and "float32[4]" in str(error)
    jaxmpi.print("caught on", me)
assert jaxmpi.allgather_object(float(jaxmpi.tree_allreduce(1.0, "sum"))) == [n] * n
jaxmpi.print("fine on", me)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_CONTEXTS": "2", "CUDA_EVENTS": "18"},
        {"CUDA_HURRIES": "1"},
        pytest.param({"CUDA_SEED": "1"}, marks=pytest.mark.exhaustive),
        pytest.param({"CUDA_NO_KERNELS": "1"}, marks=pytest.mark.exhaustive),
    ],
)
def test_arrays_of_a_gpu_are_staged(stand_in_for_cuda, environ, tmp_path):
    """Copies may happen as late, and as early, as a GPU's; two contexts alternate."""
    done = run(3, STAGED.replace("{library!r}", repr(stand_in_for_cuda)), tmp_path, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine on") == 3 and done.stdout.count("caught on") == 3


@pytest.mark.slow
def test_an_error_of_the_gpu_is_one_of_the_step(stand_in_for_cuda, tmp_path):
    code = STAGED.replace("{library!r}", repr(stand_in_for_cuda))
    done = run(2, code, tmp_path, CUDA_FAILS_AFTER="3")
    assert done.returncode != 0
    assert (
        "cuMemcpyAsync failed: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)"
        in done.stdout + done.stderr
    )


WORKS = """
import importlib, os, sys, threading, time
import jax.numpy as jnp
import jaxmpi
from jaxmpi._backends import native, start

extension = importlib.import_module("jaxmpi._native")
handler = extension.handler
extension.handler = lambda name: handler("rehearsal" if name == "host" else name)
native.on_host = lambda: False
start.why_not_native = lambda: extension.use_cuda({library!r}) or None
world = jaxmpi.init()
slow = world.rank == world.size - 1
step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))
step(jnp.ones(1000)).block_until_ready()
jaxmpi.barrier()
os.environ["CUDA_WORKS_MS"] = "1000" if slow else "0"
inside = []
def look():
    for _ in range(20):
        inside.append(extension.messages())
        time.sleep(0.02)

thread = threading.Thread(target=look)
thread.start()
step(jnp.ones(1000)).block_until_ready()
thread.join()
_, _, _, start, met, end = extension.events()[-1]
waited = (met - start) / 1e9
print("waited", waited, flush=True)
assert (waited < 0.5) if slow else (waited > 0.5), waited
assert not slow or all(started == ended for started, ended in inside), inside
jaxmpi.print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_work_of_a_gpu_is_no_waiting(stand_in_for_cuda, ranks, tmp_path):
    """The flight recorder and the stall watch count a message from when the GPU reaches it.

    Work of the GPU before that is not waiting.
    """
    done = run(ranks, WORKS.replace("{library!r}", repr(stand_in_for_cuda)), tmp_path)
    assert done.returncode == 0 and done.stdout.count("fine") == ranks, done.stdout + done.stderr


BESIDE = """
import importlib, os
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import jaxmpi
from jaxmpi._backends import native, start

extension = importlib.import_module("jaxmpi._native")
handler, rehearsed = extension.handler, {{"host": "rehearsal", "start": "start_rehearsal"}}
extension.handler = lambda name: handler(rehearsed.get(name, name))
native.on_host = lambda: False
start.why_not_native = lambda: extension.use_cuda({library!r}) or None
w = jaxmpi.init()
n = w.size

def loss(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer)
    return jnp.mean(x**2)

def step(params, x):
    grads = jax.grad(loss)(params, x)
    rows = jnp.tile(x[:1], (n, 1)) * (1 + lax.axis_index(jaxmpi.AXIS))
    moved = lax.all_to_all(rows, jaxmpi.AXIS, 0, 0, tiled=True).sum()
    moved += lax.all_gather(x[0], jaxmpi.AXIS).sum()
    params = [p - 0.1 * g for p, g in zip(params, jaxmpi.tree_allreduce(grads))]
    return params, moved + jnp.tanh(x @ x.T).sum()

params = [np.random.default_rng(i).normal(size=(700, 700)) / 26 for i in range(4)]
params = [jnp.asarray(x, jnp.float32) for x in params]
x = jnp.asarray(np.random.default_rng(w.rank).normal(size=(8, 700)), jnp.float32)
found = []
for mode in "01":
    os.environ["JAXMPI_OVERLAP"] = mode
    jitted, out = jaxmpi.jit(step), (params, 0)
    assert ("jaxmpi_start" in jitted.lower(params, x).as_text()) == (mode == "1")
    for turn in range(4):
        os.environ["CUDA_WORKS_MS"] = str(20 * (turn % 2))
        out = jitted(out[0], x)
    found.append(jax.device_get(out))
for a, b in zip(*map(jax.tree.leaves, found)):
    assert a.tobytes() == b.tobytes()
jaxmpi.print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "environ",
    [{"CUDA_CONTEXTS": "2", "CUDA_EVENTS": "44"}, {"CUDA_SEED": "1", "CUDA_EVENTS": "22"}],
)
def test_messages_of_a_gpu_are_on_their_way_while_it_computes(stand_in_for_cuda, environ, tmp_path):
    """Messages have their own stream, and start once the GPU has computed what they send.

    Each message has one event, which is reused.
    """
    environ = {**environ, "JAXMPI_NODE_RANKS": "1", "JAXMPI_TUNE": "small_bytes=0,bucket_bytes=1"}
    done = run(3, BESIDE.format(library=stand_in_for_cuda), tmp_path, **environ)
    assert done.returncode == 0 and done.stdout.count("fine") == 3, done.stdout + done.stderr


BOTH = """
import importlib
import jax, jax.numpy as jnp, numpy as np
import jaxmpi
from jaxmpi._backends import native, start

extension = importlib.import_module("jaxmpi._native")
native.on_host = lambda: False
start.why_not_native = lambda: extension.use_cuda({library!r}) or None
registered, register = [], jax.ffi.register_ffi_target
def noted(name, handler, platform="cpu", **options):
    registered.extend([platform] * (name == "jaxmpi_collective"))
    register(name, handler, platform=platform, **options)
jax.ffi.register_ffi_target = noted
world = jaxmpi.init()
assert registered == ["cpu", "CUDA"], registered  # of jaxmpi_collective
n = world.size
total = jaxmpi.tree_allreduce(jnp.arange(5.0) + world.rank, "sum")
np.testing.assert_array_equal(total, n * np.arange(5.0) + n * (n - 1) / 2)
with jax.default_device(jax.devices("cpu")[0]):
    mean = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))(jnp.full(3, float(world.rank)))
np.testing.assert_array_equal(mean, np.full(3, (n - 1) / 2))
jaxmpi.print("fine")
"""


@pytest.mark.slow
def test_arrays_of_the_host_in_a_job_of_gpus(stand_in_for_cuda, tmp_path):
    """Host arrays go straight through shared memory, without the GPU's driver, which fails here."""
    done = run(
        2, BOTH.replace("{library!r}", repr(stand_in_for_cuda)), tmp_path, CUDA_FAILS_AFTER="0"
    )
    assert done.returncode == 0 and done.stdout.count("fine") == 2, done.stdout + done.stderr
