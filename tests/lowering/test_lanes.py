"""A loop that communicates in its condition, under `vmap`: each lane ends on its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from other_transport import mpi4jax_pool

import jaxmpi
from jaxmpi._job.launch.pool import Task
from jaxmpi.testing import run_ranks

XS = np.array([[1.0, 2, 3], [20, 0.25, 1]], np.float32)


def doubled(x):
    """Double x until its sum over the ranks is 10."""
    return lax.while_loop(lambda c: jaxmpi.tree_allreduce(c, "sum") < 10, lambda c: c * 2, x)


def doubled_and_summed(x):
    """Do so with messages in the body, too, and a loop in the condition."""

    def total(c):
        return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] / 2), (0, 4 * c))[1]

    def body(c):
        return 2 * c[0], c[1] + jaxmpi.tree_allreduce(c[0], "max")

    start = x, jnp.zeros_like(x)
    return lax.while_loop(lambda c: total(jaxmpi.tree_allreduce(c[0], "sum")) < 10, body, start)[1]


def wanted(loop, x, size):
    """Return the result of one lane, where rank r has (r + 1)·x."""
    summed = 0.0
    while sum(range(1, size + 1)) * x < 10:
        summed += size * x
        x *= 2
    return x if loop is doubled else summed


WAYS = {
    "inside": lambda loop: jaxmpi.jit(jax.vmap(jax.vmap(loop))),
    "outside": lambda loop: jax.vmap(jax.vmap(jaxmpi.jit(loop))),
    "between": lambda loop: jax.jit(jax.vmap(jaxmpi.jit(jax.vmap(loop)))),
    "plain": lambda loop: jax.jit(jax.vmap(jax.vmap(loop))),
    "eager": lambda loop: jax.vmap(jax.vmap(loop)),
}
LOOPS = [doubled, doubled_and_summed]


def check(loop, way):
    r, n = jaxmpi.rank(), jaxmpi.size()
    got = WAYS[way](loop)(jnp.asarray(XS) * (r + 1))
    want = np.reshape([wanted(loop, x, n) for x in XS.ravel()], XS.shape)
    np.testing.assert_allclose(got, want * (r + 1 if loop is doubled else 1), rtol=1e-6)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
@run_ranks(1, 2)
def test_vmap_of_a_loop_is_one_loop_for_each_lane(way, loop):
    check(loop, way)


@pytest.mark.slow
@pytest.mark.mpi4jax
def test_vmap_of_a_loop_is_one_loop_for_each_lane_with_mpi4jax():
    ranks = mpi4jax_pool(2)
    for way in WAYS:
        ranks.run(Task(__file__, "check", {"loop": doubled, "way": way}, 120.0))
    ranks.end()


@pytest.mark.parametrize("way", WAYS)
@run_ranks(2, backend="xla")
def test_vmap_of_a_loop_is_one_loop_for_each_lane_or_an_error_on_xla(way):
    if way == "inside":
        check(doubled, way)
    else:
        with pytest.raises(RuntimeError, match="inside"):
            check(doubled, way)


def test_vmap_of_a_loop_is_one_loop_for_each_simulated_lane():
    with jaxmpi.simulate(3):
        xs = jaxmpi.PerRank(jnp.asarray(XS) * (jnp.arange(3)[:, None, None] + 1))
        got = WAYS["inside"](doubled)(xs).stack
    want = np.reshape([wanted(doubled, x, 3) for x in XS.ravel()], XS.shape)
    np.testing.assert_allclose(got, want * np.arange(1, 4)[:, None, None], rtol=1e-6)
