"""A number that one rank alone changes while the ranks train is named within 100 steps."""

import re
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmpi
from jaxmpi._consistency.findings import Finding
from jaxmpi._jit.numbers import EVERY, Numbers, NumberWatch
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

CHANGED = 30  # the step at which rank 1 changes a number


def loss(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


def start():
    return {"w": jnp.ones(3)}


def batch():
    return jax.random.normal(jaxmpi.rank_key(jax.random.key(9)), (8, 3))


def is_changed(step):
    return step >= CHANGED and jaxmpi.rank() == 1


def transformed(wrap, jit=jaxmpi.jit, **options):
    """Change the learning rate in the state of an optimizer."""
    tx = wrap(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))

    @jit(**options)
    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params = start()
    state = tx.init(params)
    for i in range(CHANGED + 100):
        if is_changed(i):
            state = optax.tree.set(state, learning_rate=jnp.float32(0.01))
        params, state = jax.block_until_ready(step(params, state, batch()))


def as_argument(kind):
    """Change a rate that is an argument."""

    @jaxmpi.jit
    def step(params, x, rate):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    params = start()
    for i in range(CHANGED + 100):
        rate = kind(0.01 if is_changed(i) else 0.1)
        params = jax.block_until_ready(step(params, batch(), rate))


def flag():
    """Freeze the parameters on one rank, by a flag."""

    @jaxmpi.jit
    def step(params, x, trains):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, g: jnp.where(trains, p - 0.1 * g, p), params, grads)

    params = start()
    for i in range(CHANGED + 100):
        params = jax.block_until_ready(step(params, batch(), not is_changed(i)))


def reset():
    """Begin the optimizer anew on one rank: its count differs from then on."""
    tx = jaxmpi.distributed(optax.adam(0.1))

    @jaxmpi.jit
    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params = start()
    state = tx.init(params)
    for i in range(CHANGED + 100):
        if i == CHANGED and jaxmpi.rank() == 1:
            state = tx.init(params)
        params, state = jax.block_until_ready(step(params, state, batch()))


def in_nnx():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    tx = jaxmpi.distributed(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @jaxmpi.nn.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)

    for i in range(CHANGED + 100):
        if i == CHANGED and jaxmpi.rank() == 1:
            rate = optimizer.opt_state.hyperparams["learning_rate"]
            rate[...] = rate[...] * 0.1
        step(model, optimizer, batch())
        jax.block_until_ready(nnx.state(model))


def in_pmap():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)

    def step(params, state, x):
        grads = jax.lax.pmean(jax.grad(loss)(params, x), "batch")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jaxmpi.pmap(step, axis_name="batch")
    params = jax.tree.map(lambda x: x[None], start())
    state = jax.tree.map(lambda x: jnp.asarray(x)[None], tx.init(start()))
    for i in range(CHANGED + 100):
        if is_changed(i):
            state = optax.tree.set(state, learning_rate=jnp.float32([0.01]))
        params, state = jax.block_until_ready(step(params, state, batch()[None]))


def two_steps():
    """Two steps in turns, of which one changes."""

    def make(name):
        def step(params, x, rate):
            grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
            return jax.tree.map(lambda p, g: p - rate * g, params, grads)

        step.__name__ = name
        return jaxmpi.jit(step)

    other, step = make("other"), make("step")
    params = start()
    for i in range(CHANGED + 100):
        params = other(params, batch(), 0.1)
        params = jax.block_until_ready(step(params, batch(), 0.01 if is_changed(i) else 0.1))


def fully_sharded():
    """Each rank has its own shards, so no array has two values."""
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)

    @jaxmpi.jit
    def step(shards, state, x):
        grads = jax.grad(lambda shards: loss(jaxmpi.unshard(shards), x))(shards)
        updates, state = tx.update(grads, state, shards)
        return optax.apply_updates(shards, updates), state

    shards = jaxmpi.fully_shard(start())
    state = jaxmpi.jit(tx.init)(shards)
    for i in range(CHANGED + 100):
        if is_changed(i):
            state = optax.tree.set(state, learning_rate=jnp.float32(0.01))
        shards, state = jax.block_until_ready(step(shards, state, batch()))


RATE = r"hyperparams\['learning_rate'\]"
CHANGES = {
    "distributed": (lambda: transformed(jaxmpi.distributed), RATE),
    "sharded": (lambda: transformed(jaxmpi.sharded), RATE),
    "fully sharded": (fully_sharded, RATE),
    "donated": (lambda: transformed(jaxmpi.distributed, donate_argnums=(0, 1)), RATE),
    "named": (
        lambda: transformed(
            jaxmpi.distributed, replicated_argnums=(0, 1), replicated_outnums=(0, 1)
        ),
        RATE,
    ),
    "accumulate": (
        lambda: transformed(lambda tx: jaxmpi.accumulate(jaxmpi.distributed(tx), 2)),
        RATE,
    ),
    "Python float": (lambda: as_argument(float), "argument 2"),
    "NumPy float": (lambda: as_argument(np.float32), "argument 2"),
    "JAX float": (lambda: as_argument(jnp.float32), "argument 2"),
    "bfloat16": (lambda: as_argument(jnp.bfloat16), "argument 2"),
    "flag": (flag, "argument 2"),
    "reset": (reset, r"\.count"),
    "nnx": (in_nnx, "learning_rate"),
    "pmap": (in_pmap, "learning_rate"),
    "two steps": (two_steps, "argument 2"),
}


def check_change(name):
    call, leaf = CHANGES[name]
    # A program that is under way when another rank raises fails: JAX raises where it is read.
    with pytest.raises((jaxmpi.RankMismatchError, jax.errors.JaxRuntimeError)) as caught:
        call()
    text = str(caught.value)
    assert re.search(
        rf"step: [^:]*{leaf}[^:]* differ between the ranks: .* on rank \d and", text
    ), text
    assert 'allow="unequal_number"' in text
    jaxmpi.barrier()  # all ranks have raised


@run_ranks(2, 3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_number_that_one_rank_changes_is_named_on_mpi(name):
    check_change(name)


@pytest.mark.slow
@run_ranks(2, 3, backend="xla")
@pytest.mark.parametrize("name", CHANGES)
def test_a_number_that_one_rank_changes_is_named_on_xla(name):
    check_change(name)


@run_ranks(2)
def test_a_number_that_differs_again_is_named_again():
    for _ in range(2):
        check_change("Python float")


# what may differ


def weights(i):
    """Numbers of samples and weights, which only go into a mean."""

    @jaxmpi.jit
    def step(params, x, n, seed):
        noise = jax.random.normal(jax.random.key(seed), x.shape)
        grads, total = jaxmpi.tree_allreduce(
            (jax.tree.map(lambda g: n * g, jax.grad(loss)(params, x + noise)), n), op="sum"
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g / total, params, grads)

    return step, lambda i: (jnp.float32(4 + i * jaxmpi.rank()), jaxmpi.rank())


def local_rates(i):
    """A rate of the rank's own, for what each rank explores."""

    @jaxmpi.jit
    def step(params, x, rate, last):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x * (1 + rate)))
        shown = jaxmpi.tree_allreduce(rate + last)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), shown

    return step, lambda i: (0.1 * (1 + jaxmpi.rank()) * 0.99**i, jnp.float32(i + jaxmpi.rank()))


def same_everywhere(i):
    @jaxmpi.jit
    def step(params, x, rate):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    return step, lambda i: (0.1 * 0.99**i,)


QUIET = {"weights": weights, "local rates": local_rates, "equal": same_everywhere}


def check_quiet(name):
    step, numbers = QUIET[name](0)
    params = start()
    for i in range(120):
        out = step(params, batch(), *numbers(i))
        params = out[0] if isinstance(out, tuple) else out
        if i % 7 == jaxmpi.rank():
            time.sleep(0.002)  # ranks are not at one call
    time.sleep(0.5)  # any message has come
    step(params, batch(), *numbers(0))


@run_ranks(2, 3)
@pytest.mark.parametrize("name", QUIET)
def test_numbers_that_may_differ_are_not_reported_on_mpi(name):
    check_quiet(name)


@pytest.mark.slow
@run_ranks(2, backend="xla")
@pytest.mark.parametrize("name", QUIET)
def test_numbers_that_may_differ_are_not_reported_on_xla(name):
    check_quiet(name)


@run_ranks(4, axes={"island": 2, "member": 2})
def test_shards_over_the_members_of_an_island_may_have_a_rate_of_their_own():
    @jaxmpi.jit
    def step(shards, x, rate):
        grads = jax.grad(lambda shards: loss(jaxmpi.unshard(shards), x))(shards)
        return jax.tree.map(lambda p, g: p - rate * g, shards, grads)

    shards = jaxmpi.fully_shard(start(), axis="member")
    rate = 0.1 if jaxmpi.rank() < 2 else 0.05
    for _ in range(CHANGED + 100):
        shards = step(shards, batch(), rate)
    time.sleep(0.5)
    step(shards, batch(), rate)


@run_ranks(2)
def test_calls_of_one_rank_alone_shift_nothing():
    """A rank evaluates alone with the same step, and another one has forgotten its programs."""

    @jaxmpi.jit(static_argnums=3)
    def step(params, count, x, train):
        if not train:
            return loss(params, x)
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, g: p - 0.1 / (1 + count) * g, params, grads), count + 1

    params, count = start(), jnp.int32(0)
    for i in range(150):
        params, count = step(params, count, batch(), True)
        if jaxmpi.rank() == 0 and i % 3 == 0:
            step(params, count, batch(), False)
        if jaxmpi.rank() == 1 and i == 40:
            step.clear_cache()
    time.sleep(0.5)
    step(params, count, batch(), True)


@run_ranks(2)
def test_allow_lets_numbers_differ():
    @jaxmpi.jit(allow="unequal_number")
    def step(params, x, rate):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    params = start()
    for i in range(CHANGED + 100):
        params = step(params, batch(), 0.01 if is_changed(i) else 0.1)


# the end of a script

SCRIPT = """
import sys, jax, jax.numpy as jnp, numpy as np, optax, jaxmpi
rank = jaxmpi.init().rank
who, steps = sys.argv[1], int(sys.argv[2])
wrap = jaxmpi.sharded if "sharded" in sys.argv else jaxmpi.distributed
tx = wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
params = {"w": jnp.ones(3)}
state = tx.init(params)

@jaxmpi.jit
def step(p, s, x):
    g = jax.grad(lambda p: jnp.mean((x @ p["w"] - 1) ** 2))(p)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s

x = jax.random.normal(jaxmpi.rank_key(jax.random.key(1)), (8, 3))
for i in range(steps):
    if i == steps - 3 and who in ("all", str(rank)):
        state = optax.tree.set(state, learning_rate=jnp.float32(0.01))
    params, state = step(params, state, x)
print("the end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mpi", "xla"])
@pytest.mark.parametrize(
    ("ranks", "arguments"), [(2, "1 10"), (2, "0 60"), (3, "1 10 sharded"), (2, "all 10")]
)
def test_a_change_in_the_last_steps_ends_the_job(tmp_path, monkeypatch, backend, ranks, arguments):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("JAXMPI_BACKEND", backend)
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), tmp_path / "script.py"]
    done = subprocess.run(
        [*command, *arguments.split()], capture_output=True, text=True, timeout=120
    )
    text = done.stdout + done.stderr
    assert text.count("the end") >= ranks, text
    if arguments.startswith("all"):
        assert done.returncode == 0 and "differ" not in text, text
        return
    assert done.returncode != 0, text
    assert re.search(
        r"step: argument 1\S*hyperparams\['learning_rate'\] differ between the ranks: "
        r"0.0?1\S* on rank \d and 0.0?1\S* on rank \d",
        text,
    ), text


# numbers as words


NUMBERS = [
    ("bool", True),
    ("int8", -3),
    ("uint8", 200),
    ("int32", -70_000),
    ("uint32", 4_000_000_000),
    ("bfloat16", 0.5),
    ("float16", 0.25),
    ("float32", 0.1),
    ("complex64", 1 + 2j),
]


def test_numbers_of_each_dtype_come_back():
    leaves = [jnp.asarray(value, dtype) for dtype, value in NUMBERS]
    numbers = Numbers(
        "step",
        tuple(range(len(leaves))),
        tuple(dtype for dtype, _ in NUMBERS),
        tuple(dtype for dtype, _ in NUMBERS),
    )
    packed = np.asarray(jax.jit(numbers.pack)(leaves)).tobytes()
    for found, (dtype, value) in zip(numbers.unpack(packed), NUMBERS, strict=True):
        assert found == (np.float32(value) if dtype == "float32" else value), dtype
    assert numbers.difference(0, packed, 1, packed, numbers.magnitudes(packed)) is None


def test_numbers_may_differ_by_rounding_and_no_more():
    numbers = Numbers("step", (0, 1), ("rate", "count"), ("float32", "int32"))

    def packed(rate, count):
        return np.asarray(numbers.pack([jnp.float32(rate), jnp.int32(count)])).tobytes()

    def difference(mine, other, theirs, largest=(0.1, 1e6)):
        return numbers.difference(0, mine, other, theirs, largest)

    one = packed(0.1, 1_000_000)
    assert difference(one, 1, packed(0.1 + 1e-7, 1_000_000)) is None
    assert difference(one, 1, packed(0.1, 1_000_001)).leaves == ["count"]
    found = difference(one, 2, packed(0.09, 1_000_000))
    assert found.leaves == ["rate"] and "0.1 on rank 0 and 0.09 on rank 2" in found.warning()
    assert difference(packed(np.nan, 1), 1, packed(np.nan, 1)) is None
    assert difference(packed(np.nan, 1), 1, packed(0.1, 1)).leaves == ["rate"]
    # a schedule that ends at 0, or beside it
    assert difference(packed(0.0, 1), 1, packed(1e-8, 1)) is None
    assert difference(packed(0.0, 1), 1, packed(1e-8, 1), (1e-3, 1)).leaves == ["rate"]
    assert difference(packed(1e-8, 1), 1, packed(2e-8, 1), (2e-8, 1)).leaves == ["rate"]


# which calls are compared


class End:
    """The `end` of a call: ready some calls later."""

    shape = (1,)

    def __init__(self, now, ready_at):
        self.now, self.ready_at = now, ready_at

    def is_ready(self):
        return self.now() >= self.ready_at


class Exchange:
    """An exchange that keeps which calls it was given."""

    def __init__(self):
        self.errors, self.calls, self.given = 0, 0, []

    def count(self, has_failed, output):
        self.calls += 1
        return True

    def watch(self, stream):
        pass

    def poll(self):
        pass

    def add(self, stream, at, values):
        self.given.append((at.errors, at.call))


def given(delay, steps=1, calls=200):
    """Return the calls that are compared, where `end` is ready some calls later."""
    exchange = Exchange()
    arrays = SimpleNamespace(local=lambda end: np.zeros(1, np.uint32))
    backend = SimpleNamespace(
        transport=SimpleNamespace(arrays=arrays), registry=SimpleNamespace(numbers={})
    )
    watches = [NumberWatch(backend, f"step {i}", exchange) for i in range(steps)]
    for i in range(calls):
        if i == 90:
            exchange.errors, exchange.calls = 1, 0  # all ranks have raised
        watches[i % steps].note(End(lambda: i, i + delay(i)))  # noqa: B023 - called at once
    for watch in watches:
        watch.send_last()
    return set(exchange.given)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_ranks_compare_the_same_calls_however_many_programs_are_under_way(steps):
    at_once = given(lambda i: 0, steps)
    if steps == 1:
        assert {(0, 1), (0, 1 + EVERY), (1, 1), (1, 1 + EVERY)} <= at_once
    assert len(at_once) >= 8
    for late in (lambda i: 32, lambda i: 31 * (i % 2), lambda i: i % 40):
        assert given(late, steps) == at_once


@run_ranks(2)
def test_what_another_rank_has_raised_meanwhile_is_not_raised_again():
    jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))(jnp.ones(3))
    exchange = session.neighbors()
    now = session.current("test").registry.mismatches
    finding = Finding("unequal_number", "step", ["rate"], detail="1 on rank 0 and 2 on rank 1")
    exchange.found.extend([(now - 1, finding), (now, finding), (now - 1, finding)])
    assert exchange.take() == finding and exchange.take() is None


@run_ranks(2, backend="xla")
def test_a_program_with_a_count_of_the_host_has_one_usual_time():
    @jaxmpi.jit(replicated_argnums=1)
    def step(x, count):
        return jaxmpi.tree_allreduce(x) * count

    log = session.current("test").programs
    log.look()
    before = len(log._longest)
    for i in range(10):
        jax.block_until_ready(step(jnp.ones(3), i))
    log.look()
    assert len(log._longest) <= before + 1
