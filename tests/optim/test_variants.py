"""On one rank, every transform gives plain optax's numbers, jitted and not.

The checks are optax's own, with chex.
"""

import chex
import jax
import jax.numpy as jnp
import optax
from absl.testing import parameterized

import jaxmpi

TRANSFORMS = {
    "distributed": lambda inner: jaxmpi.distributed(inner),
    "sharded": lambda inner: jaxmpi.sharded(inner),
    "accumulate": lambda inner: jaxmpi.accumulate(jaxmpi.distributed(inner), 1),
    "local_sgd": lambda inner: jaxmpi.local_sgd(inner, 2),
    "skip_nonfinite": lambda inner: jaxmpi.skip_nonfinite(jaxmpi.distributed(inner)),
    "average_gradients": lambda inner: optax.chain(jaxmpi.average_gradients(), inner),
    "int8": lambda inner: jaxmpi.distributed(inner, codec=jaxmpi.codecs.int8()),
}
STEPS = 3


def parameters():
    return {"kernel": jnp.arange(12.0).reshape(3, 4) / 12, "bias": jnp.linspace(-1.0, 1.0, 4)}


def train(tx, jit):
    """The parameters after some steps down a bowl."""
    params = parameters()
    state = tx.init(params)

    @jit
    def step(params, state):
        grads = jax.tree.map(lambda x: 2 * x, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    return params


class TestTransforms(chex.TestCase):
    def setUp(self):
        super().setUp()
        jaxmpi.init()

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters((name, name) for name in TRANSFORMS)
    def test_one_rank_is_plain_optax(self, name):
        inner = optax.adam(0.1)
        want = train(inner, self.variant)
        chex.assert_trees_all_close(train(TRANSFORMS[name](inner), self.variant), want, rtol=1e-6)
