"""Common Flax and JAX steps give one rank's numbers for the whole batch, on every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import jaxmpi
from jaxmpi.testing import run_ranks

ROWS = 12
DATA = np.random.default_rng(0).normal(size=(ROWS, 5, 3)).astype(np.float32)


def mean(tree):
    return jaxmpi.tree_allreduce(tree)


def transposed_broadcast(x):
    root = jaxmpi.size() - 1
    (back,) = jax.linear_transpose(lambda w: jaxmpi.tree_bcast(w, root=root), jnp.zeros(3))(
        x.mean((0, 1))
    )
    return mean(back)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = (
            nnx.Linear(3, 4, rngs=rngs),
            nnx.BatchNorm(4, axis_name=jaxmpi.AXIS, rngs=rngs),
        )

    def __call__(self, x):
        return self.norm(self.dense(x))


def split_and_merged(x):
    """The functional way of nnx, with statistics that change inside of the derivative."""
    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest):
        model = nnx.merge(graph, params, rest, copy=True)
        out = jnp.mean(jnp.sin(model(x)) ** 2)
        return out, nnx.state(model, nnx.Not(nnx.Param))

    (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest)
    return mean(value), mean(grads), rest


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(x)


def train_state_in_a_scan(x):
    net = Linen()
    params = net.init(jax.random.key(0), jnp.ones((1, 3)))
    state = TrainState.create(
        apply_fn=net.apply, params=params, tx=jaxmpi.distributed(optax.adam(0.1))
    )

    def step(state, _):
        value, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads), mean(value)

    state, values = jax.lax.scan(step, state, None, length=3)
    return state.params, state.step, values


def recurrent(x):
    rngs = nnx.Rngs(0)
    model = nnx.Bidirectional(
        nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs)), nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs))
    )

    def loss(model):
        return jnp.mean(model(x) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    return mean(value), mean(grads)


class Steps(nnx.Variable):
    """A user's own type."""


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.steps, self.rngs = (
            nnx.Linear(3, 2, rngs=rngs),
            Steps(jnp.zeros((), jnp.int32)),
            rngs,
        )

    def __call__(self, x):
        self.steps[...] += 1
        return self.dense(x) + 0 * jax.random.normal(self.rngs.noise(), (2,))


def counted(x):
    """Variables and keys that count, in a scan of nnx."""
    model = Counting(nnx.Rngs(0, noise=1))

    @nnx.scan(in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0), length=3)
    def thrice(model, x):
        return model, jnp.mean(model(x) ** 2)

    model, values = thrice(model, x)
    return mean(values), model.steps[...], model.rngs.noise.count[...]


def scaled(x):
    """Flax's loss scale, which averages the gradients over the axis itself."""
    params = {"w": jnp.ones(3)}
    scale = DynamicScale(growth_interval=1)
    grad = scale.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2), axis_name=jaxmpi.AXIS)
    scale, finite, value, grads = grad(params)
    return scale.scale, finite, mean(value), grads


def rematerialized(x):
    @jax.checkpoint
    def step(w):
        value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(x @ w) ** 2))(w)
        return w - 0.1 * mean(grads), mean(value)

    return mean(jax.grad(lambda w: step(step(w)[0])[1])(jnp.ones(3)))


FUNCTIONS = [
    transposed_broadcast,
    split_and_merged,
    train_state_in_a_scan,
    recurrent,
    counted,
    scaled,
    rematerialized,
]
CASES = {function.__name__: function for function in FUNCTIONS}


def leaves_of_one(case):
    """Return one rank's results for the whole batch, by vmap."""
    outs = jax.vmap(CASES[case], axis_name=jaxmpi.AXIS)(DATA[None])
    return [np.asarray(x)[0] for x in jax.tree.leaves(outs)]


def check(case, x):
    outs = jax.tree.leaves(jaxmpi.jit(CASES[case])(x))
    for got, want in zip(outs, leaves_of_one(case), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-6)


def own_rows():
    return np.split(DATA, jaxmpi.size())[jaxmpi.rank()]


@pytest.mark.slow
@run_ranks(1, 2, 3)
@pytest.mark.parametrize("case", CASES)
def test_it_is_right_on_mpi(case):
    check(case, own_rows())


@pytest.mark.slow
@run_ranks(2, backend="xla")
@pytest.mark.parametrize("case", CASES)
def test_it_is_right_on_xla(case):
    check(case, own_rows())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_it_is_right_simulated(case, ranks):
    with jaxmpi.simulate(ranks):
        check(case, jaxmpi.PerRank(np.stack(np.split(DATA, ranks))))


@pytest.mark.slow
@run_ranks(2)
def test_a_derivative_of_a_rematerialized_step_of_its_own():
    step = jaxmpi.jit(lambda w, x: mean(jnp.mean(jnp.sin(x @ w) ** 2)))
    x, w = own_rows(), jnp.ones(3)
    plain, again = (jax.grad(f)(w, x) for f in (step, jax.checkpoint(step)))
    np.testing.assert_allclose(plain, again, rtol=1e-6)


@pytest.mark.slow
@run_ranks(1, 2)
def test_a_reference_as_an_argument_is_refused_in_a_sentence():
    with pytest.raises(
        TypeError,
        match=r"jaxmpi.jit: argument 0 of <lambda> is a reference, .* Pass its value, ref\[...\]",
    ):
        jaxmpi.jit(lambda ref: mean(ref[...]))(jax.new_ref(jnp.ones(3)))


def check_cast():
    with pytest.raises(
        NotImplementedError,
        match=r"^jaxmpi.jit: pcast at test_flax.py:\d+ is not supported. Leave it out: .*types\.",
    ):
        jaxmpi.jit(lambda x: mean(jax.lax.pcast(x, jaxmpi.AXIS, to="varying")))(jnp.ones(3))


@run_ranks(1, 2)
def test_pcast_is_refused_in_a_sentence_on_mpi():
    check_cast()


@run_ranks(2, backend="xla")
def test_pcast_is_refused_in_a_sentence_on_xla():
    check_cast()


@run_ranks(1, 2)
def test_cached_partial_takes_a_step():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jaxmpi.distributed(optax.sgd(0.1)), wrt=nnx.Param)

    @jaxmpi.nn.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return jaxmpi.tree_allreduce(value)

    x = own_rows()
    plain = [float(step(*nnx.clone((model, optimizer)), x))]
    cached = nnx.cached_partial(step, model, optimizer)
    values = [float(cached(x)) for _ in range(3)]
    assert values[0] == plain[0] and values[0] > values[1] > values[2]
    assert float(step(model, optimizer, x)) < values[2]  # the model itself has been trained
