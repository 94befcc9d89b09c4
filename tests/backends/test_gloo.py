"""XLA's collectives on CPU ranks: what JAX's gloo gets wrong is not used."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from programs import on_ranks, run

import jaxmpi
from jaxmpi.testing import run_ranks

R = jaxmpi.AXIS


def gathers(x):
    """Gather x; the gradient is a psum_scatter."""
    return jnp.sum(lax.all_gather(x[0], R) ** 2 * x) / 2


def scatters(x):
    sharded = jaxmpi.sharded(optax.sgd(1.0))
    return sharded.update(x, sharded.init(x), x)[0]


WAYS = {
    "psum_scatter": lambda x: lax.psum_scatter(x, R),
    "tiled": lambda x: lax.psum_scatter(x, R, scatter_dimension=1, tiled=True),
    "gradient of all_gather": jax.grad(gathers),
    "tree_reduce_scatter": lambda x: jaxmpi.tree_reduce_scatter(x, "sum"),
    "mean": lambda x: jaxmpi.tree_reduce_scatter(x.astype(jnp.bfloat16)),
    "sharded": scatters,
    "vmap": jax.vmap(lambda x: lax.psum_scatter(x, R, tiled=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@run_ranks(2, backend="xla")
def test_no_program_has_a_reduce_scatter(way):
    """jaxmpi avoids gloo's reduce_scatter, which is sometimes wrong for shares of 4 MB and more."""
    step = jaxmpi.jit(WAYS[way])
    x = np.ones((jaxmpi.size(), 4 * jaxmpi.size()), np.float32)
    text = step.lower(x).as_text()
    assert "reduce_scatter" not in text and "all_to_all" in text


def scatter_repeatedly(times, items):
    """Large shares, to ranks that come at different times."""
    n, rank = jaxmpi.size(), jaxmpi.rank()
    step = jaxmpi.jit(lambda x: (lax.psum_scatter(x, R), jax.grad(gathers)(x)[0]))
    for i in range(times):
        full = (
            np.random.default_rng(i)
            .integers(-100, 100, (n, n, items), dtype=np.int8)
            .astype(np.float32)
        )
        time.sleep(0.01 * ((i + rank) % 3))
        shares, gradient = step(jnp.asarray(full[rank]))
        np.testing.assert_array_equal(shares, full.sum(0)[rank], err_msg=f"at time {i}")
        # derivative of Σ_q Σ_p x_p[0]² x_q[p] / 2 with respect to x_rank[0]
        want = full[rank, 0] * full[:, rank].sum(0) + (full[0, 0] ** 2 / 2)
        np.testing.assert_allclose(gradient, want, rtol=1e-6, err_msg=f"at time {i}")


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_large_shares_are_right():
    scatter_repeatedly(4, 1 << 20)


@pytest.mark.matrix
@run_ranks(2, 3, backend="xla", timeout_seconds=900.0)
def test_large_shares_are_right_60_times():
    scatter_repeatedly(60, 1 << 22)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", ["ranks", "member"])
def test_a_rank_may_be_late_to_the_first_collective_of_its_group(axis):
    """`init` connects the ranks of a group, since gloo waits at most 30 s for the last one."""
    output = run(on_ranks(4, "tests/backends/late_script.py", axis), JAXMPI_BACKEND="xla")
    assert output.count("right") == 4
