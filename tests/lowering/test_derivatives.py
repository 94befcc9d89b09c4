"""The table of derivatives in docs/concepts.md, checked with finite differences.

The differences are of the sum of all ranks' outputs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi.testing import run_ranks

ROWS = ("tree_alltoall", "tree_reduce_scatter")
CALLS = {
    "allreduce_mean": lambda x: jaxmpi.tree_allreduce(x),
    "allreduce_sum": lambda x: jaxmpi.tree_allreduce(x, "sum"),
    "allreduce_max": lambda x: jaxmpi.tree_allreduce(x, "max"),
    "allreduce_min": lambda x: jaxmpi.tree_allreduce(x, "min"),
    "allreduce_prod": lambda x: jaxmpi.tree_allreduce(x, "prod"),
    "bcast": lambda x: jaxmpi.tree_bcast(x, jaxmpi.size() - 1),
    "reduce_mean": lambda x: jaxmpi.tree_reduce(x, root=jaxmpi.size() - 1),
    "reduce_prod": lambda x: jaxmpi.tree_reduce(x, "prod", root=0),
    "allgather": jaxmpi.tree_allgather,
    "allgather_tiled": lambda x: jaxmpi.tree_allgather(x, tiled=True),
    "reduce_scatter_mean": lambda x: jaxmpi.tree_reduce_scatter(x),
    "reduce_scatter_max": lambda x: jaxmpi.tree_reduce_scatter(x, "max"),
    "alltoall": jaxmpi.tree_alltoall,
}


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_gradient_is_that_of_the_sum_over_ranks(name, jit):
    """grad of L_r on rank r = d(Σ_q L_q)/dx_r, with L_q a nonlinear function of rank q's output."""
    r, n = jaxmpi.rank(), jaxmpi.size()
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(7 + r).uniform(0.5, 1.5, (n, 3)))

        def loss(x):
            y = CALLS[name](x)
            weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) + r)
            return jnp.sum(jnp.sin(y) * weights)

        grad = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
        got = np.asarray(grad(x))

        total = jax.jit(lambda x: jaxmpi.tree_allreduce(loss(x), "sum"))
        want, h = np.zeros((n, n, 3)), 1e-6
        # every rank steps through every rank's entries, together
        for rank, row, column in np.ndindex(want.shape):
            step = np.zeros((n, 3))
            step[row, column] = h * (rank == r)
            want[rank, row, column] = (total(x + step) - total(x - step)) / (2 * h)
        np.testing.assert_allclose(got, want[r], rtol=2e-6, atol=1e-8)


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("name", list(CALLS))
def test_jvp_agrees_with_vjp(name):
    r, n = jaxmpi.rank(), jaxmpi.size()
    with jax.enable_x64(True):
        generator = np.random.default_rng(11 + r)
        x, dx = jnp.asarray(generator.uniform(0.5, 1.5, (2, n, 3)))
        y, dy = jax.jvp(CALLS[name], (x,), (dx,))
        ct = jnp.asarray(generator.normal(size=y.shape))
        _, vjp = jax.vjp(CALLS[name], x)
        both = jaxmpi.tree_allreduce([jnp.vdot(ct, dy), jnp.vdot(vjp(ct)[0], dx)], "sum")
        np.testing.assert_allclose(*both, rtol=1e-12)


@run_ranks(2, 3)
def test_prod_has_a_gradient_at_zero():
    r = jaxmpi.rank()
    x = jnp.array([0.0 if r == 0 else r + 1.0])  # zero on rank 0 alone
    got = jax.grad(lambda x: jaxmpi.tree_allreduce(x, "prod")[0])(x)
    others = np.prod([q + 1.0 for q in range(1, jaxmpi.size())])
    np.testing.assert_allclose(got, [jaxmpi.size() * others if r == 0 else 0.0])


@run_ranks(2, 3)
def test_max_shares_its_gradient_among_equals():
    n = jaxmpi.size()
    got = jax.grad(lambda x: jaxmpi.tree_allreduce(x, "max"))(2.0)  # the same on all ranks
    np.testing.assert_allclose(got, n * (1 / n), rtol=1e-6)


@run_ranks(1, 2, 3)
def test_second_derivative():
    r, n = jaxmpi.rank(), jaxmpi.size()
    mean = (n + 1) / 2
    got = jax.grad(jax.grad(lambda x: jaxmpi.tree_allreduce(x) ** 3))(r + 1.0)
    np.testing.assert_allclose(got, 6 * mean, rtol=1e-5)


@run_ranks(2, 3)
def test_leaves_without_derivative_pass_through():
    r = jaxmpi.rank()
    tree = {"x": jnp.float32(r + 1), "i": jnp.arange(3) + r}
    grads = jax.grad(lambda t: jaxmpi.tree_allreduce(t, "max")["x"] ** 2, allow_int=True)(tree)
    assert grads["i"].dtype == jax.dtypes.float0
    averaged = jaxmpi.tree_allreduce(grads)
    assert averaged["i"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(
        averaged["x"], 2 * jaxmpi.size() * jaxmpi.size() / jaxmpi.size(), rtol=1e-6
    )
