"""Both forms of `codecs.int8`: in JAX, and the extension's loops, with the same bits."""

import math
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi import codecs
from jaxmpi._backends import extension
from jaxmpi._optim import int8_blocks
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

# from numbers of a normal distribution
KINDS = {
    "random": lambda x: x,
    "zero": lambda x: 0 * x,  # of both signs
    "zero blocks": lambda x: np.where(np.arange(x.size) // 1024 % 2, x, 0 * x),
    "nan": lambda x: np.where(np.arange(x.size) % 3001 == 1, np.nan, x),
    "infinite": lambda x: np.where(np.arange(x.size) % 2003 == 2, -np.inf, x),
    "denormal": lambda x: 1e-39 * x,
    "scales are denormal": lambda x: 1e-37 * x,
    "large": lambda x: np.clip(1e38 * x, -3.4e38, 3.4e38),
    "wide": lambda x: x * np.exp(80 * np.sin(np.arange(x.size) ** 2)),
}
BLOCKS = (1, 2, 3, 7, 16, 31, 100, 256, 1000, 1024)


@pytest.fixture(scope="module", autouse=True)
def loops():
    """Have XLA know the extension's loops, as a job on the native transport does."""
    try:
        native = extension.load()
    except ImportError:
        pytest.skip("the extension is not built")
    extension.register_int8(native)


def numbers(kind, shape, seed):
    x = np.random.default_rng(seed).normal(size=math.prod(shape))
    with np.errstate(over="ignore"):
        return KINDS[kind](x).astype(np.float32).reshape(shape)


def both(form, **parameters):
    """Return the form in JAX and that of the extension, jitted."""
    return jax.jit(partial(form.in_jax, **parameters)), jax.jit(
        partial(form.primitive.bind, **parameters)
    )


def assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    for x, y in zip(map(np.asarray, ours), map(np.asarray, theirs), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.dtype == np.float32:
            x, y = np.nan_to_num(x, nan=1.5), np.nan_to_num(y, nan=1.5)
            x, y = x.view(np.int32), y.view(np.int32)
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_array_equal(x, y)


def scales(coded, block):
    k = coded.shape[-1] // (block + 4) * block
    return np.ascontiguousarray(np.asarray(coded)[..., k:]).view(np.float32)


@pytest.mark.parametrize("block", BLOCKS)
def test_both_forms_have_the_same_bits(block):
    for size, blocks_of_row in ((2, 3), (3, 70 if block < 256 else 2)):
        k = blocks_of_row * block
        count = size * k - min(block - 1, 5)  # a part of the last block is padding
        cuts = sorted({0, 1 % count, count // 3, count // 3, count // 2 + 1, count})
        shapes = tuple((end - begin,) for begin, end in pairwise(cuts))
        encode = both(int8_blocks.encode_form, block=block)
        encode_mean = both(int8_blocks.encode_mean_form, block=block)
        decode = both(int8_blocks.decode_form, block=block, shapes=((0,), *shapes))
        for kind in KINDS:
            x = numbers(kind, (count,), 1)
            parts = np.split(x, cuts[1:-1])
            e = numbers("random" if kind in ("nan", "infinite") else kind, (size, k), 2)
            in_jax, of_loops = (f(e, np.zeros(0, np.float32), *parts) for f in encode)
            assert_same_bits(in_jax, of_loops)
            coded = in_jax[0]
            assert_same_bits(*(f(e[0], coded) for f in encode_mean))
            assert_same_bits(*(f(coded) for f in decode))


@pytest.mark.parametrize("block", [1, 7, 256])
def test_loops_of_large_arrays_have_the_same_bits(block):
    """They are cut into tasks for several threads."""
    size, k = 2, -(-300_000 // block) * block
    x, e = numbers("random", (2 * k - 3,), 1), numbers("random", (size, k), 2)
    in_jax, of_loops = (f(e, x) for f in both(int8_blocks.encode_form, block=block))
    assert_same_bits(in_jax, of_loops)
    coded = in_jax[0]
    assert_same_bits(*(f(e[0], coded) for f in both(int8_blocks.encode_mean_form, block=block)))
    shapes = ((k - 1,), (1,), (5, 100), (k - 700,))
    assert_same_bits(*(f(coded) for f in both(int8_blocks.decode_form, block=block, shapes=shapes)))


@pytest.mark.parametrize("which", [0, 1], ids=["jax", "loops"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nan_or_an_infinity_makes_its_block_nan(which, value):
    """Wherever it is in the block: XLA's maximum of floats would miss a NaN."""
    block, k = 100, 3300
    encode = both(int8_blocks.encode_form, block=block)[which]
    decode = both(int8_blocks.decode_form, block=block, shapes=((2, k),))[which]
    x = numbers("random", (2, k), 1)
    hit = np.zeros((2, k // block), bool)
    for row, block_number, position in ((0, 0, 0), (0, 7, 55), (1, 0, 31), (1, 32, 99)):
        x[row, block_number * block + position] = value
        hit[row, block_number] = True
    coded, residual = encode(np.zeros((2, k), np.float32), x)
    (decoded,) = decode(coded)
    expected = np.repeat(hit, block, axis=1)
    np.testing.assert_array_equal(np.isnan(decoded), expected)
    np.testing.assert_array_equal(np.isnan(residual), expected)


def test_codes_are_the_nearest_of_their_steps():
    """Half of a step is rounded to the even code, and the largest number is ±127."""
    x = np.array([127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49], np.float32)
    for encode in both(int8_blocks.encode_form, block=8):
        coded, residual = map(np.asarray, encode(np.zeros(8, np.float32), x))
        np.testing.assert_array_equal(coded[:8], [127, -127, 0, 2, 2, 0, -2, 0])
        np.testing.assert_array_equal(scales(coded, 8), [1.0])
        np.testing.assert_array_equal(residual, x - coded[:8])


def test_primitives_under_vmap_and_scan_and_grad():
    e, x = numbers("random", (3, 2, 32), 1), numbers("random", (3, 60), 2)
    in_jax, of_loops = (
        partial(f, block=16)
        for f in (int8_blocks.encode_form.in_jax, int8_blocks.encode_form.primitive.bind)
    )
    expected = [jax.jit(in_jax)(*pair) for pair in zip(e, x, strict=True)]
    expected = [np.stack(column) for column in zip(*expected, strict=True)]
    assert_same_bits(expected, jax.jit(jax.vmap(of_loops))(e, x))
    scanned = jax.jit(lambda e, x: jax.lax.scan(lambda c, pair: (c, of_loops(*pair)), 0, (e, x))[1])
    assert_same_bits(expected, scanned(e, x))
    one_e = [jax.jit(in_jax)(e[0], row) for row in x]
    one_e = [np.stack(column) for column in zip(*one_e, strict=True)]
    assert_same_bits(one_e, jax.jit(jax.vmap(of_loops, in_axes=(None, 0)))(e[0], x))
    slope_in_jax, slope = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(e[0], x)[1] ** 2))) for f in (in_jax, of_loops)
    )
    np.testing.assert_allclose(slope(x[0]), slope_in_jax(x[0]), rtol=1e-6)


@run_ranks(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mean_of_int8_has_the_same_bits_on_both_forms(dtype):
    """The codec as a whole, over three steps, with a state that is given away."""
    codec, rank = codecs.int8(block=32), jaxmpi.rank()
    shapes = {"w": (40, 30), "b": (31,), "none": (0,), "scale": ()}
    params = {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    transport, found = session.current("test").transport, []
    is_native = transport.name == "native"
    assert transport.loops(xla="xla", native="native") == ("native" if is_native else "xla")
    in_xla = lambda self, *, xla, native: xla
    for loops in (type(transport).loops, in_xla):
        patch = pytest.MonkeyPatch()
        patch.setattr(type(transport), "loops", loops)
        state = codec.init(params)
        mean = jaxmpi.jit(lambda g, s: codec.mean(g, s), donate_argnums=1)
        outs = []
        for step in range(3):
            grads = {
                name: jnp.asarray(numbers("random", shape, rank + 10 * step), dtype)
                for name, shape in shapes.items()
            }
            out, state = mean(grads, state)
            assert {k: (x.shape, str(x.dtype)) for k, x in out.items()} == {
                k: (x.shape, str(x.dtype)) for k, x in grads.items()
            }
            outs += [np.asarray(x, np.float32) for x in jax.tree.leaves(out)]
        patch.undo()
        found.append([*outs, *map(np.asarray, state)])
    assert_same_bits(*found)
