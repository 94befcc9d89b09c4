"""Random trees, random kills and a long run.

`make test-all ONLY=soak` takes 10,000 trees, 200 kills and 30 minutes.
"""

import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_monitor import end, jaxmpi_run

import jaxmpi
from jaxmpi.testing import run_ranks


def few_and_many(name, few, many):
    """Run a test with few of something in the suite `exhaustive`, with many in `soak`."""
    marked = [
        pytest.param(few, marks=pytest.mark.exhaustive),
        pytest.param(many, marks=pytest.mark.soak),
    ]
    return pytest.mark.parametrize(name, marked)


OPS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}
DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint16", "bool", "complex64")


def random_tree(rng, op):
    """Make a random structure with shapes and dtypes."""
    without = "bool" if op in ("sum", "mean", "prod") else "complex64"
    kinds = [dtype for dtype in DTYPES if dtype != without]

    def node(depth):
        what = rng.integers(4) if depth < 3 else 3
        if what == 0:
            return {f"k{i}": node(depth + 1) for i in range(rng.integers(0, 4))}
        if what == 1:
            return [node(depth + 1) for _ in range(rng.integers(0, 4))]
        if what == 2:
            return (node(depth + 1), None)
        shape = tuple(int(n) for n in rng.integers(0, 7, rng.integers(0, 4)))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(rng.choice(kinds)))

    return node(0)


def filled(tree, seed, rank):
    rng = np.random.default_rng([seed, rank])

    def fill(x):
        return jnp.asarray(rng.integers(0, 3, x.shape), x.dtype)  # all sums and products are exact

    return jax.tree.map(fill, tree)


def reduced(op, *xs):
    ordered = [x.real for x in xs] if op in ("max", "min") else xs
    return OPS[op](np.stack(ordered), axis=0)


@few_and_many("trees", 60, 10_000)
@run_ranks(2, 3, timeout_seconds=7200.0)
def test_random_trees(trees):
    size, here = jaxmpi.size(), jaxmpi.rank()
    for seed in range(trees):
        rng = np.random.default_rng(seed)
        kind = rng.choice(["allreduce", "bcast", "allgather"])
        op, root = str(rng.choice(list(OPS))), int(rng.integers(size))
        tree = random_tree(rng, op)
        all_ranks = [filled(tree, seed, rank) for rank in range(size)]
        wide = [
            jax.tree.map(lambda x: np.asarray(x).astype(np.complex128), one) for one in all_ranks
        ]
        if kind == "allreduce":
            got, want = (
                jaxmpi.tree_allreduce(all_ranks[here], op=op),
                jax.tree.map(partial(reduced, op), *wide),
            )
        elif kind == "bcast":
            got, want = jaxmpi.tree_bcast(all_ranks[here], root=root), wide[root]
        else:
            got, want = (
                jaxmpi.tree_allgather(all_ranks[here]),
                jax.tree.map(lambda *xs: np.stack(xs), *wide),
            )
        assert jax.tree.structure(got) == jax.tree.structure(want), seed
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            exact = np.asarray(x).astype(np.complex128)
            if op == "mean" and kind == "allreduce":
                integer = jnp.issubdtype(x.dtype, jnp.integer)
                y = np.floor(y.real + 1e-9) if integer else y
                np.testing.assert_allclose(
                    exact, y, 1e-2 if x.dtype.itemsize == 2 else 1e-6, err_msg=str(seed)
                )
            else:
                np.testing.assert_array_equal(exact, y, err_msg=str(seed))
        if seed % 200 == 199:
            jax.clear_caches()  # of 10 000 programs


@few_and_many("n", 2**18 + 9, 2**31 + 9)
@run_ranks(2, timeout_seconds=600.0)
def test_more_numbers_than_an_int32_counts(n):
    here = jaxmpi.rank()
    sums = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x, op="sum"), donate_argnums=0)
    x = np.full(n, here + 1, np.int8)  # NumPy's, as JAX without x64 indexes with 32 bits
    x[-1], x[n // 2] = 10 * here, 20 + here
    got = np.asarray(sums(jnp.asarray(x)))
    assert got.shape == (n,) and got[-1] == 10 and got[n // 2] == 41 and got[0] == 3
    assert np.count_nonzero(got == 3) == n - 2


KILLED = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np, optax
import jaxmpi
world = jaxmpi.init()
directory, kills, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
attempt = int(os.environ["JAXMPI_RESTART"])
chance = np.random.default_rng(attempt)
if attempt < kills and chance.integers(world.size) == world.rank:
    threading.Timer(chance.uniform(0, 1.5), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
elif attempt < kills:
    chance.uniform(0, 1.5)
samples = 50
data = (np.arange(samples), np.random.default_rng(0).normal(size=(samples, 3)).astype(np.float32))
tx = jaxmpi.sharded(optax.adam(0.1))

@jaxmpi.jit
def step(run, batch, mask):
    number, x = batch
    def loss(p):
        return jnp.sum(jnp.where(mask, (x @ p) ** 2, 0))
    updates, state = tx.update(jax.grad(loss)(run["params"]), run["state"], run["params"])
    seen = jnp.zeros(samples, jnp.int32).at[number].add(mask.astype(jnp.int32))
    return run | {
        "params": optax.apply_updates(run["params"], updates),
        "state": state,
        "seen": run["seen"] + jaxmpi.tree_allreduce(seen, op="sum"),
        "row": jnp.minimum(run["row"] + 8, samples),
    }

params = jnp.ones(3)
zero = jnp.int32(0)
run = {
    "params": params,
    "state": tx.init(params),
    "seen": jnp.zeros(samples, jnp.int32),
    "epoch": zero,
    "row": zero,
}
if jaxmpi.latest(directory) is not None:
    run = jaxmpi.restore(directory, run)
for epoch in range(int(run["epoch"]), epochs):
    rest = {"seed": 0, "epoch": epoch, "start": int(run["row"]), "remainder": "mask"}
    for batch, mask in jaxmpi.batches(data, 8, **rest):
        run = step(run, batch, mask)
        if attempt < kills:
            time.sleep(0.1)  # there are more steps than the kills have time for
        jaxmpi.save(directory, epoch * 1000 + int(run["row"]), run)
    run |= {"epoch": run["epoch"] + 1, "row": jnp.int32(0)}
if world.rank == 0:
    seen = np.asarray(run["seen"])
    bits = np.asarray(run["params"]).tobytes().hex()
    print("final", bits, seen.min(), seen.max(), "after", attempt, flush=True)
"""


@few_and_many("number", 3, 200)
def test_random_kills(tmp_path, number):
    """Parameters equal an undisturbed run's, bit by bit; each epoch sees each sample once."""
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    epochs = max(6, 4 * number)
    finals = []
    for kills in (0, number):
        options = ["--restarts", str(kills + 2)]
        code, output, _, left = end(
            jaxmpi_run(2, *options, script, tmp_path / str(kills), str(kills), str(epochs)),
            str(tmp_path),
            timeout=3600,
        )
        assert not code and not left, output[-5000:]
        assert "a checkpoint is passed over" not in output, output[-5000:]
        finals.append(re.search(r"final (\S+) (\d+) (\d+) after (\d+)", output).groups())
    assert finals[0][:3] == finals[1][:3] == (finals[0][0], str(epochs), str(epochs))
    assert int(finals[1][3]) == number


LONG = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np, optax
import jaxmpi
world = jaxmpi.init()
end = time.time() + 60 * float(sys.argv[2])
tx = jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.adam(0.1)))

@jaxmpi.jit
def step(params, state, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p) ** 2))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jaxmpi.tree_allreduce(loss)

params = jnp.ones((64, 64))
state = tx.init(params)
count, half = 0, None
while jaxmpi.broadcast_object(time.time() < end):
    for _ in range(100):
        x = np.random.default_rng(count).normal(size=(8, 64)).astype(np.float32)
        params, state, loss = step(params, state, x)
        count += 1
    jaxmpi.average_metrics(loss)
    jaxmpi.save(sys.argv[1], count, (params, state))
    rss = int(open("/proc/self/statm").read().split()[1]) * 4096
    now = rss, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    if half is None and time.time() > end - 30 * float(sys.argv[2]):
        half = now
grown = " ".join(str(b - a) for a, b in zip(half, now))
# one write with its newline: the ranks share the output
line = f"grown {grown} from {half[0]} {half[1]} {half[2]} steps {count}\\n"
print(line, end="", flush=True)
"""


@few_and_many("minutes", 0.2, 30.0)
def test_a_long_run_does_not_grow(tmp_path, minutes):
    """In the second half of the run, memory, descriptors and threads do not grow."""
    script = tmp_path / "script.py"
    script.write_text(LONG)
    code, output, _, left = end(
        jaxmpi_run(2, script, tmp_path / "saved", str(minutes)),
        str(tmp_path),
        timeout=120 + 61 * minutes,
    )
    assert not code and not left, output[-5000:]
    grown = re.findall(r"grown (-?\d+) (-?\d+) (-?\d+) from (\d+)", output)
    assert len(grown) == 2, output
    for memory, descriptors, threads, start in grown:
        assert int(memory) < 0.02 * int(start) and int(descriptors) <= 2 and int(threads) <= 1, (
            output
        )
    sys.stdout.write(output)
