"""A dependency keeps the bits of a value, and XLA cannot compute the value before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmpi
from jaxmpi._backends.base import Overlap, Started, Target
from jaxmpi._barriers import depending_on, token_of
from jaxmpi._lowering.plan import plan_of
from jaxmpi._lowering.rewrite import rewrite
from jaxmpi._lowering.trace import inlined

DTYPES = ("float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64")
MARK = lax.erf_inv_p  # stands for the start of a message


# XLA makes one of 16 bits this one, whatever it does with it
NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00}


def of_any_bits(dtype):
    bits = np.random.default_rng(0).integers(0, 256, 8 * 1000, np.uint8)
    if dtype in NAN:
        bits = bits.view(np.uint16)
        exponent = NAN[dtype] & NAN[dtype] << 1
        bits = np.where(bits & exponent == exponent, bits & 0x8000 | NAN[dtype], bits).astype(
            np.uint16
        )
    return bits[:1000] % 2 == 1 if dtype == "bool" else bits.view(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_all_bits_stay(dtype, other):
    x, before = of_any_bits(dtype), of_any_bits(other)
    after = jax.jit(lambda before, x: depending_on(token_of([before]), [x])[0])(before, x)
    np.testing.assert_array_equal(np.asarray(after).view(np.uint8), x.view(np.uint8))
    assert after.dtype == x.dtype


def test_the_compiled_program_takes_both():
    """XLA keeps the token; if it learns that it does not matter, another way must be found."""
    f = jax.jit(lambda before, x: depending_on(token_of([before]), [x])[0] * 2.0, keep_unused=True)
    text = f.lower(jnp.ones(3), jnp.ones(1000)).compile().as_text()
    entry = text[text.index("ENTRY") :]
    before = next(line.split()[0] for line in entry.splitlines() if "parameter(0)" in line)
    assert entry.count(before + ")") + entry.count(before + ",") == 1, text


def overlap(bucket_bytes):
    """A way to start messages of which the arrays are marked."""
    start = lambda call, xs, bucket, first: Started(
        [MARK.bind(x) for x in xs], lambda before: (list(xs), list(before))
    )
    return Overlap(0, bucket_bytes, lambda call: True, start)


def rewritten(f, *args, bucket_bytes=1):
    jaxpr = inlined(jax.make_jaxpr(f, axis_env=[(jaxmpi.AXIS, 2)])(*args), {jaxmpi.AXIS: 2})
    starts = overlap(bucket_bytes)
    target = Target(2, lambda call, xs: list(xs), lambda: jnp.int32(0), overlap=starts)
    return rewrite(plan_of(jaxpr, 2, overlap=starts), target)


def after_the_start(jaxpr, name):
    """Count the equations of this name that depend on a start, and those that do not."""
    marked, found = set(), []
    for eqn in jaxpr.jaxpr.eqns:
        inputs = {v for v in eqn.invars if not hasattr(v, "val")}  # without literals
        depends = eqn.primitive is MARK or bool(inputs & marked)
        marked.update(eqn.outvars if depends else ())
        found += [depends] if eqn.primitive.name == name else []
    return found.count(True), found.count(False)


def halo(u):
    row = lax.ppermute(u[0], jaxmpi.AXIS, [(0, 1), (1, 0)])
    inside = lax.pad(u, 0.0, [(1, 1, 0), (0, 0, 0)])
    return (inside[2:] + inside[:-2] - 2 * u).at[0].add(row)


def test_the_inside_of_a_halo_exchange_is_computed_after_its_start():
    u = jnp.arange(24.0).reshape(-1, 1) * jnp.ones(3)
    program = rewritten(halo, u)
    assert after_the_start(program, "pad") == (1, 0)
    np.testing.assert_array_equal(
        jax.jit(jax.extend.core.jaxpr_as_fun(program))(u)[0],
        jax.vmap(halo, axis_name=jaxmpi.AXIS)(jnp.stack([u, u]))[0],
    )


def test_what_the_message_is_made_of_is_not():
    def f(u):
        wider = lax.pad(u, 0.0, [(1, 1, 0)] * 2)
        return lax.ppermute(wider[0], jaxmpi.AXIS, [(0, 1), (1, 0)]), lax.pad(
            u, 0.0, [(9, 9, 0)] * 2
        ) * 2.0 + u[0, 0]

    program = rewritten(f, jnp.ones((24, 3)))
    assert after_the_start(program, "pad") == (1, 1)


def test_a_product_keeps_its_operands():
    """XLA would copy them."""
    f = lambda u, w: (lax.ppermute(u[0], jaxmpi.AXIS, [(0, 1), (1, 0)]), u @ w)
    jaxpr = rewritten(f, jnp.ones((24, 24)), jnp.ones((24, 24)))
    assert after_the_start(jaxpr, "dot_general") == (0, 1)


def test_random_keys_are_left_as_they_are():
    def f(u, key):
        row = lax.ppermute(u[0], jaxmpi.AXIS, [(0, 1), (1, 0)])
        return (u * 0.5 + u + jax.random.uniform(key, u.shape)).at[0].add(row)

    arguments = jnp.ones((24, 3)), jax.random.key(0)
    (got,) = jax.jit(jax.extend.core.jaxpr_as_fun(rewritten(f, *arguments)))(*arguments)
    want = jax.vmap(f, in_axes=(0, None), axis_name=jaxmpi.AXIS)(
        jnp.stack([arguments[0]] * 2), arguments[1]
    )
    np.testing.assert_array_equal(got, want[0])


def used_before_the_start(u):
    """The sine is needed by what waits, and by a product that is not moved."""
    inner = jnp.sin(u)
    row = lax.ppermute(u[0], jaxmpi.AXIS, [(0, 1), (1, 0)])
    return inner + 1, jnp.cos(inner) * row[0]


def reads_and_writes(u):
    """What is read before a write is not read after it."""
    ref = jax.new_ref(u)
    before = ref[...]
    ref[...] = u + 1
    return lax.ppermute(u[0], jaxmpi.AXIS, [(0, 1), (1, 0)]), before, ref[...]


@pytest.mark.parametrize("f", [used_before_the_start, reads_and_writes])
def test_what_other_equations_need_is_computed_before_them(f):
    u = jnp.arange(72.0).reshape(24, 3)
    got = jax.jit(jax.extend.core.jaxpr_as_fun(rewritten(f, u)))(u)
    want = jax.vmap(f, axis_name=jaxmpi.AXIS)(jnp.stack([u] * 2))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y[0])


def test_many_arrays_take_as_many_operations():
    """The start of a message is one operation; what follows needs one of its arrays, not all."""

    def operations(n):
        many = lambda us: [halo(u) for u in us]
        program = jax.extend.core.jaxpr_as_fun(
            rewritten(many, [jnp.ones((24, 3))] * n, bucket_bytes=1 << 20)
        )
        return len(
            jax.jit(program).lower(*[jnp.ones((24, 3))] * n).compile().as_text().splitlines()
        )

    assert operations(40) < 2.5 * operations(20)
