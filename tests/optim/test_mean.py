"""`Mean`: the arguments that go together, for each way to form a mean."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi._optim.mean import Allreduce, Weighted

# options of `distributed` that ask for a mean each, as errors name them
OPTIONS = {
    "a codec": {"codec": jaxmpi.codecs.topk(1.0)},
    "micro_batches": {"micro_batches": 2},
    "op 'sum'": {"op": "sum"},
    "op 'max'": {"op": "max"},
    "op 'adasum'": {"op": "adasum"},
}
# the arguments that `update` takes
TAKES = {
    "op 'mean'": {"weight", "value_fn"},
    "a codec": {"weight", "value_fn"},
    "op 'sum'": {"value_fn"},
    "op 'max'": set(),
    "op 'adasum'": set(),
    "micro_batches": set(),
}


def loss(w):
    return jnp.sum(w**2)


def update(options, **args):
    """Update on two simulated ranks, of which rank r has the gradient r + 1; return it."""
    with jaxmpi.simulate(2):
        tx = jaxmpi.distributed(
            optax.with_extra_args_support(optax.identity()), **OPTIONS.get(options, {})
        )

        def step(w):
            stack = (1,) if options == "micro_batches" else ()
            grads = jnp.full((*stack, 3), jaxmpi.rank() + 1.0)
            return tx.update(grads, tx.init(w), w, **args)[0]

        return np.asarray(jaxmpi.local(jaxmpi.jit(step)(jnp.zeros(3))))


@pytest.mark.parametrize("options", TAKES)
@pytest.mark.parametrize("name", ["weight", "value_fn"])
def test_distributed_takes_or_refuses_an_argument_of_update(options, name):
    args = {"weight": {"weight": 2.0}, "value_fn": {"value_fn": loss}}[name]
    if name in TAKES[options]:
        np.testing.assert_allclose(update(options, **args), update(options), rtol=1e-6)
        return
    with pytest.raises(ValueError, match=f"{name} does not go together with {options}"):
        update(options, **args)


@pytest.mark.parametrize("names", [*combinations(OPTIONS, 2)], ids=" and ".join)
def test_distributed_refuses_two_means(names):
    first, second = (OPTIONS[name] for name in names)
    if "op" in first:  # both are values of one argument
        return
    op = (first | second).get("op", "mean")
    asked = " and ".join([name for name in names if not name.startswith("op")] + [f"op '{op}'"])
    with pytest.raises(ValueError, match=f"distributed: {asked} do not go together"):
        jaxmpi.distributed(optax.sgd(1.0), **first, **second)


def test_weighted_state_stays_where_no_rank_counts():
    with jaxmpi.simulate(2):
        tx = jaxmpi.distributed(optax.identity(), codec=jaxmpi.codecs.topk(0.3))

        def kept(weight):
            grads = jnp.asarray([1.0, 2.0, 4.0])
            return tx.update(grads, tx.init(grads), grads, weight=weight)[1].codec.per_rank[0]

        step = jaxmpi.jit(kept)
        np.testing.assert_array_equal(jaxmpi.local(step(jnp.float32(0.0))), np.zeros(3))
        np.testing.assert_array_equal(jaxmpi.local(step(jnp.float32(3.0))), [3.0, 6.0, 0.0])


def test_weighted_extra_travels_with_the_mean():
    """The closed form Σ w·x / Σ w for both trees, with w_r = r and x_r = r + 1."""
    with jaxmpi.simulate(3):

        def step():
            rank = jaxmpi.rank() * jnp.float32(1)
            mean = Weighted(Allreduce("test"), rank)
            means, extra, _ = mean.mean({"g": rank + 1}, {"value": 10 * (rank + 1)}, ())
            return means["g"], extra["value"]

        got = jax.tree.map(jaxmpi.local, jaxmpi.jit(step)())
    np.testing.assert_allclose(got, [8 / 3, 80 / 3], rtol=1e-6)
