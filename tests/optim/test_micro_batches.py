"""Micro-batches: the same bits on any number of ranks, and with any number of threads of a rank."""

import hashlib
import os
import subprocess
import sys

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxmpi
from jaxmpi.testing import run_ranks

MICRO_BATCHES = 12
TRANSFORMS = {
    "adam": lambda: optax.adam(1e-2),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "novograd": lambda: optax.novograd(1e-2),
    "schedule": lambda: optax.inject_hyperparams(optax.fromage)(lambda step: 0.01 / (step + 1)),
}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def loss(params, batch):
    """A sum over the samples for every bias, sums over a row in the normalization, and a scan."""
    x, y = batch
    h = jnp.tanh(x @ params["w"] + params["b"])
    h, _ = jax.lax.scan(
        lambda h, scale: (jax.checkpoint(jax.nn.standardize)(h) * scale, None), h, params["scales"]
    )
    return jnp.mean((h @ params["v"] - y) ** 2)


def digests():
    """The parameters after two steps of each transform."""
    params = {
        "w": normal(1, 16, 784),
        "b": jnp.zeros(784),
        "scales": jnp.ones((2, 784)),
        "v": normal(2, 784, 96),
    }
    batch = jaxmpi.shard(np.asarray(normal(3, 24 * MICRO_BATCHES, 16 + 96)))[:]
    batch = batch[:, :16], batch[:, 16:]
    found = {}
    for name, make in TRANSFORMS.items():
        tx = jaxmpi.distributed(make(), micro_batches=MICRO_BATCHES)

        @jaxmpi.jit
        def step(params, state, batch, tx=tx):
            grads = jaxmpi.micro_batch_grads(jax.grad(loss), MICRO_BATCHES)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        new, state = params, tx.init(params)
        for _ in range(2):
            new, state = step(new, state, batch)
        found[name] = hashlib.sha256(
            b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(new))
        ).hexdigest()
    return found


@pytest.mark.exhaustive
def test_any_number_of_threads_gives_the_same_bits():
    """NPROC sets the threads of XLA's CPU client; these optimizers' sums are split over several."""
    runs = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "NPROC": str(n)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in (1, 2, 3)
    ]
    one, *others = [
        dict(line.split() for line in run.communicate(timeout=300)[0].splitlines()) for run in runs
    ]
    assert one.keys() == TRANSFORMS.keys()
    for other in others:
        assert other == one


@pytest.mark.exhaustive
@run_ranks(1, 2, 3)
def test_all_ranks_have_the_same_bits():
    found = digests()
    assert all(other == found for other in jaxmpi.allgather_object(found))


@run_ranks(1, 2, 3)
def test_arrays_without_numbers_are_averaged_too():
    tx = jaxmpi.distributed(optax.sgd(1.0), micro_batches=6)
    params = {"none": jnp.zeros((0, 3)), "w": jnp.zeros(2)}
    here = 6 // jaxmpi.size()
    grads = {"none": jnp.zeros((here, 0, 3)), "w": jnp.full((here, 2), jaxmpi.rank() + 1.0)}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["none"].shape == (0, 3)
    np.testing.assert_allclose(updates["w"], np.full(2, -(jaxmpi.size() + 1) / 2), rtol=1e-6)


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (optax.contrib.muon(1e-2), "scale_by_muon"),
        (optax.chain(optax.clip(1.0), optax.contrib.muon(1e-2)), "scale_by_muon"),
    ],
)
def test_matrix_products_of_an_optimizer_are_refused_by_name(inner, name):
    jaxmpi.init()
    tx = jaxmpi.distributed(inner, micro_batches=1)
    params = {"w": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match=rf"{name} in inner multiplies matrices \(dot_general\)"):
        tx.update(jax.tree.map(lambda x: x[None], params), tx.init(params), params)


class Normalized(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False, axis_name=jaxmpi.AXIS)(x)


@pytest.mark.slow
@run_ranks(1, 2)
@pytest.mark.parametrize("how", ["BatchNorm", "tree_allreduce", "in a scan"])
def test_what_communicates_within_a_micro_batch_is_refused(how):
    model = Normalized()
    variables = model.init(jax.random.key(0), jnp.ones((2, 3)))

    def value(params, x):
        if how == "BatchNorm":
            return jnp.sum(
                model.apply({**variables, "params": params}, x, mutable=["batch_stats"])[0]
            )
        mean = lambda x: jax.lax.pmean(x, jaxmpi.AXIS)
        if how == "in a scan":
            return jnp.sum(jax.lax.scan(lambda c, row: (mean(c + row), None), x[0], x)[0])
        return jnp.sum(jaxmpi.tree_bcast(x)) if jaxmpi.size() > 1 else jnp.sum(mean(x))

    step = jaxmpi.jit(jaxmpi.micro_batch_grads(jax.grad(value), 2 * jaxmpi.size()))
    with pytest.raises(
        ValueError,
        match=r"micro_batch_grads: fun communicates \(\w+ at .*\), so that its results depend",
    ):
        step(variables["params"], np.ones((4, 3), np.float32))


if __name__ == "__main__":
    jaxmpi.init()
    for name, digest in digests().items():
        print(name, digest)


def test_a_gpu_that_adds_in_any_order_is_warned_of(monkeypatch):
    jaxmpi.init()
    grads = jaxmpi.micro_batch_grads(jax.grad(lambda w, x: jnp.mean(x @ w)), 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(UserWarning, match="xla_gpu_deterministic_ops"):
        grads(jnp.ones(3), jnp.ones((4, 3)))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    grads = jaxmpi.micro_batch_grads(jax.grad(lambda w, x: jnp.sum(x @ w)), 2)
    np.testing.assert_array_equal(grads(jnp.ones(3), jnp.ones((4, 3))), np.full((2, 3), 2.0))
