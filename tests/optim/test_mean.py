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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_python_number_is_a_leaf_like_any_other(ranks):
    """Its weighted mean, its update and the state of its codec are those of an array."""
    f = jaxmpi.average_loss(lambda w: 1.5, weight=2.0)
    transforms = {
        "distributed": jaxmpi.distributed(optax.identity()),
        "skip_nonfinite": jaxmpi.skip_nonfinite(optax.identity()),
        "clip_by_global_norm": jaxmpi.clip_by_global_norm(0.75),
        "measure_noise_scale": jaxmpi.measure_noise_scale(),
        "accumulate": jaxmpi.accumulate(jaxmpi.distributed(optax.identity()), 1),
        "a codec": jaxmpi.distributed(optax.identity(), codec=jaxmpi.codecs.int8()),
    }
    with jaxmpi.simulate(ranks):
        np.testing.assert_allclose(jaxmpi.jit(lambda w: f(w) + 0 * w)(1.0), 1.5)
        for name, tx in transforms.items():
            step = jaxmpi.jit(lambda w, tx=tx: tx.update({"w": 1.5}, tx.init({"w": 1.5}))[0])
            want = 0.75 if name == "clip_by_global_norm" else 1.5
            np.testing.assert_allclose(step(1.0)["w"], want, rtol=1e-2, err_msg=name)


@pytest.mark.parametrize("make", ["distributed", "sharded"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_value_and_grad_of_no_samples_are_zero(make, ranks):
    def update(grads, state, params, *, value, grad, **_):
        return jax.tree.map(lambda g, x: g + x + value, grads, grad), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = getattr(jaxmpi, make)(inner)
    with jaxmpi.simulate(ranks):

        def step(w, nan):
            return tx.update(w, tx.init(w), w, weight=jnp.float32(0), value=nan, grad=w * nan)[0]

        np.testing.assert_array_equal(jaxmpi.jit(step)(jnp.ones(4), jnp.float32(np.nan)), [0] * 4)
