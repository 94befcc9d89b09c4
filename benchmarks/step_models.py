"""Models for train_step.py, as plain functions.

Each makes a loss of (params, batch), the parameters, and one rank's batch.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from models import mlp, resnet50


def _cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def _random(shapes, scale=0.02):
    rng = np.random.default_rng(0)
    arrays = []
    for shape in shapes:
        if len(shape) > 1:
            arrays.append(rng.normal(size=shape).astype(np.float32) * scale)
        else:
            arrays.append(np.ones(shape, np.float32))
    return arrays


def _batch(inputs_shape, classes, labels_shape):
    rng = np.random.default_rng(1)
    return rng.normal(size=inputs_shape).astype(np.float32), rng.integers(0, classes, labels_shape)


def mlp_10m():
    def loss_of(params, batch):
        x, labels = batch
        for i in range(0, len(params), 2):
            x = x @ params[i] + params[i + 1]
            x = jax.nn.relu(x) if i < len(params) - 2 else x
        return _cross_entropy(x, labels)

    return loss_of, _random(mlp()), _batch((128, 784), 10, 128)


def conv(x, kernel, stride=1):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


CNN_SHAPES = [(3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (12544, 128), (128,), (128, 10), (10,)]


def cnn():
    def loss_of(params, batch):
        x, labels = batch
        x = jax.nn.relu(conv(x, params[0]) + params[1])
        x = jax.nn.relu(conv(x, params[2], 2) + params[3]).reshape(len(x), -1)
        x = jax.nn.relu(x @ params[4] + params[5])
        return _cross_entropy(x @ params[6] + params[7], labels)

    return loss_of, _random(CNN_SHAPES), _batch((64, 28, 28, 1), 10, 64)


def resnet_50():
    """Build ResNet-50 on images of 32 pixels."""

    def loss_of(params, batch):
        x, labels = batch
        rest = iter(params)

        def conv_norm(x, stride=1):
            y = conv(x, next(rest), stride)
            scale, shift = next(rest), next(rest)
            mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
            return (y - mean) * lax.rsqrt(variance + 1e-5) * scale + shift

        x = jax.nn.relu(conv_norm(x, 2))
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                y = jax.nn.relu(conv_norm(x))
                y = jax.nn.relu(conv_norm(y, stride))
                y = conv_norm(y)
                x = jax.nn.relu(y + (conv_norm(x, stride) if block == 0 else x))
        return _cross_entropy(x.mean((1, 2)) @ next(rest) + next(rest), labels)

    return loss_of, _random(resnet50()), _batch((8, 32, 32, 3), 1000, 8)


GPT = {"layers": 6, "width": 368, "heads": 8, "length": 64, "batch": 4, "vocabulary": 256}


def gpt_10m():
    d, heads = GPT["width"], GPT["heads"]
    block = {
        "ln1": (d,),
        "qkv": (d, 3 * d),
        "out": (d, d),
        "ln2": (d,),
        "up": (d, 4 * d),
        "down": (4 * d, d),
    }
    shapes = {"embed": (GPT["vocabulary"], d), "place": (GPT["length"], d), "ln": (d,)}
    shapes["blocks"] = [block] * GPT["layers"]
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))

    def norm(x, scale):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale

    def loss_of(params, batch):
        words, targets = batch
        x = params["embed"][words] + params["place"]
        for p in params["blocks"]:
            parts = jnp.split(norm(x, p["ln1"]) @ p["qkv"], 3, axis=-1)
            q, k, v = (y.reshape(*y.shape[:2], heads, d // heads) for y in parts)
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
            x = x + attended @ p["out"]
            x = x + jax.nn.gelu(norm(x, p["ln2"]) @ p["up"]) @ p["down"]
        return _cross_entropy(norm(x, params["ln"]) @ params["embed"].T, targets)

    words = np.random.default_rng(1).integers(
        0, GPT["vocabulary"], (2, GPT["batch"], GPT["length"])
    )
    return loss_of, tree.unflatten(_random(leaves)), (words[0], words[1])


def stacked_gpt(layers, width, heads=8, length=64, batch=4, vocabulary=256):
    """Build a GPT as a scan over stacked layers, with rematerialization in the backward pass.

    `whole` gathers the parameters that a layer needs.
    """
    block = {"ln1": (width,), "qkv": (width, 3 * width), "out": (width, width)}
    block |= {"ln2": (width,), "up": (width, 4 * width), "down": (4 * width, width)}
    shapes = {"embed": (vocabulary, width), "place": (length, width), "ln": (width,)}
    shapes["blocks"] = {name: (layers, *shape) for name, shape in block.items()}
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))

    def norm(x, scale):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale

    def loss_of(params, batch, whole=lambda tree: tree):
        @jax.checkpoint
        def layer(x, p):
            p = whole(p)
            parts = jnp.split(norm(x, p["ln1"]) @ p["qkv"], 3, axis=-1)
            q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in parts)
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
            x = x + attended @ p["out"]
            return x + jax.nn.gelu(norm(x, p["ln2"]) @ p["up"]) @ p["down"], None

        words, targets = batch
        outer = whole({name: params[name] for name in ("embed", "place", "ln")})
        x, _ = lax.scan(layer, outer["embed"][words] + outer["place"], params["blocks"])
        return _cross_entropy(norm(x, outer["ln"]) @ outer["embed"].T, targets)

    words = np.random.default_rng(1).integers(0, vocabulary, (2, batch, length))
    return loss_of, tree.unflatten(_random(leaves)), (words[0], words[1])


MODELS = {"MLP 10M": mlp_10m, "CNN": cnn, "ResNet-50": resnet_50, "GPT 10M": gpt_10m}


def torch_models(torch):
    """Build the torch models, without ResNet-50: (function that makes the model, batch, loss)."""
    nn = torch.nn

    def dense():
        widths = [shape[0] for shape in mlp()[::2]] + [10]
        layers = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def convolutional():
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12544, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            d = GPT["width"]
            self.embed, self.place = (
                nn.Embedding(GPT["vocabulary"], d),
                nn.Parameter(torch.zeros(GPT["length"], d)),
            )
            layer = nn.TransformerEncoderLayer(
                d, GPT["heads"], 4 * d, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(
                layer, GPT["layers"], nn.LayerNorm(d), enable_nested_tensor=False
            )
            self.mask = nn.Transformer.generate_square_subsequent_mask(GPT["length"])

        def forward(self, words):
            x = self.blocks(self.embed(words) + self.place, self.mask, is_causal=True)
            return (x @ self.embed.weight.T).transpose(1, 2)

    images, labels = cnn()[2]
    loss = nn.functional.cross_entropy
    return {
        "MLP 10M": (dense, mlp_10m()[2], loss),
        "CNN": (convolutional, (np.moveaxis(images, 3, 1), labels), loss),
        "GPT 10M": (Words, gpt_10m()[2], loss),
    }
