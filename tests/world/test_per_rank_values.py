"""A `PerRank` is refused, in one sentence, where a number is needed."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi

USES = {
    "+": lambda x: x + 1,
    "reflected +": lambda x: 1 + x,
    "in place": lambda x: operator.iadd(x, 1),
    "NumPy's number": lambda x: np.float32(2) * x,
    "NumPy's array": lambda x: np.ones(3) * x,
    "JAX's array": lambda x: jnp.ones(3) * x,
    "of another": lambda x: x - x,
    "sum": lambda x: sum([x, x]),
    "==": lambda x: x == 1,
    "!=": lambda x: x != x,
    "<": lambda x: x < 1,
    "array ==": lambda x: np.ones(3) == x,
    "max": lambda x: max(x, 0),
    "bool": bool,
    "not": lambda x: not x,
    "float": float,
    "int": int,
    "format": lambda x: f"{x:.3f}",
    "percent": lambda x: "%.3f" % x,  # noqa: UP031
    "str.format": "{:>8}".format,
    "abs": abs,
    "round": lambda x: round(x, 2),
    "index": lambda x: [0, 1, 2][x],
}


@pytest.mark.parametrize("use", USES)
def test_per_rank_is_no_number(use):
    with pytest.raises(
        TypeError, match=r"^PerRank: .* is not defined: each .*x\[0\], .*np.asarray\(x\)"
    ) as caught:
        USES[use](jaxmpi.PerRank(jnp.arange(3.0)))
    assert str(caught.value).count(". ") == 1


def test_per_rank_has_no_methods_of_arrays():
    with pytest.raises(AttributeError, match=r"^PerRank: .item is not defined.*average_metrics"):
        jaxmpi.PerRank(jnp.arange(3.0)).item()
    assert not hasattr(jaxmpi.PerRank(jnp.arange(3.0)), "shape")


def test_per_rank_prints_copies_and_is_averaged():
    x = jaxmpi.PerRank(np.arange(3.0))
    assert f"{x}" == str(x) == repr(x) == "PerRank(array([0., 1., 2.]))"
    assert x[2] == 2 and len(x) == 3 and list(x) == [0, 1, 2] and len({x, x}) == 1
    for other in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), jax.device_get(x)):
        np.testing.assert_array_equal(other, [0, 1, 2])
    with jaxmpi.simulate(3):
        assert f"{jaxmpi.average_metrics(x):.3f}" == "1.000"
