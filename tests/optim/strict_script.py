"""Print which public functions differ under implicit and strict promotion of dtypes.

See test_strict.py.
"""

import sys
import tempfile
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxmpi
from jaxmpi import codecs

jaxmpi.init()
RANK, N = jnp.float32(jaxmpi.rank()), jaxmpi.size()


def gradients(rank):
    w = jnp.asarray(np.arange(24, dtype=np.float32).reshape(6, 4) / 24) + rank
    return {
        "w": w,
        "b": jnp.full(6, 0.5, jnp.float32) + rank,
        "d": jnp.arange(5, dtype=jnp.float64) + rank.astype(jnp.float64),
    }


PARAMS = {
    "w": jnp.ones((6, 4), jnp.float32),
    "b": jnp.ones(6, jnp.float32),
    "d": jnp.ones(5, jnp.float64),
}


def steps(tx, n=3, **extra):
    """The parameters after n steps of an optimizer, in a step of `jaxmpi.jit`."""

    def step(params, state, rank):
        updates, state = tx.update(gradients(rank), state, params, **extra)
        return optax.apply_updates(params, updates), state

    def call():
        params, state, run = PARAMS, tx.init(PARAMS), jaxmpi.jit(step)
        for _ in range(n):
            params, state = run(params, state, RANK)
        return params

    return call


def fsdp():
    tx = optax.sgd(0.1, momentum=0.9)

    def step(shards, state, rank):
        loss = lambda shards: (
            sum(jnp.sum(x * x).astype(jnp.float32) for x in jax.tree.leaves(jaxmpi.unshard(shards)))
            * rank
        )
        updates, state = tx.update(jax.grad(loss)(shards), state, shards)
        return optax.apply_updates(shards, updates), state

    shards = jaxmpi.fully_shard(PARAMS)
    shards, _ = jaxmpi.jit(step)(shards, tx.init(shards), RANK)
    return jaxmpi.unshard(shards)


def micro():
    tx = jaxmpi.distributed(optax.sgd(0.1, momentum=0.9), micro_batches=4 * N)
    grads = jaxmpi.micro_batch_grads(
        jax.grad(lambda p, x: jnp.mean((x @ p["w"].T + p["b"]) ** 2)), 4 * N
    )

    def step(params, state, x):
        updates, state = tx.update(grads(params, x), state, params)
        return optax.apply_updates(params, updates)

    x = jnp.asarray(np.arange(32, dtype=np.float32).reshape(8, 4))
    return jaxmpi.jit(step)(PARAMS, tx.init(PARAMS), x)


def saved():
    with tempfile.TemporaryDirectory() as folder:
        folder = jaxmpi.broadcast_object(folder)
        tx = jaxmpi.sharded(optax.sgd(0.1, momentum=0.9))
        run = {"params": PARAMS, "state": tx.init(PARAMS), "step": 3, "key": jax.random.key(0)}
        jaxmpi.save(folder, 1, run, background=False)
        run = jaxmpi.restore(folder, run)
        jaxmpi.barrier()
        return run["params"], jax.random.key_data(run["key"])


def loss_scale():
    tx = jaxmpi.dynamic_loss_scale(jaxmpi.distributed(optax.sgd(0.1)), growth_every=2)
    return steps(tx)()


def sampled():
    rows = list(jaxmpi.prefetch(jaxmpi.batches(np.arange(24.0, dtype=np.float32), 12, seed=0)))
    key = jaxmpi.rank_key(jax.random.key(0))
    return rows, jax.random.key_data(key), jnp.asarray(jaxmpi.any_rank(rows[0][0] > 3))


sgd, adam = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)  # optax.adam itself needs promotion
ring = lambda n: [(r, (r + 1) % n) for r in range(n)]


def along(f):
    """Make a case: the outputs of a function of [ranks, 2] in `jaxmpi.jit`."""
    rows = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
    return lambda: jaxmpi.jit(f)(jnp.asarray(rows) + RANK)


OPS = ("mean", "sum", "max", "min", "prod")
DTYPES = ("float32", "float64", "int8", "int32", "int64", "uint8", "bfloat16")
CODECS = {
    "bf16": codecs.bf16(),
    "f16": codecs.f16(),
    "int8": codecs.int8(),
    "topk": codecs.topk(0.25),
    "powersgd": codecs.powersgd(2),
}


def reduced(op, dtype):
    return lambda: jaxmpi.tree_allreduce(jnp.arange(4).astype(dtype) + RANK.astype(dtype), op)


def slope(op):
    return along(jax.grad(lambda x: jnp.sum(jaxmpi.tree_allreduce(x, op))))


nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)


def positive_branch(x):
    return lax.cond(lax.psum(1, jaxmpi.AXIS) > 1, lambda: lax.pmax(x, jaxmpi.AXIS), lambda: x)


def times_rank(p, r):
    return jnp.sum(p["b"]) * r


CASES = {
    **{f"allreduce {op} {dtype}": reduced(op, dtype) for op in OPS for dtype in DTYPES},
    "bcast": lambda: jaxmpi.tree_bcast({"a": 3, "b": np.float32(RANK)}),
    "reduce": lambda: jaxmpi.tree_reduce(gradients(RANK), "mean", 0),
    "reduce_scatter": along(jaxmpi.tree_reduce_scatter),
    "reduce_scatter max": along(lambda x: jaxmpi.tree_reduce_scatter(x, "max")),
    "alltoall": along(jaxmpi.tree_alltoall),
    "psum": along(lambda x: lax.psum(x, jaxmpi.AXIS)),
    "ppermute": along(lambda x: lax.ppermute(x, jaxmpi.AXIS, ring(N))),
    "psum_scatter": along(lambda x: lax.psum_scatter(x, jaxmpi.AXIS)),
    "all_to_all": along(lambda x: lax.all_to_all(x, jaxmpi.AXIS, 0, 0)),
    "pbroadcast": along(lambda x: lax.pbroadcast(x, (jaxmpi.AXIS,), 0)),
    **{f"gradient of {op}": slope(op) for op in ("mean", "sum", "max", "prod")},
    "loop": along(lambda x: lax.fori_loop(0, 3, lambda i, x: lax.pmean(x, jaxmpi.AXIS), x)),
    "branch": along(positive_branch),
    "vmap": along(jax.vmap(lambda x: lax.pmean(x, jaxmpi.AXIS))),
    "distributed": steps(jaxmpi.distributed(adam)),
    "distributed, weight": steps(jaxmpi.distributed(adam), weight=3),
    "distributed, sum": steps(jaxmpi.distributed(adam, op="sum")),
    "adasum": steps(jaxmpi.distributed(sgd, op="adasum")),
    "accumulate": steps(jaxmpi.accumulate(jaxmpi.distributed(adam), 2)),
    "accumulate, weight": steps(jaxmpi.accumulate(jaxmpi.distributed(adam), 2), weight=3),
    "sharded": steps(jaxmpi.sharded(adam)),
    "sharded, clip": steps(jaxmpi.sharded(optax.chain(jaxmpi.clip_by_global_norm(1.0), adam))),
    "local_sgd": steps(jaxmpi.local_sgd(adam, 2)),
    "local_sgd, outer": steps(jaxmpi.local_sgd(sgd, 2, nesterov)),
    "local_sgd, fragments": steps(jaxmpi.local_sgd(sgd, 2, fragments=2, delay=1), 6),
    "skip_nonfinite": steps(jaxmpi.skip_nonfinite(jaxmpi.distributed(adam))),
    "loss scale": loss_scale,
    "watch_replicas": steps(jaxmpi.watch_replicas(jaxmpi.distributed(adam), 2)),
    **{
        f"codec {name}": steps(jaxmpi.distributed(sgd, codec=codec))
        for name, codec in CODECS.items()
    },
    "fully_shard": fsdp,
    "micro_batches": micro,
    "noise scale": steps(optax.chain(jaxmpi.measure_noise_scale(), jaxmpi.distributed(sgd))),
    "average_metrics": lambda: jaxmpi.average_metrics(
        {"loss": 0.5, "n": 3, "x": np.float32(RANK)}, weight=2
    ),
    "average_loss": lambda: jaxmpi.jit(jax.grad(jaxmpi.average_loss(times_rank)))(PARAMS, RANK),
    "batch_stats": lambda: jaxmpi.nn.average_batch_stats(gradients(RANK)),
    "synchronize": lambda: jaxmpi.synchronize({**gradients(RANK), "n": 3, "x": np.arange(3)}),
    "checkpoint": saved,
    "data": sampled,
}


def outcome(case, promotion):
    """The outputs of a case, of new programs."""
    jax.clear_caches()
    with jax.numpy_dtype_promotion(promotion):
        try:
            return [np.asarray(x) for x in jax.tree.leaves(jax.device_get(case()))], ""
        except Exception as error:
            where = []
            for frame in traceback.extract_tb(error.__traceback__):
                if "/jaxmpi/" in frame.filename:
                    where.append(f"{frame.filename}:{frame.lineno}")
            return [], f"{type(error).__name__}: {str(error)[:300]} {where[-3:]}"


for name, case in CASES.items():
    if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
        continue
    standard, why = outcome(case, "standard")
    strict, why_strict = outcome(case, "strict")
    equal = len(standard) == len(strict)
    for a, b in zip(standard, strict, strict=False):
        equal = equal and np.array_equal(a, b) and a.dtype == b.dtype
    if why or why_strict or not equal:
        print(
            f"DIFFERS {name}: {why or 'right'} | {why_strict or [x.dtype for x in strict]}",
            flush=True,
        )
print("done", flush=True)
