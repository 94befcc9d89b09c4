"""Law 1 for gradient transforms: n ranks train as plain optax does on the whole batch.

`check` trains on the ranks that there are, whatever their backend, and compares with a reference
that knows of no ranks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmpi

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(
        0.01, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "lion": lambda: optax.lion(0.01),
    "lamb": lambda: optax.lamb(0.01),
}
VARIANTS = (
    "plain",
    "weighted",
    "accumulate",
    "sharded",
    "sharded weighted",
    "clip before",
    "clip after",
    "sharded clip",
    "bf16",
)
# variants with parameters in shards, by fully_shard
SHARDED_VARIANTS = ("plain", "weighted", "accumulate", "clip", "bf16")
STEPS = 6
EVEN, UNEVEN = 24, 23  # samples: 1 to 4 ranks divide the first
CLIP = 0.3


def data(samples, dtype=np.float64):
    rng = np.random.default_rng(5)
    return {
        "x": rng.normal(size=(samples, 5)).astype(dtype),
        "y": rng.normal(size=(samples, 3)).astype(dtype),
    }


def parameters(dtype=np.float64):
    rng = np.random.default_rng(7)
    # no number of ranks divides them all
    shapes = {"w": (5, 7), "b": (7,), "v": (7, 3), "scale": ()}
    return {
        name: jnp.asarray(0.4 * rng.normal(size=shape), dtype) for name, shape in shapes.items()
    }


def loss(params, batch, mask):
    """Return the mean over the samples that the mask keeps."""
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"] * params["scale"]
    errors = jnp.sum((out - batch["y"]) ** 2, axis=1)
    return jnp.sum(jnp.where(mask, errors, 0)) / jnp.sum(mask)


def transform(variant, optimizer):
    inner = OPTIMIZERS[optimizer]()
    clipped = optax.chain(jaxmpi.clip_by_global_norm(CLIP), inner)
    if variant.startswith("fully "):
        return {"fully clip": clipped, "fully accumulate": jaxmpi.accumulate(inner, 2)}.get(
            variant, inner
        )
    return {
        "plain": lambda: jaxmpi.distributed(inner),
        "weighted": lambda: jaxmpi.distributed(inner),
        "accumulate": lambda: jaxmpi.accumulate(jaxmpi.distributed(inner), 2),
        "sharded": lambda: jaxmpi.sharded(inner),
        "sharded weighted": lambda: jaxmpi.accumulate(jaxmpi.sharded(inner), 2),
        "clip before": lambda: optax.chain(
            optax.clip_by_global_norm(CLIP), jaxmpi.average_gradients(), inner
        ),
        "clip after": lambda: jaxmpi.distributed(clipped),
        "sharded clip": lambda: jaxmpi.sharded(clipped),
        "bf16": lambda: jaxmpi.sharded(inner, master_dtype=jnp.float32),
    }[variant]()


def settings(variant):
    """Return the number of samples, the batch size, and whether batches are weighted."""
    if variant in ("weighted", "fully weighted"):
        return UNEVEN, UNEVEN, True
    if variant in ("accumulate", "sharded weighted", "fully accumulate"):
        return UNEVEN, 12, True
    return EVEN, EVEN, False


def train(variant, optimizer, jit):
    """Train on these ranks; return the parameters."""
    if variant.startswith("fully "):
        return train_shards(variant, optimizer, jit)
    samples, batch_size, weighted = settings(variant)
    dtype = jnp.bfloat16 if variant == "bf16" else np.float64
    params = parameters(dtype)
    tx = transform(variant, optimizer)
    state = tx.init(params)

    @jit
    def step(params, state, batch, mask):
        grads = jax.grad(loss)(params, jax.tree.map(lambda x: x.astype(dtype), batch), mask)
        weight = {"weight": jnp.sum(mask)} if weighted else {}
        updates, state = tx.update(grads, state, params, **weight)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        for batch, mask in jaxmpi.batches(data(samples), batch_size, remainder="mask"):
            params, state = step(params, state, batch, mask)
    return params, state


def train_shards(variant, optimizer, jit):
    """Train with parameters of which each rank has a shard."""
    samples, batch_size, weighted = settings(variant)
    short = variant == "fully bf16"
    dtype = jnp.bfloat16 if short else np.float64
    start = parameters(jnp.bfloat16).items() if short else parameters().items()
    params = jaxmpi.fully_shard({name: x.astype(jnp.float32) if short else x for name, x in start})
    tx = transform(variant, optimizer)
    state = tx.init(params)

    @jit
    def step(params, state, batch, mask):
        batch = jax.tree.map(lambda x: x.astype(dtype), batch)
        weight = jnp.sum(mask) if weighted else None
        grads = jax.grad(
            lambda shards: loss(jaxmpi.unshard(shards, dtype=dtype, weight=weight), batch, mask)
        )(params)
        total = {}
        if variant == "fully accumulate":
            total["weight"] = jaxmpi.tree_allreduce(weight, "sum")
        updates, state = tx.update(grads, state, params, **total)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        for batch, mask in jaxmpi.batches(data(samples), batch_size, remainder="mask"):
            params, state = step(params, state, batch, mask)
    return jaxmpi.unshard(params, dtype=dtype), state


def reference(variant, optimizer, ranks):
    """Train with plain optax on the whole batch."""
    samples, _, _ = settings(variant)
    whole = data(samples)
    inner = OPTIMIZERS[optimizer]()
    gradient = jax.jit(jax.grad(loss))
    parts = []
    if samples % ranks == 0:
        for r in range(ranks):
            parts.append(jax.tree.map(lambda x, r=r: np.split(x, ranks)[r], whole))
    if variant in ("clip after", "sharded clip", "fully clip"):
        inner = optax.chain(optax.clip_by_global_norm(CLIP), inner)
    clip = optax.clip_by_global_norm(CLIP)
    short = variant.endswith("bf16")
    params = parameters(jnp.bfloat16) if short else parameters()
    master = jax.tree.map(lambda x: x.astype(jnp.float32), params) if short else params
    state = inner.init(master)
    update = jax.jit(inner.update)
    for _ in range(STEPS):
        if variant == "clip before":
            grads = []
            for part in parts:
                grad = gradient(params, part, np.ones(len(part["x"]), bool))
                grads.append(clip.update(grad, clip.init(params))[0])
            grads = jax.tree.map(lambda *xs: sum(xs) / ranks, *grads)
        elif short:
            rounded = [jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), part) for part in parts]
            grads = [gradient(params, part, np.ones(len(part["x"]), bool)) for part in rounded]

            def mean(*xs):
                wide = sum(x.astype(jnp.float32) for x in xs) / ranks
                return wide.astype(jnp.bfloat16).astype(jnp.float32)

            grads = jax.tree.map(mean, *grads)
        else:
            grads = gradient(params, whole, np.ones(samples, bool))
        updates, state = update(grads, state, master)
        master = optax.apply_updates(master, updates)
        params = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
    return params


def check(variant, optimizer, jit=jaxmpi.jit):
    """Assert the law on the ranks that there are."""
    with jax.enable_x64(True):
        got, _ = train(variant, optimizer, jit)
        want = reference(variant, optimizer, jaxmpi.size())
        scale = 2e-2 if variant.endswith("bf16") else 1e-12
        for name, x in want.items():
            a, b = np.asarray(got[name], np.float64), np.asarray(x, np.float64)
            np.testing.assert_allclose(
                a, b, rtol=scale, atol=scale, err_msg=f"{variant} {optimizer} {name}"
            )
            # it has learnt something
            assert np.abs(b - np.asarray(parameters()[name])).max() > 1e-3
