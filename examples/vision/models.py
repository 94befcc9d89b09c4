"""ResNets (He et al. 2015) and ViTs (Beyer et al. 2022) in Flax nnx.

The ResNets have the stride in the 3×3 convolution.

Both take [batch, pixels, pixels, 3] and return [batch, classes]. Parameters are `param_dtype`;
`dtype` is what they compute in, but for the head, whose logits would be equal too often in 16 bits.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx


class Block(nnx.Module):
    """Residual block: two 3×3 convolutions, or 1×1, 3×3 and 1×1 with four times the channels."""

    def __init__(self, inputs, channels, stride, bottleneck, *, conv, norm, rngs):
        outputs = 4 * channels if bottleneck else channels
        widths = (
            [inputs, channels, channels, outputs] if bottleneck else [inputs, channels, channels]
        )
        kernels, strides = ([1, 3, 1], [1, stride, 1]) if bottleneck else ([3, 3], [stride, 1])
        shapes = zip(widths, widths[1:], kernels, strides, strict=False)
        self.convs = nnx.List(
            [conv(a, b, (k, k), s, padding=k // 2, rngs=rngs) for a, b, k, s in shapes]
        )
        # the last scale begins at zero, and each block as its shortcut (Goyal et al. 2017)
        last = len(kernels) - 1
        ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
        scales = [ones] * last + [zeros]
        norms = zip(widths[1:], scales, strict=True)
        self.norms = nnx.List([norm(b, scale_init=scale, rngs=rngs) for b, scale in norms])
        shortcut, shortcut_norm = None, None
        if stride > 1 or inputs != outputs:
            shortcut = conv(inputs, outputs, (1, 1), stride, rngs=rngs)
            shortcut_norm = norm(outputs, rngs=rngs)
        self.shortcut, self.shortcut_norm = nnx.data(shortcut), nnx.data(shortcut_norm)

    def __call__(self, x):
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(nnx.relu(y) if i else y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut_norm(self.shortcut(x))))


class ResNet(nnx.Module):
    """Residual network; with `axis_name` its batch statistics are those of all ranks."""

    def __init__(
        self, blocks, bottleneck, classes, *, width=64, axis_name=None, dtype, param_dtype, rngs
    ):
        types = {"dtype": dtype, "param_dtype": param_dtype}
        he = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        conv = partial(nnx.Conv, use_bias=False, kernel_init=he, **types)
        norm = partial(nnx.BatchNorm, momentum=0.9, axis_name=axis_name, **types)
        self.stem = conv(3, width, (7, 7), 2, padding=3, rngs=rngs)
        self.stem_norm = norm(width, rngs=rngs)
        stages, inputs = [], width
        for stage, count in enumerate(blocks):
            for i in range(count):
                channels, stride = width * 2**stage, 2 if stage and not i else 1
                stages.append(
                    Block(inputs, channels, stride, bottleneck, conv=conv, norm=norm, rngs=rngs)
                )
                inputs = 4 * channels if bottleneck else channels
        self.blocks = nnx.List(stages)
        self.head = nnx.Linear(
            inputs,
            classes,
            kernel_init=nnx.initializers.normal(0.01),
            rngs=rngs,
            param_dtype=param_dtype,
        )

    def __call__(self, x):
        x = nnx.relu(self.stem_norm(self.stem(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Encoder(nnx.Module):
    """Transformer block, normalized before attention and before the MLP."""

    def __init__(self, width, heads, *, rngs, **types):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs, **types)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs, **types)
        types["kernel_init"] = nnx.initializers.xavier_uniform()
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs, **types)
        self.dense1 = nnx.Linear(width, 4 * width, rngs=rngs, **types)
        self.dense2 = nnx.Linear(4 * width, width, rngs=rngs, **types)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dense2(nnx.gelu(self.dense1(self.norm2(x))))


class ViT(nnx.Module):
    """Vision transformer over 16×16 patches, with sines and cosines as positions.

    The mean of all patches goes to the head. It has no batch statistics.
    """

    def __init__(self, heads, classes, *, width=64, axis_name=None, dtype, param_dtype, rngs):
        del axis_name
        types = {"dtype": dtype, "param_dtype": param_dtype}
        self.patches = nnx.Conv(
            3, width * heads, (16, 16), (16, 16), padding="VALID", rngs=rngs, **types
        )
        self.blocks = nnx.List(
            [Encoder(width * heads, heads, rngs=rngs, **types) for _ in range(12)]
        )
        self.norm = nnx.LayerNorm(width * heads, rngs=rngs, **types)
        zeros = nnx.initializers.zeros_init()
        self.head = nnx.Linear(
            width * heads, classes, kernel_init=zeros, rngs=rngs, param_dtype=param_dtype
        )

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(len(x), -1, x.shape[-1])
        x = x + positions(round(x.shape[1] ** 0.5), x.shape[-1]).astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def positions(side, width):
    """Return [side², width]: sines and cosines of row and column.

    The width/4 frequencies go from 1 to 1/10000.
    """
    row, column = np.mgrid[:side, :side].reshape(2, -1, 1)
    frequencies = 10000.0 ** -np.linspace(0, 1, width // 4)
    waves = []
    for angle in (row * frequencies, column * frequencies):
        waves += [np.sin(angle), np.cos(angle)]
    return jnp.asarray(np.concatenate(waves, axis=1))


MODELS = {
    "resnet18": partial(ResNet, (2, 2, 2, 2), False),
    "resnet34": partial(ResNet, (3, 4, 6, 3), False),
    "resnet50": partial(ResNet, (3, 4, 6, 3), True),
    "vit-ti": partial(ViT, 3),
    "vit-s": partial(ViT, 6),
}
