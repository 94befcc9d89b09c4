"""Sums and means of 16-bit floats over the ranks are those of float32, rounded once.

All inputs are multiples of 1/16 below 8, so that sums in float32 are exact in any order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmpi
from jaxmpi._job.launch.pool import Pool, Task
from jaxmpi._lowering.plan import entries_of, plan_of
from jaxmpi._lowering.trace import trace
from jaxmpi.testing import run_ranks

R = jaxmpi.AXIS
LANES = 64
DTYPES = (jnp.bfloat16, jnp.float16)
CALLS = {
    "psum": lambda x, axes: lax.psum(x, axes),
    "pmean": lambda x, axes: lax.pmean(x, axes),
    "psum_in_float32": lambda x, axes: lax.psum(x.astype(jnp.float32), axes).astype(x.dtype),
}


def values(n, dtype):
    """Return `[n, LANES, 50]`."""
    integers = np.random.default_rng(3).integers(-128, 128, size=(n, LANES, 50))
    return jnp.asarray(integers / 16, dtype)


def over_both(name):
    """Return a function that reduces over a `vmap` axis and the ranks together."""
    call = lambda x: CALLS[name](x, ("lanes", R))
    return jax.vmap(call, axis_name="lanes", out_axes=None)


def wanted(name, xs):
    total = np.sum(np.asarray(xs, np.float32), (0, 1))
    if name == "pmean":
        total = total / np.float32(LANES) / np.float32(len(xs))
    return np.asarray(jnp.asarray(total).astype(xs.dtype), np.float32)


def check(name, dtype):
    xs = values(jaxmpi.size(), dtype)
    got = jaxmpi.jit(over_both(name))(xs[jaxmpi.rank()])
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), wanted(name, xs))
    # the sum of one rank's lanes fits no float16
    large = jnp.full((2, 3), 40000.0, jnp.float16) * (-1) ** jaxmpi.rank()
    if jaxmpi.size() == 2:
        np.testing.assert_array_equal(jaxmpi.jit(over_both(name))(large), np.zeros(3))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, 3)
def test_sum_over_lanes_and_ranks_is_rounded_once(name, dtype):
    check(name, dtype)


@pytest.mark.parametrize("name", CALLS)
@run_ranks(2, backend="xla")
def test_sum_over_lanes_and_ranks_is_rounded_once_on_xla(name):
    check(name, jnp.bfloat16)


@pytest.mark.parametrize("name", CALLS)
def test_sum_over_lanes_and_simulated_ranks_is_rounded_once(name):
    xs = values(3, jnp.bfloat16)
    with jaxmpi.simulate(3):
        got = jaxmpi.jit(over_both(name))(jaxmpi.PerRank(xs))
    np.testing.assert_array_equal(np.asarray(got, np.float32), wanted(name, xs))


@run_ranks(2, 3, axes={"island": 1, "member": -1})
def test_sum_over_lanes_and_a_group_is_rounded_once():
    xs = values(jaxmpi.size(), jnp.bfloat16)
    call = lambda x: lax.psum(x, ("lanes", "member"))
    got = jaxmpi.jit(jax.vmap(call, axis_name="lanes", out_axes=None))(xs[jaxmpi.rank()])
    np.testing.assert_array_equal(np.asarray(got, np.float32), wanted("psum", xs))


def test_sum_of_a_constant_over_lanes_and_ranks_keeps_its_dtype():
    with jaxmpi.simulate(3):
        got = jaxmpi.jit(lambda: over_both("psum")(jnp.ones((5, 2), jnp.bfloat16)))()
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), [15, 15])


@pytest.mark.parametrize("rounds_once", [False, True])
def test_sum_in_float32_is_sent_in_16_bits_only_where_that_rounds_once(rounds_once):
    def function(x):
        wide = x.astype(jnp.float32)
        return [lax.psum(wide, R).astype(x.dtype), lax.pmean(wide, R).astype(x.dtype)]

    jaxpr, *_ = trace(function, {R: 4}, [jax.ShapeDtypeStruct((2000,), jnp.float16)])
    plan = plan_of(jaxpr, 4, divides=True, rounds_once=rounds_once)
    sent = {entry.call.op: {dtype for _, dtype in entry.arrays} for entry in entries_of(plan)}
    assert sent == {"mean": {"float16"}, "sum": {"float16" if rounds_once else "float32"}}


def check_between_nodes():
    """A sum that fits, of two nodes whose sums do not."""
    x = jnp.full(300_000, 40000.0 if jaxmpi.rank() < 2 else -40000.0, jnp.float16)
    in_float32 = jaxmpi.jit(lambda x: CALLS["psum_in_float32"](x, R))(x)
    np.testing.assert_array_equal(in_float32, 0)
    np.testing.assert_array_equal(jaxmpi.tree_allreduce(x, "sum"), 0)
    np.testing.assert_array_equal(jaxmpi.tree_allreduce(abs(x)), abs(x))


@pytest.mark.slow
def test_sum_in_float32_is_not_rounded_on_each_node():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMPI_NODE_RANKS", "2")
        ranks = Pool(4, "mpi")
    ranks.run(Task(__file__, "check_between_nodes", {}, 120.0))
    ranks.end()
