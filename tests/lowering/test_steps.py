"""Each step from a call to its program is entered once, for a model with loops and statistics."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmpi
from jaxmpi._jit import analyze, program
from jaxmpi._lowering import lower, plan
from jaxmpi.testing import run_ranks

STEPS = [
    (program, "trace"),
    (program, "analyze"),
    (analyze, "check_shards"),
    (analyze, "plan_of"),
    (plan, "fuse_means"),
    (analyze, "entries_of"),
    (analyze, "control_equations"),
    (program, "Signature"),
    (lower, "build"),
    (lower, "rewrite"),
]


class Model(nnx.Module):
    """Attention in a scan over layers, behind a batch normalization over all ranks."""

    def __init__(self, layers, rngs):
        self.norm = nnx.BatchNorm(8, axis_name=jaxmpi.AXIS, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs))(
            rngs.fork(split=layers)
        )

    def __call__(self, x):
        graph, state = nnx.split(self.layers)
        x, _ = lax.scan(lambda x, one: (x + nnx.merge(graph, one)(x), None), self.norm(x), state)
        return x


@run_ranks(2)
@pytest.mark.parametrize("layers", [2, 24])
def test_each_step_is_entered_once(layers):
    counts = Counter()

    def counted(name, function):
        def wrapper(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return wrapper

    graph, params, rest = nnx.split(Model(layers, nnx.Rngs(0)), nnx.Param, ...)
    tx = jaxmpi.distributed(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))

    @jaxmpi.jit
    def step(params, rest, state, x):
        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            return jnp.mean(model(x) ** 2), nnx.split(model, nnx.Param, ...)[2]

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        mean = jaxmpi.tree_allreduce(value, "mean")
        return optax.apply_updates(params, updates), rest, state, mean

    patch = pytest.MonkeyPatch()
    for module, name in STEPS:
        patch.setattr(module, name, counted(name, getattr(module, name)))
    try:
        x = np.random.default_rng(jaxmpi.rank()).normal(size=(4, 3, 8)).astype(np.float32)
        *_, mean = step(params, rest, tx.init(params), x)
    finally:
        patch.undo()
    assert np.isfinite(mean)
    assert counts == dict.fromkeys([name for _, name in STEPS], 1)
