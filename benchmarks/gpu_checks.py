"""Checks that gpu.py runs, each in its own processes; each result is printed as a line of JSON.

    jaxmpi run -n 2 benchmarks/gpu_checks.py collectives

The docstrings of the functions say what each shows. On CPUs they run as well, with smaller arrays.
"""

import argparse
import ctypes
import gzip
import itertools
import json
import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import step_models
from jax import lax
from models import resnet50

import jaxmpi

AXIS = jaxmpi.AXIS
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "complex64", "bool")


def say(what, value, unit="", right=True, note=""):
    """Print one line of results on rank 0, right only if it is right on all ranks."""
    right = all(jaxmpi.allgather_object(bool(right))) if jaxmpi.size() > 1 else bool(right)
    if jaxmpi.rank() == 0:
        line = {"what": what, "value": value, "unit": unit, "right": right, "note": note}
        print("RESULT " + json.dumps(line), flush=True)


def median_of(call, seconds=1.0):
    """Return the seconds of a call: the median over all ranks, and its quartiles."""
    for _ in range(3):
        jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(
        jaxmpi.allgather_object(int(np.clip(seconds / (time.perf_counter() - start), 5, 300)))
    )
    took = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(call())
        took.append(time.perf_counter() - start)
    return [float(q) for q in np.percentile(jaxmpi.allgather_object(took), [25, 50, 75])]


def numbers(rank, shape, dtype):
    """Make whole numbers, which every dtype sums without rounding."""
    found = np.random.default_rng(rank).integers(0, 5, shape)
    return found.astype(bool) if dtype == "bool" else np.asarray(found, dtype=jnp.dtype(dtype))


def cases(n):
    """Return {name: (traced function, expected result on rank r from all ranks' arrays)}."""
    turn = [(r, (r + 1) % n) for r in range(n)]
    return {
        "psum": (lambda x: lax.psum(x, AXIS), lambda xs, r: sum(xs)),
        "pmax": (lambda x: lax.pmax(x, AXIS), lambda xs, r: np.max(xs, 0)),
        "all_gather": (lambda x: lax.all_gather(x, AXIS), lambda xs, r: np.stack(xs)),
        "psum_scatter": (
            lambda x: lax.psum_scatter(x, AXIS, tiled=True),
            lambda xs, r: np.split(sum(xs), n)[r],
        ),
        "all_to_all": (
            lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
            lambda xs, r: np.concatenate([np.split(x, n)[r] for x in xs]),
        ),
        "ppermute": (lambda x: lax.ppermute(x, AXIS, turn), lambda xs, r: xs[(r - 1) % n]),
        "tree_bcast": (lambda x: jaxmpi.tree_bcast(x, root=n - 1), lambda xs, r: xs[n - 1]),
    }


def collectives():
    """Check every collective and dtype on the device, before and after computation.

    Also checks aliasing, loops, and arrays that live on the CPU.
    """
    world = jaxmpi.init()
    n, rank = world.size, world.rank
    say(
        "device",
        f"{world.device.platform}, {world.device.device_kind}, backend {world.backend}",
        note=f"{n} ranks",
    )
    for name, (traced, expected) in cases(n).items():
        reduces = name in ("psum", "pmax", "psum_scatter")
        without = {"bool"} if reduces else set()
        if name == "pmax":
            without.add("complex64")
        dtypes = [dtype for dtype in DTYPES if dtype not in without]
        xs = [[] for _ in range(n)]  # [ranks][arrays]
        for r, dtype in itertools.product(range(n), dtypes):
            xs[r].append(numbers(r, (n * 3,), dtype))
            xs[r].append(numbers(r, (n * 50_000, 5), dtype))
        done = jaxmpi.jit(partial(jax.tree.map, traced))([jnp.asarray(x) for x in xs[rank]])
        wrong = []
        for x, y, *of_ranks in zip(xs[rank], done, *xs, strict=True):
            if not np.array_equal(np.asarray(y), expected(of_ranks, rank)):
                wrong.append(f"{x.dtype}{list(x.shape)}")
        say(
            name,
            f"{len(done)} arrays",
            right=not wrong,
            note=f"wrong: {wrong}" if wrong else ", ".join(dtypes),
        )

    # A message waits for what is computed before it, and what is computed behind it waits for the
    # message.
    @jaxmpi.jit
    def between(x):
        for _ in range(4):
            x = x @ x / jnp.linalg.norm(x)
        y = lax.pmean(x, AXIS)
        return y, y @ y

    side = 256 if world.device.platform == "cpu" else 4096
    x = jnp.asarray(np.random.default_rng(rank).standard_normal((side, side), np.float32))
    right = True
    for _ in range(20):
        mean, square = between(x)
        everyone = jaxmpi.allgather_object([float(jnp.sum(mean)), float(jnp.sum(square))])
        right = (
            right and all(one == everyone[0] for one in everyone) and np.isfinite(everyone).all()
        )
    local = np.mean(jaxmpi.allgather_object(_powers(x)), axis=0)
    error = float(np.max(np.abs(np.asarray(mean)[:8] - local)) / np.max(np.abs(local)))
    say("computation, message, computation: error", error, right=right and error < 1e-4)

    # What is donated is used again only when it is free.
    @partial(jaxmpi.jit, donate_argnums=0)
    def donated(x, y):
        return lax.psum(x + y, AXIS) / n, lax.psum(x, AXIS)

    x = jnp.arange(100_000.0) + rank
    right = True
    for turn in range(50):
        x, before = donated(x, jnp.ones_like(x))
        mean = np.arange(100_000.0) + (n - 1) / 2 + turn
        if turn == 0:
            right = right and np.allclose(before, n * mean)
        right = right and np.allclose(x, mean + 1)
    say("donated state over 50 steps", right, right=right)

    def plus_rank(x):
        return lax.pmean(x + lax.axis_index(AXIS), AXIS)

    @jaxmpi.jit
    def looped(x):
        def turn(x, k):
            x = lax.cond(k % 2 == 0, plus_rank, lambda x: x * 2, x)
            return x, lax.psum(jnp.sum(x), AXIS)

        return lax.scan(turn, x, jnp.arange(6))

    x, sums = looped(jnp.zeros(1000))
    want, each = 0.0, []
    for k in range(6):
        want = want + (n - 1) / 2 if k % 2 == 0 else want * 2
        each.append(1000 * n * want)
    right = np.allclose(x, want) and np.allclose(sums, each)
    say("messages in a loop and a branch", right, right=right)

    grads = jaxmpi.jit(jax.grad(lambda x: jnp.sum(lax.psum(x, AXIS) ** 2)))(
        jnp.full(1000, rank + 1.0)
    )
    right = np.allclose(grads, 2 * n * n * (n + 1) / 2)
    say("the derivative of a message", right, right=right)

    tree = {f"a{i}": jnp.full(shape, rank + i, jnp.float32) for i, shape in enumerate(resnet50())}
    mean = jaxmpi.jit(lambda tree: jaxmpi.tree_allreduce(tree, "mean"))(tree)
    right = all(np.all(np.asarray(mean[f"a{i}"]) == (n - 1) / 2 + i) for i in range(len(tree)))
    say(f"the mean of {len(tree)} arrays", right, right=right)

    if world.device.platform != "cpu" and world.backend == "mpi":
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            right = np.allclose(
                jaxmpi.jit(lambda x: lax.psum(x, AXIS))(jnp.full(1000, rank + 1.0)), n * (n + 1) / 2
            )
        say("arrays of the CPU in a job of GPUs", right, right=right)
    try:
        jaxmpi.jit(lambda x: lax.psum(x, AXIS))(jnp.zeros(3 + (rank == n - 1)))
        said = "nothing"
    except jaxmpi.RankMismatchError as error:
        said = str(error)
    if n > 1:
        say(
            "shapes that differ are an error on each rank",
            said.splitlines()[0],
            right="float32[3]" in said and "float32[4]" in said,
        )
    x = jaxmpi.jit(lambda x: lax.psum(x, AXIS))(jnp.ones(3))
    say("messages after the error", float(x[0]), right=float(x[0]) == n)


def _powers(x):
    for _ in range(4):
        x = x @ x / jnp.linalg.norm(x)
    return np.asarray(x)[:8]


def staging():
    """Measure GB/s of a mean of device arrays, of CPU arrays, and of copies of pinned memory."""
    world = jaxmpi.init()
    on_gpu = world.device.platform != "cpu"
    big = 25_600_000 if on_gpu else 250_000
    mean = jaxmpi.jit(lambda tree: lax.pmean(tree, AXIS))
    trees = {
        "1 KB": [256],
        "1 MB": [262_144],
        "100 MB": [big],
        "ResNet-50": [int(np.prod(s)) for s in resnet50()] if on_gpu else [1000] * 161,
    }
    for name, sizes in trees.items():
        bytes_ = 4 * sum(sizes)
        for where in ("GPU", "CPU") if on_gpu else ("CPU",):
            device = jax.local_devices(backend=where.lower())[0]
            with jax.default_device(device):
                tree = []
                for k in sizes:
                    x = jnp.full(k, world.rank + 1.0, jnp.float32)
                    tree.append(jax.device_put(x, device))
                low, median, high = median_of(lambda tree=tree: mean(tree))
            say(
                f"mean of {name}, {len(sizes)} arrays, on the {where}",
                round(1e3 * median, 4),
                "ms",
                note=f"quartiles {1e3 * low:.3f} to {1e3 * high:.3f}; "
                f"{bytes_ / median / 1e9:.2f} GB/s",
            )
    if on_gpu:
        _plain_copies(world)


def _plain_copies(world):
    """Measure GB/s between pinned host memory and the GPU on one rank, while the others wait."""
    cuda = ctypes.CDLL("libcuda.so.1")
    size, context, device, host, gpu = (
        100 << 20,
        ctypes.c_void_p(),
        ctypes.c_int(),
        ctypes.c_void_p(),
        ctypes.c_uint64(),
    )
    codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0)]
    codes += [
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxPushCurrent_v2(context),
    ]
    codes += [cuda.cuMemHostAlloc(ctypes.byref(host), ctypes.c_size_t(size), 0)]
    codes += [cuda.cuMemAlloc_v2(ctypes.byref(gpu), ctypes.c_size_t(size))]
    ways = {
        "to the host": lambda n: cuda.cuMemcpyDtoH_v2(host, gpu, ctypes.c_size_t(n)),
        "to the GPU": lambda n: cuda.cuMemcpyHtoD_v2(gpu, host, ctypes.c_size_t(n)),
    }
    found = {}
    if world.rank == 0:
        for name, copy in ways.items():
            for n in (4096, 4 << 20, size):
                took = []
                for _ in range(20):
                    start = time.perf_counter()
                    codes.append(copy(n))
                    took.append(time.perf_counter() - start)
                found[f"plain copy {name}, {n} bytes"] = float(np.median(took)), n
    for name, (seconds, n) in jaxmpi.broadcast_object(found).items():
        say(
            name,
            round(n / seconds / 1e9, 2),
            "GB/s",
            right=not any(codes),
            note=f"{1e6 * seconds:.1f} µs",
        )


def _step_of(model, cpu):
    """Build one model's train step, sized for the device; return (step, optimizer, params, batch).

    `step(params, opt_state, batch)` is built for any optimizer.
    """
    if model == "digits":
        loss_of, params, batch = step_models.cnn()
        optimizer, dtype = optax.adamw(3e-3), jnp.float32
    elif model == "resnet50":
        loss_of, params, _ = step_models.resnet_50()
        optimizer, dtype = optax.sgd(0.01, momentum=0.9), jnp.bfloat16
        count, pixels = (2, 32) if cpu else (128, 224)
        rng = np.random.default_rng(1)
        batch = (
            rng.normal(size=(count, pixels, pixels, 3)).astype(np.float32),
            rng.integers(0, 1000, count),
        )
    else:
        shape = (2, 64, 4, 32, 2) if cpu else (12, 768, 12, 512, 16)
        loss_of, params, batch = step_models.stacked_gpt(*shape)
        optimizer, dtype = optax.adam(1e-4), jnp.bfloat16

    def lowered(tree):
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def step_with(optimizer):
        def step(params, opt_state, batch):
            def wide_loss(params):
                return loss_of(lowered(params), lowered(batch)).astype(jnp.float32)

            loss, grads = jax.value_and_grad(wide_loss)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        return step

    return step_with, optimizer, jax.tree.map(jnp.asarray, params), jax.tree.map(jnp.asarray, batch)


def steps(model):
    """Compare a train step of jaxmpi.jit and `distributed` with plain JAX, in one process."""
    world = jaxmpi.init()
    cpu = world.device.platform == "cpu"
    step_with, optimizer, params, batch = _step_of(model, cpu)
    averaged = jaxmpi.distributed(optimizer)
    contenders = {
        "plain JAX": jax.jit(step_with(optimizer), donate_argnums=(0, 1)),
        "jaxmpi": jaxmpi.jit(
            step_with(averaged),
            donate_argnums=(0, 1),
            replicated_argnums=(0, 1),
            replicated_outnums=(0, 1),
        ),
    }
    states, losses, took, compiled = {}, {}, {}, {}
    for name, step in contenders.items():
        state = jax.tree.map(
            jnp.copy, (params, (averaged if name == "jaxmpi" else optimizer).init(params))
        )
        start = time.perf_counter()
        for _ in range(5):
            *state, loss = step(*state, batch)
        losses[name], states[name], took[name] = float(loss), state, []
        compiled[name] = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(
        contenders["plain JAX"](*jax.tree.map(jnp.copy, states["plain JAX"]), batch)
    )
    turns = int(np.clip(0.3 / (time.perf_counter() - start), 3, 100))
    rounds, turns = (2, 1) if cpu else (8, max(jaxmpi.allgather_object(turns)))
    for turn in range(rounds):
        for name in list(contenders)[:: 1 - 2 * (turn % 2)]:
            jaxmpi.barrier()
            start = time.perf_counter()
            for _ in range(turns):
                *states[name], loss = contenders[name](*states[name], batch)
            jax.block_until_ready(loss)
            took[name].append((time.perf_counter() - start) / turns)
    ms = {name: 1e3 * np.median(jaxmpi.allgather_object(values)) for name, values in took.items()}
    ratios = np.divide(took["jaxmpi"], took["plain JAX"])
    difference = abs(losses["jaxmpi"] / losses["plain JAX"] - 1)
    about = f"{world.backend}, {world.size} ranks"
    for name in contenders:
        say(
            f"{model}, {about}: {name}",
            round(ms[name], 4),
            "ms a step",
            note=f"first five steps {compiled[name]:.1f} s",
        )
    say(
        f"{model}, {about}: jaxmpi / plain JAX",
        round(float(np.median(ratios)), 4),
        "times",
        note=f"{rounds} turns of {turns} steps: {ratios.min():.3f} to {ratios.max():.3f}",
    )
    same = difference < (1e-5 if model == "digits" else 5e-3)
    say(
        f"{model}, {about}: the loss after five steps, relative difference",
        difference,
        right=same,
        note=str(losses),
    )
    text = contenders["jaxmpi"].lower(*states["jaxmpi"], batch).as_text()
    say(f"{model}, {about}: all-reduces of XLA in the program", text.count("all_reduce"))


def overlap():
    """Compare a step that communicates while the GPU computes with one that waits."""
    world = jaxmpi.init("mpi")
    step_with, optimizer, params, batch = _step_of("gpt", world.device.platform == "cpu")
    optimizer = jaxmpi.distributed(optimizer)
    finals, ms = {}, {}
    reproducible = {} if world.device.platform == "cpu" else {"xla_gpu_deterministic_ops": True}
    for mode in ("0", "1"):
        os.environ["JAXMPI_OVERLAP"] = mode
        step = jaxmpi.jit(
            step_with(optimizer), replicated_argnums=(0, 1), compiler_options=reproducible
        )
        state = params, optimizer.init(params)
        for _ in range(3):
            *state, loss = step(*state, batch)
        start = time.perf_counter()
        for _ in range(5):
            *state, loss = step(*state, batch)
        jax.block_until_ready(loss)
        ms[mode] = 1e3 * (time.perf_counter() - start) / 5
        finals[mode] = [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(state[0]))]
    say(
        "messages beside computation: time over that of messages at once",
        round(ms["1"] / ms["0"], 3),
        "times",
        note=str(ms),
    )
    say(
        "messages beside computation: the same bits",
        finals["0"] == finals["1"],
        right=finals["0"] == finals["1"],
    )


def _training(directory, until):
    """Train with a checkpoint every second step, from the newest; return the parameters' bytes."""
    rng = np.random.default_rng(0)
    batches = rng.normal(size=(10, 4, 16)).astype(np.float32)
    optimizer = jaxmpi.distributed(optax.adam(1e-2))

    @jaxmpi.jit
    def step(params, opt_state, batch):
        grads = jax.grad(lambda params: jnp.mean((batch @ params["w"]) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.ones((16, 16))}
    state, start = (params, optimizer.init(params)), 0
    if jaxmpi.checkpoint.latest(directory) is not None:
        state, start = (
            jaxmpi.checkpoint.restore(directory, state),
            jaxmpi.checkpoint.latest(directory),
        )
    for number in range(start, until):
        state = step(*state, jnp.asarray(jaxmpi.shard(batches[number])[:]))
        if number % 2 == 1:
            jaxmpi.checkpoint.save(directory, number + 1, state)
    return np.asarray(state[0]["w"]).tobytes()


def checkpoint(directory):
    """Check that a resumed run on the device ends with the bits of an undisturbed one."""
    jaxmpi.init()
    whole = _training(Path(directory) / "whole", 8)
    _training(Path(directory) / "parts", 4)
    resumed = _training(Path(directory) / "parts", 8)
    say("bits after a restart from a checkpoint", whole == resumed, right=whole == resumed)


def killed():
    """Kill one rank, and expect the job to end with an error."""
    _until(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stalled():
    """Stop one rank, and expect the others to report it and the job to end."""
    _until(lambda: time.sleep(3600))


def out_of_memory():
    """Check that a program too large for the GPU raises on its rank, and that the job then ends."""
    world = jaxmpi.init()
    size = 10**14 if world.rank == 0 else 10
    jax.block_until_ready(jax.jit(lambda: jnp.zeros(size, jnp.float32) + 1)())
    jaxmpi.barrier()


def _until(ends):
    world = jaxmpi.init()
    step = jaxmpi.jit(lambda x: lax.pmean(x, AXIS) + 1)
    x = jnp.zeros(1_000_000)
    for number in range(1000):
        if number == 20 and world.rank == world.size - 1:
            ends()
        x = step(x)
        x.block_until_ready()


def profile(directory):
    """Show where the time of a mean of ResNet-50's arrays goes.

    Prints the stages of its staging, and the longest events that JAX's profiler sees.
    """
    from jaxmpi import _native

    world = jaxmpi.init()
    mean = jaxmpi.jit(lambda tree: lax.pmean(tree, AXIS))
    tree = [jnp.full(int(np.prod(shape)), 1.0) for shape in resnet50()]
    jax.block_until_ready(mean(tree))
    folder = Path(directory) / f"profile-{world.rank}"
    before = _native.staged_ns()
    with jax.profiler.trace(folder):
        for _ in range(5):
            jax.block_until_ready(mean(tree))
    spent, calls = Counter(), Counter()
    for path in folder.rglob("*.trace.json.gz"):
        for event in json.loads(gzip.open(path).read())["traceEvents"]:
            # those are frames of Python
            if event.get("ph") == "X" and not event["name"].startswith("$"):
                spent[event["name"][:60]] += event.get("dur", 0)
                calls[event["name"][:60]] += 1
    for name, start, end in zip(
        ("waits for the GPU and for copies", "shared memory"),
        before,
        _native.staged_ns(),
        strict=True,
    ):
        say(f"profile: {name}", round((end - start) / 5e3, 1), "µs a mean")
    for name, us in spent.most_common(12):
        say(f"profile: {name}", round(us / 5, 1), "µs a mean", note=f"{calls[name] / 5:g} a mean")


PARTS = (collectives, staging, steps, overlap, checkpoint, killed, stalled, out_of_memory, profile)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[part.__name__ for part in PARTS])
    parser.add_argument(
        "arguments", nargs="*", help="the model of steps, the folder of checkpoint and profile"
    )
    options = parser.parse_args()
    {part.__name__: part for part in PARTS}[options.part](*options.arguments)
