"""`jaxmpi.nn.jit`: an nnx step that changes its objects in place trains on n ranks as `nnx.jit` does on one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmpi
from jaxmpi.testing import run_ranks

STEPS, BATCH = 3, 24
F64 = {"dtype": jnp.float64, "param_dtype": jnp.float64}


class Model(nnx.Module):
    def __init__(self, axis):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(4, 6, use_bias=False, rngs=rngs, **F64)  # the norm takes it away
        self.norm = nnx.BatchNorm(6, axis_name=axis, rngs=rngs, **F64)
        self.dense = nnx.Linear(6, 3, rngs=rngs, **F64)
        for stat in (self.norm.mean, self.norm.var):
            stat.set_value(stat.get_value().astype(jnp.float64))  # Flax makes them float32

    def __call__(self, x):
        return self.dense(nnx.tanh(self.norm(self.hidden(x))))


def train_step(model, optimizer, metrics, x, *, y):
    def loss_of(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    metrics.update(values=loss.astype(jnp.float32))
    return loss


def train(jit, optimizer, axis, batches):
    """The losses, and what the objects hold at the end."""
    model = Model(axis)
    optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    metrics, step = nnx.metrics.Average(), jit(train_step)
    losses = [step(model, optimizer, metrics, x, y=y) for x, y in batches]
    return losses, nnx.state((model, optimizer)), metrics.count.get_value()


def check(part):
    """`part` takes the ranks' own of a whole batch."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        whole = [(rng.normal(size=(BATCH, 4)), rng.normal(size=(BATCH, 3))) for _ in range(STEPS)]
        _, want, count = train(nnx.jit, optax.adam(0.1), None, whole)
        parts = [(part(x), part(y)) for x, y in whole]

        def jit(step):
            return jaxmpi.nn.jit(step, replicated_argnums=(0, 1), donate_argnums=(0, 1))

        _, got, count_of_ranks = train(jit, jaxmpi.distributed(optax.adam(0.1)), jaxmpi.AXIS, parts)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(np.asarray(count_of_ranks), count)


def test_the_options_of_newer_nnx_jits_are_taken():
    jaxmpi.init()
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    shared = {"a": model, "b": model}
    for options in ({"graph": True}, {"graph": False}, {"graph_updates": False}, {"graph": True, "graph_updates": True}):
        before = np.asarray(model.bias)

        @jaxmpi.nn.jit(**options)
        def step(models):
            models["a"].bias[...] += 1
            return models["b"].bias[...]

        np.testing.assert_array_equal(step(shared), before + 1)
        np.testing.assert_array_equal(model.bias, before + 1)


def own_rows(x):
    return jnp.asarray(np.split(x, jaxmpi.size())[jaxmpi.rank()])


@pytest.mark.slow
@run_ranks(1, 2, 3, 4)
def test_n_ranks_train_as_one_on_mpi():
    check(own_rows)


@pytest.mark.exhaustive
@run_ranks(2, backend="xla")
def test_n_ranks_train_as_one_on_xla():
    check(own_rows)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_simulated_ranks_train_as_one(ranks):
    with jaxmpi.simulate(ranks):
        check(lambda x: jaxmpi.PerRank(np.stack(np.split(x, ranks))))


@run_ranks(1, 2)
def test_compiled_ahead_of_time_and_as_a_method():
    class Growing(nnx.Linear):
        @jaxmpi.nn.jit
        def grow(self, by):
            self.kernel[...] += jax.lax.psum(by, jaxmpi.AXIS)
            return by

    model, by, ranks = Growing(2, 3, rngs=nnx.Rngs(0)), jnp.float32(1), jaxmpi.size()
    before = np.asarray(model.kernel)
    compiled = Growing.grow.lower(model, by).compile()
    np.testing.assert_array_equal(np.asarray(model.kernel), before)  # nothing has run yet
    assert float(compiled(model, by)) == 1
    np.testing.assert_allclose(np.asarray(model.kernel), before + ranks)
    assert float(model.grow(by)) == 1
    np.testing.assert_allclose(np.asarray(model.kernel), before + 2 * ranks)
    assert Growing.grow.eval_shape(model, by).shape == ()
    assert len(Growing.grow.program(model, by).entries) == (ranks > 1)


def test_objects_that_arguments_share_stay_shared():
    jaxmpi.init()
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    both = {"first": layer, "again": nnx.Sequential(layer, nnx.relu)}

    @jaxmpi.nn.jit
    def add(layer, both, number):
        layer.bias[...] += number
        both["again"].layers[0].bias[...] += number
        return both["first"].bias[...]

    np.testing.assert_array_equal(add(layer, both, 1.0), [2.0, 2.0])
    np.testing.assert_array_equal(both["again"].layers[0].bias[...], [2.0, 2.0])
    assert both["again"].layers[0] is layer


def test_a_step_without_objects_is_that_of_jit():
    jaxmpi.init()
    assert jaxmpi.nn.jit(lambda x, n: x * n, static_argnums=1)(3.0, 2) == 6.0


def test_changes_that_would_be_lost_are_refused():
    jaxmpi.init()
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    def step(x, model):
        model.kernel[...] += x
        return x

    def returned(x, model):
        step(x, model)
        return model

    said = (
        r"jaxmpi.jit: step changes argument (1|model)\.kernel.* in place, in a Linear that it does not return: "
        "the change would be lost. Use jaxmpi.nn.jit"
    )
    for call in (lambda: jaxmpi.jit(step)(1.0, model), lambda: jaxmpi.jit(step)(1.0, model=model)):
        with pytest.raises(ValueError, match=said):
            call()
    with jaxmpi.simulate(2), pytest.raises(ValueError, match=said):
        jaxmpi.jit(step)(1.0, model)
    np.testing.assert_allclose(jaxmpi.jit(returned)(1.0, model).kernel[...], model.kernel[...] + 1)
    assert jaxmpi.jit(lambda model, x: model(x))(model, jnp.ones(2)).shape == (3,)  # reading is no change


def test_what_a_model_leaves_behind_may_be_left_alone():
    class Keeping(nnx.Linear):
        def __call__(self, x):
            self.before = nnx.Intermediate(x)  # sorted before the kernel
            return super().__call__(x)

    jaxmpi.init()
    x, model = jnp.ones(2), Keeping(2, 3, rngs=nnx.Rngs(0))
    want = nnx.Linear(2, 3, rngs=nnx.Rngs(0))(x)
    np.testing.assert_allclose(jaxmpi.jit(lambda model, x: model(x))(model, x), want)

    @jaxmpi.nn.jit
    def forward(model, x):
        return model(x), nnx.pop(model, nnx.Intermediate)

    out, kept = forward(model, x)
    np.testing.assert_allclose(out, want)
    np.testing.assert_array_equal(jax.tree.leaves(kept)[0], x)


def test_objects_that_are_replicated_must_stay_so():
    """The optimizer is plain: each rank would take a step of its own."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))

    x = jaxmpi.PerRank(jnp.ones((2, 4, 2)))
    with jaxmpi.simulate(2), pytest.raises(ValueError, match=r"output \[0\]\['bias'\].* of step is to be equal on all ranks"):
        jaxmpi.nn.jit(step, replicated_argnums=(0, 1))(model, optimizer, x)


def test_a_step_that_adds_variables_is_refused():
    jaxmpi.init()

    @jaxmpi.nn.jit
    def grow(model):
        model.more = nnx.Param(jnp.zeros(2))

    with pytest.raises(ValueError, match=r"jaxmpi.nn.jit: grow changes the structure of its nnx arguments"):
        grow(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
