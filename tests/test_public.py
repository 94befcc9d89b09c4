"""Every public function on one rank, on ranks of mpi and xla, and on simulated ranks.

A second call compiles nothing.

The names come from the modules' `__all__`: a new one fails until it has a row here. A row is a
function that returns a call; the call checks what it gets, or that it is refused as documented, and
is made twice.
"""

import contextlib
import io
import logging
import tempfile
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmpi
from jaxmpi.testing import run_ranks

MODULES = ("checkpoint", "codecs", "console", "data", "diagnose", "nn", "testing")
# the names of the programs that this process has compiled, or found in the persistent cache
COMPILED = []


def listen(event, _, **about):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(about)


jax.monitoring.register_event_duration_secs_listener(listen)
ROWS = {}


def public():
    """Return all public names; an object with two names counts once.

    `jaxmpi.save` and `checkpoint.save` are such names.
    """
    names = {name: getattr(jaxmpi, name) for name in jaxmpi.__all__}
    for module in MODULES:
        of_module = getattr(jaxmpi, module)
        names |= {f"{module}.{name}": getattr(of_module, name) for name in of_module.__all__}
    objects = {}
    for name, x in names.items():
        if not isinstance(x, type(jaxmpi)):  # a module's functions have rows of their own
            objects.setdefault(x if isinstance(x, str) else id(x), name)
    return set(objects.values())


def row(*names):
    return lambda function: ROWS.update(dict.fromkeys(names, function)) or function


def simulated():
    return jaxmpi._world.session.current("test").name == "simulate"


def each(of_rank):
    """Return a function's value on this rank; under simulation, the values of all ranks."""
    if not simulated():
        return of_rank(jaxmpi.rank())
    return jax.tree.map(
        lambda *xs: jaxmpi.PerRank(np.stack(xs)), *map(of_rank, range(jaxmpi.size()))
    )


def assert_each(got, want):
    """Assert that every rank here has got `want(rank)`."""
    is_own = lambda x: isinstance(x, jaxmpi.PerRank)
    for rank in range(jaxmpi.size()) if simulated() else [jaxmpi.rank()]:
        mine = jax.tree.map(lambda x, rank=rank: x[rank] if is_own(x) else x, got, is_leaf=is_own)
        chex.assert_trees_all_close(
            jax.tree.map(np.asarray, mine),
            jax.tree.map(np.asarray, want(rank)),
            rtol=1e-5,
            atol=1e-6,
        )


def tree(rank):
    return {"w": np.arange(6, dtype=np.float32).reshape(2, 3) + rank, "b": np.float32(rank)}


def mean(size):
    return tree((size - 1) / 2)


@contextlib.contextmanager
def refused(condition, error, match):
    """Check that the body is refused if the condition holds."""
    with pytest.raises(error, match=match) if condition else contextlib.nullcontext():
        yield


# collectives


@row(
    "tree_allreduce",
    "tree_reduce",
    "tree_bcast",
    "tree_allgather",
    "tree_reduce_scatter",
    "tree_alltoall",
)
def collectives():
    n = jaxmpi.size()
    rows = lambda rank: {"x": np.arange(4 * n, dtype=np.float32).reshape(n, 4) + 100 * rank}
    all_rows = np.stack([rows(rank)["x"] for rank in range(n)])  # [from, row, 4]

    def both(function, x, want):
        step = jaxmpi.jit(function)
        return lambda: [assert_each(run(each(x)), want) for run in (function, step)]

    calls = [
        both(
            lambda t: jaxmpi.tree_allreduce(t, op="sum"), rows, lambda rank: {"x": all_rows.sum(0)}
        ),
        both(jaxmpi.tree_bcast, rows, lambda rank: {"x": all_rows[0]}),
        both(
            jaxmpi.tree_reduce,
            rows,
            lambda rank: {"x": all_rows.mean(0) if rank == 0 else all_rows[rank]},
        ),
        both(jaxmpi.tree_allgather, rows, lambda rank: {"x": all_rows}),
        both(
            lambda t: jaxmpi.tree_allgather(t, tiled=True),
            rows,
            lambda rank: {"x": np.concatenate(all_rows)},
        ),
        both(jaxmpi.tree_reduce_scatter, rows, lambda rank: {"x": all_rows.mean(0)[rank]}),
        both(jaxmpi.tree_alltoall, rows, lambda rank: {"x": all_rows[:, rank]}),
    ]
    return lambda: [call() for call in calls]


@row("broadcast_object", "allgather_object", "barrier", "synchronize")
def objects():
    def call():
        r, n = jaxmpi.rank(), jaxmpi.size()
        assert jaxmpi.broadcast_object({"rank": r}) == {"rank": 0}
        assert jaxmpi.allgather_object(("rank", r)) == [
            ("rank", 0 if simulated() else q) for q in range(n)
        ]
        jaxmpi.barrier()
        chex.assert_trees_all_equal(
            jaxmpi.synchronize({"x": jnp.full(3, r), "y": np.float32(r)}),
            {"x": jnp.zeros(3, int), "y": np.float32(0)},
        )

    return call


@row("any_rank")
def votes():
    step, last = jaxmpi.jit(jaxmpi.any_rank), jaxmpi.size() - 1

    def call():
        for vote in (jaxmpi.any_rank, step):
            assert_each(
                vote(each(lambda rank: np.bool_(rank == last))), lambda rank: np.bool_(True)
            )
            assert_each(
                vote(each(lambda rank: np.bool_(rank > last))), lambda rank: np.bool_(False)
            )

    return call


# optimizers


def updates_of(make, want, *, eager=True, weight=None, params=tree):
    """Return a transform's updates for `tree(rank)`, in a step and eagerly for equal ones."""
    tx, n = make(), jaxmpi.size()
    params = jax.tree.map(jnp.asarray, params(0))
    step = jaxmpi.jit(
        lambda g, s, p, w: tx.update(g, s, p, **({} if weight is None else {"weight": w}))
    )

    def call():
        w = each(lambda rank: np.float32(1 if weight is None else weight(rank)))
        assert_each(step(each(tree), tx.init(params), params, w)[0], lambda rank: want)
        if eager:  # in simulation, arrays outside of a step are those of all ranks
            grads = jax.tree.map(jnp.asarray, mean(n) if simulated() else tree(jaxmpi.rank()))
            extra = {}
            if weight is not None:
                extra["weight"] = 1.0 if simulated() else weight(jaxmpi.rank())
            out, _ = tx.update(grads, tx.init(params), params, **extra)
            if not simulated() or weight is None:
                assert_each(out, lambda rank: want)

    return call


def negative(x):
    return jax.tree.map(lambda x: -x, x)


@row("distributed", "average_gradients", "sharded", "clip_by_global_norm")
@row("skip_nonfinite", "dynamic_loss_scale", "accumulate", "local_sgd")
def transforms():
    n, sgd = jaxmpi.size(), optax.sgd(1.0)
    weight = lambda rank: rank + 1.0
    weighted = negative(tree(sum(r * (r + 1.0) for r in range(n)) / sum(r + 1.0 for r in range(n))))
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in mean(n).values()))
    clipped = lambda: optax.chain(jaxmpi.clip_by_global_norm(1.0), sgd)
    calls = [
        updates_of(lambda: jaxmpi.distributed(sgd), negative(mean(n))),
        updates_of(lambda: jaxmpi.distributed(sgd), weighted, weight=weight),
        updates_of(lambda: optax.chain(jaxmpi.average_gradients(), sgd), weighted, weight=weight),
        updates_of(lambda: jaxmpi.sharded(sgd), weighted, weight=weight, eager=not simulated()),
        updates_of(
            lambda: jaxmpi.sharded(sgd, master_dtype=jnp.float32),
            negative(mean(n)),
            eager=not simulated(),
        ),
        updates_of(
            lambda: jaxmpi.sharded(clipped()),
            negative(jax.tree.map(lambda x: x / norm, mean(n))),
            eager=not simulated(),
        ),
        updates_of(
            lambda: jaxmpi.distributed(clipped()),
            negative(jax.tree.map(lambda x: x / norm, mean(n))),
        ),
        updates_of(lambda: jaxmpi.skip_nonfinite(jaxmpi.distributed(sgd)), weighted, weight=weight),
        updates_of(
            lambda: jaxmpi.dynamic_loss_scale(jaxmpi.distributed(sgd), initial=1.0),
            negative(mean(n)),
        ),
        updates_of(lambda: jaxmpi.accumulate(jaxmpi.distributed(sgd), 1), negative(mean(n))),
        updates_of(
            lambda: jaxmpi.accumulate(jaxmpi.distributed(sgd), 2),
            jax.tree.map(np.zeros_like, mean(n)),
            weight=weight,
        ),
    ]
    calls.append(updates_of(lambda: jaxmpi.local_sgd(sgd, 1), negative(mean(n))))
    if simulated():
        with pytest.raises(RuntimeError, match=r"sharded: update was called outside of a step"):
            updates_of(lambda: jaxmpi.sharded(sgd), negative(mean(n)))()
    return lambda: [call() for call in calls]


@row(
    "codecs.bf16",
    "codecs.f16",
    "codecs.int8",
    "codecs.powersgd",
    "codecs.topk",
    "codecs.Codec",
    "codecs.OneMessage",
    "codecs.check_codec",
)
def codecs():
    made = [
        jaxmpi.codecs.bf16(),
        jaxmpi.codecs.f16(),
        jaxmpi.codecs.int8(),
        jaxmpi.codecs.powersgd(2),
        jaxmpi.codecs.topk(1.0),
    ]
    assert all(isinstance(codec, jaxmpi.codecs.Codec) for codec in made)
    one_messages = [isinstance(codec.one_message, jaxmpi.codecs.OneMessage) for codec in made]
    assert one_messages == [True, True, True, False, True]
    # numbers are rounded to halves: a codec's error is smaller
    exact = jax.tree.map(lambda x: np.round(2 * x) / 2, mean(jaxmpi.size()))
    calls = []
    for codec in made:
        tx = jaxmpi.distributed(optax.sgd(1.0), codec=codec)
        params = jax.tree.map(jnp.zeros_like, tree(0))
        step = jaxmpi.jit(lambda g, s, tx=tx: tx.update(g, s))

        def call(tx=tx, step=step, params=params, codec=codec):
            jaxmpi.codecs.check_codec("test", codec)
            updates, _ = step(each(tree), tx.init(params))
            assert_each(
                jax.tree.map(lambda x: np.round(2 * np.asarray(x)) / 2, updates),
                lambda rank: negative(exact),
            )
            with refused(simulated(), RuntimeError, "outside of a step"):
                tx.update(jax.tree.map(jnp.asarray, mean(jaxmpi.size())), tx.init(params))

        calls.append(call)
    with pytest.raises(TypeError, match="codec is a int"):
        jaxmpi.codecs.check_codec("test", 8)
    return lambda: [call() for call in calls]


@row("measure_noise_scale")
def noise():
    n, tx = jaxmpi.size(), jaxmpi.measure_noise_scale()
    step = jaxmpi.jit(lambda g, s: tx.update(g, s))

    def call():
        out, state = step(each(tree), tx.init(tree(0)))
        assert_each(out, lambda rank: mean(n))
        assert np.isnan(state.scale(8)) if n == 1 else float(state.scale(8)) > 0
        tx.update(jax.tree.map(jnp.asarray, mean(n)), tx.init(tree(0)))

    return call


@row("average_loss")
def losses():
    n = jaxmpi.size()
    loss = lambda w, x: (w - x) ** 2
    step = jaxmpi.jit(lambda w, x: jax.value_and_grad(jaxmpi.average_loss(loss))(w, x))

    def call():
        want = (
            np.mean([(3.0 - r) ** 2 for r in range(n)]),
            np.mean([2 * (3.0 - r) for r in range(n)]),
        )
        assert_each(
            step(np.float32(3), each(np.float32)), lambda rank: jax.tree.map(np.float32, want)
        )
        if not simulated():
            assert_each(
                jaxmpi.average_loss(loss)(jnp.float32(3), np.float32(jaxmpi.rank())),
                lambda rank: np.float32(want[0]),
            )

    return call


@row("watch_replicas", "check_replicas")
def replicas():
    n, tx = jaxmpi.size(), jaxmpi.watch_replicas(jaxmpi.distributed(optax.sgd(1.0)), 1)
    step = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))
    params = jax.tree.map(jnp.asarray, tree(0))

    def call():
        out, state = step(each(tree), tx.init(params), params)
        assert_each(out, lambda rank: negative(mean(n)))
        jaxmpi.check_replicas(state, params)
        _, state = step(each(tree), tx.init(params), each(tree))
        with refused(n > 1, jaxmpi.RankMismatchError, r"leaf \['b'\] of the parameters on rank 1"):
            jaxmpi.check_replicas({"optimizer": (state, 1)}, params)
        _, state = tx.update(jax.tree.map(jnp.asarray, mean(n)), tx.init(params), params)
        jaxmpi.check_replicas(state, params)
        with pytest.raises(TypeError, match=r"check_replicas: state is a tuple without a state"):
            jaxmpi.check_replicas(optax.adam(1.0).init(params), params)

    return call


@row("micro_batch_grads")
def micro_batches():
    n = jaxmpi.size()
    loss = lambda p, x: jnp.mean(x @ p)
    grads, tx = (
        jaxmpi.micro_batch_grads(jax.grad(loss), 2 * n),
        jaxmpi.distributed(optax.sgd(1.0), micro_batches=2 * n),
    )
    params, rows = jnp.ones(3), lambda rank: np.arange(12, dtype=np.float32).reshape(4, 3) + rank
    run = lambda p, s, x: tx.update(grads(p, x), s, p)
    step = jaxmpi.jit(run)

    def call():
        want = lambda rank: -(rows(0).mean(0) + (n - 1) / 2)
        assert_each(step(params, tx.init(params), each(rows))[0], want)
        if not simulated():
            assert_each(run(params, tx.init(params), jnp.asarray(rows(jaxmpi.rank())))[0], want)

    return call


@row("unshard", "reshard")
def whole_states():
    n, tx = jaxmpi.size(), jaxmpi.sharded(optax.adam(0.1))
    params = jax.tree.map(jnp.asarray, tree(0))
    step = jaxmpi.jit(lambda g, s, p: tx.update(g, s, p))

    def call():
        _, state = step(each(tree), tx.init(params), params)
        whole = jaxmpi.unshard(state)
        assert_each(whole.inner[0].mu, lambda rank: jax.tree.map(lambda x: 0.1 * x, mean(n)))
        again = jaxmpi.unshard(jaxmpi.reshard(whole))
        assert_each(again.inner[0].mu, lambda rank: jax.tree.map(lambda x: 0.1 * x, mean(n)))

    return call


@row("fully_shard", "ShardedArray")
def shards():
    n, params = jaxmpi.size(), jax.tree.map(jnp.asarray, tree(0))

    def loss(shards, x):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jaxmpi.unshard(shards), x)))

    step = jaxmpi.jit(lambda shards, x: jaxmpi.unshard(jax.grad(loss)(shards, x)))

    def call():
        cut = jaxmpi.fully_shard(params)
        is_cut = lambda x: isinstance(x, jaxmpi.ShardedArray)
        assert all(map(is_cut, jax.tree.leaves(cut, is_leaf=is_cut)))
        assert_each(jaxmpi.unshard(cut), lambda rank: tree(0))
        assert_each(step(cut, each(tree)), lambda rank: mean(n))

    return call


# steps


@row("jit", "local", "AXIS")
def steps():
    n = jaxmpi.size()
    step = jaxmpi.jit(lambda x: (lax.psum(x, jaxmpi.AXIS), 2 * x))

    def call():
        total, double = step(each(lambda rank: np.float32(rank)))
        assert_each(
            (total, double), lambda rank: (np.float32(n * (n - 1) / 2), np.float32(2 * rank))
        )
        assert float(jaxmpi.local(total) + jnp.float32(1)) == n * (n - 1) / 2 + 1

    return call


@row("pmap")
def mapped():
    step = jaxmpi.pmap(
        lambda x: (x - jax.lax.pmean(x, "batch"), x.shape), axis_name="batch", out_axes=(0, None)
    )
    rows = each(lambda rank: jax.tree.map(lambda x: np.asarray(x)[None], tree(rank)["w"]))

    def call():
        apart, shape = step(rows)
        assert [int(n) for n in shape] == [2, 3]
        assert_each(apart, lambda rank: (tree(rank)["w"] - mean(jaxmpi.size())["w"])[None])

    return call


@row("nn.jit", "nn.average_batch_stats", "nn.BatchNorm")
def models():
    n = jaxmpi.size()
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jaxmpi.distributed(optax.sgd(0.0)), wrt=nnx.Param)

    @jaxmpi.nn.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x)))(model)
        optimizer.update(model, grads)
        return jaxmpi.tree_allreduce(loss)

    kernel = np.asarray(model.kernel[...])
    norm = jaxmpi.nn.BatchNorm(2, momentum=0.0, rngs=nnx.Rngs(0))  # of the ranks above 0
    normalize = jaxmpi.nn.jit(lambda norm, x, mask: norm(x, mask=mask))

    def call():
        got = step(model, optimizer, each(lambda rank: np.full((3, 2), rank, np.float32)))
        assert_each(got, lambda rank: np.float32((n - 1) / 2 * kernel.sum()))
        stats = each(
            lambda rank: {"mean": np.full(2, rank, np.float32), "var": np.ones(2, np.float32)}
        )
        stats = jaxmpi.nn.average_batch_stats(stats)
        normalize(
            norm,
            each(lambda rank: np.full((1, 2), rank, np.float32)),
            each(lambda rank: np.full((1, 1), rank > 0)),
        )
        assert_each(norm.mean[...], lambda rank: np.full(2, n / 2 if n > 1 else 0, np.float32))
        want = {
            "mean": np.full(2, (n - 1) / 2, np.float32),
            "var": np.full(2, 1 + np.var(np.arange(n)), np.float32),
        }
        assert_each(stats, lambda rank: want)

    return call


@row("explain", "diagnose.Explanation")
def explanations():
    step = jaxmpi.jit(lambda x: lax.pmean(x, jaxmpi.AXIS))

    def call():
        with contextlib.redirect_stdout(io.StringIO()):
            plan = jaxmpi.explain(step, np.ones(10, np.float32))
        assert isinstance(plan, jaxmpi.diagnose.Explanation)
        assert plan.messages == (jaxmpi.size() > 1)
        if simulated() and plan.messages:
            assert plan.seconds is None
        else:
            assert (plan.seconds > 0) == (jaxmpi.size() > 1)

    return call


@row("simulate", "PerRank", "testing.assert_equivalent")
def simulation():
    several = jaxmpi.size() > 1 and not simulated()
    step = jaxmpi.jit(lambda x: lax.psum(x, jaxmpi.AXIS))

    def call():
        with refused(several, RuntimeError, "simulate: this is one of"), jaxmpi.simulate(3):
            assert float(step(jaxmpi.PerRank(np.arange(3.0)))) == 3.0

    return call


# data


@row("batches", "check_data", "prefetch", "data.Batches", "data.Shard", "shard", "rank_key")
def data():
    n, samples = jaxmpi.size(), np.arange(12.0)

    def call():
        with refused(simulated(), RuntimeError, "shard: simulated ranks take one step together"):
            part = jaxmpi.shard(samples)
            assert isinstance(part, jaxmpi.data.Shard) and len(part) == 12 // n
        jaxmpi.check_data(samples)
        batches = jaxmpi.batches(samples, 4)
        assert simulated() or isinstance(batches, jaxmpi.data.Batches)
        first = next(iter(jaxmpi.prefetch(batches)))
        assert_each(first, lambda rank: np.arange(4.0).reshape(n, -1)[rank].astype(np.float32))
        key = jax.random.key(0)
        data = jax.random.key_data(
            jaxmpi.rank_key(key).stack[0] if simulated() else jaxmpi.rank_key(key)
        )
        np.testing.assert_array_equal(
            data, jax.random.key_data(jax.random.fold_in(key, 0 if simulated() else jaxmpi.rank()))
        )

    return call


@row("per_rank_batches")
def per_rank_data():
    def call():
        r, n = jaxmpi.rank() if not simulated() else 0, jaxmpi.size()
        words = "per_rank_batches: simulated ranks are one process"
        with refused(simulated(), RuntimeError, words):
            batches = [np.full(2, 10.0 * r + k) for k in range(r + 1)]
            seen = [float(batch[0]) for batch in jaxmpi.per_rank_batches(batches)]
            assert seen == [10.0 * r]
            taken = [
                (float(batch.sum()), bool(mask.all()))
                for batch, mask in jaxmpi.per_rank_batches(batches, remainder="mask")
            ]
            assert taken == [(20.0 * r + 2 * k, True) if k <= r else (0.0, False) for k in range(n)]

    return call


@row("save", "restore", "latest", "PerRankState")
def checkpoints():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    state = {
        "w": jnp.arange(3.0),
        "step": 4,
        "own": jaxmpi.PerRankState(jnp.full(2, jaxmpi.rank())),
    }
    like = {"w": jnp.zeros(3), "step": 0, "own": jaxmpi.PerRankState(jnp.zeros(2, int))}

    def call():
        jaxmpi.save(directory, 4, state)
        assert jaxmpi.latest(directory) == 4
        chex.assert_trees_all_equal(jaxmpi.restore(directory, like), state)

    return call


# console


@row(
    "average_metrics",
    "merge_metrics",
    "print",
    "progress",
    "get_logger",
    "Throughput",
    "Rate",
    "MetricsLog",
)
def console():
    n = jaxmpi.size()
    meter, metric = jaxmpi.Throughput(), nnx.metrics.Average()

    def call():
        weights = [rank + 1.0 for rank in range(n)]
        got = jaxmpi.average_metrics(
            each(lambda rank: {"loss": np.float32(rank)}), each(lambda rank: np.float32(rank + 1))
        )
        assert_each(
            got, lambda rank: {"loss": np.float32(np.average(np.arange(n), weights=weights))}
        )
        total = each(lambda rank: np.float32(rank))
        for name in ("total", "count"):
            getattr(metric, name).set_value(total)
        assert float(jaxmpi.merge_metrics(metric).total[...]) == n * (n - 1) / 2
        with contextlib.redirect_stdout(io.StringIO()):
            jaxmpi.print("a", 1, sep="-", end="")
        assert list(jaxmpi.progress([1, 2])) == [1, 2]
        assert isinstance(jaxmpi.get_logger("jaxmpi-public"), logging.Logger)
        meter.add(3)
        rate = meter.read()
        assert isinstance(rate, jaxmpi.Rate)
        with tempfile.TemporaryDirectory() as folder:
            jaxmpi.MetricsLog(folder).write(3, {"loss": np.float32(0.5)}, rate)
            assert [path.name for path in Path(folder).glob("*")] == ["metrics.csv"] * (
                jaxmpi.rank() == 0
            )

    return call


# the job


@row(
    "init", "initialized", "World", "rank", "size", "local_rank", "local_size", "preempted", "busy"
)
def worlds():
    def call():
        world = jaxmpi.init()
        assert isinstance(world, jaxmpi.World) and jaxmpi.initialized()
        assert (world.rank, world.size) == (jaxmpi.rank(), jaxmpi.size())
        assert (world.local_rank, world.local_size) == (jaxmpi.local_rank(), jaxmpi.local_size())
        with jaxmpi.busy("asking"):
            assert jaxmpi.preempted() is False

    return call


@row("launch")
def launches():
    several = jaxmpi.size() > 1 and not simulated()

    def call():
        with refused(several, RuntimeError, "launch: this is one of 2 ranks"):
            assert jaxmpi.launch(lambda x: x + jaxmpi.rank(), 1, 41) == [41]

    return call


@row(
    "CheckpointError",
    "MPIError",
    "NotInitializedError",
    "RankCountError",
    "RankMismatchError",
    "testing.RankFailure",
)
def errors():
    kinds = (
        jaxmpi.CheckpointError,
        jaxmpi.MPIError,
        jaxmpi.RankCountError,
        jaxmpi.RankMismatchError,
        jaxmpi.testing.RankFailure,
    )
    return lambda: [str(kind("text")) for kind in kinds]


@row("testing.assert_replicated")
def comparisons():
    last = jaxmpi.size() - 1

    def call():
        jaxmpi.testing.assert_replicated(tree(0))
        with refused(last, AssertionError, f"the tree of rank {last}, compared with rank 0"):
            jaxmpi.testing.assert_replicated(each(lambda rank: np.float32(rank == last)))

    return call


@row("testing.run_ranks")
def decorators():
    def call():
        @jaxmpi.testing.run_ranks(1, 2)
        def test_nothing():
            pass

        assert test_nothing.pytestmark[0].args == ("ranks", (1, 2))

    return call


@row("finalize")
def endings():  # the last row
    def call():
        if jaxmpi._world.session.current("test").name in ("single", "mpi"):
            jaxmpi.finalize()
            assert not jaxmpi.initialized()
            jaxmpi.init()

    return call


# all of them


def check_all():
    for function in dict.fromkeys(ROWS.values()):
        call = function()
        call()
        COMPILED.clear()
        call()
        assert not COMPILED, f"{function.__name__}: the second call has compiled {COMPILED}"


def test_every_public_name_has_a_row():
    assert public() == ROWS.keys()


@pytest.mark.slow
def test_on_one_rank():
    jaxmpi.init()
    check_all()


@pytest.mark.slow
def test_on_simulated_ranks():
    jaxmpi.init()
    with jaxmpi.simulate(2):
        check_all()


@pytest.mark.slow
@run_ranks(2)
def test_on_ranks_of_mpi():
    check_all()


@pytest.mark.exhaustive
@run_ranks(2, backend="xla")
def test_on_ranks_of_xla():
    check_all()
