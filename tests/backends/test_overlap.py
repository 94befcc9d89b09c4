"""Messages sent while a step computes: equal bits for any timing, and failures on all ranks.

The nodes are pretended (JAXMPI_NODE_RANKS), and even the smallest messages are started
(JAXMPI_TUNE).
"""

import itertools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_native import run

import jaxmpi
from jaxmpi._analysis.inner_jaxprs import equations
from jaxmpi._backends.base import Overlap
from jaxmpi._job.tools import timeline
from jaxmpi._lowering import lower
from jaxmpi._lowering.plan import plan_of
from jaxmpi._lowering.trace import inlined

pytestmark = pytest.mark.skipif(
    os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax", reason="these are of the other transport"
)
EVERYTHING = {"JAXMPI_OVERLAP": "1", "JAXMPI_TUNE": "small_bytes=0,bucket_bytes=1"}
PROGRAMS = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np, optax
from jax import lax
import jaxmpi
from jaxmpi import codecs

w = jaxmpi.init(axes={"half": -1, "pair": 2} if int(os.environ["JAXMPI_TEST_PAIRS"]) else None)
n, steps, delay, names = w.size, int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
rng = np.random.default_rng(w.rank)
WIDTH, LAYERS, R = 48, 4, jaxmpi.AXIS
ring = [(p, (p + 1) % n) for p in range(n)]


def waits(x):  # another time on each rank, before and between the starts of messages
    if not delay:
        return x
    def wait(x):
        time.sleep(rng.uniform(0, delay) * (1 + w.rank))
        return x

    return jax.pure_callback(wait, x, x)


@jax.custom_vjp
def late(x):
    return waits(x)


late.defvjp(lambda x: (waits(x), None), lambda _, ct: (waits(ct),))


def loss(params, x, norm):
    for layer in params:
        x = norm(jnp.tanh(late(x) @ layer["w"] + layer["b"].astype(x.dtype)))
    return jnp.mean(x**2)


def same(x):
    return x


def training(transform, norm=same, dtype=jnp.float32, kept=same, whole=same, **extra):
    keys = jax.random.split(jax.random.key(0), LAYERS)

    def layer(key):
        w = jax.random.normal(key, (WIDTH, WIDTH), dtype) / 7
        return {"w": w, "b": jnp.zeros(WIDTH, jnp.bfloat16)}

    params = kept([*map(layer, keys)])

    def step(params, state, x):
        loss_of = lambda params: loss(whole(params), x.astype(dtype), norm)
        value, grads = jax.value_and_grad(loss_of)(params)
        updates, state = transform.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, lax.pmean(value, R)

    def start():
        state = (jax.tree.map(jnp.copy, params), transform.init(params))
        return jaxmpi.jit(step, donate_argnums=(0, 1)), state

    return start


def on_array(f):
    u = jnp.asarray(np.random.default_rng(7 + w.rank).normal(size=(WIDTH, WIDTH)), jnp.float32)
    return lambda: (jaxmpi.jit(lambda u, unused, x: (f(u), unused, jnp.sum(x))), (u, 0))


def work(u):
    return jnp.tanh(late(u) @ u.T) @ u


def halo(u):
    above, below = lax.ppermute(u[-1], R, ring), lax.ppermute(u[0], R, [(q, p) for p, q in ring])
    return work(u).at[0].add(above).at[-1].add(below) / 9


def moved(u):
    rows = jnp.tile(u[None], (n, 1, 1)) * (1 + lax.axis_index(R))
    y = lax.all_to_all(rows, R, 0, 0).sum(0) + lax.all_gather(u[:3], R).sum()
    y = y + lax.psum_scatter(rows, R) + jaxmpi.tree_bcast(u, root=n - 1) + lax.pmax(u, R)
    return (y + work(u)) / (9 * n)


def branch(u):
    total = jnp.sum(lax.psum(u, R))
    positive = lambda u: lax.psum(u, R) + work(u)
    negative = lambda u: u - lax.psum(2 * u, R) * work(u)
    y = lax.cond(total > 0, positive, negative, u)
    return y / jnp.max(jnp.abs(y))


def pairs(u):
    return (lax.psum(u, "pair") + lax.pmean(u.T, R) + work(u)) / 9


adam = optax.adam(1e-3)
PROGRAMS = {
    "adam": training(jaxmpi.distributed(adam)),
    "bfloat16": training(jaxmpi.distributed(adam), dtype=jnp.bfloat16),
    "int8": training(jaxmpi.distributed(adam, codec=codecs.int8())),
    "bf16": training(jaxmpi.distributed(adam, codec=codecs.bf16())),
    "topk": training(jaxmpi.distributed(adam, codec=codecs.topk(0.1))),
    "powersgd": training(jaxmpi.distributed(adam, codec=codecs.powersgd(2))),
    "adasum": training(jaxmpi.distributed(adam, op="adasum")),
    "weighted": training(jaxmpi.distributed(adam), weight=1.0 + w.rank),
    "noise": training(optax.chain(jaxmpi.measure_noise_scale(), adam)),
    "replicas": training(jaxmpi.watch_replicas(jaxmpi.distributed(adam), every=2)),
    "local sgd": training(jaxmpi.local_sgd(adam, every=2)),
    "fully sharded": training(adam, kept=jaxmpi.fully_shard, whole=jaxmpi.unshard),
    "accumulate": training(optax.MultiSteps(jaxmpi.distributed(adam), 2)),
    "batch norm": training(
        jaxmpi.distributed(adam), lambda x: (x - lax.pmean(jnp.mean(x, 0), R)) * 1.1
    ),
    "clipped": training(
        jaxmpi.skip_nonfinite(
            jaxmpi.distributed(optax.chain(optax.clip_by_global_norm(1.0), adam))
        )
    ),
    "sharded": training(jaxmpi.sharded(adam)),
    "halo": on_array(halo),
    "scan": on_array(lambda u: lax.fori_loop(0, 3, lambda _, u: halo(u), u)),
    "moved": on_array(moved),
    "branch": on_array(branch),
    **({"pairs": on_array(pairs)} if "pair" in w.axes else {}),
}
PROGRAMS = {name: build for name, build in PROGRAMS.items() if (name in names or not names)}
x = jnp.asarray(rng.normal(size=(16, WIDTH)), jnp.float32)
runs = {}
for mode in "01":
    os.environ["JAXMPI_OVERLAP"] = mode
    for name, build in PROGRAMS.items():
        step, state = build()
        if mode == "1":
            assert "jaxmpi_start" in step.lower(*state, x).as_text(), name
        runs[mode, name] = step, step(*state, x)
for turn in range(steps):
    for name in PROGRAMS:
        for mode in "01":
            step, (params, state, _) = runs[mode, name]
            runs[mode, name] = step, step(params, state, x)
        got, want = (jax.tree.leaves(runs[mode, name][1]) for mode in "10")
        for a, b in zip(got, want, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (name, turn)
jaxmpi.print("equal on", w.rank)
"""


def bits(ranks, on_a_node, tmp_path, *arguments):
    environ = {
        **EVERYTHING,
        "JAXMPI_NODE_RANKS": str(on_a_node),
        "JAXMPI_TEST_PAIRS": str(int(ranks % 2 == 0)),
    }
    code = f"import sys\nsys.argv[1:] = {[*map(str, arguments)]}\n{PROGRAMS}"
    done = run(ranks, code, tmp_path, timeout=3000, **environ)
    assert done.returncode == 0 and done.stdout.count("equal on") == ranks, (
        done.stdout + done.stderr
    )


@pytest.mark.slow
def test_bits_are_those_without_overlap(tmp_path):
    bits(2, 1, tmp_path, 3, 0.002, "adam", "sharded", "scan", "moved", "pairs")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "on_a_node"), [(3, 1), (3, 2), (4, 2)])
def test_bits_of_all_programs(ranks, on_a_node, tmp_path):
    bits(ranks, on_a_node, tmp_path, 3, 0.002)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "on_a_node"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_bits_in_a_thousand_steps(ranks, on_a_node, tmp_path):
    bits(ranks, on_a_node, tmp_path, 1000, 0.0002)


FAULTS = """
import os, signal
import jax, jax.numpy as jnp, numpy as np
import jaxmpi

w = jaxmpi.init()
fault = FAULT
happens = False


def hit(ct):
    if happens and w.rank == w.size - 1:
        os.kill(os.getpid(), signal.SIGKILL) if fault == "kill" else 1 / 0
    return ct


@jax.custom_vjp
def middle(x):
    return x


middle.defvjp(lambda x: (x, None), lambda _, ct: (jax.pure_callback(hit, ct, ct),))


def loss(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh((middle(x) if i == 2 else x) @ w)
    return jnp.mean(x**2)


step = jaxmpi.jit(lambda params, x: jaxmpi.tree_allreduce(jax.grad(loss)(params, x)))
params, x = [jnp.eye(64)] * 5, jnp.ones((8, 64))
assert "jaxmpi_start" in step.lower(params, x).as_text()
want = np.asarray(step(params, x)[0])
if fault == "differ":
    for _ in range(2):
        try:
            step(params[: 5 - (w.rank == 0)], x)
        except jaxmpi.RankMismatchError as error:
            assert "float32[64, 64]" in str(error) and "rank 0" in str(error)
        else:
            raise AssertionError("ranks that differ")
        np.testing.assert_array_equal(step(params, x)[0], want)
    jaxmpi.finalize()
    jaxmpi.init()
    np.testing.assert_array_equal(step(params, x)[0], want)
    print("went on", flush=True)
else:
    happens = True
    jax.block_until_ready(step(params, x))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("fault", ["differ", "kill", "raise"])
def test_faults_between_start_and_wait(fault, ranks, tmp_path):
    start = time.monotonic()
    done = run(
        ranks,
        FAULTS.replace("FAULT", repr(fault), 1),
        tmp_path,
        JAXMPI_NODE_RANKS="1",
        **EVERYTHING,
    )
    said = done.stdout + done.stderr
    if fault == "differ":
        assert done.returncode == 0 and done.stdout.count("went on") == ranks, said
        return
    assert done.returncode and time.monotonic() - start < 60
    words = f"rank {ranks - 1} (pid" if fault == "kill" else "ZeroDivisionError"
    assert words in said and "Traceback" not in said.replace("Traceback", "", 4 * ranks), said


# messages from one call to a later one

AHEAD = """
import os
import jax, jax.numpy as jnp, numpy as np, optax
import jaxmpi
from jaxmpi import codecs
from jaxmpi._native import messages

w = jaxmpi.init(axes={"island": -1, "member": 2} if int(os.environ["JAXMPI_TEST_PAIRS"]) else None)
axis = "island" if "island" in w.axes else jaxmpi.AXIS
WIDTH, EVERY = 24, 4
params = {}
for i, name in enumerate("abcd"):
    numbers = np.random.default_rng(i).normal(size=(WIDTH, WIDTH))
    params[name] = jnp.asarray(numbers, jnp.float32)
x = jnp.asarray(np.random.default_rng(w.rank).normal(size=(8, WIDTH)), jnp.float32)


def loss(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer)
    return jnp.mean(x**2)


def made(codec, mode, inner):
    os.environ["JAXMPI_OVERLAP"] = mode
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    if axis != jaxmpi.AXIS:
        inner = jaxmpi.distributed(inner, axis="member")
    tx = jaxmpi.local_sgd(inner, EVERY, outer, codec=codec, axis=axis, fragments=2, delay=2)

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    step, state = jaxmpi.jit(step), (params, tx.init(params))
    assert ("jaxmpi_send_ahead" in step.lower(*state, x).as_text()) == (mode == "1")
    step(*state, x)
    return step, state


def equal(a, b, what):
    def numbers(tree):
        fragments = [f._replace(number=()) for f in tree[1].fragments]
        return jax.tree.leaves((tree[0], fragments, tree[1].inner))

    for i, (a, b) in enumerate(zip(numbers(a), numbers(b), strict=True)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (what, i)


def numbers_of(state):
    return {tuple(map(int, f.number)) for f in state[1].fragments}


for codec in (None, codecs.bf16(axis=axis), codecs.int8(axis=axis), codecs.topk(0.3, axis=axis)):
    (at_once, a), (ahead, b) = (made(codec, mode, optax.adam(1e-2)) for mode in "01")
    seen, before = set(), jax.block_until_ready((a, b)) and messages()[0]
    for turn in range(18):
        a, b = at_once(*a, x), ahead(*b, x)
        equal(a, b, turn)
        seen |= numbers_of(b)
        assert numbers_of(a) == {(0, 0)}
    assert len(seen) >= 8
    # within groups, each call sends two: a comparison, and the mean of the gradients
    others = 72 if axis != jaxmpi.AXIS else 0
    sent = messages()[0] - before - others
    # two for each turn of a fragment: none is sent again where it is received
    assert 16 <= sent <= 18, sent
    assert len(set(map(str, jaxmpi.allgather_object(sorted(seen))))) == 1

# a state that is used twice, and one that has outlived its messages
kept = b
assert any(map(bool, (f.on_its_way for f in b[1].fragments)))
for again in range(2):
    b = kept
    for turn in range(6):
        b = ahead(*b, x)
    equal(b, b if not again else first, again)
    first = b
for _ in range(70):  # states that nobody goes on with
    ahead(*kept, x)
kept = jax.device_get(kept)
jaxmpi.finalize()
w = jaxmpi.init(axes={"island": -1, "member": 2} if int(os.environ["JAXMPI_TEST_PAIRS"]) else None)
b = jax.tree.map(jnp.asarray, kept)
for turn in range(6):
    b = ahead(*b, x)
equal(b, first, "after init")
print("equal on", w.rank, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "on_a_node", "pairs"),
    [
        (2, 1, 0),
        pytest.param(3, 2, 0, marks=pytest.mark.exhaustive),
        pytest.param(4, 2, 1, marks=pytest.mark.exhaustive),
        pytest.param(4, 1, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_messages_ahead_have_the_bits_of_those_at_once(ranks, on_a_node, pairs, tmp_path):
    environ = {
        "JAXMPI_OVERLAP": "1",
        "JAXMPI_NODE_RANKS": str(on_a_node),
        "JAXMPI_TEST_PAIRS": str(pairs),
    }
    done = run(ranks, AHEAD, tmp_path, timeout=600, **environ)
    assert done.returncode == 0 and done.stdout.count("equal on") == ranks, (
        done.stdout + done.stderr
    )


SEEN = """
import time
import jax, jax.numpy as jnp
from jax import lax
import jaxmpi

world = jaxmpi.init()
ring = [(r, (r + 1) % world.size) for r in range(world.size)]


@jaxmpi.jit
def step(u, m):
    moved = lax.ppermute(u, jaxmpi.AXIS, ring)
    return moved, lax.fori_loop(0, 100, lambda _, m: jnp.tanh(m @ m), m)


u, m = jnp.ones(1000), jnp.ones((300, 300))
jax.block_until_ready(step(u, m))
for _ in range(3):
    time.sleep(0.3 * world.rank)
    jax.block_until_ready(step(u, m))
"""


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_the_timeline_shows_what_is_computed_meanwhile(overlap, tmp_path):
    flight = tmp_path / "flight"
    environ = {
        "JAXMPI_NODE_RANKS": "1",
        "JAXMPI_OVERLAP": overlap,
        "JAXMPI_FLIGHT_DIR": str(flight),
    }
    done = run(2, SEEN, tmp_path, **EVERYTHING | environ)
    assert done.returncode == 0, done.stdout + done.stderr
    first, _ = timeline.read(flight)
    seconds = sum(end - start for start, end in timeline.overlapped(first.events, first.waits))
    assert seconds > 0.02 if overlap == "1" else seconds < 0.001
    waits = sum(end - start for start, end in first.waits)
    assert waits > (0.5 if overlap == "0" else 0)
    names = [event["name"] for event in timeline.trace([first])["traceEvents"]]
    assert ("computes while a message travels" in names) == (overlap == "1")
    assert "waits for a message" in names


# which messages, in which pieces


def rounds(f, *args, bucket_bytes=1000, small_bytes=2000):
    jaxpr = inlined(jax.make_jaxpr(f, axis_env=[(jaxmpi.AXIS, 2)])(*args), {jaxmpi.AXIS: 2})
    overlap = Overlap(small_bytes, bucket_bytes, lambda call: True, lambda *_: None)
    rounds = plan_of(jaxpr, 2, overlap=overlap).rounds
    return [each.messages for each in rounds if each.messages.calls]


def sent(f, *args, **sizes):
    """List the shapes in each bucket, for each round of `f`."""
    shapes = lambda bucket: [bucket.coalesced.eqns[i].outvars[0].aval.shape for i in bucket.indices]
    return [[*map(shapes, messages.started)] for messages in rounds(f, *args, **sizes)]


def gradients(sizes, scale=lambda g: g):
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def step(params, x):
        return jax.tree.map(lambda g: lax.pmean(scale(g), jaxmpi.AXIS), jax.grad(loss)(params, x))

    return step, [jnp.ones(shape) for shape in itertools.pairwise(sizes)], jnp.ones((4, sizes[0]))


SIZES = [20, 21, 22, 23, 24]


@pytest.mark.parametrize("scale", [lambda g: g, lambda g: (g * 2).astype(jnp.bfloat16)])
def test_buckets_follow_the_backward_pass(scale):
    """Buckets follow the backward pass, however the gradients are used later."""
    (buckets,) = sent(*gradients(SIZES, scale), bucket_bytes=800)
    assert buckets == [[(23, 24)], [(22, 23)], [(21, 22)], [(20, 21)]]


def test_the_last_bucket_has_nothing_beside_it():
    (messages,) = rounds(*gradients(SIZES), bucket_bytes=800)
    assert messages.counts(messages.calls[0]) == (4, 3)


def test_a_bucket_has_the_bytes_that_are_worth_a_message():
    (buckets,) = sent(*gradients(SIZES), bucket_bytes=4 * 1000)
    assert buckets == [[(23, 24), (22, 23)], [(21, 22), (20, 21)]]


def test_gradients_that_are_there_together_are_one_bucket():
    def loss(params, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0])

    def step(params, x):
        grads = jax.grad(loss)(params["stacked"], jnp.tanh(x @ params["first"]))
        first = jax.grad(lambda w: jnp.sum((x @ w) @ params["stacked"][0]))(params["first"])
        return [lax.pmean(g, jaxmpi.AXIS) for g in (grads, first)]

    params = {"stacked": jnp.ones((3, 20, 20)), "first": jnp.ones((7, 20))}
    (buckets,) = sent(step, params, jnp.ones((4, 7)))
    assert len(buckets) == 2
    (together,) = sent(
        lambda x, y: (lax.pmean(x @ y, jaxmpi.AXIS), lax.pmean(jnp.tanh(x), jaxmpi.AXIS)),
        *[jnp.ones((30, 30))] * 2,
    )
    assert together == [[(30, 30)], [(30, 30)]]


def test_nothing_is_started_that_has_nothing_to_hide_behind():
    mean = lambda x: lax.pmean(x * 2, jaxmpi.AXIS)
    assert sent(mean, jnp.ones(1000)) == [[]]
    # next to nothing
    assert sent(lambda x, y: (mean(x), y * 2), jnp.ones(1000), jnp.ones((50, 50))) == [[]]
    assert sent(lambda x, y: (mean(x), y * 2), jnp.ones(1000), jnp.ones((50, 500))) == [[[(1000,)]]]
    assert sent(lambda x, y: (mean(x), y @ y), jnp.ones(10), jnp.ones((50, 50))) == [[[(10,)]]]
    assert sent(lambda x, y: mean(x @ y), *[jnp.ones((50, 50))] * 2) == [[]]


def test_an_array_that_is_sent_once_is_in_one_bucket():
    def step(x, y):
        z = jnp.tanh(y @ y)
        return lax.psum(x, jaxmpi.AXIS), lax.psum(z, jaxmpi.AXIS), lax.psum(x, jaxmpi.AXIS) + 1

    (buckets,) = sent(step, jnp.ones(1000), jnp.ones((50, 50)))
    assert buckets == [[(1000,), (1000,)], [(50, 50)]]


@pytest.mark.parametrize(
    ("f", "dtype", "parted"),
    [
        (lambda x, y: (y * 0.9 + y).at[0].add(x[0]), jnp.float32, 1),
        (lambda x, y: jnp.concatenate([x[:1], y * 0.9 + y]), jnp.float32, 1),
        (lambda x, y: (x[0], y * 0.9), jnp.float32, 1),
        (lambda x, y: (y * 0.9).at[0].add(x[0]), jnp.float32, 0),  # may be one fused multiply-add
        (lambda x, y: y * 0.9 + y + x[0], jnp.float32, 0),
        # is not rounded to 16 bits in between
        (lambda x, y: (y * 0.9 + y).at[0].add(x[0]), jnp.bfloat16, 0),
    ],
)
def test_only_what_xla_rounds_alike_is_parted(f, dtype, parted):
    step = lambda x, y: f(lax.pmean(x, jaxmpi.AXIS), y)
    (messages,) = rounds(step, jnp.ones((1, 50), dtype), jnp.ones((900, 50), dtype))
    assert [v.aval.shape for v in messages.before_waits] == [(900, 50)] * parted
    assert len(messages.started) == parted


# programs that fail between a start and its wait

FAILS = """
import time
import jax, jax.numpy as jnp, numpy as np
import jaxmpi
from jaxmpi._world import session

w = jaxmpi.init()
native = session.current("test").transport.native
fails = False


def check(ct):
    if fails:
        raise ValueError("the data is bad")
    return ct


@jax.custom_vjp
def middle(x):
    return x


middle.defvjp(lambda x: (x, None), lambda _, ct: (jax.pure_callback(check, ct, ct),))


def loss(params, x):
    for i, w in enumerate(params):
        inner = lambda x: middle(x) if i == 2 else x
        x = jnp.tanh(jax.lax.scan(lambda x, _: (inner(x), ()), x, length=1)[0] @ w)
    return jnp.mean(x**2)


step = jaxmpi.jit(lambda params, x: jaxmpi.tree_allreduce(jax.grad(loss)(params, x)))
params, x = [jnp.eye(64)] * 5, jnp.ones((8, 64))
assert "jaxmpi_start" in step.lower(params, x).as_text()
want = np.asarray(step(params, x)[0])
before, _ = native.messages()
fails = True
time.sleep(w.rank)  # rank 0 fails while its messages wait for rank 1
try:
    jax.block_until_ready(step(params, x))
except Exception as error:
    assert "the data is bad" in str(error), error
    begun, ended = native.messages()
    assert ended == begun > before, (ended, begun, before)
else:
    raise AssertionError("the step has not failed")
fails = False
np.testing.assert_array_equal(step(params, x)[0], want)
jaxmpi.print("fine on", w.rank)
"""


@pytest.mark.parametrize("depth", [5, 7])
def test_callbacks_of_shared_functions_stay_shared(depth):
    function = lambda x: jax.pure_callback(np.sin, x, x)
    for _ in range(depth):
        function = jax.jit(lambda x, inner=function: inner(x) + inner(x + 1))
    program = jax.make_jaxpr(function)(1.0)
    ending = lower._ending_started(program, lambda: None)
    of_each = lambda jaxpr: [eqn.primitive.name for eqn in equations(jaxpr)]
    assert of_each(ending) == of_each(program)
    callbacks = [eqn for eqn in equations(ending) if "callback" in eqn.params]
    assert {type(eqn.params["callback"]) for eqn in callbacks} == {lower._EndingStarted}


def test_a_program_that_fails_has_no_message_in_progress(tmp_path):
    """XLA frees the arrays of such a program, which its messages would still read and write."""
    done = run(2, FAILS, tmp_path, **EVERYTHING)
    assert done.returncode == 0 and done.stdout.count("fine on") == 2, done.stdout + done.stderr
