"""All ranks have one module, byte for byte: the rank's number is a value of the running program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmpi
from jaxmpi._backends import extension
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

AXIS = jaxmpi.AXIS


def me():
    return lax.axis_index(AXIS)


def in_scan(x):
    return lax.scan(lambda carry, y: (carry + me() * y, carry), jnp.zeros(()), x)[0]


def in_while(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + me()), (0, x[0]))[1]


def in_grad(x):
    return jax.grad(lambda x: ((me() + 1) * x**2).sum())(x)


def train(x):
    tx = jaxmpi.distributed(optax.sgd(0.1))
    params = jnp.ones(3)
    grads = jax.grad(
        lambda p: ((p * x + jax.random.normal(jaxmpi.rank_key(jax.random.key(0)), (3,))) ** 2).sum()
    )(params)
    return optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])


# functions, with their values on rank r of n for x = [1, 2, 3]; None where another test has them
FUNCTIONS = {
    "plain": (lambda x: me() + 0 * x[0], lambda r, n: r),
    "rank": (lambda x: jaxmpi.rank() + 0 * x[0], lambda r, n: r),
    "vmap": (lambda x: jax.vmap(lambda y: y * me())(x), lambda r, n: r * np.arange(1.0, 4)),
    "scan": (in_scan, lambda r, n: 6 * r),
    "while": (in_while, lambda r, n: 1 + 3 * r),
    "cond": (
        lambda x: lax.cond(me() > 0, lambda: me() * 2.0, lambda: -1.0),
        lambda r, n: 2 * r if r else -1,
    ),
    "switch": (
        lambda x: lax.switch(jnp.minimum(me(), 1), [lambda: 7, lambda: me() + 8]),
        lambda r, n: 8 + r if r else 7,
    ),
    "grad": (in_grad, lambda r, n: 2 * (r + 1) * np.arange(1.0, 4)),
    "checkpoint": (
        lambda x: jax.grad(jax.checkpoint(lambda y: (me() + 1) * y**2))(x[1]),
        lambda r, n: 4 * (r + 1),
    ),
    "psum": (lambda x: lax.psum(me(), AXIS), lambda r, n: n * (n - 1) // 2),
    "all_gather": (lambda x: lax.all_gather(me(), AXIS), lambda r, n: np.arange(n)),
    "train": (train, None),
}


def text_of(fun, x):
    return jaxmpi.jit(fun).lower(x).as_text()


def check_one_module(name):
    fun, expected = FUNCTIONS[name]
    x = jnp.arange(1.0, 4)
    everyone = jaxmpi.allgather_object(text_of(fun, x))
    assert all(text == everyone[0] for text in everyone), name
    out = jaxmpi.jit(fun)(x)
    if expected:
        np.testing.assert_allclose(jaxmpi.local(out), expected(jaxmpi.rank(), jaxmpi.size()))


@pytest.mark.parametrize("name", FUNCTIONS)
@run_ranks(2, 3, 4)
def test_all_ranks_have_one_module(name):
    if session.current("test").transport.name != "mpi4jax":
        check_one_module(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@run_ranks(3, backend="xla")
def test_all_ranks_have_one_module_xla(name):
    check_one_module(name)


@pytest.mark.parametrize("name", FUNCTIONS)
@run_ranks(1, 2, 3)
def test_the_rank_is_right(name):
    fun, expected = FUNCTIONS[name]
    out = jaxmpi.jit(fun)(jnp.arange(1.0, 4))
    if expected:
        np.testing.assert_allclose(out, expected(jaxmpi.rank(), jaxmpi.size()))


@run_ranks(2, 3)
def test_collectives_that_only_move_arrays_have_one_module():
    if session.current("test").transport.name != "native":
        return
    size, rank = jaxmpi.size(), jaxmpi.rank()
    shift = lambda x: lax.ppermute(x, AXIS, [(r, r + 1) for r in range(size - 1)])
    turn = lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True)
    root = lambda x: jaxmpi.tree_bcast(x, root=1)
    x = 10.0 * rank + jnp.arange(size)
    numbers = np.arange(float(size))
    for fun, expected in [
        (shift, x - 10 if rank else 0 * x),
        (turn, 10 * numbers + rank),
        (root, 10 + numbers),
    ]:
        assert len(set(jaxmpi.allgather_object(text_of(fun, x)))) == 1
        np.testing.assert_allclose(jaxmpi.jit(fun)(x), expected)


@pytest.mark.slow
@run_ranks(2)
def test_without_the_extension_the_rank_is_right():
    backend = session.current("test")
    transport = backend.transport
    before, load = transport.rank, extension.load

    def missing():
        raise ImportError("not built")

    extension.load = missing
    try:
        transport.rank = extension.rank_value(backend.place.rank)
        assert int(jaxmpi.jit(lambda x: me() + lax.psum(x, AXIS) - 2)(1)) == jaxmpi.rank()
    finally:
        extension.load, transport.rank = load, before
