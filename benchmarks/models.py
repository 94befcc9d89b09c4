"""The shapes of the parameters of known models."""

from itertools import pairwise


def resnet50():
    """Shapes of ResNet-50: 161 arrays, 25.6 million numbers (He et al. 2015, as in torchvision)."""
    shapes = [(7, 7, 3, 64), (64,), (64,)]
    width_in = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            shapes += [
                (1, 1, width_in, width),
                (width,),
                (width,),
                (3, 3, width, width),
                (width,),
                (width,),
            ]
            shapes += [(1, 1, width, 4 * width), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(1, 1, width_in, 4 * width), (4 * width,), (4 * width,)]
            width_in = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def gpt2():
    """Shapes of the small GPT-2: 148 arrays, 124 million numbers (Radford et al. 2019)."""
    d = 768
    block = [
        (d,),
        (d,),
        (d, 3 * d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (d, 4 * d),
        (4 * d,),
        (4 * d, d),
        (d,),
    ]
    return [(50257, d), (1024, d), *block * 12, (d,), (d,)]


def mlp():
    """Shapes of an MLP: 8 arrays, 10 million numbers."""
    widths = (784, 2048, 2048, 2048, 10)
    shapes = []
    for a, b in pairwise(widths):
        shapes += [(a, b), (b,)]
    return shapes
