"""`jaxmpi.jit`: the same function on MPI ranks, on XLA's, on simulated ones and on one."""

import jax
import numpy as np
import pytest
from axis_cases import CASES

import jaxmpi
from jaxmpi.testing import run_ranks


def check(stacked_got, want):
    assert jax.tree.structure(stacked_got) == jax.tree.structure(want)
    for got, wanted in zip(jax.tree.leaves(stacked_got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-12, atol=1e-12)


def on_this_rank(name, **kwargs):
    with jax.enable_x64(True):
        fun, args, want = CASES[name](jaxmpi.size())
        rank = jaxmpi.rank()
        got = jaxmpi.jit(fun, **kwargs)(*(x[rank] for x in args))
        check(got, jax.tree.map(lambda x: x[rank], want))


@pytest.mark.parametrize("name", CASES)
@run_ranks(1, 2, 3, 4)
def test_jit_on_mpi(name):
    on_this_rank(name)


@pytest.mark.parametrize("name", CASES)
@run_ranks(2, 3, backend="xla")
def test_jit_on_xla(name):
    on_this_rank(name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_jit_on_simulated_ranks(name, ranks):
    with jax.enable_x64(True), jaxmpi.simulate(ranks):
        fun, args, want = CASES[name](ranks)
        got = jaxmpi.jit(fun)(*map(jaxmpi.PerRank, args))
        leaves, treedef = jax.tree.flatten(got, is_leaf=lambda x: isinstance(x, jaxmpi.PerRank))
        stacked = [
            x.stack if isinstance(x, jaxmpi.PerRank) else np.stack([x] * ranks) for x in leaves
        ]
        check(treedef.unflatten(stacked), want)
