"""Models sharded over ranks with JAX's own collectives compute what one rank computes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.scipy.sparse import linalg

import jaxmpi
from jaxmpi._job.launch.pool import Task, pool
from jaxmpi.testing import IDLE_RANKS_SECONDS

AXES = {"data": 2, "model": 2}
XLA = pytest.param("xla", marks=pytest.mark.exhaustive)
BATCH, IN, HIDDEN, OUT, STEPS = 8, 6, 12, 3, 5


def mlp():
    """Make the parameters of an MLP, and batches."""
    rng = np.random.default_rng(0)
    params = {
        "up": rng.normal(size=(IN, HIDDEN)),
        "bias": rng.normal(size=HIDDEN),
        "down": rng.normal(size=(HIDDEN, OUT)),
    }
    return params, rng.normal(size=(STEPS, BATCH, IN)), rng.normal(size=(STEPS, BATCH, OUT))


def trained(step, params, xs, ys):
    state = optax.adam(0.1).init(params)
    for x, y in zip(xs, ys, strict=True):
        params, state = step(params, state, x, y)
    return params


def trained_by_one():
    params, xs, ys = mlp()

    @jax.jit
    def step(params, state, x, y):
        loss = lambda p: jnp.mean((jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"] - y) ** 2)
        updates, state = optax.adam(0.1).update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    with jax.enable_x64(True):
        return jax.device_get(trained(step, params, xs, ys))


@jax.custom_vjp
def entered(x):
    """Enter x into a sharded model: the derivative is the sum over the ranks."""
    return x


@jax.custom_vjp
def added(x):
    """The sum of the parts of a model: the derivative of each part is that of the sum."""
    return lax.psum(x, "model")


entered.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "model"),))
added.defvjp(lambda x: (lax.psum(x, "model"), None), lambda _, ct: (ct,))


@jaxmpi.jit
def step_of_part(params, state, x, y):
    """Step on a rank with half of the hidden units and half of the batch.

    See Shoeybi et al. 2019, "Megatron-LM".
    """

    def loss(p):
        hidden = jnp.tanh(entered(x) @ p["up"] + p["bias"])
        return jnp.mean((added(hidden @ p["down"]) - y) ** 2)

    tx = jaxmpi.distributed(optax.adam(0.1), axis="data")
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def part(params, of):
    """The hidden units of a rank."""
    mine = slice(of * HIDDEN // 2, (of + 1) * HIDDEN // 2)
    return {"up": params["up"][:, mine], "bias": params["bias"][mine], "down": params["down"][mine]}


def check_tensor_parallel():
    params, xs, ys = mlp()
    data, model = divmod(jaxmpi.rank(), 2)
    rows = slice(data * BATCH // 2, (data + 1) * BATCH // 2)
    with jax.enable_x64(True):
        got = trained(step_of_part, part(params, model), xs[:, rows], ys[:, rows])
    for name, x in part(trained_by_one(), model).items():
        np.testing.assert_allclose(got[name], x, 1e-12, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["auto", XLA])
def test_a_tensor_parallel_mlp_is_that_of_one_rank(row):
    pool(4, row, IDLE_RANKS_SECONDS, AXES).run(Task(__file__, "check_tensor_parallel", {}, 120.0))


@pytest.mark.slow
def test_a_tensor_parallel_mlp_simulated():
    params, xs, ys = mlp()
    stack = lambda trees: jax.tree.map(lambda *xs: jaxmpi.PerRank(np.stack(xs)), *trees)
    halves = lambda batches: jaxmpi.PerRank(
        np.stack([np.split(batches, 2, axis=1)[r // 2] for r in range(4)])
    )
    with jax.enable_x64(True), jaxmpi.simulate(4, axes=AXES):
        whole = jaxmpi.jit(lambda params, xs, ys: trained(step_of_part, params, xs, ys))
        got = jax.device_get(
            whole(stack([part(params, r % 2) for r in range(4)]), halves(xs), halves(ys))
        )
    for r in range(4):
        for name, x in part(trained_by_one(), r % 2).items():
            np.testing.assert_allclose(got[name][r], x, 1e-12, 1e-12)


# the Laplace operator on a line, of which each rank applies its rows


N = 24
LAPLACE = 2 * np.eye(N) - np.eye(N, k=1) - np.eye(N, k=-1)


def applied(scale, v):
    rows = N // lax.axis_size(jaxmpi.AXIS)
    near = lax.dynamic_slice(jnp.pad(v, 1), (lax.axis_index(jaxmpi.AXIS) * rows,), (rows + 2,))
    return lax.all_gather(scale * (2 * near[1:-1] - near[:-2] - near[2:]), jaxmpi.AXIS, tiled=True)


def solved(scale, b, solve="cg"):
    return getattr(linalg, solve)(lambda v: applied(scale, v), b, tol=1e-13, maxiter=200)[0]


def check_laplace():
    b = np.sin(np.arange(N)) + 1
    with jax.enable_x64(True):
        for solve in ("cg", "gmres", "bicgstab"):
            step = jaxmpi.jit(partial(solved, solve=solve), replicated_argnums=(0, 1))
            x = step(2.0, b)
            np.testing.assert_allclose(x, np.linalg.solve(2 * LAPLACE, b), 1e-10)
        slope = jaxmpi.jit(
            jax.grad(lambda scale, b: solved(scale, b).sum()), replicated_argnums=(0, 1)
        )(2.0, b)
        # each rank's is that of its rows, times the number of ranks
        mean = jaxmpi.tree_allreduce(slope, op="mean")
        np.testing.assert_allclose(mean, -np.linalg.solve(2 * LAPLACE, b).sum() / 2, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["auto", XLA])
@pytest.mark.parametrize("n", [2, 3])
def test_solvers_over_the_laplace_operator_are_the_dense_solve(n, row):
    pool(n, row, IDLE_RANKS_SECONDS).run(Task(__file__, "check_laplace", {}, 120.0))


@pytest.mark.slow
def test_solvers_simulated():
    with jaxmpi.simulate(4):
        check_laplace()
