"""Models for first_call.py with many arrays of few numbers.

Each makes a loss of (params, batch), the parameters, and one rank's batch.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from step_models import resnet_50

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 4, 16, 64


class Block(nnx.Module):
    """Transformer block from [batch, length, width] to the same shape; 16 arrays."""

    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """GPT from [batch, length] tokens to [batch, length, vocabulary] logits.

    It has 3 arrays, and 16 a layer.
    """

    def __init__(self, layers, unrolled, *, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
        self.norm = nnx.LayerNorm(WIDTH, use_bias=False, rngs=rngs)
        if unrolled:
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        else:
            self.blocks = nnx.vmap(Block)(rngs.fork(split=layers))
        self.unrolled = unrolled

    def __call__(self, text):
        x = self.embed(text) + self.position[...]
        mask = nnx.make_causal_mask(text)
        if self.unrolled:
            for block in self.blocks:
                x = block(x, mask)
        else:
            graph, state = nnx.split(self.blocks)
            x, _ = lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x, mask), None), x, state)
        return self.embed.attend(self.norm(x))


def gpt(layers, *, unrolled=True):
    graph, params = nnx.split(GPT(layers, unrolled, rngs=nnx.Rngs(0)), nnx.Param, ...)[:2]

    def loss_of(params, batch):
        words, targets = batch
        logits = nnx.merge(graph, params, nnx.State({}))(words)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    words = np.random.default_rng(1).integers(0, VOCABULARY, (2, 2, LENGTH))
    return loss_of, params, (words[0], words[1])


def small_arrays(count=400):
    def loss_of(params, x):
        return sum(jnp.sum(jnp.tanh(x @ w)) for w in params)

    rng = np.random.default_rng(0)
    return (
        loss_of,
        [jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for _ in range(count)],
        np.ones((4, 8), np.float32),
    )


MODELS = {
    "GPT 12": partial(gpt, 12),
    "GPT 24": partial(gpt, 24),
    "GPT 24 in a scan": partial(gpt, 24, unrolled=False),
    "ResNet-50": resnet_50,
    "400 arrays": small_arrays,
}
