"""The derivative of a `jaxmpi.jit` function is that of the function inside of one.

The functions of the table have derivative rules of their own: around a collective, or with one.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from other_transport import mpi4jax_pool

import jaxmpi
from jaxmpi._job.launch.pool import Task
from jaxmpi._lowering import lower
from jaxmpi.testing import run_ranks

R = jaxmpi.AXIS


@jax.custom_vjp
def added(x):
    """A sum whose rule is not its derivative."""
    return lax.psum(x, R)


added.defvjp(lambda x: (added(x), x), lambda x, ct: (10 * ct * x,))


@jax.custom_vjp
def entered(x):
    """An identity whose backward pass sums."""
    return x


entered.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, R),))


@jax.custom_jvp
def pushed(x):
    """An identity whose tangent is summed."""
    return x


pushed.defjvp(lambda primals, tangents: (primals[0], lax.psum(tangents[0], R)))


@jax.custom_jvp
def squared(x):
    """A square in whose derivative rule is a function with a rule that sums."""
    return x**2


squared.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * entered(primals[0]) * tangents[0]))


def solved(x):
    """The solution of (Σ_r a_r) y = x."""
    matrix = lambda y: lax.psum((lax.axis_index(R) + 1.0) * y, R)
    solve = lambda matrix, x: lax.fori_loop(0, 60, lambda _, y: y + (x - matrix(y)) / 8, x)
    return lax.custom_linear_solve(matrix, x, solve, symmetric=True)


def scanned(x):
    return lax.scan(lambda c, _: (added(jnp.sin(c)) / 20, pushed(c)), x, None, length=2)[1]


def branched(x):
    return lax.cond(lax.psum(x[0], R) > 0, added, lambda x: x, x)


def beside_others(x):
    """A function with a constant, a random key, an integer and a rectified linear unit."""
    noise = jax.random.normal(jax.random.key(0), x.shape)
    count = lax.psum(jnp.int32(2), R)
    return jax.nn.relu(lax.psum(x * noise, R)) * count + np.arange(1.0, 4) * entered(x)


FUNCTIONS = {
    "added": added,
    "entered": entered,
    "pushed": pushed,
    "squared": squared,
    "added_in_jit": jax.jit(lambda x: jnp.sin(jax.jit(added)(x)) + x),
    "added_in_checkpoint": jax.checkpoint(lambda x: jnp.sin(added(jnp.sin(x)))),
    "scanned": scanned,
    "branched": branched,
    "beside_others": beside_others,
    "solved": solved,
    "max": lambda x: jaxmpi.tree_allreduce(x, "max"),
    "prod": lambda x: jaxmpi.tree_allreduce(x, "prod"),
    "mean_and_max": lambda x: jaxmpi.tree_allreduce(x) * jaxmpi.tree_allreduce(x, "max"),
    "scatter_max": lambda x: jaxmpi.tree_reduce_scatter(jnp.stack([x] * jaxmpi.size()), "max"),
    "bcast": lambda x: jaxmpi.tree_bcast(x, jaxmpi.size() - 1),
    "reduce": lambda x: jaxmpi.tree_reduce(x, "sum", root=0),
    "average_loss": lambda x: jaxmpi.average_loss(lambda x: jnp.sum(x**3))(x) * jnp.ones(3),
    "relu": lambda x: jax.nn.relu(lax.psum(x, R)),
}


def loss_of(name):
    def loss(x):
        y = FUNCTIONS[name](x)
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(3.0) + lax.axis_index(R)))

    return loss


def arguments(*shape):
    return jnp.asarray(np.random.default_rng(jaxmpi.rank()).uniform(0.5, 1.5, (*shape, 3)))


def check_gradient(name):
    loss, x = loss_of(name), arguments()
    inside = jaxmpi.jit(jax.value_and_grad(loss))(x)
    outside = jax.value_and_grad(jaxmpi.jit(loss))(x)
    in_jit = jax.jit(jax.value_and_grad(jaxmpi.jit(loss)))(x)
    for got in (outside, in_jit):
        jax.tree.map(lambda y, want: np.testing.assert_allclose(y, want, rtol=2e-5), got, inside)
    assert np.any(inside[1] != 0) or jaxmpi.size() > 1


@pytest.mark.parametrize("name", FUNCTIONS)
@run_ranks(1, 2)
def test_gradient_outside_is_that_inside(name):
    check_gradient(name)


@pytest.mark.slow
@pytest.mark.mpi4jax
def test_gradient_outside_is_that_inside_with_mpi4jax():
    ranks = mpi4jax_pool(2)
    for name in FUNCTIONS:
        ranks.run(Task(__file__, "check_gradient", {"name": name}, 120.0))
    ranks.end()


@pytest.mark.parametrize("name", ["added", "bcast", "mean_and_max", "squared"])
@run_ranks(1, 2)
def test_derivatives_of_derivatives_and_of_lanes_outside_are_those_inside(name):
    loss, x, xs = loss_of(name), arguments(), arguments(2)
    second = lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))
    lanes = lambda f: jax.vmap(jax.grad(f))
    np.testing.assert_allclose(second(jaxmpi.jit(loss))(x), jaxmpi.jit(second(loss))(x), rtol=2e-5)
    np.testing.assert_allclose(lanes(jaxmpi.jit(loss))(xs), jaxmpi.jit(lanes(loss))(xs), rtol=2e-5)


@pytest.mark.parametrize("name", ["pushed", "mean_and_max", "relu"])
@run_ranks(1, 2)
def test_tangents_outside_are_those_inside(name):
    loss, x, dx = loss_of(name), arguments(), arguments(2)[1]
    push = lambda f: lambda x, dx: jax.jvp(f, (x,), (dx,))
    got, want = push(jaxmpi.jit(loss))(x, dx), jaxmpi.jit(push(loss))(x, dx)
    np.testing.assert_allclose(got, want, rtol=2e-5)


@run_ranks(1, 2)
def test_gradient_outside_is_of_some_arguments_and_some_outputs():
    def function(tree, count, x):
        total = added(tree["w"] * x)
        return {"loss": jnp.sum(total), "count": lax.psum(count, R), "unused": lax.psum(x, R)}

    tree, x = {"w": arguments(), "i": jnp.arange(2)}, arguments(2)[0]

    def gradient(function):
        def loss(w, x):
            outs = function({**tree, "w": w}, 3, x)
            return outs["loss"], (outs["count"], outs["unused"])

        return jax.grad(loss, has_aux=True)

    got = gradient(jaxmpi.jit(function))(tree["w"], x)
    want = jaxmpi.jit(gradient(function))(tree["w"], x)
    jax.tree.map(lambda y, want: np.testing.assert_allclose(y, want, rtol=2e-5), got, want)


@run_ranks(1, 2)
def test_gradient_of_unsharded_parameters_outside_is_that_inside():
    params = jaxmpi.fully_shard({"w": jnp.arange(4.0) + 1})
    loss = lambda p, b: jnp.sum((jaxmpi.unshard(p)["w"] * b) ** 2)
    b = jnp.ones(4) * (jaxmpi.rank() + 1)
    got, want = jax.grad(jaxmpi.jit(loss))(params, b), jaxmpi.jit(jax.grad(loss))(params, b)
    jax.tree.map(np.testing.assert_allclose, got, want)


KEPT = {  # functions with rules of their own, none of which has to do with the ranks
    "relu": jax.nn.relu,
    "relu_in_scan": lambda x: lax.scan(lambda c, _: (jax.nn.relu(c), c), x, None, length=2)[0],
    "silu": jax.nn.silu,
    "solve": lambda x: jnp.linalg.solve(jnp.diag(x) + jnp.arange(9.0).reshape(3, 3) ** 2 + 1, x),
    "logsumexp": lambda x: jax.nn.logsumexp(jnp.stack([x, -x])) * x,
}
DERIVATIVES = {"grad": jax.grad, "jacfwd": jax.jacfwd, "hessian": jax.hessian}


def kept_loss_of(name):
    return lambda x: jnp.sum(jnp.sin(KEPT[name](x)) * (1 + lax.pmean(x, R) ** 2))


@pytest.mark.parametrize("mode", DERIVATIVES)
@pytest.mark.parametrize("name", KEPT)
@run_ranks(1, 2)
def test_derivatives_outside_of_local_rules_are_those_inside_in_both_modes(name, mode):
    loss, x = kept_loss_of(name), jnp.asarray([0.0, -0.5, 1.5]) * (jaxmpi.rank() + 1)
    derivative = DERIVATIVES[mode]
    outside, inside = jax.jit(derivative(jaxmpi.jit(loss))), jaxmpi.jit(derivative(loss))
    np.testing.assert_allclose(outside(x), inside(x), rtol=2e-5, atol=1e-6)


@run_ranks(1, 2)
def test_gradient_outside_of_relu_at_zero_is_zero():
    loss = lambda x: jnp.sum(jax.nn.relu(x) + 0 * lax.psum(x, R))
    np.testing.assert_array_equal(jax.grad(jaxmpi.jit(loss))(jnp.arange(-1.0, 2)), [0, 0, 1])


@run_ranks(1)
def test_forward_mode_outside_of_a_broadcast_on_one_rank():
    loss = lambda x: jnp.sum(jaxmpi.tree_bcast(x, 0) ** 3)
    for derivative in DERIVATIVES.values():
        got, want = derivative(jaxmpi.jit(loss))(arguments()), derivative(loss)
        np.testing.assert_allclose(got, jaxmpi.jit(want)(arguments()), rtol=2e-5)


@pytest.mark.parametrize("name", KEPT)
@run_ranks(1, 2)
def test_gradient_outside_of_local_rules_beside_a_callback_is_that_inside(name):
    def loss(x):
        io_callback(lambda x: None, None, lax.stop_gradient(x[0]), ordered=True)
        return kept_loss_of(name)(x)

    x = jnp.asarray([0.0, -0.5, 1.5]) * (jaxmpi.rank() + 1)
    got, want = jax.grad(jaxmpi.jit(loss))(x), jaxmpi.jit(jax.grad(kept_loss_of(name)))(x)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", KEPT)
def test_gradient_outside_of_local_rules_for_a_per_rank_argument_is_that_inside(name):
    loss, x = kept_loss_of(name), jnp.asarray([0.0, -0.5, 1.5])
    with jaxmpi.simulate(1):
        per_rank = jaxmpi.PerRank(x[None])
        outside = jax.grad(lambda w: jaxmpi.jit(lambda w, x: loss(w * x))(w, per_rank))
        inside = jaxmpi.jit(jax.grad(lambda w, x: loss(w * x)))
        for w in (jnp.ones(3), jnp.arange(3.0)):
            got, want = outside(w), inside(w, per_rank)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_gradient_outside_for_a_per_rank_argument_names_it():
    with jaxmpi.simulate(1):
        loss = jaxmpi.jit(lambda w, x: jnp.sum(added(w * x)))
        x = jaxmpi.PerRank(jnp.ones((1, 3)))
        with pytest.raises(RuntimeError, match=r"for arguments that are jaxmpi\.PerRank"):
            jax.grad(lambda w: loss(w, x))(jnp.ones(3))


@run_ranks(1, 2)
def test_local_rules_cost_no_further_program_and_no_further_trace():
    """A rule is traced once for each call, as JAX does, and a program is lowered once."""
    traces = []

    @jax.custom_jvp
    def rectified(x):
        return jnp.maximum(x, 0)

    @rectified.defjvp
    def rule(primals, tangents):
        traces.append(1)
        return rectified(*primals), tangents[0] * (primals[0] > 0)

    def loss(x, depth):
        for _ in range(depth):
            x = rectified(x * 2)
        return jnp.sum(x + lax.pmean(x, R))

    with pytest.MonkeyPatch.context() as patch:
        built = []
        build = lower.build
        patch.setattr(lower, "build", lambda *a, **k: built.append(1) or build(*a, **k))
        for depth in (5, 10):
            traces.clear()
            built.clear()
            jax.jit(jax.grad(jaxmpi.jit(partial(loss, depth=depth)))).lower(arguments())
            assert (len(traces), len(built)) == (depth, 1)


@run_ranks(2)
def test_ranks_of_which_one_takes_the_gradient_outside_are_a_mismatch():
    @jax.custom_vjp
    def summed(x):
        return lax.psum(x, R)

    summed.defvjp(
        lambda x: (lax.psum(x, R), lax.psum(jnp.stack([x] * 3), R)), lambda res, ct: (ct * res[0],)
    )
    value = jaxmpi.jit(lambda x: jnp.sum(summed(x)))
    run = jax.grad(value) if jaxmpi.rank() else jax.jit(value)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RankMismatchError: .*the derivative of"):
        jax.block_until_ready(run(arguments()))


@run_ranks(1, 2)
def test_gradient_outside_beside_a_callback_is_an_error():
    def loss(x):
        io_callback(lambda x: None, None, x, ordered=True)
        return jnp.sum(added(x))

    jaxmpi.jit(loss)(arguments())
    jax.jit(jaxmpi.jit(loss))(arguments())
    # JAX 0.12 lets a function with callbacks have rules, and refuses the callback itself.
    ours, of_jax = r"derivative of loss .*beside callbacks .*grad inside", "do not support JVP"
    with pytest.raises((RuntimeError, ValueError), match=f"{ours}|{of_jax}"):
        jax.grad(jaxmpi.jit(loss))(arguments())


@run_ranks(2, backend="xla")
def test_gradient_outside_is_an_error_on_xla():
    with pytest.raises(RuntimeError, match=r"inside of jax\.jit, jax\.grad"):
        jax.grad(jaxmpi.jit(loss_of("added")))(arguments())


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradient_outside_is_that_inside_or_an_error_on_simulated_ranks(ranks):
    loss, x = loss_of("added"), jnp.arange(1.0, 4)
    with jaxmpi.simulate(ranks):
        if ranks == 1:
            want = jaxmpi.jit(jax.grad(loss))(x)
            np.testing.assert_allclose(jax.grad(jaxmpi.jit(loss))(x), want, rtol=2e-5)
        else:
            with pytest.raises(RuntimeError, match=r"inside of jax\.jit, jax\.grad"):
                jax.grad(jaxmpi.jit(loss))(x)
