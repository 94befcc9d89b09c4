"""A function is traced once, and what stays of it as it stands is not traced again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmpi
from jaxmpi import _jaxcompat
from jaxmpi.testing import run_ranks


def step(x, scale):
    """Local work, a call, a loop and a branch, with collectives in each and without."""

    def turn(carry, y):
        return carry + lax.pmean(jnp.tanh(y * carry), jaxmpi.AXIS), jax.jit(jnp.cumsum)(
            jnp.stack([carry, y])
        )

    total, rows = lax.scan(turn, scale, x)
    shared = jax.jit(lambda v: lax.psum(v * scale, jaxmpi.AXIS))(x)
    means = jaxmpi.tree_allreduce({"rows": rows, "total": total}, op="mean")
    largest = lax.cond(scale > 0, lambda v: lax.pmax(v, jaxmpi.AXIS), lambda v: v, x)
    return means, shared + largest * lax.axis_index(jaxmpi.AXIS), jnp.where(x > 0, x, 1.0)


def arguments():
    return (jaxmpi.rank() + 1) * jnp.arange(5.0) / 7, jnp.float32(0.5)


def jitted(fun):
    return jaxmpi.jit(fun, replicated_argnums=1)


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("use", ["lower", "trace", "__call__"])
def test_a_function_is_traced_once(use):
    calls = []

    def counted(x, scale):
        calls.append(x)
        return step(x, scale)

    getattr(jitted(counted), use)(*arguments())
    assert len(calls) == 1


def test_a_function_of_simulated_ranks_is_traced_once():
    calls = []

    def counted(x, scale):
        calls.append(x)
        return step(x, scale)

    with jaxmpi.simulate(3):
        jitted(counted).lower(jaxmpi.PerRank(np.arange(6.0).reshape(3, 2)), jnp.float32(0.5))
    assert len(calls) == 1


@run_ranks(1, 2, 3)
def test_a_jax_without_these_internals_makes_the_same_module():
    quick = _jaxcompat.module_text(jitted(step).lower(*arguments()))
    assert _jaxcompat.retrace.DynamicJaxprTrace is not None
    assert _jaxcompat.ordered.jaxpr_subcomp is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_jaxcompat.retrace, "DynamicJaxprTrace", None)
        patch.setattr(_jaxcompat.ordered, "jaxpr_subcomp", None)
        slow = _jaxcompat.module_text(jitted(step).lower(*arguments()))
    assert slow == quick


@run_ranks(1, 2, 3)
def test_equations_that_stay_keep_their_source_lines():
    locations = jitted(step).lower(*arguments()).as_text(debug_info=True)
    assert "test_first_trace.py" in locations
