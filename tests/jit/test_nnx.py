"""`jaxmpi.nn.jit`: an in-place nnx step on n ranks trains as `nnx.jit` does on one."""

import dataclasses
import tempfile

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
    for options in (
        {"graph": True},
        {"graph": False},
        {"graph_updates": False},
        {"graph": True, "graph_updates": True},
    ):
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
        r"jaxmpi.jit: step changes argument (1|model)\.kernel.* in place, in a Linear that it does "
        r"not return: "
        "the change would be lost. Use jaxmpi.nn.jit"
    )
    for call in (lambda: jaxmpi.jit(step)(1.0, model), lambda: jaxmpi.jit(step)(1.0, model=model)):
        with pytest.raises(ValueError, match=said):
            call()
    with jaxmpi.simulate(2), pytest.raises(ValueError, match=said):
        jaxmpi.jit(step)(1.0, model)
    np.testing.assert_allclose(jaxmpi.jit(returned)(1.0, model).kernel[...], model.kernel[...] + 1)
    # reading is no change
    assert jaxmpi.jit(lambda model, x: model(x))(model, jnp.ones(2)).shape == (3,)


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
    with (
        jaxmpi.simulate(2),
        pytest.raises(
            ValueError,
            match=r"^jaxmpi\.nn\.jit: output \[0\]\['bias'\].* of step is declared replicated "
            "but may differ",
        ),
    ):
        jaxmpi.nn.jit(step, replicated_argnums=(0, 1))(model, optimizer, x)


def test_a_step_that_adds_variables_is_refused():
    jaxmpi.init()

    @jaxmpi.nn.jit
    def grow(model):
        model.more = nnx.Param(jnp.zeros(2))

    with pytest.raises(
        ValueError, match=r"jaxmpi.nn.jit: grow changes the structure of its nnx arguments"
    ):
        grow(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


class Net(nnx.Module):
    """A model with variables of all kinds that are each rank's own, and of one that is not."""

    def __init__(self, seed, dropout):
        rngs = nnx.Rngs(params=seed, dropout=dropout)
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.loss = nnx.metrics.Average()
        self.per_rank = nnx.Variable(jnp.zeros(2))  # a name, and no mark

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def of_rank(r):
    """A model whose every array is another one on each rank."""
    model = Net(r, jax.random.fold_in(jax.random.key(7), r))
    model.norm.mean.set_value(jnp.arange(8.0) + r)
    model.loss.update(values=jnp.full(3, r + 1.0))
    model.per_rank.set_value(jnp.full(2, r + 0.5))
    return model


def values(state):
    """The arrays by their paths in an `nnx.State`; keys as numbers."""
    found = {}
    for path, variable in nnx.to_flat_state(state):
        x = variable.get_value()
        found[path] = np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
    return found


KINDS = (nnx.RngState, nnx.BatchStat, nnx.metrics.MetricState)


@run_ranks(1, 2, 3)
def test_synchronize_leaves_the_variables_that_nn_jit_calls_each_ranks_own():
    r = jaxmpi.rank()
    for got in (
        jaxmpi.synchronize(nnx.state(of_rank(r))),
        nnx.state(jaxmpi.synchronize(of_rank(r))),
    ):
        own, rest = nnx.split_state(got, KINDS, ...)
        mine, zeros = (nnx.split_state(nnx.state(of_rank(rank)), KINDS, ...) for rank in (r, 0))
        for x, y in ((own, mine[0]), (rest, zeros[1])):
            assert values(x).keys() == values(y).keys() and values(x)
            for path, array in values(x).items():
                np.testing.assert_array_equal(array, values(y)[path], err_msg=str(path))


@run_ranks(1, 2, 3)
def test_save_keeps_the_variables_that_nn_jit_calls_each_ranks_own():
    model = of_rank(jaxmpi.rank())
    nnx.update(model, jaxmpi.synchronize(nnx.state(model)))
    folder, state = jaxmpi.broadcast_object(tempfile.mkdtemp()), nnx.state(model)
    jaxmpi.save(folder, 1, {"model": state}, background=False)
    got = values(jaxmpi.restore(folder, {"model": nnx.state(of_rank(9))})["model"])
    assert got.keys() == values(state).keys()
    for path, array in values(state).items():
        np.testing.assert_array_equal(got[path], array, err_msg=str(path))
    # without what each rank has: a variable of the kind that holds None
    drop = lambda x: x.replace(None) if isinstance(x, KINDS) else x
    like = jax.tree.map(drop, nnx.state(of_rank(9)), is_leaf=lambda x: isinstance(x, nnx.Variable))
    left = jaxmpi.restore(folder, {"model": like})["model"]
    np.testing.assert_array_equal(
        left["linear"]["kernel"].get_value(), state["linear"]["kernel"].get_value()
    )
    assert left["norm"]["mean"].get_value() is None


@run_ranks(2)
def test_checks_leave_the_variables_that_nn_jit_calls_each_ranks_own():
    r, model = jaxmpi.rank(), of_rank(jaxmpi.rank())
    nnx.update(model, jaxmpi.synchronize(nnx.state(model)))
    step = jaxmpi.jit(
        lambda state: jax.tree.map(lambda x: x, state), replicated_argnums=0, replicated_outnums=0
    )
    assert values(step(nnx.state(model))).keys() == values(nnx.state(model)).keys()
    tx = jaxmpi.watch_replicas(optax.sgd(0.1), every=1)
    params = nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))  # of which the statistics differ
    _, state = jaxmpi.jit(tx.update)(params, tx.init(params), params)
    jaxmpi.check_replicas(state, params)
    params["linear"]["bias"].set_value(jnp.full(8, float(r)))
    _, state = jaxmpi.jit(tx.update)(params, state, params)
    with pytest.raises(
        jaxmpi.RankMismatchError,
        match=r"leaf \['linear'\]\['bias'\]\.value of the parameters on rank 1",
    ):
        jaxmpi.check_replicas(state, params)


@dataclasses.dataclass
class Mine:
    per_rank: jax.Array
    shard: jax.Array


jax.tree_util.register_dataclass(Mine, ["per_rank", "shard"], [])


@run_ranks(2)
def test_a_users_field_called_per_rank_is_no_mark():
    r = jaxmpi.rank()
    identity = jaxmpi.jit(lambda x: x)
    x = jnp.full(2, r + 1.0)
    marked = nnx.state(Holder(x))
    plain = {"plain": Mine(x, x), "marked": {"per_rank": x}}
    # whichever comes first, the other one's structure is not found for it
    for tree in (marked, plain, marked):
        got = jaxmpi.synchronize(identity(tree))
        assert jax.tree.structure(got) == jax.tree.structure(tree)
    np.testing.assert_array_equal(
        jaxmpi.synchronize(identity(plain))["marked"]["per_rank"], np.full(2, 1.0)
    )
    got = jaxmpi.synchronize(identity(marked))
    np.testing.assert_array_equal(got["plain"]["per_rank"].get_value(), np.full(2, 1.0))
    np.testing.assert_array_equal(jax.tree.leaves(got["marked"])[0], np.full(2, r + 1.0))


class Holder(nnx.Module):
    def __init__(self, x):
        self.plain = nnx.data({"per_rank": nnx.Variable(x)})
        self.marked = nnx.data(jaxmpi.PerRankState(nnx.Variable(x)))


def spectral_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(
        lambda model: jnp.mean((model(x, update_stats=True) - y) ** 2)
    )(model)
    optimizer.update(model, grads)
    return loss


def spectral(seed=0):
    rngs = nnx.Rngs(seed)
    model = nnx.SpectralNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=rngs)
    return model, nnx.Optimizer(model, jaxmpi.distributed(optax.sgd(0.1)), wrt=nnx.Param)


@run_ranks(1, 2, 3)
def test_the_power_iteration_of_spectral_norm_is_equal_if_it_starts_so():
    rng = np.random.default_rng(0)
    whole = [(rng.normal(size=(12, 4)), rng.normal(size=(12, 3))) for _ in range(3)]
    model, optimizer = spectral()
    one = nnx.SpectralNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    alone = nnx.Optimizer(one, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxmpi.nn.jit(spectral_step, replicated_argnums=(0, 1))
    for x, y in whole:
        mine = lambda a: a.reshape(jaxmpi.size(), -1, a.shape[1])[jaxmpi.rank()]
        step(model, optimizer, mine(x), mine(y))
        nnx.jit(spectral_step)(one, alone, x, y)
    for path, array in values(nnx.state(model)).items():
        np.testing.assert_allclose(
            array, values(nnx.state(one))[path], rtol=1e-4, atol=1e-5, err_msg=str(path)
        )


@run_ranks(2)
def test_a_power_iteration_that_starts_unequal_is_an_error():
    model, optimizer = spectral(jaxmpi.rank())
    step = jaxmpi.nn.jit(spectral_step, replicated_argnums=(0, 1))
    with pytest.raises(
        jaxmpi.RankMismatchError,
        match=r"'u'.* is named in replicated_argnums, .*jaxmpi\.tree_bcast",
    ):
        # a program of its own, whose first call this is
        step(model, optimizer, np.ones((5, 4)), np.ones((5, 3)))


class Dropped(nnx.Module):
    def __init__(self, seed):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=seed))

    def __call__(self, x):
        return self.dropout(x)


def dropped(jit, key, of_rank):
    """Two masks of a model whose dropout is reseeded by the recipe of docs/migration.md."""
    model = Dropped(0)

    @jit
    def reseed(model):
        nnx.reseed(model, dropout=of_rank(key))

    reseed(model)
    step = jit(lambda model, x: model(x))
    return [step(model, jnp.ones(32)) for _ in range(2)]


def check_dropped():
    key = jax.random.key(3)
    got = dropped(jaxmpi.nn.jit, key, jaxmpi.rank_key)
    simulated = jaxmpi.init().backend == "simulate"
    fold = lambda r: lambda key: jax.random.fold_in(key, r)
    want = [dropped(nnx.jit, key, fold(r)) for r in range(jaxmpi.size())]
    for r in range(jaxmpi.size()) if simulated else [jaxmpi.rank()]:
        for mask, expected in zip(got, want[r], strict=True):
            np.testing.assert_array_equal(mask[r] if simulated else mask, expected)
    different = set()
    for masks in want:
        different.update(np.asarray(mask).tobytes() for mask in masks)
    assert len(different) == 2 * jaxmpi.size()


@run_ranks(1, 2)
def test_dropout_is_reseeded_by_rank():
    check_dropped()


@run_ranks(2, backend="xla")
def test_dropout_is_reseeded_by_rank_on_xla():
    check_dropped()


def test_dropout_is_reseeded_by_rank_on_simulated_ranks():
    with jaxmpi.simulate(3):
        check_dropped()
